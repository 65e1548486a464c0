"""Int8RowwiseTensors laid end to end, as FSDP2 and DDP ask for them. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors.collectives import broadcast_parts
from qsub.tensors.dispatch import OpTable

aten = torch.ops.aten
FLAT = OpTable(
    "a flat view of an Int8RowwiseTensor",
    "Its scales belong to rows: work on the matrix, or call .dequantize() on it before view(-1).",
)


class FlatRows(torch.Tensor):
    """Int8RowwiseTensors, and plain tensors, end to end as one dimension: what `view(-1)` and then `cat` make.

    FSDP2 keeps one beside each shard and never looks at it. DDP broadcasts a bucket of parameters as one and copies
    its pieces back. Anything else raises NotImplementedError.

    Args:
        pieces: tensors of one float dtype and device, of any shape each.
    """

    pieces: list[Tensor]

    @staticmethod
    def __new__(cls, pieces: list[Tensor]):
        """See the class."""
        first, numel = pieces[0], sum(piece.numel() for piece in pieces)
        self = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=first.dtype, device=first.device)
        self.pieces = pieces
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FlatRows({self.pieces})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handlers follow."""
        return FLAT.dispatch(func, args, kwargs)


@FLAT.implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, x: FlatRows) -> FlatRows:
    """Autograd."""
    return FlatRows(x.pieces)


@FLAT.implements(aten.cat.default)
def _cat(func: Any, tensors: list[Tensor], dim: int = 0) -> FlatRows:
    """DDP's bucket. What it is broadcast from, and to, is a copy, as a bucket of plain tensors would be."""
    pieces = [piece for x in tensors for piece in (x.pieces if isinstance(x, FlatRows) else [x])]
    return FlatRows([piece.clone(memory_format=torch.contiguous_format) for piece in pieces])


@FLAT.implements(aten.slice.Tensor)
def _slice(func: Any, x: FlatRows, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> FlatRows:
    """A piece of DDP's bucket."""
    first, last, _ = slice(start, end).indices(x.shape[0])
    place = 0
    for piece in x.pieces:
        if (place, place + piece.numel(), step) == (first, last, 1):
            return FlatRows([piece])
        place += piece.numel()
    raise NotImplementedError(f"elements {first} to {last} of {FLAT.owner} are not one of its tensors. {FLAT.remedy}")


@FLAT.implements(aten.view.default)
def _view(func: Any, x: FlatRows, size: Any) -> Tensor:
    """A piece of DDP's bucket in its shape."""
    piece = x.pieces[0]
    if len(x.pieces) == 1 and tuple(size) == tuple(piece.shape):
        return piece.detach()
    if len(x.pieces) == 1 and type(piece) is Tensor:
        return piece.view(size)
    raise NotImplementedError(f"view of {FLAT.owner} as {tuple(size)}. {FLAT.remedy}")


if torch.distributed.is_available():

    @FLAT.implements(torch.ops.c10d.broadcast_.default)
    def _broadcast(func: Any, tensors: list[FlatRows], *group: Any) -> Any:
        """DDP: codes and scales as they are, so that all ranks hold the same ones."""
        return tensors, broadcast_parts(func, tensors[0].pieces, *group)
