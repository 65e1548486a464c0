"""Views of Int8RowwiseTensor: they share the int8 data and the scales. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors.dispatch import view_of
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor
from qsub.tensors.rowwise_flat import FlatRows

aten = torch.ops.aten


def _view(func: Any, x: Int8RowwiseTensor, args: tuple[Any, ...], int_data: Tensor, **changes: Any) -> Any:
    scale = changes.pop("scale", x.scale)
    return view_of(func, x, args, lambda: x.view_like(int_data, scale, **changes))


def _scale_index(x: Int8RowwiseTensor) -> int | None:
    """The dimension of the scales, counted from the front."""
    return None if x.scale_dim is None else x.dim() + x.scale_dim


@OPS.implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, x: Int8RowwiseTensor) -> Any:
    """nn.Parameter, state_dict, .data, autograd's saved tensors."""
    with torch.inference_mode(x.is_inference()):
        return _view(func, x, (), func(x.int_data), scale=func(x.scale)).keep_shard(x)


@OPS.implements(aten.permute.default)
def _permute(func: Any, x: Int8RowwiseTensor, dims: list[int]) -> Any:
    """`w.T`, `w.permute(1, 0)`, einsum: the scale stays with its dimension."""
    order = [dim % x.dim() for dim in dims]
    place = _scale_index(x)
    return _view(
        func, x, (dims,), func(x.int_data, dims), scale_dim=None if place is None else order.index(place) - x.dim()
    )


@OPS.implements(aten.transpose.int)
def _transpose(func: Any, x: Int8RowwiseTensor, dim0: int, dim1: int) -> Any:
    """`w.mT`, `w.transpose(0, 1)`: a permutation of two dimensions."""
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(aten.permute.default, x, dims)


@OPS.implements(aten.t.default)
def _t(func: Any, x: Int8RowwiseTensor) -> Any:
    """`w.t()`: linear and the backward of mm."""
    return _transpose(func, x, 0, 1) if x.dim() == 2 else _alias(aten.alias.default, x)


@OPS.implements(aten.slice.Tensor)
def _slice(func: Any, x: Int8RowwiseTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """`w[a:b]`, narrow, FSDP2's shards: of rows, with their scales; or of columns, with the scales of the rows."""
    int_data = func(x.int_data, dim, start, end, step)
    if dim % x.dim() == _scale_index(x):
        rows = _view(func, x, (dim, start, end, step), int_data, scale=func(x.scale, 0, start, end, step))
        return rows.keep_shard(x) if not start else rows  # FSDP2 cuts the padding off a shard
    return _view(func, x, (dim, start, end, step), int_data, whole_rows=x.whole_rows and int_data.shape == x.shape)


@OPS.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, x: Int8RowwiseTensor, sizes: Any, dim: int = 0) -> Any:
    """split, chunk: a slice for each piece."""
    pieces = func(x.int_data, sizes, dim)
    along = dim % x.dim() == _scale_index(x)
    scales = func(x.scale, sizes, 0) if along else [x.scale] * len(pieces)
    whole_rows = x.whole_rows and (along or len(pieces) == 1)
    with torch.inference_mode(x.is_inference()):
        return [x.view_like(piece, scale, whole_rows=whole_rows) for piece, scale in zip(pieces, scales, strict=True)]


@OPS.implements(aten.select.int)
def _select(func: Any, x: Int8RowwiseTensor, dim: int, index: int) -> Any:
    """`w[i]`, `w[:, j]`, iteration: a row with its scale, or a column with the scales of all rows."""
    dim, place = dim % x.dim(), _scale_index(x)
    int_data = func(x.int_data, dim, index)
    if dim == place:
        return _view(func, x, (dim, index), int_data, scale=func(x.scale, 0, index), scale_dim=None)
    left = None if place is None else (place if place < dim else place - 1) - int_data.dim()
    return _view(func, x, (dim, index), int_data, scale_dim=left, whole_rows=x.whole_rows and x.shape[dim] == 1)


@OPS.implements(aten.unbind.int)
def _unbind(func: Any, x: Int8RowwiseTensor, dim: int = 0) -> Any:
    """`for row in w`."""
    return [_select(aten.select.int, x, dim, index) for index in range(x.shape[dim])]


@OPS.implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, x: Int8RowwiseTensor, *dims: Any) -> Any:
    """Dimensions of size 1 go, that of a single row too."""
    chosen = range(x.dim()) if not dims else [dims[0]] if isinstance(dims[0], int) else dims[0]
    gone = {dim % x.dim() for dim in chosen if x.shape[dim] == 1}
    place = _scale_index(x)
    if place is None or place in gone:
        scale, left = (x.scale if place is None else x.scale[0]), None
    else:
        scale, left = x.scale, sum(dim not in gone for dim in range(place)) + len(gone) - x.dim()
    return _view(func, x, dims, func(x.int_data, *dims), scale=scale, scale_dim=left)


@OPS.implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, x: Int8RowwiseTensor, dim: int) -> Any:
    """einsum: a dimension of size 1."""
    dim, place = dim % (x.dim() + 1), _scale_index(x)
    moved = None if place is None else (place + 1 if dim <= place else place) - x.dim() - 1
    return _view(func, x, (dim,), func(x.int_data, dim), scale_dim=moved)


@OPS.implements(aten.expand.default)
def _expand(func: Any, x: Int8RowwiseTensor, size: list[int], implicit: bool = False) -> Any:
    """matmul and bmm of a batch with one weight: new leading dimensions, and those of size 1 that hold no scale."""
    int_data = func(x.int_data, size, implicit=implicit)
    place = _scale_index(x)
    if place is not None and int_data.shape[x.scale_dim] != x.shape[place]:
        raise NotImplementedError("expand of the rows of an Int8RowwiseTensor: call .dequantize() first")
    return _view(func, x, (size,), int_data, whole_rows=x.whole_rows and int_data.shape == x.shape)


@OPS.implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _reshape(func: Any, x: Int8RowwiseTensor, size: list[int]) -> Any:
    """View and reshape that keep the rows: dimensions of size 1 come and go (einsum, bmm). One row takes any shape."""
    place = _scale_index(x)
    if list(size) == [-1] and x.dim() == 2 and x.scale_dim == -2:
        return FlatRows([x])
    target = list(torch.empty(x.shape, device="meta").view(size).shape)
    if target == list(x.shape):
        return _view(func, x, (size,), x.int_data.view(size))
    if x.scale.numel() == 1:
        return _view(func, x, (size,), x.int_data.view(size), scale=x.scale.view(()), scale_dim=None)
    kept = [dim for dim, length in enumerate(x.shape) if length != 1]
    new = [dim for dim, length in enumerate(target) if length != 1]
    if place not in kept or [x.shape[dim] for dim in kept] != [target[dim] for dim in new]:
        raise NotImplementedError(f"{_RESHAPE}, got {tuple(x.shape)} to {tuple(target)}")
    return _view(func, x, (size,), x.int_data.view(size), scale_dim=new[kept.index(place)] - len(target))


_RESHAPE = "view of an Int8RowwiseTensor must keep its rows: call .dequantize() first"
