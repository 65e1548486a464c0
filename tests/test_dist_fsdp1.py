"""The 8-bit optimizers under FSDP1: refused at the first step, and fp32 state, which works and resumes bit for bit."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from qsub.optim import AdamW8bit

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::FutureWarning")]

STRATEGIES = {"full": ShardingStrategy.FULL_SHARD, "grad_op": ShardingStrategy.SHARD_GRAD_OP}


def sharded(use_orig_params, strategy):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 65))
    return FullyShardedDataParallel(
        layers, use_orig_params=use_orig_params, sharding_strategy=STRATEGIES[strategy], device_id=torch.device("cpu")
    )


def backward(model, step):
    model.zero_grad()
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 128, generator=generator)).square().sum().backward()


def _refused(rank, use_orig_params, strategy):
    model = sharded(use_orig_params, strategy)
    before = [param.detach().clone() for param in model.parameters()]
    # Shards of ranks differ in size, also across min_8bit_size: all ranks must refuse alike.
    optimizer = AdamW8bit(model.parameters(), min_8bit_size=10_000, backend="eager")
    backward(model, 0)
    with pytest.raises(NotImplementedError) as caught:
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before)) and not optimizer.state
    return str(caught.value)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_8_bit_state_is_refused_at_the_first_step(strategy, use_orig_params):
    first, second = on_ranks(_refused, 2, use_orig_params, strategy)
    assert first == second
    assert "FSDP1" in first and "torch.distributed.fsdp.fully_shard" in first and "state_bits=32" in first


def _resumed(rank, use_orig_params, strategy):
    model = sharded(use_orig_params, strategy)
    optimizer = AdamW8bit(model.parameters(), state_bits=32, backend="eager")
    for step in range(3):
        backward(model, step)
        optimizer.step()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    for step in range(3, 5):
        backward(model, step)
        optimizer.step()
    model.zero_grad()
    wanted = [param.detach().clone() for param in model.parameters()]
    resumed = AdamW8bit(model.parameters(), state_bits=32, backend="eager")
    set_state_dict(model, resumed, model_state_dict=weights, optim_state_dict=state)
    assert not all(map(torch.equal, model.parameters(), wanted))
    for step in range(3, 5):
        backward(model, step)
        resumed.step()
    return all(map(torch.equal, model.parameters(), wanted))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp32_state_resumes_bit_for_bit(strategy, use_orig_params):
    assert on_ranks(_resumed, 2, use_orig_params, strategy) == [True, True]
