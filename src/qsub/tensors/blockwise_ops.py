"""Arithmetic, row slices and further copies of Blockwise8bitTensor. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors.blockwise import OPS, Blockwise8bitTensor
from qsub.tensors.dispatch import plain_operators, view_of

aten = torch.ops.aten


def _plain(value: Any) -> Any:
    if isinstance(value, Blockwise8bitTensor):
        return value.dequantize()
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@OPS.implements(*plain_operators())
def _plain_result(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Logging of norms and means, comparisons: an operator on the dequantized state; the result is plain."""
    return func(*(_plain(arg) for arg in args), **{key: _plain(value) for key, value in kwargs.items()})


@OPS.implements(aten.zero_.default)
def _zero_(func: Any, x: Blockwise8bitTensor) -> Blockwise8bitTensor:
    """A reset of the state."""
    x.codes.zero_()
    x.scale.zero_()
    return x


@OPS.implements(
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.masked_fill_.Scalar,
)
def _in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Edits of the state by the user: decode, update, encode to nearest."""
    if not isinstance(x, Blockwise8bitTensor):
        return func(x, *(_plain(arg) for arg in args), **kwargs)
    return x.copy_(func(x.dequantize(torch.float32), *(_plain(arg) for arg in args), **kwargs))


@OPS.implements(aten.zeros_like.default, aten.ones_like.default)
def _float_like(func: Any, x: Blockwise8bitTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    """A plain float tensor, as of Int8RowwiseTensor."""
    return func(torch.empty(x.shape, dtype=dtype or x.dtype, device=device or x.device))


@OPS.implements(aten.empty_like.default)
def _empty_like(func: Any, x: Blockwise8bitTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Containers for a state that is loaded into them."""
    return x.like(torch.empty_like(x.codes, device=device), torch.empty_like(x.scale, device=device), dtype)


@OPS.implements(aten._pin_memory.default)
def _pin_memory(func: Any, x: Blockwise8bitTensor, device: Any = None) -> Blockwise8bitTensor:
    """`.pin_memory()`: offloading."""
    return x.like(func(x.codes, device), func(x.scale, device))


@OPS.implements(aten.is_pinned.default)
def _is_pinned(func: Any, x: Blockwise8bitTensor, device: Any = None) -> bool:
    """`.is_pinned()`."""
    return func(x.codes, device) and func(x.scale, device)


def _check_rows(x: Blockwise8bitTensor, dim: int, name: str) -> None:
    if x.dim() < 2 or dim % x.dim() != 0:
        raise NotImplementedError(
            f"{name} of a Blockwise8bitTensor takes rows (dim 0) of a tensor of 2 dimensions or more, since blocks run "
            "along the others: call .dequantize() first"
        )


@OPS.implements(aten.slice.Tensor)
def _slice(func: Any, x: Blockwise8bitTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A range of rows with their scales: a shard."""
    _check_rows(x, dim, "slice")
    inner = [func(t, 0, start, end, step) for t in (x.codes, x.scale)]
    return view_of(func, x, (dim, start, end, step), lambda: x.like(*inner))


@OPS.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, x: Blockwise8bitTensor, sizes: Any, dim: int = 0) -> Any:
    """split, chunk: ranges of rows."""
    _check_rows(x, dim, "split")
    pieces = zip(func(x.codes, sizes, 0), func(x.scale, sizes, 0), strict=True)
    with torch.inference_mode(x.is_inference()):
        return [x.like(codes, scale) for codes, scale in pieces]


@OPS.implements(aten.cat.default)
def _cat(func: Any, tensors: list[Tensor], dim: int = 0) -> Blockwise8bitTensor:
    """Rows of one layout put together: shards made whole."""
    first = tensors[0]
    if not isinstance(first, Blockwise8bitTensor) or not all(first.same_layout(x) for x in tensors):
        raise NotImplementedError("cat takes Blockwise8bitTensors of one layout: call .dequantize() on them first")
    _check_rows(first, dim, "cat")
    inner = [(x.codes, x.scale) for x in tensors]  # type: ignore[attr-defined]
    return first.like(torch.cat([codes for codes, _ in inner]), torch.cat([scale for _, scale in inner]))
