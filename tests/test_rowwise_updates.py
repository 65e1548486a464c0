"""Updates in place and copies of Int8RowwiseTensor: views, lists with plain tensors, and what autograd is told."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsub
from qsub import Int8RowwiseTensor


def layer(dtype=torch.float32, trainable=True):
    return qsub.quantize_(nn.Linear(10, 6, dtype=dtype), trainable=trainable)


@pytest.mark.parametrize(
    "view",
    [
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.t(),
        lambda p: p[:],
        lambda p: p.split(6)[0],
        lambda p: p.as_strided((6, 10), p.stride()),
    ],
)
def test_updates_through_fresh_views_are_not_rounded_alike_for_ever(view):
    """Optimizers that write to `p.data` make a new view at each step."""
    start = torch.full((6, 10), 0.3003)
    start[:, 0] = 1.0  # pins the scale, so that the values stay as they are until a code moves
    delta = torch.full((6, 10), 1e-5)
    delta[:, 0] = 0
    weight = nn.Parameter(Int8RowwiseTensor.from_float(start))
    before = weight.detach().dequantize()
    with torch.no_grad():
        for _ in range(2000):
            turned = view(weight)
            turned.add_(delta if turned.shape == delta.shape else delta.t())
    moved = (weight.detach().dequantize() - before)[:, 1:].mean()
    # 54 elements, 2.54 steps of 1/127 each: the sd of their mean is sqrt(2.54 / 54) / 127 = .0017.
    assert abs(moved - 2000 * 1e-5) < 5 * 0.0017


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_foreach_updates_the_plain_tensors_of_the_list_too(dtype):
    m = layer(dtype)
    expected = [p.detach().clone() for p in m.parameters()]
    m(torch.ones(3, 10, dtype=dtype)).sum().backward()
    for value, p in zip(expected, m.parameters(), strict=True):
        value.sub_(p.grad, alpha=0.5)
    torch.optim.SGD(m.parameters(), lr=0.5, foreach=True).step()
    torch.testing.assert_close(m.bias.detach(), expected[1])
    assert (m.weight.detach().dequantize() - expected[0].dequantize()).abs().max() < 2 * 1.9 / 127  # a step each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=0.0, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, foreach=False),
        lambda p: qsub.optim.AdamW8bit(p, lr=0.0, min_8bit_size=1, backend="eager"),
        lambda p: qsub.optim.AdamW8bit(p, lr=0.1, weight_decay=0.0, backend="eager"),
    ],
)
def test_a_step_that_changes_nothing_moves_no_code(make_optimizer, dtype):
    """Zero gradients, or lr=0 with others; also in rows whose largest code is under 127, as rounding leaves some."""
    m = layer(dtype)
    m.weight.int_data[:3].clamp_(-90, 90)
    before = m.weight.int_data.clone(), m.weight.scale.clone()
    optimizer = make_optimizer(m.parameters())
    for _ in range(20):
        for p in m.parameters():
            p.grad = torch.full(p.shape, float(optimizer.param_groups[0]["lr"] == 0), dtype=dtype)
        optimizer.step()
    with torch.no_grad():
        m.weight.add_(0.0).mul_(1.0).add_(torch.zeros(6, 10))
    assert torch.equal(m.weight.int_data, before[0]) and torch.equal(m.weight.scale, before[1])


def test_foreach_operators_of_two_kinds():
    weight, plain = Int8RowwiseTensor.from_float(torch.randn(6, 10)), torch.ones(2, dtype=torch.bfloat16)
    decayed = torch._foreach_add([torch.ones(6, 10)], [weight], alpha=0.1)
    torch.testing.assert_close(decayed[0], 1 + 0.1 * weight.dequantize())
    source = Int8RowwiseTensor.from_float(torch.randn(6, 10))
    torch._foreach_copy_([weight, plain], [source, torch.zeros(2)])
    assert torch.equal(weight.int_data, source.int_data) and torch.equal(weight.scale, source.scale)
    assert not plain.any()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-4, foreach=True),
        lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=1e-4, foreach=True),
        lambda p: torch.optim.RAdam(p, lr=5e-2, weight_decay=1e-4, foreach=True),
        lambda p: torch.optim.Adamax(p, lr=2e-2, foreach=True),
        lambda p: torch.optim.Rprop(p, lr=1e-3, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.1, centered=True, weight_decay=1e-4, foreach=True),
        lambda p: torch.optim.Adagrad(p, lr=1e-1, weight_decay=1e-4, foreach=True),
        lambda p: torch.optim.Adadelta(p, lr=5.0, foreach=True),
        lambda p: torch.optim.ASGD(p, lr=0.5, foreach=True),
    ],
)
def test_foreach_optimizers_learn(make_optimizer):
    x, target = torch.randn(256, 10), 0.3 * torch.randn(6, 10)
    m = layer()
    optimizer = make_optimizer(m.parameters())
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (m(x) - x @ target.t()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    "update",
    [
        lambda w: w.add_(1.0),
        lambda w: w.copy_(torch.ones(6, 10)),
        lambda w: w.copy_(Int8RowwiseTensor.from_float(torch.ones(6, 10))),
        lambda w: w[1:3].mul_(2.0),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: w.requantize_(torch.ones(6, 10)),
    ],
)
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("product", [F.linear, lambda x, w: x @ w.t()])
def test_backward_through_a_weight_that_has_changed_is_refused(update, trainable, product):
    """As with a plain weight: the gradient would be that of other values."""
    m = layer(trainable=trainable)
    y = product(torch.randn(3, 10, requires_grad=True), m.weight)
    with torch.no_grad():
        update(m.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: qsub.dequantize_(m),
        lambda m: setattr(m.weight, "data", Int8RowwiseTensor.from_float(torch.ones(6, 10))),
        lambda m: setattr(m.weight, "data", torch.ones(6, 10)),
    ],
)
def test_backward_through_a_weight_that_was_moved_or_replaced_is_that_of_the_old_values(change):
    """As with a plain weight. A graph that is still alive doesn't keep a module from being offloaded."""
    m, x = layer(trainable=False), torch.randn(3, 10, requires_grad=True)
    expected = torch.ones(3, 6) @ m.weight.dequantize()
    y = m(x)
    change(m)
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_backward_after_a_step_is_refused(backend):
    """Kernels write to memory that autograd doesn't watch, of plain parameters as well."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "triton" and device == "cpu":
        pytest.skip("needs a CUDA GPU")
    m = nn.Sequential(layer(), nn.Linear(6, 4)).to(device)
    optimizer = qsub.optim.AdamW8bit(m.parameters(), lr=0.1, min_8bit_size=1, backend=backend)
    x = torch.randn(3, 10, device=device, requires_grad=True)
    m(x).sum().backward()
    outputs = m(x), m[0](x)
    optimizer.step()
    for y in outputs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool])
def test_copy_of_integers_is_refused(dtype):
    """They could be codes as well as numbers, and their negation may wrap around."""
    weight = Int8RowwiseTensor.from_float(torch.randn(2, 3))
    before = weight.dequantize()
    with pytest.raises(TypeError, match=r"use \.float\(\) for numbers"):
        weight.copy_(torch.ones(2, 3, dtype=dtype))
    with pytest.raises(TypeError, match="float dtype"):
        weight.requantize_(torch.ones(2, 3, dtype=dtype))
    assert torch.equal(weight.dequantize(), before)
    weight[0] = 1  # a Python number is none
    assert torch.equal(weight.dequantize()[0], torch.ones(3))


def test_copy_under_compile():
    weight = Int8RowwiseTensor.from_float(torch.randn(6, 10))
    value = torch.randn(6, 10)
    torch.compile(lambda: weight.copy_(value), backend="aot_eager", fullgraph=True)()
    assert torch.equal(weight.dequantize(), Int8RowwiseTensor.from_float(value).dequantize())


@pytest.mark.parametrize(
    "piece", [lambda w: w[1], lambda w: w[1][None], lambda w: w[1].unsqueeze(1), lambda w: w[1, 2].clone()]
)
def test_updates_of_one_row_in_any_shape(piece):
    weight = Int8RowwiseTensor.from_float(torch.randn(6, 10))
    expected = -piece(weight.dequantize())
    turned = piece(weight)
    turned.neg_()
    # A number by itself has a scale of its own, rounded to fp16.
    torch.testing.assert_close(turned.dequantize(), expected, rtol=2**-11, atol=0)
    turned.copy_(expected.abs())
    torch.testing.assert_close(turned.dequantize(), expected.abs(), rtol=0, atol=3.0 / 127)
    with pytest.raises(NotImplementedError, match="can't be updated in place"):
        weight[1].expand(4, 10).clone().neg_()


# ---- Copies ----


def test_deepcopy_of_a_parameter_that_is_a_piece_of_another():
    """As the halves of a fused projection; torch would ask for the storage of a view that begins further on."""
    halves = Int8RowwiseTensor.from_float(torch.randn(12, 10), requires_grad=True).detach().split(6)
    m = nn.Linear(10, 6)
    m.weight = nn.Parameter(halves[1], requires_grad=True)
    m.weight.note = ["of mine"]
    m.tied = nn.ParameterList([m.weight])
    m(torch.randn(3, 10)).sum().backward()
    copied = copy.deepcopy(m)
    assert isinstance(copied.weight, nn.Parameter) and copied.weight.requires_grad and copied.weight.grad is None
    assert copied.weight is copied.tied[0] and copied.weight.note == ["of mine"]
    assert torch.equal(copied.weight.int_data, m.weight.int_data)
    assert copied.weight.int_data.untyped_storage().nbytes() == 60
    with torch.no_grad():
        copied.weight.zero_()
    assert m.weight.detach().dequantize().any()
    with pytest.raises(RuntimeError, match=r"call \.detach\(\)"):
        copy.deepcopy(m.weight.t())
