"""Tensor parallel of int8 weights, against one process that holds the whole model."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import qsub
from qsub import Int8RowwiseTensor

pytestmark = pytest.mark.dist
WIDTH = 24
PLAIN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Block(nn.Module):
    """LayerNorm and two Linears with a bias, for a plan of all three styles; the same values in each call."""

    def __init__(self, hidden):
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def new_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def inner(value):
    """Plain tensors of a parameter, gathered from all ranks where it is a DTensor. Collective."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return [value.int_data, value.scale] if isinstance(value, Int8RowwiseTensor) else [value.detach()]


def assert_same_weights(model, other):
    """Parameters of both, bit for bit. Collective."""
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        for left, right in zip(inner(a), inner(b), strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right), name


def _parallel(rank, hidden, sequence, trainable):
    mesh, world = new_mesh(), dist.get_world_size()
    one = qsub.quantize_(Block(hidden), trainable=trainable)
    model = parallelize_module(copy.deepcopy(one), mesh, SEQUENCE if sequence else PLAIN)
    assert_same_weights(model, one)
    assert type(model.up.weight.to_local()) is type(model.down.weight.to_local()) is Int8RowwiseTensor
    x = torch.randn(3, 2 * world, WIDTH, generator=torch.Generator().manual_seed(5))
    whole = x.clone().requires_grad_()
    mine = (x.chunk(world, 1)[rank] if sequence else x).clone().requires_grad_()
    y, expected = model(mine), one(whole)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(y, expected.chunk(world, 1)[rank] if sequence else expected, **close)
    y.square().sum().backward()
    expected.square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert type(a.grad) is type(a.data) or isinstance(a.data, Int8RowwiseTensor), name
            grad = a.grad.full_tensor() if isinstance(a, DTensor) else a.grad
            torch.testing.assert_close(grad, b.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine.grad, whole.grad.chunk(world, 1)[rank] if sequence else whole.grad, **close)
    return {name: p.grad.placements for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block(sequence, trainable):
    """Even shards: the outputs, gradients and weights of one process; float gradients, placed as the weights."""
    placements = on_ranks(_parallel, 2, 66, sequence, trainable)[1]
    assert ("up.weight" in placements) == ("down.weight" in placements) == trainable
    if trainable:
        assert placements["up.weight"] == (Shard(0),) and placements["down.weight"] == (Shard(1),)


def _weights(rank, shape, placement, source):
    weight = Int8RowwiseTensor.from_float(torch.randn(shape, generator=torch.Generator().manual_seed(rank)))
    twin = Int8RowwiseTensor.from_float(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    placed = distribute_tensor(weight if source == 0 else twin, new_mesh(), [placement], src_data_rank=source)
    local = placed.to_local()
    assert placed.shape == torch.Size(shape) and isinstance(local, Int8RowwiseTensor)
    if placement == Shard(1) and local.numel():
        assert torch.equal(local.scale, twin.scale)
    for left, right in zip(inner(placed), inner(twin), strict=True):
        assert torch.equal(left, right)
    turned = placed.redistribute(placements=[Shard(1) if placement == Shard(0) else Shard(0)])
    for left, right in zip(inner(turned), inner(twin), strict=True):
        assert torch.equal(left, right)
    return local.numel()


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("shape", [(65, 24), (24, 65), (66, 64)], ids=str)
def test_distribute_and_gather(shape, placement, source):
    """The weight of rank 0, or that of each rank, cut and put together again bit for bit."""
    sizes = on_ranks(_weights, 2, shape, placement, source)
    assert sum(sizes) == (2 if placement == Replicate() else 1) * shape[0] * shape[1]


# ---- Int8 activations ----


def _bound(h, weight, threshold):
    """The most that quantized rows of `h` can move the product with `weight`: half a step, |h| / 254, for each term.

    Columns over the threshold are multiplied in float. 2**-20 of the sum of magnitudes is for fp32 sums of 66 terms.
    """
    values = weight.dequantize().abs()
    inside = h if threshold is None else torch.where(h.abs().amax(0) > threshold, 0.0, h)
    terms = values if threshold is None else torch.where(h.abs().amax(0) > threshold, 0.0, values)
    return inside.abs().amax(1, keepdim=True) / 254 @ terms.sum(1, keepdim=True).t() + h.abs() @ values.t() * 2.0**-20


def _activations(rank, trainable, threshold):
    world = dist.get_world_size()
    one = qsub.quantize_(Block(66), trainable=trainable, activations="int8", outlier_threshold=threshold)
    model = parallelize_module(copy.deepcopy(one), new_mesh(), PLAIN)
    local = model.down.weight.to_local()
    assert (local.activations, local.outlier_threshold) == ("int8", threshold)
    generator = torch.Generator().manual_seed(7)
    # Rows are quantized as a whole on each rank, codes are multiplied exactly.
    x = torch.randn(10, WIDTH, generator=generator)
    torch.testing.assert_close(model.up(x), one.up(x).chunk(world, 1)[rank], atol=1e-6, rtol=1e-6)
    # Columns: each rank quantizes its own. Those of the second one are small, and one of the first is an outlier.
    h = torch.randn(10, 66, generator=generator)
    h[:, 33:] *= 0.01
    h[4, 2] = 50.0
    mine = h.chunk(world, 1)[rank].clone().requires_grad_()
    y, whole, exact = model.down(mine), one.down(h), h @ one.down.weight.dequantize().t() + one.down.bias
    weight = one.down.weight.detach()
    parts = zip(h.chunk(world, 1), weight.chunk(world, 1), strict=True)
    bound = sum(_bound(piece, columns, threshold) for piece, columns in parts)
    assert ((y - exact).abs() <= bound).all()
    assert not ((y - exact).abs() <= bound / 20).all()  # negative control: it is quantized
    y.square().sum().backward()
    grad = 2 * y.detach() @ weight.dequantize()
    torch.testing.assert_close(mine.grad, grad.chunk(world, 1)[rank], atol=1e-4, rtol=1e-5)
    assert (model.down.weight.grad is not None) == trainable
    return (y - exact).norm().item(), (whole - exact).norm().item(), y.tolist()


@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("trainable", [False, True])
def test_int8_activations(trainable, threshold):
    """Rows shared out give the numbers of one process. Columns shared out have a scale for each rank's part of a row:
    the error is within half a step of that, and less than with one scale where the parts differ in magnitude."""
    first, second = on_ranks(_activations, 2, trainable, threshold)
    assert first == second
    apart, whole, _ = first
    assert apart < whole
