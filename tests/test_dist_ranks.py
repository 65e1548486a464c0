"""The pools of processes that the distributed tests run on."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

pytestmark = pytest.mark.dist


def _sum_of_ranks(rank: int, offset: int) -> int:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total)


def _fail_on(rank: int, bad: int) -> int:
    if rank == bad:
        raise ValueError(f"rank {rank} is bad")
    return rank


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_pool_runs_functions_and_reports_errors(world_size):
    assert on_ranks(_sum_of_ranks, world_size, 1) == [sum(range(1, world_size + 1))] * world_size
    with pytest.raises(RuntimeError, match="rank 1 is bad"):
        on_ranks(_fail_on, world_size, 1)
    assert on_ranks(_fail_on, world_size, -1) == list(range(world_size))
