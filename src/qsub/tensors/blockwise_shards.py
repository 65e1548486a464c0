"""Shards of Blockwise8bitTensor: slices of it, putting them together, and collectives. Each handler says who calls it.

A range of rows (dim 0) is a range of rows of codes and of scales; narrow rows that share blocks get scales of their own
first. A range of dim 1, or of the only dimension, that begins and ends where blocks do is a range of their columns;
another one would tear a block from its scale, and is refused.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qsub.tensors import collectives
from qsub.tensors.blocks import fitting_rows, scale_shape
from qsub.tensors.blockwise import OPS, Blockwise8bitTensor
from qsub.tensors.dispatch import float_dtype, view_of

aten = torch.ops.aten
_REMEDY = (
    "Choose a block_size that divides the shards, or call dequantize() (of a whole optimizer, to_torch_state_dict()): "
    "floats can be cut anywhere."
)


def _blocks(x: Blockwise8bitTensor, dim: int, start: int, end: int) -> tuple[int, int, int]:
    """Dimension of the scales, and the range of it, that belong to the range from `start` to `end` of `dim`."""
    if x.dim() >= 2 and dim == 0:
        return 0, start, end
    if dim == min(1, x.dim() - 1):  # the outermost one in a row; all of a tensor of one dimension is one row
        inner = math.prod(x.shape[2:])
        first, last = start * inner, end * inner
        if first % x.block_size == 0 and (last % x.block_size == 0 or end == x.shape[dim]):
            return 1, first // x.block_size, -(-last // x.block_size)
    raise NotImplementedError(
        f"elements {start} to {end} of dim {dim} of a Blockwise8bitTensor of shape {tuple(x.shape)} are not whole "
        f"blocks of {x.block_size}: shards must be rows (dim 0 of 2 or more), or whole blocks of dim 1. {_REMEDY}"
    )


@OPS.implements(aten.slice.Tensor)
def _slice(func: Any, x: Blockwise8bitTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A shard: torch.distributed.checkpoint's narrow, x[a:b]."""
    dim %= max(1, x.dim())
    low, high, _ = slice(start, end).indices(x.shape[dim] if x.dim() else 0)
    high = max(low, high)
    if step != 1 and (dim != 0 or x.dim() < 2):
        raise NotImplementedError(f"slices of dim {dim} of a Blockwise8bitTensor take step 1, got {step}")
    args = dim, start, end, step
    if (low, high, step) == (0, x.shape[dim] if x.dim() else 0, 1):
        return view_of(func, x, args, lambda: x.alias(func(x.codes, *args)))
    x.ungroup_()
    scale_dim, first, last = _blocks(x, dim, low, high)
    inner = func(x.codes, dim, low, high, step), func(x.scale, scale_dim, first, last, step)
    return view_of(func, x, args, lambda: x.like(*inner))


@OPS.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, x: Blockwise8bitTensor, sizes: Any, dim: int = 0) -> Any:
    """split, chunk: distribute_tensor, DTensor.redistribute."""
    dim %= max(1, x.dim())
    pieces, start = [], 0
    x.ungroup_()
    with torch.inference_mode(x.is_inference()):
        for codes in func(x.codes, sizes, dim):
            scale_dim, low, high = _blocks(x, dim, start, start + codes.shape[dim])
            pieces.append(x.like(codes, x.scale.narrow(scale_dim, low, high - low)))
            start += codes.shape[dim]
    return pieces


def join(func: Any, tensors: list[Tensor], dim: int = 0) -> Blockwise8bitTensor:
    """Shards made whole: DTensor.full_tensor."""
    first = tensors[0]
    if not isinstance(first, Blockwise8bitTensor) or not all(first.same_layout(x) for x in tensors):
        raise NotImplementedError("cat takes Blockwise8bitTensors of one layout: call .dequantize() on them first")
    dim %= max(1, first.dim())
    first, tensors = first.by_rows(), [x.by_rows() for x in tensors]  # type: ignore[attr-defined]
    codes = torch.cat([x.codes for x in tensors], dim)  # type: ignore[attr-defined]
    whole = first.like(codes, codes.new_zeros(scale_shape(codes.shape, first.block_size, first.code)).to(first.scale))
    start = 0
    for x in tensors:
        scale_dim, low, high = _blocks(whole, dim, start, start + x.shape[dim])
        whole.scale.narrow(scale_dim, low, high - low).copy_(x.scale)  # type: ignore[attr-defined]
        start += x.shape[dim]
    return whole


def select_rows(func: Any, x: Blockwise8bitTensor, index: Tensor) -> Blockwise8bitTensor:
    """Rows in another order: DTensor.full_tensor where two mesh dimensions shard the rows."""
    x = x.by_rows()
    return x.like(func(x.codes, 0, index), func(x.scale, 0, index))


@OPS.implements(aten.constant_pad_nd.default)
def _pad(func: Any, x: Blockwise8bitTensor, pad: list[int], value: float = 0) -> Blockwise8bitTensor:
    """Zeros at the end of a dimension: shards of uneven size are padded before they are gathered."""
    if value != 0 or any(pad[::2]):
        raise NotImplementedError(
            f"pad of a Blockwise8bitTensor appends zeros, got pad={pad}, value={value}: call .dequantize() first"
        )
    x = x.by_rows()
    codes = func(x.codes, pad, 0)
    wanted = scale_shape(codes.shape, x.block_size, x.code)
    grown = [size - old for size, old in zip(wanted, x.scale.shape, strict=True)]
    return x.like(codes, func(x.scale, [end for size in reversed(grown) for end in (0, size)], 0))


@OPS.implements(aten.new_empty.default, aten.new_zeros.default)
def _container(
    func: Any, x: Blockwise8bitTensor, size: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> Any:
    """Copies that torch.distributed.checkpoint.async_save stages; shards of no rows."""
    codes = func(x.codes, size, device=device)
    rows = x.rows_per_block if codes.shape[1:] == x.shape[1:] else 1
    scale = func(x.scale, scale_shape(codes.shape, x.block_size, x.code, rows), device=device)
    return x.like(codes, scale, float_dtype(dtype, x.dtype, OPS.owner), rows)


@OPS.implements(aten.view.default)
def _view(func: Any, x: Blockwise8bitTensor, size: Any) -> Any:
    """DTensor.from_local and to_local, which view a tensor in its own shape."""
    if tuple(size) != tuple(x.shape):
        raise NotImplementedError(
            f"view of a Blockwise8bitTensor of shape {tuple(x.shape)} as {tuple(size)}: its blocks belong to its "
            "shape. Call .dequantize() first."
        )
    return view_of(func, x, (size,), lambda: x.alias(aten.alias(x.codes)))


def _recode(x: Blockwise8bitTensor, value: Tensor) -> None:
    """As the state of a parameter is encoded that isn't sharded: ranks that receive floats do that."""
    rows = fitting_rows(x.shape, x.block_size)
    made = x.from_float(value, x.block_size, x.code, rows_per_block=rows)
    x.codes, x._held = made.codes, made._held


collectives.implement(OPS, has_rows=lambda x: x.dim() >= 2, recode=_recode)
