"""Rows and elements of Blockwise8bitTensor, read and written as a user edits the state of an optimizer.

Rows (dim 0 of 2 or more dimensions) whose blocks are their own are read, written and joined as they are stored: the
others keep their bits. What reads anything else makes a copy, of plain floats, which can be assigned to the state. What
writes anything else encodes the blocks in which a value changed, to nearest, and keeps the bits of all others.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsub.tensors.blocks import from_blocks, to_blocks
from qsub.tensors.blockwise import OPS, Blockwise8bitTensor
from qsub.tensors.blockwise_shards import join, select_rows
from qsub.tensors.dispatch import foreach_operators, view_of

aten = torch.ops.aten


def has_rows(x: Tensor) -> bool:
    """Whether `x` is coded and has rows: each has blocks of its own, or gets them where it must."""
    return isinstance(x, Blockwise8bitTensor) and x.dim() >= 2


def plain(value: Any) -> Any:
    """The value with each Blockwise8bitTensor in it decoded."""
    if isinstance(value, Blockwise8bitTensor):
        return value.dequantize()
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


# ---- Writing ----


def edit(x: Blockwise8bitTensor, change: Callable[[Tensor], Any]) -> Blockwise8bitTensor:
    """Let `change` work on the floats of `x` in place, and encode the blocks in which it changed any.

    Raises:
        ValueError: a value that can't be encoded. `x` is as it was.
    """
    before = x.dequantize(torch.float32)
    after = before.clone()
    change(after)
    if x.numel() == 0:
        return x
    layout = x.shape, x.block_size, x.rows_per_block
    old, new = (to_blocks(value, *layout) for value in (before, after))
    changed = (old != new).any(1)
    made = x.from_float(after, x.block_size, x.code, _second(x, old, new), x.rows_per_block)
    kept = [to_blocks(codes, *layout) for codes in (x.codes, made.codes)]
    x.codes.copy_(from_blocks(torch.where(changed.unsqueeze(1), kept[1], kept[0]), x.shape, x.rows_per_block))
    mask = changed.view(x.scale.shape[:2] + (1,) * (x.scale.dim() - 2))
    x.scale.copy_(torch.where(mask, made.scale, x.scale))
    return x


def _second(x: Blockwise8bitTensor, old: Tensor, new: Tensor) -> Tensor | None:
    """The second moment that tells how fine a first moment is encoded, for `from_float`.

    A block keeps the knee that it was encoded with, unless a value under it is written: elements that are cleared cost
    the others of the block nothing then. (A block of zeros has none.)
    """
    if x.code != "float8_signed":
        return None
    knee = x.scale[..., 0].reshape(-1, 1).to(torch.int32)
    small = (new != old) & (new != 0) & (new.abs() < (knee << 23).view(torch.float32))
    lasting = (knee > 0) & ~small.any(1, keepdim=True)
    # encode_exp_avg takes for the knee half the root of the smallest second moment: this is the inverse
    exponent = (2 * knee - 125).clamp(1, 254) << 23
    return from_blocks(torch.where(lasting, exponent.view(torch.float32), new.square()), x.shape, x.rows_per_block)


_IN_PLACE = """
    add_ sub_ mul_ div_ pow_ neg_ abs_ sqrt_ addcmul_ addcdiv_ lerp_ clamp_ clamp_min_ clamp_max_ nan_to_num_
    fill_ masked_fill_ masked_scatter_ index_fill_ index_add_ scatter_ scatter_add_ normal_ uniform_ bernoulli_
"""


def _overloads(names: str) -> list[Any]:
    packets = [getattr(aten, name) for name in names.split()]
    return [getattr(packet, name) for packet in packets for name in packet.overloads() if "out" not in name]


@OPS.implements(*_overloads(_IN_PLACE))
def _in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Edits of the state by the user: masks of a pruning, resets of neurons, decay."""
    args = tuple(plain(arg) for arg in args)
    if not isinstance(x, Blockwise8bitTensor):
        return func(x, *args, **kwargs)
    return edit(x, lambda value: func(value, *args, **kwargs))


def _copy_from(value: Tensor, target: Tensor) -> None:
    target.copy_(value)


