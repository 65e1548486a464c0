"""Collectives on a tensor that consists of inner tensors: these travel one after the other, as they are.

DTensor calls them on its local parts, `torch.distributed.checkpoint.state_dict` on whole states.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from qsub.tensors.dispatch import OpTable, called_from

COLLECTIVES: list[Any] = []  # the operators that `implement` registers

if torch.distributed.is_available():
    import torch.distributed._functional_collectives  # registers the operators

    _functional, _c10d = torch.ops._c10d_functional, torch.ops.c10d
    _GATHER = [_functional.all_gather_into_tensor.default, _functional.wait_tensor.default]
    # Since torch 2.13.
    _WRAP = [_functional._wrap_tensor_autograd.default] if hasattr(_functional, "_wrap_tensor_autograd") else []
    _SCATTER, _BROADCAST = _c10d.scatter_.default, _c10d.broadcast_.default
    COLLECTIVES += [*_GATHER, *_WRAP, _SCATTER, _BROADCAST]


def implement(table: OpTable, has_rows: Callable[[Any], bool], encode: Callable[[Any, Tensor], Any]) -> None:
    """Register the collectives in the table of a subclass.

    Args:
        table: operators of the subclass.
        has_rows: whether dim 0 of all inner tensors is that of the tensor, so that gathering them gathers it.
        encode: (tensor, float tensor of its shape) to one like it with those values, rounded to nearest.
    """
    if not COLLECTIVES:
        return

    @table.implements(*_GATHER)
    def gather(func: Any, x: Any, *group: Any) -> Any:
        """DTensor.full_tensor and redistribute."""
        if not has_rows(x):
            raise NotImplementedError(f"{func} of {table.owner} takes rows of 2 dimensions or more. {table.remedy}")
        return x.like(*(func(part.contiguous(), *group) for part in _parts(x)))

    @table.implements(*_WRAP)
    def wait(func: Any, x: Any) -> Any:
        """What was gathered, waited for at once rather than when it is first used."""
        return x.like(*(_functional.wait_tensor(part) for part in _parts(x)))

    @table.implements(_SCATTER)
    def scatter(func: Any, outputs: list[Any], inputs: list[list[Any]], *group: Any) -> Any:
        """distribute_tensor: pieces of a whole tensor, which only the source has."""
        received = zip(*map(_parts, outputs), strict=True)
        sent = [[_parts(piece) for piece in row] for row in inputs]

        def calls() -> Iterator[Any]:
            for place, parts in enumerate(received):
                pieces = [[piece[place].contiguous() for piece in row] for row in sent]
                yield func(list(parts), pieces, *group)[1]

        return outputs, _last(calls())

    @table.implements(_BROADCAST)
    def broadcast(func: Any, tensors: list[Any], *group: Any) -> Any:
        """distribute_tensor to replicas.

        set_model_state_dict and set_optimizer_state_dict with broadcast_from_rank0=True receive in plain float tensors,
        so floats must be sent. All ranks encode them anew, the sender as well, or replicas of the same tensor would go
        on from different ones.
        """
        if not called_from("torch.distributed._state_dict_utils"):
            return tensors, broadcast_each(func, [part for x in tensors for part in _parts(x)], *group)
        with torch.no_grad():
            values = [x.dequantize().contiguous() for x in tensors]
        work = _last([func(values, *group)[1]])
        for x, value in zip(tensors, values, strict=True):
            for name, part in zip(x.__tensor_flatten__()[0], _parts(encode(x, value)), strict=True):
                setattr(x, name, part)  # not in place: the caller's state may share the old ones
        return tensors, work


def broadcast_each(func: Any, tensors: Iterable[Tensor], *group: Any) -> Any:
    """Broadcast plain tensors of several dtypes, with the arguments of `broadcast_`."""
    return _last(func([tensor], *group)[1] for tensor in tensors)


def _last(works: Iterable[Any]) -> Any:
    """The last of several collectives; each has ended before the next one begins."""
    work = None
    for work in works:
        if work is not None:
            work.wait()
    return work


def _parts(x: Any) -> list[Tensor]:
    """The inner tensors."""
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]
