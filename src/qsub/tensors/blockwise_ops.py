"""Arithmetic and further copies of Blockwise8bitTensor. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors.blockwise import OPS, Blockwise8bitTensor
from qsub.tensors.dispatch import float_dtype, plain_operators

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


@OPS.implements(aten.ones_like.default)
def _ones_like(func: Any, x: Blockwise8bitTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    """A plain float tensor."""
    return func(torch.empty(x.shape, dtype=dtype or x.dtype, device=device or x.device))


@OPS.implements(aten.empty_like.default, aten.zeros_like.default)
def _container(func: Any, x: Blockwise8bitTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Containers for a state that is loaded into them, or staged to be written in the background."""
    shown = float_dtype(dtype, x.dtype, OPS.owner)
    return x.like(func(x.codes, device=device), func(x.scale, device=device), shown)


@OPS.implements(aten._pin_memory.default)
def _pin_memory(func: Any, x: Blockwise8bitTensor, device: Any = None) -> Blockwise8bitTensor:
    """`.pin_memory()`: offloading."""
    return x.like(func(x.codes, device), func(x.scale, device))


@OPS.implements(aten.is_pinned.default)
def _is_pinned(func: Any, x: Blockwise8bitTensor, device: Any = None) -> bool:
    """`.is_pinned()`."""
    return func(x.codes, device) and func(x.scale, device)