@OPS.implements(*foreach_operators(in_place=True))
def _foreach_in_place(func: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """The same, on the states of many parameters; some may be fp32."""
    values = [x.dequantize(torch.float32) if isinstance(x, Blockwise8bitTensor) else x for x in tensors]
    func(values, *(plain(arg) for arg in args), **kwargs)
    for x, value in zip(tensors, values, strict=True):
        if isinstance(x, Blockwise8bitTensor):
            edit(x, functools.partial(_copy_from, value))


@OPS.implements(aten._foreach_copy_.default)
def _foreach_copy_(func: Any, tensors: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """copy_ for each: exact between equal layouts."""
    for x, source in zip(tensors, sources, strict=True):
        x.copy_(source, non_blocking)


def _row_index(indices: list[Tensor | None]) -> Tensor | None:
    """The index, if it is one of whole rows: a list of them, or a mask."""
    index = indices[0] if len(indices) == 1 else None
    return index if index is not None and index.dim() == 1 else None


def _put_rows(x: Blockwise8bitTensor, index: Tensor, value: Any) -> Blockwise8bitTensor:
    shape = x.ungroup_().codes[index].shape
    if not x.same_layout(value) or value.shape != shape:
        floats = plain(value).to(x.device, torch.float32).expand(shape)
        value = Blockwise8bitTensor.from_float(floats, x.block_size, x.code)
    x.codes[index], x.scale[index] = value.codes, value.row_scales()
    return x


@OPS.implements(aten.index_put_.default)
def _index_put_(func: Any, x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    """x[rows] = value, x[mask] = value."""
    index = _row_index(indices)
    if isinstance(x, Blockwise8bitTensor) and has_rows(x) and index is not None and not accumulate:
        return _put_rows(x, index, values)
    return _in_place(func, x, indices, values, accumulate)


@OPS.implements(aten.index_copy_.default)
def _index_copy_(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x.index_copy_(0, rows, value)."""
    if isinstance(x, Blockwise8bitTensor) and has_rows(x) and dim % x.dim() == 0 and source.shape[1:] == x.shape[1:]:
        return _put_rows(x, index.reshape(-1), source)
    return _in_place(func, x, dim, index, source)


def _set_item(x: Blockwise8bitTensor, index: Any, value: Any) -> None:
    """x[index] = value. torch writes through views, which numbers and columns don't have here."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    part: Any = x
    if not rest and isinstance(first, (Tensor, list)):
        Tensor.__setitem__(x, first, value)
        return
    if has_rows(x) and isinstance(first, slice):
        part, index = x[first], (slice(None), *rest)
        if not rest and x.same_layout(value) and part.shape == value.shape:
            part.copy_(value)
            return
    elif has_rows(x) and isinstance(first, int) and not isinstance(first, bool):
        row = operator.index(first)
        if not -x.shape[0] <= row < x.shape[0]:
            raise IndexError(f"index {row} is out of bounds for dimension 0 with size {x.shape[0]}")
        part, index = x.narrow(0, row % x.shape[0], 1), (0, *rest)
    floats = plain(value)
    edit(part, lambda target: target.__setitem__(index, floats))


Blockwise8bitTensor.__setitem__ = _set_item  # type: ignore[method-assign]


# ---- Reading ----


@OPS.implements(aten.index.Tensor)
def _index(func: Any, x: Tensor, indices: list[Any]) -> Tensor:
    """x[rows], x[mask]: a pruning. Rows are a Blockwise8bitTensor; anything else is plain floats."""
    index = _row_index(indices)
    if isinstance(x, Blockwise8bitTensor) and has_rows(x) and index is not None:
        x = x.by_rows()
        return x.like(func(x.codes, [index]), func(x.scale, [index]))
    return func(plain(x), indices)


@OPS.implements(aten.index_select.default)
def _index_select(func: Any, x: Blockwise8bitTensor, dim: int, index: Tensor) -> Tensor:
    """As `_index`; torch-pruning, also along dim 1. DTensor.full_tensor where two mesh dimensions shard the rows."""
    if has_rows(x) and dim % x.dim() == 0:
        return select_rows(func, x, index)
    return func(x.dequantize(), dim, index)


_COPIES = """
    masked_select gather take sort topk kthvalue median any all nonzero histc rand_like randn_like full_like
"""


@OPS.implements(*(op for op in _overloads(_COPIES) if not op._schema.is_mutable))
def _copied(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copies of elements, thresholds of a pruning and random masks for it: plain tensors."""
    return func(plain(x), *(plain(arg) for arg in args), **kwargs)


@OPS.implements(aten.select.int)
def _select(func: Any, x: Blockwise8bitTensor, dim: int, index: int) -> Any:
    """A row of a matrix, x[3], as a view."""
    if x.dim() != 2 or dim % 2 != 0 or not has_rows(x):
        raise NotImplementedError(
            f"one index of dim {dim} of a Blockwise8bitTensor of shape {tuple(x.shape)} has no view with blocks of its "
            "own. To write, assign: x[3] = 0, x[:, 3] = 0. To read, take rows, x[3:4], or call dequantize() first."
        )
    row = range(x.ungroup_().shape[0])[index]
    return view_of(func, x, (dim, index), lambda: x.like(func(x.codes, 0, row), x.scale.narrow(0, row, 1)))


@OPS.implements(aten.cat.default)
def _cat(func: Any, tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Rows made more: floats are encoded, those that are coded keep their bits. Elsewhere the result is plain floats.

    Of coded tensors alone, see `blockwise_shards.join`.
    """
    tensors = [x for x in tensors if x.shape != (0,) or isinstance(x, Blockwise8bitTensor)]  # torch skips them, too
    coded = [x for x in tensors if isinstance(x, Blockwise8bitTensor)]
    if len(coded) == len(tensors):
        return join(func, tensors, dim)
    if not coded:
        return func(tensors, dim)
    first = coded[0]
    if not all(map(has_rows, coded)) or not all(map(first.same_layout, coded)) or dim % first.dim() != 0:
        return func([plain(x) for x in tensors], dim)
    size, code = first.block_size, first.code
    encoded = [x if isinstance(x, Blockwise8bitTensor) else first.from_float(x, size, code) for x in tensors]
    return join(func, list(encoded), 0)
