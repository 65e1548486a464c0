"""Collectives on a tensor that consists of inner tensors: these travel one after the other, as they are.

DTensor calls them on its local parts, `torch.distributed.checkpoint.state_dict` on whole states.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from qsub.tensors.dispatch import OpTable, called_from

COLLECTIVES: list[Any] = []  # the operators that `implement` registers

if torch.distributed.is_available():
    import torch.distributed._functional_collectives  # registers the operators

    _functional, _c10d = torch.ops._c10d_functional, torch.ops.c10d
    _GATHER = [_functional.all_gather_into_tensor.default, _functional.wait_tensor.default]
    _WRAP = [getattr(_functional, name).default for name in ["_wrap_tensor_autograd"] if hasattr(_functional, name)]
    COLLECTIVES += [*_GATHER, *_WRAP, _c10d.scatter_.default, _c10d.broadcast_.default]  # _WRAP is since torch 2.13


def implement(table: OpTable, has_rows: Callable[[Any], bool], recode: Callable[[Any, Tensor], None]) -> None:
    """Register the collectives in the table of a subclass.

    Args:
        table: operators of the subclass.
        has_rows: whether dim 0 of all inner tensors is that of the tensor, so that gathering them gathers it.
        recode: (tensor, float tensor of its shape): gives the tensor those values, to nearest, in new inner tensors,
            since the caller's state may share the old ones.
    """
    if not COLLECTIVES:
        return

    @table.implements(*_GATHER, *_WRAP)
    def gather(func: Any, x: Any, *group: Any) -> Any:
        """DTensor.full_tensor and redistribute: each inner tensor has arrived before the next one is sent.

        With several on their way at a time, the worker threads of gloo can corrupt the heap (torch 2.13).
        """
        if not has_rows(x):
            raise NotImplementedError(f"{func} of {table.owner} takes rows of 2 dimensions or more. {table.remedy}")
        sent = (part if func in _WRAP else func(part.contiguous(), *group) for part in _parts(x))
        whole = x.like(*map(_functional.wait_tensor, sent))
        whole.gathered = True
        return whole

    @table.implements(_c10d.scatter_.default)
    def scatter(func: Any, outputs: list[Any], inputs: list[list[Any]], *group: Any) -> Any:
        """distribute_tensor: pieces of a whole tensor, which only the source has."""
        work = None
        for place, parts in enumerate(zip(*map(_parts, outputs), strict=True)):
            rows = [[_parts(piece)[place].contiguous() for piece in row] for row in inputs]
            work = _finished(func, list(parts), rows, *group)
        counts = [_count(x) for x in outputs]
        if None not in counts:
            work = _finished(func, counts, [[_count(piece) for piece in row] for row in inputs], *group)
            _set_counts(outputs, counts)
        return outputs, work

    @table.implements(_c10d.broadcast_.default)
    def broadcast(func: Any, tensors: list[Any], *group: Any) -> Any:
        """distribute_tensor to replicas.

        State dicts with broadcast_from_rank0=True are received in plain float tensors, so floats must be sent. All
        ranks encode them anew, the sender as well, or replicas of the same tensor would go on from different ones.
        """
        if not called_from("torch.distributed._state_dict_utils"):
            return tensors, broadcast_parts(func, tensors, *group)
        with torch.no_grad():
            values = [x.dequantize().contiguous() for x in tensors]
        work = _finished(func, values, *group)
        for x, value in zip(tensors, values, strict=True):
            recode(x, value)
            if _count(x) is not None:
                x._updates = None  # as on the ranks that receive floats
        return tensors, work


def broadcast_parts(func: Any, tensors: Iterable[Any], *group: Any) -> Any:
    """Broadcast plain tensors, and the inner tensors of others, with the arguments of `broadcast_`."""
    work = None
    tensors = list(tensors)
    for part in (part for x in tensors for part in _parts(x)):
        work = _finished(func, [part], *group)
    for x in tensors:
        count = _count(x)
        if count is not None:
            work = _finished(func, [count], *group)
            _set_counts([x], [count])
    return work


def _count(x: Any) -> Any:
    """Of a weight: the number of its stochastic roundings, (1,) int64. Replicas that begin to differ in it stay so."""
    if not hasattr(x, "count_as"):
        return None
    return torch.tensor([x.count], device=x.int_data.device)


def _set_counts(tensors: list[Any], counts: list[Tensor]) -> None:
    for x, count in zip(tensors, counts, strict=True):
        if x.device.type != "meta" and int(count) != x.count:
            x.updates[0] = int(count)


def _finished(func: Any, *args: Any) -> Any:
    """Run an operator of c10d to its end; returns its work.

    A caller may have asked for that (async_op=False). Asked so, NCCL returns no work, and None in its place ends the
    process on its way to Python: so it is asked for work, which is waited for here.
    """
    place = [argument.name for argument in func._schema.arguments].index("async_op")
    work = func(*args[:place], True, *args[place + 1 :])[1]
    work.wait()
    return work


def _parts(x: Any) -> list[Tensor]:
    if hasattr(x, "ungroup_"):  # all ranks exchange the form in which each row has a scale of its own
        x.ungroup_()
    return [x] if type(x) is Tensor else [getattr(x, name) for name in x.__tensor_flatten__()[0]]
