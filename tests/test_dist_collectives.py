"""Collectives on tensors of several inner tensors."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from ranks import on_ranks

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.tensors import blockwise, rowwise

pytestmark = pytest.mark.dist
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
KINDS = {
    "weight": (rowwise.OPS, lambda: Int8RowwiseTensor.from_float(torch.randn(4, 6))),
    "state": (blockwise.OPS, lambda: Blockwise8bitTensor.from_float(torch.randn(4, 6), 64, "float8_signed")),
}


def _gather(rank, kind):
    table, make = KINDS[kind]
    x, pending = make(), []

    def gather(part, *group):
        pending.append(torch._C._distributed_c10d._get_work_registry_size())
        return GATHER(part, *group)

    whole = table.handlers[GATHER](gather, x, dist.get_world_size(), dist.group.WORLD.group_name)
    assert torch.equal(whole.dequantize(), torch.cat([x.dequantize()] * dist.get_world_size()))
    return [*pending, torch._C._distributed_c10d._get_work_registry_size()]


@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_at_a_time(kind):
    """Several on their way make gloo corrupt the heap now and then (torch 2.13)."""
    assert on_ranks(_gather, 2, kind) == [[0, 0, 0]] * 2
