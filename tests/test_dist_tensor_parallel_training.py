"""Training of int8 weights whose rows or columns are shared out: updates, checkpoints, and fully_shard on top."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_weights import Adapted
from ranks import on_ranks
from test_dist_tensor_parallel import PLAIN, WIDTH, Block, assert_same_weights, inner, new_mesh
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import qsub
from qsub import Int8RowwiseTensor
from qsub.optim import AdamW8bit, param_groups

pytestmark = pytest.mark.dist
FULL = StateDictOptions(full_state_dict=True)
HIDDEN = 66


def new_block(trainable=True, factor=1.0):
    block = Block(HIDDEN)
    with torch.no_grad():
        block.down.weight.mul_(factor)
    return qsub.quantize_(block, trainable=trainable)


def parallel(model):
    return parallelize_module(model, new_mesh(), PLAIN)


# ---- Updates ----


OPTIMIZERS = {
    "AdamW8bit": lambda params: AdamW8bit(params, lr=1e-4, backend="eager", min_8bit_size=1 << 20),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
}


def _train_twins(rank, optimizer, copied):
    """Weights of a parallel block beside plain ones that hold the same shard, on the same gradients."""
    one, model = new_block(), parallel(new_block())
    model = copy.deepcopy(model) if copied else model
    world = dist.get_world_size()
    columns = one.down.weight.detach().chunk(world, 1)[rank].clone()
    twins = {"up": one.up.weight, "down": nn.Parameter(columns, requires_grad=True)}
    start = {name: twin.detach().clone() for name, twin in twins.items()}
    weights = {name: getattr(model, name).weight for name in twins}
    trained = {id(param) for group in param_groups(model) for param in group["params"]}
    assert all(weight.requires_grad and id(weight) in trained for weight in weights.values())
    steps = [OPTIMIZERS[optimizer](list(params.values())) for params in (weights, twins)]
    for number in range(3):
        for name, weight in weights.items():
            whole = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.grad = distribute_tensor(whole, weight.device_mesh, weight.placements)
            twins[name].grad = whole if name == "up" else whole.chunk(world, 1)[rank]
        for step in steps:
            step.step()
    for left, right in zip(inner(weights["up"]), inner(twins["up"]), strict=True):
        assert torch.equal(left, right)
    local = weights["down"].to_local()
    assert torch.equal(local.int_data, twins["down"].int_data) and torch.equal(local.scale, twins["down"].scale)
    # Three steps of 1e-4 are a tenth of a code at most: to nearest, most codes would be the old ones.
    for name, old in start.items():
        assert (twins[name].int_data != old.int_data).float().mean() > 0.01
    return local.scale.tolist()


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shards_are_updated_as_plain_weights_are(optimizer, copied):
    """Bit for bit, rounded stochastically: rows as in the whole weight, columns with scales of their own."""
    first, second = on_ranks(_train_twins, 2, optimizer, copied)
    assert first != second


def _frozen(rank):
    """A weight that was trainable and is frozen now takes an adapter's delta to nearest, and so does its copy."""
    weight = new_block().down.weight.requires_grad_(False)
    delta = torch.full_like(weight, 1e-3)
    for this in (weight, copy.deepcopy(weight)):
        nearest = Int8RowwiseTensor.from_float(this.dequantize() + delta)
        this.add_(delta)
        assert torch.equal(this.int_data, nearest.int_data)


def test_frozen_weights_are_rounded_to_nearest():
    on_ranks(_frozen, 1)


# ---- torch.distributed.checkpoint ----


def _trained(model, steps=2):
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, backend="eager")
    for number in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _save(rank, path, trained):
    model = parallel(new_block())
    model = _trained(model) if trained else model
    full = get_model_state_dict(model, options=FULL)
    weight, local = full["down.weight"], model.down.weight.to_local()
    columns = weight.dequantize().chunk(dist.get_world_size(), 1)[rank]
    half_a_step = weight.scale.float().unsqueeze(1) / 254
    assert ((columns - local.dequantize()).abs() <= half_a_step * (1 + 1e-5)).all()
    assert torch.equal(columns, local.dequantize()) == (not trained)
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    if rank == 0:
        torch.save(full, f"{path}/full.pt")
    return local.int_data.tolist(), local.scale.tolist()


LAYOUTS = {
    "parallel": parallel,
    "one": lambda model: model,
    "fully_shard": lambda model: fully_shard(model, mesh=new_mesh()),
}


