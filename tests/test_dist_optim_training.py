"""Training with the 8-bit optimizers on several ranks: forward, backward and step under fully_shard, DDP and ZeRO."""

import copy

import pytest
import torch
import torch.distributed as dist
from dist_optim import assert_same_states, differs, new_optimizer, whole
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qsub.optim import AdamW8bit

pytestmark = pytest.mark.dist


class Net(nn.Module):
    """Two hidden layers, the same values in each call; rows of 130 and 65 do not divide by the ranks."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(72, 130), nn.Linear(130, 65), nn.Linear(65, 64)]).to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _batch(step, dtype=torch.float32):
    return torch.randn(8, 72, generator=torch.Generator().manual_seed(step)).to(dtype)


def _train(model, optimizer, first, last, dtype=torch.float32, clip=None):
    """The same batch on each rank, so that the mean of two ranks' gradients is that of one process."""
    for step in range(first, last):
        model(_batch(step, dtype)).float().square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def _shard(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


FSDP = {
    "fp32": (torch.float32, {}, {}),
    "bf16": (torch.bfloat16, {}, {"stochastic_round": True}),
    "weights stay gathered": (torch.float32, {"reshard_after_forward": False}, {}),
    "offloaded to the CPU": (torch.float32, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
    "amsgrad": (torch.float32, {}, {"amsgrad": True, "capturable": True}),
}


def _fsdp(rank, case):
    dtype, sharding, options = FSDP[case]
    model, twin = _shard(Net(dtype), **sharding), Net(dtype)
    optimizer, reference = new_optimizer(model, **options), new_optimizer(twin, **options)
    _train(model, optimizer, 0, 4, dtype), _train(twin, reference, 0, 4, dtype)
    assert_same_states(optimizer.state_dict(), reference.state_dict())
    assert not differs(model, twin)
    _train(twin, reference, 4, 5, dtype)
    assert differs(model, twin)  # negative control


@pytest.mark.parametrize("case", FSDP)
def test_fully_sharded_training_equals_one_process(case):
    on_ranks(_fsdp, 2, case)


def _mixed(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _shard(Net(), mp_policy=policy)
    before = [whole(param)[0].clone() for param in model.parameters()]
    optimizer = new_optimizer(model)
    losses = []
    for _ in range(30):
        loss = model(_batch(rank, torch.bfloat16)).float().square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for param, entry in zip(model.parameters(), before, strict=True):
        assert param.dtype == torch.float32 and not torch.equal(whole(param)[0], entry)
    return losses[0], losses[-1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_precision_and_clipping(world_size):
    for first, last in on_ranks(_mixed, world_size, world_size):
        assert last < 0.7 * first


def _clip(rank):
    """Clipped gradients of a DTensor, whose norm is a sum over ranks: equal up to its rounding."""
    model, twin = _shard(Net()), Net()
    optimizer, reference = new_optimizer(model, lr=1e-3), new_optimizer(twin, lr=1e-3)
    _train(model, optimizer, 0, 1, clip=1e-3), _train(twin, reference, 0, 1, clip=1e-3)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        # The first update is lr * g / (|g| + eps) whatever the scale of g, but for eps: 1e-8 against 1e-6 and less.
        torch.testing.assert_close(param.full_tensor(), other, rtol=0, atol=1e-2 * 1e-4)


def test_clipped_gradients():
    on_ranks(_clip, 2)


def _scaled(rank):
    """The third of four steps overflows, in what one rank does."""
    model = _shard(Net())
    optimizer = new_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steps = []
    for step in range(4):
        loss = model(_batch(step)).square().mean()
        scaler.scale(loss * float("inf") if (rank, step) == (1, 2) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(int(optimizer.state_dict()["state"][0]["step"]))
    assert all(whole(param)[0].isfinite().all() for param in model.parameters())
    return steps, scaler.get_scale()


def test_a_gradient_scaler_skips_a_step_on_all_ranks():
    assert on_ranks(_scaled, 2) == [([1, 2, 2, 3], 512.0)] * 2


# ---- DDP ----


def _ddp(rank, stochastic, zero):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that part of it is deprecated

    model = DistributedDataParallel(Net(torch.bfloat16 if stochastic else torch.float32))
    options = {"lr": 1e-2, "backend": "eager", "stochastic_round": stochastic}
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW8bit, **options)
    else:
        optimizer = AdamW8bit(model.parameters(), **options)
    dtype = model.module.layers[0].weight.dtype

    def run(first, last):
        for step in range(first, last):
            model(_batch(100 * rank + step, dtype)).float().square().mean().backward()  # each rank its own data
            optimizer.step()
            optimizer.zero_grad()

    run(0, 4)
    if zero:
        optimizer.consolidate_state_dict(to=0)
        saved = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
        dist.broadcast_object_list(saved)
        weights = copy.deepcopy(model.state_dict())
        run(4, 6)
        wanted = [param.detach().clone() for param in model.parameters()]
        model.load_state_dict(weights)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW8bit, **options)
        optimizer.load_state_dict(saved[0])
        run(4, 6)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))
    return [param.detach().float().tolist() for param in model.parameters()]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_replicas_stay_equal(stochastic, zero):
    """Under DDP; with ZeroRedundancyOptimizer also a resume from its consolidated state is exact."""
    first, second = on_ranks(_ddp, 2, stochastic, zero)
    assert first == second
