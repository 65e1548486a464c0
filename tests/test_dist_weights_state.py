"""Int8 weights through state dicts and torch.distributed.checkpoint: bit-identical on any number of ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_weights import batch, differing, loss_of, parts, quantized, shard, whole
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qsub import Int8RowwiseTensor
from qsub.optim import AdamW8bit

pytestmark = pytest.mark.dist
OPTIMIZERS = {
    "AdamW8bit": lambda params: AdamW8bit(params, lr=1e-2, backend="eager"),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}
FULL = StateDictOptions(full_state_dict=True)
WEIGHT = "layers.1.linear.weight"


def other_weights(**options):
    """A quantized Net of other values, with rows whose largest code is not 127."""
    model = quantized(True, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    return model


def _full(rank, dtype):
    twin = other_weights(dtype=dtype)
    model = shard(other_weights(dtype=dtype))
    wanted, full = get_model_state_dict(twin), get_model_state_dict(model, options=FULL)
    assert full.keys() == wanted.keys()
    for name, value in full.items():
        assert type(value) is type(wanted[name]) and value.dtype == dtype
        assert all(torch.equal(a, b) for a, b in zip(parts(value), parts(wanted[name]), strict=True)), name
    assert isinstance(full[WEIGHT], Int8RowwiseTensor)
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(offloaded) == (rank == 0)
    local = get_model_state_dict(model)
    assert isinstance(local[WEIGHT], DTensor) and isinstance(local[WEIGHT].to_local(), Int8RowwiseTensor)
    for target in (shard(quantized(True, dtype=dtype)), quantized(True, dtype=dtype)):
        assert WEIGHT in differing(target, twin)  # negative control
        set_model_state_dict(target, copy.deepcopy(full), options=FULL)
        assert not differing(target, twin)
    target = shard(quantized(True, dtype=dtype))
    set_model_state_dict(target, local)
    assert not differing(target, twin)
    x = batch(0, dtype=dtype)
    assert torch.equal(target(x), twin(x))
    # A full state dict of floats, encoded to nearest by each rank for its rows.
    target = shard(quantized(True, dtype=dtype))
    floats = {name: v.dequantize() if isinstance(v, Int8RowwiseTensor) else v for name, v in wanted.items()}
    set_model_state_dict(target, dict(floats), options=FULL)
    nearest = quantized(True, dtype=dtype)
    nearest.load_state_dict(floats)
    assert not differing(target, nearest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_state_dicts(world_size, dtype):
    on_ranks(_full, world_size, dtype)


def _from_first_rank(rank, sharded):
    twin = other_weights()
    full = get_model_state_dict(twin) if rank == 0 else {}
    sent, before = dict(full), copy.deepcopy(full)  # torch puts what it loaded in the dict
    model = shard(quantized(True)) if sharded else quantized(True)
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for name, value in sent.items():
        assert all(torch.equal(a, b) for a, b in zip(parts(value), parts(before[name]), strict=True))
    # It arrives as floats: encoded to nearest.
    nearest = quantized(True)
    nearest.load_state_dict(
        {n: v.dequantize() if isinstance(v, Int8RowwiseTensor) else v for n, v in twin.state_dict().items()}
    )
    assert not differing(model, nearest)
    return [tensor.tolist() for param in model.parameters() for tensor in parts(param)]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_broadcast_from_the_first_rank_leaves_all_with_the_same_weights(sharded):
    first, second = on_ranks(_from_first_rank, 2, sharded)
    assert first == second


def _distributed(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for rows in (64, 65, 1):
        weight = Int8RowwiseTensor.from_float(torch.randn(rows, 16))
        placed = distribute_tensor(weight, mesh, [Shard(0)])
        local = placed.to_local()
        assert isinstance(local, Int8RowwiseTensor)
        assert all(torch.equal(a, b) for a, b in zip(parts(placed), parts(weight), strict=True))
        assert torch.equal(whole(placed).dequantize(), weight.dequantize())


@pytest.mark.parametrize("world_size", [2, 3])
def test_distribute_tensor(world_size):
    on_ranks(_distributed, world_size)


# ---- torch.distributed.checkpoint ----


def _trained(model, kind, last=2):
    optimizer = OPTIMIZERS[kind](model.parameters())
    _continue(model, optimizer, 0, last)
    return optimizer


def _continue(model, optimizer, first, last):
    for step in range(first, last):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(rank, path, asynchronous, kind):
    model = shard(quantized(True))
    optimizer = _trained(model, kind)
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state}
    if asynchronous:
        # a group of its own, as the steps below have collectives too
        saving = dcp.async_save(content, checkpoint_id=path, process_group=dist.new_group(backend="gloo"))
        _continue(model, optimizer, 2, 4)  # what is written must not change under way
        saving.result()
    else:
        dcp.save(content, checkpoint_id=path)


def _load(rank, path, sharded, kind):
    model, twin = quantized(True), quantized(True)
    model = shard(model) if sharded else model
    optimizer, reference = OPTIMIZERS[kind](model.parameters()), _trained(twin, kind)
    assert WEIGHT in differing(model, twin)  # negative control
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    assert not differing(model, twin)
    x = batch(7)
    assert torch.equal(model(x), twin(x))
    if dist.get_world_size() < 3:  # where the mean of equal gradients is exact
        _continue(model, optimizer, 2, 4), _continue(twin, reference, 2, 4)
        assert not differing(model, twin)


@pytest.mark.parametrize(
    ("asynchronous", "kind"), [(False, "AdamW8bit"), (True, "AdamW8bit"), (False, "SGD"), (True, "SGD")]
)
def test_saved_on_two_ranks_and_loaded_on_other_numbers(tmp_path, asynchronous, kind):
    """And the training that follows is the same: of torch.optim too, where the weights count their roundings."""
    on_ranks(_save, 2, str(tmp_path), asynchronous, kind)
    for world_size, sharded in ((1, False), (1, True), (2, True), (3, True)):
        on_ranks(_load, world_size, str(tmp_path), sharded, kind)
