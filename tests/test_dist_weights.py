"""Int8 weights under fully_shard: what one process computes, gathered as int8 codes and scales."""

import pytest
import torch
import torch.distributed as dist
from dist_weights import batch, differing, loss_of, parts, quantized, shard, whole
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import qsub
from qsub import Int8RowwiseTensor
from qsub.optim import AdamW8bit

pytestmark = pytest.mark.dist

SHARDING = {
    "gathered for each use": {},
    "weights stay gathered": {"reshard_after_forward": False},
    "offloaded to the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def _same_run(rank, trainable, sharding):
    model, twin = shard(quantized(trainable), **SHARDING[sharding]), quantized(trainable)
    assert not differing(model, twin)
    local = model.layers[1].linear.weight.to_local()
    assert type(local) is Int8RowwiseTensor and (local.shape[0] < 65) == (dist.get_world_size() > 1)
    size = {name: 0.0 for name, _ in twin.named_parameters()}
    for step in range(2):  # accumulated
        loss, wanted = loss_of(model, batch(step)), loss_of(twin, batch(step))
        assert torch.equal(loss, wanted)
        loss.backward(), wanted.backward()
        trained = [(name, param) for name, param in twin.named_parameters() if param.requires_grad]
        for (name, _), grad in zip(
            trained, torch.autograd.grad(loss_of(twin, batch(step)), [p for _, p in trained]), strict=True
        ):
            size[name] = size[name] + grad.abs()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not param.requires_grad:
            assert param.grad is None and name.endswith("linear.weight")
            continue
        grad = param.grad.full_tensor()
        assert type(param.grad.to_local()) is torch.Tensor and grad.dtype == torch.float32
        # The mean of equal gradients: a rounding for each of two sums, the division and the accumulation.
        apart = (grad - other.grad).abs()
        assert (apart <= 2.0**-22 * size[name]).all(), name
        assert not (apart + 0.01 * other.grad.abs() <= 2.0**-22 * size[name]).all()  # negative control
    assert model.layers[1].linear.weight.requires_grad == trainable


@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forward_and_backward_equal_one_process(world_size, trainable, sharding):
    on_ranks(_same_run, world_size, trainable, sharding)


# ---- Bytes on the wire ----


class Wire(TorchDispatchMode):
    """Bytes that one rank contributes to all-gathers, and the dtypes that are reduced."""

    def __init__(self):
        super().__init__()
        self.gathered, self.reduced = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered.append(args[1].nbytes)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduced.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _bytes(rank, world_size, int8):
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 65, bias=False)
    if int8:
        qsub.quantize_(layer, trainable=True)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
    with Wire() as wire:
        layer(torch.randn(2, 128, requires_grad=True)).sum().backward()
    return wire.gathered, wire.reduced


@pytest.mark.parametrize("world_size", [2, 3])
def test_codes_and_scales_are_gathered_and_floats_reduced(world_size):
    rows = -(-65 // world_size)
    for gathered, reduced in on_ranks(_bytes, world_size, world_size, True):
        assert gathered == [rows * (128 + 2)]  # int8 codes and an fp16 scale a row
        assert reduced == {torch.float32}
    for gathered, _ in on_ranks(_bytes, world_size, world_size, False):  # negative control
        assert gathered == [rows * 128 * 4]


# ---- Training ----


def _train(model, optimizer, first, last, dtype=torch.float32):
    for step in range(first, last):
        loss_of(model, batch(step, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _training(rank, trainable, sharding):
    model, twin = shard(quantized(trainable), **SHARDING[sharding]), quantized(trainable)
    start = quantized(trainable)
    options = {"lr": 1e-2, "backend": "eager"}
    optimizers = [AdamW8bit([p for p in m.parameters() if p.requires_grad], **options) for m in (model, twin)]
    _train(model, optimizers[0], 0, 4), _train(twin, optimizers[1], 0, 4)
    assert not differing(model, twin)
    assert ("layers.0.linear.weight" in differing(model, start)) == trainable
    _train(twin, optimizers[1], 4, 5)
    assert differing(model, twin)  # negative control


@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_with_8_bit_adam_equals_one_process_bit_for_bit(world_size, trainable, sharding):
    """On 2 ranks, where the mean of equal gradients is exact, and on 1, where FSDP2 gathers in another way."""
    on_ranks(_training, world_size, trainable, sharding)


def _mixed(rank, sharding):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(quantized(True), mp_policy=policy, **SHARDING[sharding])
    start = [tensor.clone() for tensor in parts(model.layers[0].linear.weight)]
    seen = []
    model.layers[0].linear.register_forward_hook(lambda module, args, out: seen.append((module.weight, out.dtype)))
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, backend="eager")
    losses = []
    for _ in range(30):
        losses.append(loss_of(model, batch(rank, rank)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    weight, out = seen[0]
    assert type(weight) is Int8RowwiseTensor and weight.dtype == out == torch.bfloat16
    weight = model.layers[0].linear.weight
    assert isinstance(weight, DTensor) and weight.dtype == torch.float32
    assert not torch.equal(parts(weight)[0], start[0])
    return losses[0].item(), losses[-1].item()


@pytest.mark.parametrize("sharding", SHARDING)
def test_mixed_precision_changes_appearance_only(sharding):
    for first, last in on_ranks(_mixed, 3, sharding):
        assert last < 0.7 * first


# ---- Shards made whole, and converted ----


def _whole(rank, dtype):
    twin = quantized(True, dtype=dtype)
    model = shard(quantized(True, dtype=dtype))
    for (name, param), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        full = whole(param)
        assert full.dtype == other[1].dtype == dtype and full.shape == other[1].shape
        assert isinstance(full, Int8RowwiseTensor) == name.endswith("linear.weight")
    assert not differing(model, twin)
    model.to(torch.bfloat16)  # appearance only; FSDP2 pads the shards again
    assert not differing(model, twin) or dtype != torch.bfloat16
    assert all(
        torch.equal(a, b)
        for a, b in zip(parts(model.layers[0].linear.weight), parts(twin.layers[0].linear.weight), strict=True)
    )
    assert torch.equal(model(batch(0, dtype=torch.bfloat16)), twin.to(torch.bfloat16)(batch(0, dtype=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_tensor(world_size, dtype):
    on_ranks(_whole, world_size, dtype)


# ---- torch.optim ----


def _torch_optimizer(rank, foreach):
    model, twin = shard(quantized(True)), quantized(True)
    for this in (model, twin):
        optimizer = torch.optim.AdamW(this.parameters(), lr=1e-4, foreach=foreach)
        torch.manual_seed(rank)
        _train(this, optimizer, 0, 4)
    assert not differing(model, twin)
    nearest = quantized(False)  # negative control: the update is a fraction of a code step, lost to nearest rounding
    assert "layers.1.linear.weight" in differing(model, nearest)
    _train(twin, optimizer, 4, 5)
    assert differing(model, twin)


@pytest.mark.parametrize("foreach", [False, True])
def test_training_with_torch_adam_equals_one_process_bit_for_bit(foreach):
    """Rounding is stochastic, of shards too, whatever the state of each rank's generator."""
    on_ranks(_torch_optimizer, 2, foreach)
