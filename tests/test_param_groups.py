"""qsub.optim.param_groups: what decays, what keeps fp32 state, and that each parameter comes once."""

import pytest
import torch
from torch import nn

import qsub
from qsub import Blockwise8bitTensor
from qsub.optim import AdamW8bit, param_groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.body = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 100)
        self.head.weight = self.table.weight


def names(model, groups):
    by_id = {id(param): name for name, param in model.named_parameters()}
    return {(g["weight_decay"], g["state_bits"]): {by_id[id(p)] for p in g["params"]} for g in groups}


def test_biases_and_norms_do_not_decay_and_embeddings_keep_fp32_state():
    model = Model()
    assert names(model, param_groups(model, 0.1)) == {
        (0.1, 32): {"table.weight"},  # and the head that is tied to it
        (0.0, 8): {"norm.weight", "norm.bias", "body.bias", "head.bias"},
        (0.1, 8): {"body.weight"},
    }


def test_own_rules_take_the_place_of_both():
    model = Model()
    groups = param_groups(
        model, no_decay=lambda name, _: name.startswith("body"), state_32bit=lambda _, param: param.dim() == 1
    )
    assert names(model, groups) == {
        (1e-2, 8): {"table.weight"},
        (1e-2, 32): {"norm.weight", "norm.bias", "head.bias"},
        (0.0, 8): {"body.weight"},
        (0.0, 32): {"body.bias"},
    }


def test_the_optimizer_takes_them():
    model = Model()
    optimizer = AdamW8bit(param_groups(model), lr=1e-2, backend="eager")
    before = model.norm.weight.detach().clone()
    model.head(model.body(model.norm(model.table(torch.arange(8))))).sum().backward()
    model.norm.weight.grad.zero_()
    optimizer.step()
    assert torch.equal(model.norm.weight, before)  # no gradient, and no decay
    assert type(optimizer.state[model.table.weight]["exp_avg"]) is torch.Tensor
    assert isinstance(optimizer.state[model.body.weight]["exp_avg"], Blockwise8bitTensor)


def test_a_quantized_model_has_its_floats_in_the_groups():
    model = qsub.quantize_(Model())
    assert {name for group in names(model, param_groups(model)).values() for name in group} == {
        "table.weight",
        "norm.weight",
        "norm.bias",
        "body.bias",
        "head.bias",
    }
    trainable = qsub.quantize_(Model(), trainable=True)
    assert names(trainable, param_groups(trainable))[1e-2, 8] == {"body.weight"}


def test_nothing_to_train():
    with pytest.raises(TypeError, match="takes a module, got generator"):
        param_groups(Model().parameters())
    with pytest.raises(ValueError, match="no parameter of Linear requires grad: quantize_ freezes .* trainable=True"):
        param_groups(qsub.quantize_(nn.Linear(4, 4, bias=False)))
