"""Int8 weights under torch.optim resume bit for bit: how often a weight was rounded is part of its state."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsub
from qsub import Int8RowwiseTensor

OPTIMIZERS = {
    name: options
    for name, options in {
        "SGD": {"lr": 1e-2, "momentum": 0.9},
        "Adam": {},
        "AdamW": {"weight_decay": 1e-2},
        "NAdam": {},
        "RAdam": {},
        "Adamax": {},
        "Adagrad": {},
        "Adadelta": {"lr": 1.0},
        "Adafactor": {},
        "ASGD": {"lr": 1e-2},
        "RMSprop": {"lr": 1e-3, "momentum": 0.1, "centered": True},
        "Rprop": {"lr": 1e-3},
        "Muon": {"lr": 1e-2},
        "LBFGS": {"lr": 0.1},
    }.items()
    if hasattr(torch.optim, name)
}
FOREACH = sorted(OPTIMIZERS.keys() - {"LBFGS", "Muon"})
CASES = [(name, False) for name in sorted(OPTIMIZERS)] + [(name, True) for name in FOREACH]


def model(seed=0):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(48, 40, bias=False), nn.ReLU(), nn.Linear(40, 8, bias=False))
    return qsub.quantize_(m, trainable=True)


def optimizer(name, foreach, m):
    options = {"foreach": True} if foreach else {}
    return getattr(torch.optim, name)(m.parameters(), **OPTIMIZERS[name], **options)


def step(m, o, number):
    g = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 48, generator=g), torch.randn(16, 8, generator=g)

    def closure():
        o.zero_grad()
        loss = F.mse_loss(m(x), y)
        loss.backward()
        return loss

    if isinstance(o, torch.optim.LBFGS):
        o.step(closure)
    else:
        closure()
        o.step()


def codes(m):
    return [part.clone() for p in m.parameters() for part in (p.int_data, p.scale)]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("name", "foreach"), CASES)
def test_resumed_training_equals_training_that_went_on(name, foreach, tmp_path):
    m = model()
    o = optimizer(name, foreach, m)
    for number in range(4):
        step(m, o, number)
    saved = io.BytesIO()
    torch.save((m.state_dict(), o.state_dict()), saved)
    qsub.save_file(m.state_dict(), tmp_path / "weights.safetensors")
    copied, at_save = copy.deepcopy(m), codes(m)
    for number in range(4, 8):
        step(m, o, number)
    assert not equal(codes(m), at_save)
    saved.seek(0)
    weights, state = torch.load(saved)
    for source in ("pickle", "assigned", "safetensors", "deepcopy"):
        other = copied if source == "deepcopy" else model(1)
        if source == "safetensors":
            other.load_state_dict(qsub.load_file(tmp_path / "weights.safetensors"))
        elif source != "deepcopy":
            other.load_state_dict(copy.deepcopy(weights), assign=source == "assigned")
        assert equal(codes(other), at_save)
        other_o = optimizer(name, foreach, other)
        other_o.load_state_dict(copy.deepcopy(state))
        for number in range(4, 8):
            step(other, other_o, number)
        assert equal(codes(other), codes(m)), source


def test_without_the_count_it_would_not_be_so():
    m = model()
    for number in range(4):
        step(m, optimizer("SGD", False, m), number)
    other = copy.deepcopy(m)
    for p in other.parameters():
        assert p.count == 4
        p.updates[0] = 0
    for w in (m, other):
        step(w, optimizer("SGD", False, w), 5)
    assert not equal(codes(m), codes(other))


def test_a_weight_that_has_not_trained_is_saved_as_before(tmp_path):
    w = Int8RowwiseTensor.from_float(torch.randn(4, 6))
    assert "updates" not in w.__reduce_ex__(2)[1][2]
    assert "updates" not in qsub.serialization.describe(w)


@pytest.mark.parametrize(
    "make", [torch.clone, torch.detach, lambda w: w.to(torch.bfloat16), lambda w: w[1:3], copy.copy]
)
def test_copies_and_views_have_the_count(make):
    w = Int8RowwiseTensor.from_float(torch.randn(4, 6), requires_grad=True)
    with torch.no_grad():
        w.add_(0.1).add_(0.1)
        assert make(w).count == w.count == 2


def test_a_restored_weight_counts_as_the_one_that_was_saved():
    w = Int8RowwiseTensor.from_float(torch.randn(4, 6), requires_grad=True)
    saved = w.detach().clone()
    with torch.no_grad():
        w.add_(0.1)
        w.copy_(saved)
    assert w.count == 0
    with torch.no_grad():
        w.add_(0.1)
        w.data = w.data.clone()
    assert w.count == 1


def test_compiled_steps_are_not_compiled_anew_as_the_count_grows():
    m = model()
    forward = torch.compile(m, backend="aot_eager")
    o = optimizer("SGD", False, m)
    x = torch.randn(4, 48)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            forward(x).sum().backward()
            o.step()
            o.zero_grad()
    assert m[0].weight.count == 3
