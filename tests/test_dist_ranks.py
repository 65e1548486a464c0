"""The pools of processes that the distributed tests run on."""

import faulthandler
import os

import pytest
import torch
import torch.distributed as dist
from ranks import RankDied, on_ranks

pytestmark = pytest.mark.dist


def _sum_of_ranks(rank: int, offset: int) -> int:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total)


def _fail_on(rank: int, bad: int) -> int:
    if rank == bad:
        raise ValueError(f"rank {rank} is bad")
    return rank


def _die(rank: int, marker: str, how: str) -> int:
    if rank == 1 and (how != "abort once" or not os.path.exists(marker)):
        open(marker, "w").close()
        faulthandler.disable()  # this one is no news
        os._exit(7) if how == "exit" else os.abort()
    dist.barrier()
    return rank


def test_a_rank_that_aborts_is_given_one_more_try(tmp_path):
    assert on_ranks(_die, 2, str(tmp_path / "died"), "abort once") == [0, 1]
    with pytest.raises(RankDied, match="rank 1 of 2 died with exit code -6"):
        on_ranks(_die, 2, str(tmp_path / "died"), "abort")


def test_a_rank_that_exits_is_not(tmp_path, capsys):
    with pytest.raises(RankDied, match="rank 1 of 2 died with exit code 7"):
        on_ranks(_die, 2, str(tmp_path / "died"), "exit")
    assert "once more" not in capsys.readouterr().err


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_pool_runs_functions_and_reports_errors(world_size):
    assert on_ranks(_sum_of_ranks, world_size, 1) == [sum(range(1, world_size + 1))] * world_size
    with pytest.raises(RuntimeError, match="rank 1 is bad"):
        on_ranks(_fail_on, world_size, 1)
    assert on_ranks(_fail_on, world_size, -1) == list(range(world_size))
