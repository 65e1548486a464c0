"""quantize_ on a model that has int8 weights already, and on one that has nothing to take."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_dist_tensor_parallel import new_mesh
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard

import qsub
from qsub import Int8RowwiseTensor
from qsub.linear import int8_linear

MODES = {"activations": "int8", "outlier_threshold": 2.0, "backward": "int8"}


def pair(**options):
    return qsub.quantize_(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8)), **options)


def state_of(model):
    return [(p, p.requires_grad, p.fields()) for p in model.parameters() if isinstance(p, Int8RowwiseTensor)]


def grads(model):
    return [param.requires_grad for name, param in model.named_parameters() if name.endswith("weight")]


# ---- Other options ----


def test_other_modes_are_applied_in_place():
    model = pair()
    before = [(p, p.int_data, p.int_data.clone()) for p, _, _ in state_of(model)]
    x = torch.linspace(-3, 3, 5 * 64).view(5, 64)
    plain = model(x)
    assert qsub.quantize_(model, **MODES) is model
    for (param, codes, values), now in zip(before, [model[0].weight, model[1].weight], strict=True):
        assert now is param and now.int_data is codes and torch.equal(codes, values)
        assert (now.activations, now.outlier_threshold, now.backward_mode) == ("int8", 2.0, "int8")
    first = int8_linear(x, model[0].weight.int_data, model[0].weight.scale, model[0].bias, **MODES)
    assert torch.equal(model[0](x), first) and not torch.equal(model(x), plain)
    qsub.quantize_(model)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("options", [{}, {"trainable": True}, MODES])
def test_the_same_options_change_nothing(options):
    model = pair(**options)
    before = state_of(model)
    qsub.quantize_(model, **options)
    assert all(a is b and was == now for (a, *was), (b, *now) in zip(before, state_of(model), strict=True))


def test_float_weights_are_added_and_the_filter_chooses_on_both():
    model = pair()
    model.append(nn.Linear(8, 8))
    qsub.quantize_(model, filter_fn=lambda name, _: name != "0", activations="int8")
    assert [layer.weight.activations for layer in model] == [None, "int8", "int8"]


def test_options_that_do_not_fit_change_nothing():
    model = pair()
    before = state_of(model)
    with pytest.raises(ValueError, match="comes with activations"):
        qsub.quantize_(model, trainable=True, outlier_threshold=6.0)
    assert before == state_of(model)


def test_a_bad_float_weight_leaves_the_int8_ones_as_they_were():
    model = pair().append(nn.Linear(8, 8))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    before = state_of(model)
    with pytest.raises(ValueError, match=r"^2\.weight: row 0"):
        qsub.quantize_(model, activations="int8", trainable=True)
    assert before == state_of(model)


def test_shared_weights_stay_shared():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 8), "head": nn.Linear(8, 8), "a": nn.Linear(8, 8)})
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(8, 8)), requires_grad=False)
    model["embedding"].weight = model["head"].weight = weight  # as QsubConfig(embeddings=True) makes them
    qsub.quantize_(model, activations="int8", trainable=True)
    assert model["embedding"].weight is model["head"].weight is weight
    assert weight.activations == "int8" and weight.requires_grad
    qsub.quantize_(model, filter_fn=lambda name, _: name != "head")
    assert weight.activations == "int8" and model["a"].weight.activations is None


def test_without_a_filter_int8_weights_of_other_modules_take_the_options():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 8), "head": nn.Linear(8, 8)})
    model["embedding"].weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(8, 8)), requires_grad=False)
    qsub.quantize_(model, activations="int8", filter_fn=lambda _, layer: layer.in_features == 8)  # of a Linear
    assert model["embedding"].weight.activations is None
    qsub.quantize_(model, activations="int8")
    assert model["embedding"].weight.activations == "int8"


# ---- trainable ----


def test_trainable_and_back():
    model = pair()
    qsub.quantize_(model, trainable=True)
    assert grads(model) == [True, True]
    model(torch.randn(2, 64)).sum().backward()
    qsub.quantize_(model)
    assert grads(model) == [False, False]
    assert model[0].weight.grad is None and model[0].bias.grad is not None  # an optimizer would go on with it
    assert not model[0].weight.detach().is_trained()
    qsub.quantize_(model, trainable=True)
    assert grads(model) == [True, True] and model[0].weight.detach().is_trained()


def test_trainable_keeps_what_the_user_froze():
    frozen_first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen_first[1].weight.requires_grad_(False)
    for first in (False, True):
        model = qsub.quantize_(copy.deepcopy(frozen_first), trainable=first)
        for _ in range(2):
            qsub.quantize_(model, trainable=True)
            assert grads(model) == [True, False]
        qsub.quantize_(qsub.quantize_(model), trainable=True)  # frozen by quantize_ and back
        assert grads(model) == [True, False]
    model[0].weight.requires_grad_(False)  # after quantize_
    qsub.quantize_(model, trainable=True, activations="int8")
    assert grads(model) == [False, False]
    model[1].weight.requires_grad_(True)
    qsub.quantize_(model, trainable=True)
    assert grads(model) == [False, True]


@pytest.mark.parametrize("moved", [copy.deepcopy, lambda model: model.to(torch.bfloat16), lambda model: model.cpu()])
def test_who_froze_a_weight_survives_copies_and_moves(moved):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    assert grads(qsub.quantize_(moved(qsub.quantize_(model)), trainable=True)) == [True, False]


def test_weights_from_a_file_become_trainable(tmp_path):
    torch.save(pair(), tmp_path / "model.pt")
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert grads(model) == [False, False]
    assert grads(qsub.quantize_(model, trainable=True)) == [True, True]


@pytest.mark.parametrize("optimizer", [qsub.optim.AdamW8bit, torch.optim.AdamW])
def test_an_optimizer_goes_on_with_the_same_parameters(optimizer):
    model = pair(trainable=True)
    options = {"backend": "eager"} if optimizer is qsub.optim.AdamW8bit else {}
    opt = optimizer(model.parameters(), lr=1e-4, **options)
    x = torch.linspace(-1, 1, 16 * 64).view(16, 64)

    def step():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.item()

    losses = [step() for _ in range(3)]
    states = [opt.state[p] for p, _, _ in state_of(model)]
    qsub.quantize_(model, trainable=True, activations="int8")
    losses += [step() for _ in range(3)]
    assert all(opt.state[p] is state for (p, _, _), state in zip(state_of(model), states, strict=True))
    assert losses == sorted(losses, reverse=True)


# ---- torch.compile ----


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [False, True])
def test_a_compiled_model_sees_other_options(trainable):
    torch._dynamo.reset()
    model = pair(trainable=trainable)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.linspace(-3, 3, 5 * 64).view(5, 64)
    outputs = []
    for number, options in enumerate([{}, {"activations": "int8"}, {"activations": "int8", "outlier_threshold": 1.0}]):
        qsub.quantize_(model, trainable=trainable, **options)
        assert torch.equal(compiled(x), model(x)) and counter.frame_count == number + 1
        outputs.append(compiled(x))
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    qsub.quantize_(model, trainable=not trainable)
    x.requires_grad_()
    compiled(x).sum().backward()
    assert (model[0].weight.grad is None) == trainable
    torch._dynamo.reset()


# ---- Sharded ----


def _sharded(rank):
    model = fully_shard(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8)), mesh=new_mesh())
    qsub.quantize_(model)
    params = list(model.parameters())
    qsub.quantize_(model, trainable=True, activations="int8")
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    local = model[0].weight._local_tensor
    found = [model[0].weight.requires_grad, local.activations, local.is_trained()]
    x = torch.linspace(-1, 1, 16 * 64).view(16, 64)
    model(x).sum().backward()
    found.append(type(model[0].weight.grad).__name__)
    qsub.quantize_(model, trainable=True, activations="int8")  # the same: nothing to do
    try:
        qsub.quantize_(model, trainable=True)
    except ValueError as error:
        found.append("before the first forward" in str(error))
    return found


@pytest.mark.dist
def test_shards_before_and_after_the_first_forward():
    assert on_ranks(_sharded, 2) == [[True, "int8", True, "DTensor", True]] * 2


def _first_step(rank):
    """How many codes the first step moves, of weights that were quantized after fully_shard."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(64, 64, bias=False)), mesh=new_mesh())
    qsub.quantize_(model, trainable=True)
    before = model[0].weight._local_tensor.int_data.clone()
    opt = torch.optim.SGD(model.parameters(), lr=1e-5)
    model(torch.ones(4, 64)).mean().backward()
    opt.step()
    dist.barrier()
    return (model[0].weight._local_tensor.int_data != before).sum().item()


