"""quantize_ and dequantize_ on models that are distributed already, against one process that quantizes first."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_dist_tensor_parallel import PLAIN, Block, assert_same_weights, new_mesh
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import qsub
from qsub import Int8RowwiseTensor

pytestmark = pytest.mark.dist

DISTRIBUTE = {
    "tensor parallel": lambda model, mesh: parallelize_module(model, mesh, PLAIN),
    "fully_shard": lambda model, mesh: fully_shard(model, mesh=mesh),
    "offloaded": lambda model, mesh: fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


def _local(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _quantize(rank, how, hidden, dtype):
    plain = Block(hidden).to(dtype)
    one = qsub.quantize_(copy.deepcopy(plain), trainable=True)
    model = DISTRIBUTE[how](copy.deepcopy(plain), new_mesh())
    assert qsub.quantize_(model, trainable=True, activations="int8") is model
    for layer, other in ((model.up, one.up), (model.down, one.down)):
        assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, DTensor)
        assert layer.weight.requires_grad and layer.weight.dtype == dtype
        assert type(layer.weight.to_local()) is Int8RowwiseTensor and layer.weight.to_local().activations == "int8"
        assert layer.weight.shape == other.weight.shape and layer.weight.stride() == other.weight.stride()
    assert_same_weights(model, one)
    if how == "tensor parallel" and model.down.weight.to_local().numel():
        assert torch.equal(model.down.weight.to_local().scale, one.down.weight.scale)
    before = list(model.parameters())
    qsub.quantize_(model)  # twice changes nothing
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    qsub.dequantize_(model)
    qsub.dequantize_(one)
    assert not any(isinstance(_local(param), Int8RowwiseTensor) for param in model.parameters())
    assert_same_weights(model, one)
    quantized_shard_by_shard = Int8RowwiseTensor.from_float(
        Block(hidden).down.weight.chunk(dist.get_world_size(), 1)[0]
    )
    return torch.equal(quantized_shard_by_shard.scale, Int8RowwiseTensor.from_float(Block(hidden).down.weight).scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [66, 65, 1])
@pytest.mark.parametrize("how", DISTRIBUTE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_quantizing_first(world_size, how, hidden, dtype):
    """Bit for bit. The negative control: the scales of columns alone are others."""
    assert on_ranks(_quantize, world_size, how, hidden, dtype) == [hidden == 1] * world_size


def _ties(rank):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=new_mesh())
    qsub.quantize_(model)
    assert model[0].weight is model[1].weight and isinstance(model[0].weight.to_local(), Int8RowwiseTensor)
    qsub.dequantize_(model)
    assert model[0].weight is model[1].weight


def test_shared_weights_stay_shared():
    on_ranks(_ties, 2)


def _bad(rank, how, where, value):
    model = DISTRIBUTE[how](Block(66), new_mesh())
    before = list(model.parameters())
    if rank == 1:
        with torch.no_grad():
            _local(model.get_parameter(where))[2, 3] = value
    try:
        qsub.quantize_(model)
    except ValueError as error:
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        return str(error)
    return "no error"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 65520.0])
@pytest.mark.parametrize("how", ["tensor parallel", "fully_shard"])
def test_a_bad_value_on_one_rank_raises_on_all(how, value):
    texts = on_ranks(_bad, 2, how, "down.weight", value)
    assert texts[0] == texts[1]
    assert texts[0].startswith("down.weight: the part on rank 1 has NaN, Inf or a magnitude over 65504")
    assert on_ranks(_bad, 2, how, "down.weight", 65504.0) == ["no error"] * 2  # negative control


def _bad_beside(rank):
    """A Linear that is not distributed, next to those that are."""
    model = nn.ModuleDict({"block": parallelize_module(Block(66), new_mesh(), PLAIN), "head": nn.Linear(4, 4)})
    if rank == 0:
        with torch.no_grad():
            model["head"].weight[0, 0] = float("nan")
    try:
        qsub.quantize_(model)
    except ValueError as error:
        return str(error)[:25]


def test_a_bad_weight_that_is_not_distributed_raises_on_all():
    assert on_ranks(_bad_beside, 2) == ["head.weight: the part on "] * 2


def _after_forward(rank):
    texts = []
    for change in (qsub.quantize_, qsub.dequantize_):
        model = Block(66)
        if change is qsub.dequantize_:
            qsub.quantize_(model)
        fully_shard(model, mesh=new_mesh())
        model(torch.ones(2, 24))
        try:
            change(model)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_after_a_forward_under_fully_shard():
    for texts in on_ranks(_after_forward, 2):
        assert "call quantize_ before the first forward or before fully_shard" in texts[0]
        assert "call dequantize_ before the first forward or before fully_shard" in texts[1]


def _works(rank):
    """quantize_ between fully_shard and the first forward."""
    one = qsub.quantize_(Block(65), trainable=True)
    model = qsub.quantize_(fully_shard(Block(65), mesh=new_mesh()), trainable=True)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert torch.equal(model(x), one(x))
    model(x).square().sum().backward()
    one(x).square().sum().backward()
    for param, twin in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), twin.grad)  # the mean of equal gradients
    assert isinstance(model.up.weight.to_local(), Int8RowwiseTensor)


def test_fully_shard_gathers_what_was_quantized_after_it():
    on_ranks(_works, 2)


def _partial(rank):
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), new_mesh(), [Partial()]))
    try:
        qsub.quantize_(linear)
    except ValueError as error:
        text = str(error)
    linear.weight = nn.Parameter(linear.weight.detach().redistribute(placements=[Replicate()]))  # as it says
    qsub.quantize_(linear)
    return text


def test_partial_sums_are_refused():
    assert all(text.startswith("weight is placed as (Partial(sum),)") for text in on_ranks(_partial, 2))
