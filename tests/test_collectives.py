"""How inner tensors are sent, and what a GPU needs of it, shown by a stand-in for the operator."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from ranks import on_ranks

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.tensors import blockwise, collectives, rowwise


class Operator:
    """c10d's operator as NCCL carries it out: asked to be synchronous, it has no work to return."""

    def __init__(self, name):
        self._schema = getattr(torch.ops.c10d, name).default._schema
        self.calls, self.waits = [], 0

    def __call__(self, *args):
        self.calls.append(args)
        values = dict(zip([argument.name for argument in self._schema.arguments], args, strict=False))
        return args[0], self if values["async_op"] else None

    def wait(self):
        self.waits += 1


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name, between", [("scatter_", ([], "group", 1)), ("broadcast_", ("group", 1, 0))])
def test_work_is_asked_for_and_waited_for(name, between, asynchronous):
    operator, tensors = Operator(name), [torch.zeros(2)]
    assert collectives._finished(operator, tensors, *between, asynchronous, 30) is operator
    assert operator.calls == [(tensors, *between, True, 30)] and operator.waits == 1


def test_parts_are_sent_one_after_the_other():
    operator = Operator("broadcast_")
    parts = [torch.zeros(2), torch.ones(3)]
    assert collectives.broadcast_parts(operator, parts, "group", 0, 0, False, -1) is operator
    assert [call[0][0] for call in operator.calls] == parts and operator.waits == 2


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


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_at_a_time(kind):
    """Several on their way make gloo corrupt the heap now and then (torch 2.13)."""
    assert on_ranks(_gather, 2, kind) == [[0, 0, 0]] * 2