@pytest.mark.dist
def test_the_first_step_of_shards_rounds_stochastically():
    """An update of a thousandth of a code moves a code with that probability; to nearest it would move none."""
    assert sum(on_ranks(_first_step, 2)) > 0


# ---- Nothing to quantize ----


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 4, 4))


def tied():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embedding"].weight
    return model


def shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def of_codes():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    return model


def of_attention():
    model = nn.MultiheadAttention(8, 2)
    model.out_proj = nn.Identity()
    return model


def conv1d():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(pytorch_utils.Conv1D(4, 4), pytorch_utils.Conv1D(4, 4))


@pytest.mark.parametrize(
    ("make", "filter_fn", "text"),
    [
        (nn.ReLU, None, "finds none in ReLU, which has no matrix"),
        (lambda: nn.Linear(2, 2), lambda *_: False, r"weight \(refused by filter_fn\).*or another filter_fn"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lambda *_: False, r"0\.weight and 1 more \(refused"),
        (shared, lambda name, _: name == "0", r"0\.weight \(shared, and filter_fn refuses one of its layers\)"),
        (tied, None, r"head\.weight \(tied to embedding\.weight of Embedding, and stays float with it\)"),
        (lambda: nn.Embedding(2, 2), None, r"weight \(table of nn\.Embedding\)"),
        (Experts, None, r"up \(three dimensions, in Experts\)"),
        (of_attention, None, r"in_proj_weight \(nn\.MultiheadAttention\)"),
        (conv1d, None, r"0\.weight and 1 more \(Conv1D of transformers, whose weights are \(in, out\)\)"),
        (of_codes, None, r"weight \(torch\.uint8 in Linear of torch, quantized in another way\)"),
        (lambda: nn.Conv2d(2, 2, 2), None, r"weight \(Conv2d\)"),
        (
            lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)),
            None,
            r"the model itself \(nn\.Linear whose weight is computed by weight_norm or a parametrization",
        ),
    ],
)
def test_nothing_to_quantize_raises_and_says_why(make, filter_fn, text):
    model = make()
    before = list(model.parameters())
    with pytest.raises(ValueError, match=text):
        qsub.quantize_(model, filter_fn=filter_fn)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert not model._load_state_dict_pre_hooks


def test_int8_weights_count_as_found():
    model = nn.Sequential(Experts(), pair())
    with pytest.raises(ValueError, match="refused by filter_fn"):
        qsub.quantize_(model, filter_fn=lambda *_: False)
    qsub.quantize_(model)
