"""Int8RowwiseTensor on several ranks: its shards, and how it is gathered. Each handler says who calls it."""

from typing import Any

import torch

from qsub.tensors import codes as math8
from qsub.tensors import collectives
from qsub.tensors.dispatch import float_dtype, view_of
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor

aten = torch.ops.aten


# ---- Shards ----


@OPS.implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: Any, x: Int8RowwiseTensor, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """FSDP2's padded shards, DTensor's empty ones: Int8RowwiseTensors of zeros.

    They have rows of the weight's length, or its rows without a column. Tensors of any other size are plain floats in
    the dtype and on the device of the weight.
    """
    shard = len(size) == 2 and (size[1] == x.shape[1] or tuple(size) == (x.shape[0], 0))
    if x.scale_dim != -2 or x.dim() != 2 or not shard:
        return func(torch.empty(0, dtype=dtype or x.dtype, device=device or x.device), size)
    int_data, scale = func(x.int_data, size, device=device), func(x.scale, size[:1], device=device)
    made = x.like(int_data, scale, dtype=float_dtype(dtype, x.dtype, OPS.owner), whole_rows=True)
    made.shard_rows = size[0]
    return made


@OPS.implements(aten.as_strided.default)
def _as_strided(func: Any, x: Int8RowwiseTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """FSDP2's cut of the padding off a gathered weight: a view of the first rows."""
    first_rows = x.scale_dim == -2 and len(size) == 2 and size[1] == x.shape[1] and size[0] <= x.shape[0]
    if not first_rows or tuple(stride) != x.stride() or (storage_offset or 0) != x.storage_offset():
        raise NotImplementedError(
            f"as_strided of an Int8RowwiseTensor of shape {tuple(x.shape)} and strides {x.stride()} takes its first "
            f"rows, got {tuple(size)} and {tuple(stride)}: call .dequantize() first"
        )
    args = (size, stride, storage_offset)
    return view_of(func, x, args, lambda: x.view_like(x.int_data[: size[0]], x.scale[: size[0]]))


@OPS.implements(aten.constant_pad_nd.default)
def _pad(func: Any, x: Int8RowwiseTensor, pad: list[int], value: float = 0) -> Int8RowwiseTensor:
    """Zeros after the rows or the columns: DTensor pads shards of uneven size before they travel."""
    rows = [*pad[2:], 0, 0][:2]
    if x.scale_dim != -2 or x.dim() != 2 or value != 0 or pad[0] or rows[0] or min(pad) < 0:
        raise NotImplementedError(
            f"pad of an Int8RowwiseTensor appends zeros, got pad={pad}, value={value}: call .dequantize() first"
        )
    return x.like(func(x.int_data, pad, 0), func(x.scale, rows, 0), whole_rows=True)


# ---- Collectives ----


def _recode(x: Int8RowwiseTensor, value: Any) -> None:
    int_data, scale = math8.quantize_rows(x.as_rows(value))
    x.int_data, x.scale = int_data.view(x.shape), scale.view(x.scale.shape)


collectives.implement(OPS, has_rows=lambda x: x.scale_dim == -2 and x.dim() == 2, recode=_recode)