def _load(rank, path, layout, factor):
    model = LAYOUTS[layout](new_block(factor=factor))
    target = get_model_state_dict(model)
    full = torch.load(f"{path}/full.pt")
    try:
        dcp.load(target, checkpoint_id=path)
    except CheckpointException as error:
        model = LAYOUTS[layout](new_block(factor=factor))  # as the text says
        set_model_state_dict(model, dict(full), options=FULL)
        text = str(error)
    else:
        text = "loaded"
    after = get_model_state_dict(model, options=FULL)
    for name, value in full.items():
        assert all(torch.equal(a, b) for a, b in zip(inner(after[name]), inner(value), strict=True)), name
    local = model.down.weight.to_local() if isinstance(model.down.weight, DTensor) else model.down.weight
    return text, local.int_data.tolist(), local.scale.tolist()


ELSEWHERE = [(1, "one"), (1, "parallel"), (3, "parallel"), (2, "fully_shard")]
REFUSED = "columns of a weight with the same row scales, and these differ"


def test_trained_columns_load_on_the_same_ranks_only(tmp_path):
    """Scales of their own there: exact on as many ranks, else refused on all ranks; a full state dict is rounded."""
    saved = on_ranks(_save, 2, str(tmp_path), True)
    loaded = on_ranks(_load, 2, str(tmp_path), "parallel", 1.0)
    assert loaded == [("loaded", *entry) for entry in saved]
    for world_size, layout in ELSEWHERE:
        texts = [text for text, *_ in on_ranks(_load, world_size, str(tmp_path), layout, 1.0)]
        assert len(set(texts)) == 1 and REFUSED in texts[0] and "full_state_dict=True" in texts[0]


def test_columns_with_the_scales_of_whole_rows_load_anywhere(tmp_path):
    """Bit for bit, into a model with the same scales; into another one on as many ranks."""
    on_ranks(_save, 2, str(tmp_path), False)
    for world_size, layout in ELSEWHERE:
        for text, *_ in on_ranks(_load, world_size, str(tmp_path), layout, 1.0):
            assert text == "loaded"
        for text, *_ in on_ranks(_load, world_size, str(tmp_path), layout, 1.5):
            assert REFUSED in text
    assert [text for text, *_ in on_ranks(_load, 2, str(tmp_path), "parallel", 1.5)] == ["loaded"] * 2


# ---- fully_shard over tensor parallel ----


class Pair(nn.Module):
    """Two int8 weights, frozen, with adapters; the same values in each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = Adapted(HIDDEN, WIDTH), Adapted(WIDTH, HIDDEN)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


# The inner dimension is shared out: rows of the first layer and its adapter, columns of the second and its adapter.
PAIR = {
    "first.linear": ColwiseParallel(),
    "first.up": ColwiseParallel(),
    "second.linear": RowwiseParallel(),
    "second.down": RowwiseParallel(),
}


def _two_dimensions(rank, trainable):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = qsub.quantize_(Pair(), filter_fn=lambda name, _: name.endswith("linear"), trainable=trainable)
    model = parallelize_module(copy.deepcopy(one), mesh["tp"], PAIR)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert {type(layer.linear.weight.to_local()) for layer in (model.first, model.second)} == {Int8RowwiseTensor}
    assert_same_weights(model, one)
    groups = mesh["dp"].size()
    for step in range(2):  # accumulated, on gathered weights that were freed in between
        batches = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + k)) for k in range(groups)]
        outputs = [one(x) for x in batches]
        mine = mesh["dp"].get_local_rank()
        y = model(batches[mine])
        torch.testing.assert_close(y, outputs[mine], atol=1e-5, rtol=1e-5)
        y.square().sum().backward()
        (sum(output.square().sum() for output in outputs) / groups).backward()
    for (name, param), other in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None) == ("linear.weight" in name and not trainable), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, atol=1e-4, rtol=1e-4)
    optimizer = AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2, backend="eager")
    optimizer.step()
    assert not torch.equal(model(batches[0]), outputs[0])
    return [tensor.tolist() for param in model.parameters() for tensor in inner(param)]


@pytest.mark.parametrize("trainable", [False, True])
def test_fully_shard_over_tensor_parallel(trainable):
    """Forward and backward of one process; the whole weights are those of all ranks after a step."""
    results = on_ranks(_two_dimensions, 4, trainable)
    assert all(result == results[0] for result in results)
