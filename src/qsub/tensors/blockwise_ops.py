"""Arithmetic and further copies of Blockwise8bitTensor. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors.blockwise import OPS, Blockwise8bitTensor
from qsub.tensors.blockwise_rows import plain
from qsub.tensors.dispatch import float_dtype, foreach_operators, plain_operators

aten = torch.ops.aten


@OPS.implements(*plain_operators(), *foreach_operators(in_place=False))
def _plain_result(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Logging of norms and means, comparisons: an operator on the dequantized state; the result is plain."""
    return func(*(plain(arg) for arg in args), **{key: plain(value) for key, value in kwargs.items()})


@OPS.implements(aten.zero_.default)
def _zero_(func: Any, x: Blockwise8bitTensor) -> Blockwise8bitTensor:
    """A reset of the state."""
    x.codes.zero_()
    x.scale.zero_()
    return x


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


# ---- Methods that never reach an operator ----


def _set_data(x: Blockwise8bitTensor, value: Tensor) -> None:
    """`x.data = value`, which torch would ignore."""
    if not isinstance(value, Tensor) or value.shape != x.shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f".data of a Blockwise8bitTensor must keep its shape {tuple(x.shape)}, got {got}: assign to the state of "
            "the optimizer instead, state['exp_avg'] = value"
        )
    x.copy_(value)


Blockwise8bitTensor.data = property(Tensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]
