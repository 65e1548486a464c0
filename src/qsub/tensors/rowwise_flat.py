"""Int8RowwiseTensors laid end to end, as FSDP2 and DDP ask for them. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors.dispatch import OpTable

aten = torch.ops.aten
FLAT = OpTable(
    "a flat view of an Int8RowwiseTensor",
    "Its scales belong to rows: work on the matrix, or call .dequantize() on it before view(-1).",
)


class FlatRows(torch.Tensor):
    """What `view(-1)` of an Int8RowwiseTensor makes: the weight, held as a tensor of one dimension.

    FSDP2 keeps one beside each shard and never looks at it. Anything but holding it raises NotImplementedError.

    Args:
        pieces: tensors of one float dtype and device.
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
