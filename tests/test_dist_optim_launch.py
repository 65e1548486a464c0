"""Backend "triton" on shards: one launch for the local parts of all parameters, as of one process bit for bit.

On a CPU these run in Triton's interpreter (test_one_launch_interpreted.py starts them), else on two GPUs with NCCL.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_optim import Bag, assert_same_run, assert_same_states, new_optimizer, sharded_bag, train, whole
from one_launch_helpers import CPU
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

pytestmark = pytest.mark.dist
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
devices = pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])

# Rows that don't divide, one row, fp32 state; whole blocks, three and one dimensions where it is fast.
SHAPES = {"cpu": [(5, 80), (1, 96), (7, 6)], "cuda": [(65, 80), (1, 96), (7, 6), (64, 64), (3, 5, 10), (33,)]}
STEPS = 2


def _on_ranks(function, device, *args, world_size=2):
    return on_ranks(function, world_size, device, *args, backend="nccl" if device == "cuda" else "gloo")


def _optimizer(model, **options):
    return new_optimizer(model, **{"backend": "triton", "min_8bit_size": 64, **options})


def _trained(device, dtype=torch.float32, sharded=True, steps=STEPS, **options):
    shapes = SHAPES[device]
    model = sharded_bag(device, dtype=dtype, shapes=shapes) if sharded else Bag(dtype, shapes, device)
    optimizer = _optimizer(model, **options)
    train(model, optimizer, 0, steps)
    return model, optimizer


def _codes(optimizer):
    return [whole(entry["exp_avg"])[0] for entry in optimizer.state_dict()["state"].values()]


def _same_run(rank, device, dtype, options):
    model, optimizer = _trained(device, dtype, **options)
    twin, reference = _trained(device, dtype, sharded=False, **options)
    assert_same_run(model, optimizer, twin, reference)
    assert all(plan.covers_group for plans in optimizer._launches._plans.values() for plan in plans.values())
    other = _trained(device, dtype, sharded=False, seed=1, **options)[1]  # negative control: other random bits
    return all(torch.equal(a, b) for a, b in zip(_codes(optimizer), _codes(other), strict=True))


OPTIONS = {"AdamW": {}, "bf16": {"stochastic_round": True, "amsgrad": True}, "fp32 state": {"state_bits": 32}}


@devices
@pytest.mark.parametrize("options", OPTIONS)
def test_trajectory_equals_the_single_process_run(device, options):
    dtype = torch.bfloat16 if options == "bf16" else torch.float32
    assert _on_ranks(_same_run, device, dtype, OPTIONS[options]) == [options == "fp32 state"] * 2


def _missing(rank, device):
    """A gradient on one rank only, which is not the case the plan was made for, and then all of them again."""
    model, optimizer = _trained(device)
    grads = [param.grad for param in model.parameters()]
    if rank == 1:
        model.values[0].grad = None
    optimizer.step()
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    optimizer.step()
    return [int(entry["step"]) for entry in optimizer.state.values()]


@devices
def test_gradients_on_one_rank_only(device):
    """The parameter (1, 96) has no row on rank 1: its steps count all the same."""
    others = [STEPS + 2] * (len(SHAPES[device]) - 1)
    assert _on_ranks(_missing, device) == [[STEPS + 2, *others], [STEPS + 1, *others]]


def _save(rank, device, path):
    model, optimizer = _trained(device)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    twin, reference = _trained(device, sharded=False)
    assert_same_states(full, get_optimizer_state_dict(twin, reference))
    other, loaded = _trained(device, steps=0, seed=2)
    set_optimizer_state_dict(other, loaded, full, options=StateDictOptions(full_state_dict=True))
    assert_same_states(loaded.state_dict(), optimizer.state_dict())


def _load(rank, device, path, sharded):
    model, optimizer = _trained(device, sharded=sharded, steps=0)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    train(model, optimizer, STEPS, STEPS + 1)
    twin, reference = _trained(device, sharded=False, steps=STEPS + 1)
    assert_same_run(model, optimizer, twin, reference)


@devices
def test_a_checkpoint_resumes_on_two_ranks_and_on_one(device, tmp_path):
    _on_ranks(_save, device, str(tmp_path))
    _on_ranks(_load, device, str(tmp_path), True)
    _on_ranks(_load, device, str(tmp_path), False, world_size=1)


def _no_sync(rank, device):
    model, optimizer = _trained(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@TWO_GPUS
def test_no_step_waits_for_the_device():
    _on_ranks(_no_sync, "cuda")
