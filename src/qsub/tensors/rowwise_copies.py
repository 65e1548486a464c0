"""Copies of Int8RowwiseTensor, and new tensors made from one. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors import codes as math8
from qsub.tensors.dispatch import float_dtype
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor
from qsub.tensors.rowwise_parallel import join_columns

aten = torch.ops.aten


@OPS.implements(aten.clone.default)
def _clone(func: Any, x: Int8RowwiseTensor, *, memory_format: Any = torch.preserve_format) -> Int8RowwiseTensor:
    """clone, deepcopy, contiguous. The copy of a view of some columns has scales of its own."""
    return x.like(x.int_data.clone(memory_format=memory_format), x.scale.clone(), whole_rows=True)


@OPS.implements(aten._to_copy.default)
def _to_copy(func: Any, x: Int8RowwiseTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """`.to`, `.half`, `.cpu`, `.cuda`: the dtype changes in appearance only, the device moves both."""
    shown = float_dtype(dtype, x.dtype, "Int8RowwiseTensor")
    if options.get("layout") not in (None, torch.strided):
        raise NotImplementedError(f"an Int8RowwiseTensor is strided, got layout={options['layout']}")
    move = {"device": device, "non_blocking": options.get("non_blocking", False), "copy": True}
    int_data = x.int_data
    batch = [dim for dim in range(x.dim()) if x.dim() > 2 and int_data.stride(dim) == 0]  # autocast's cast for bmm
    for dim in batch:
        int_data = int_data[(slice(None),) * dim + (slice(0, 1),)]
    int_data = int_data.to(**move, memory_format=options.get("memory_format") or torch.preserve_format)
    int_data = int_data.expand(x.shape) if batch else int_data
    return x.like(int_data, x.scale.to(**move), dtype=shown, whole_rows=True).keep_shard(x)


@OPS.implements(aten._pin_memory.default)
def _pin_memory(func: Any, x: Int8RowwiseTensor, device: Any = None) -> Int8RowwiseTensor:
    """`.pin_memory()`: a copy in page-locked memory."""
    return x.like(func(x.int_data, device), func(x.scale, device), whole_rows=True).keep_shard(x)


@OPS.implements(aten.is_pinned.default)
def _is_pinned(func: Any, x: Int8RowwiseTensor, device: Any = None) -> bool:
    """`.is_pinned()`."""
    return func(x.int_data, device) and func(x.scale, device)


@OPS.implements(aten.empty_like.default)
def _empty_like(func: Any, x: Int8RowwiseTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Module.to_empty: an Int8RowwiseTensor with uninitialized content."""
    shown = float_dtype(dtype, x.dtype, "Int8RowwiseTensor")
    new = [torch.empty_like(inner, device=device) for inner in (x.int_data, x.scale)]
    return x.like(*new, dtype=shown, whole_rows=True)


@OPS.implements(aten.zeros_like.default, aten.ones_like.default, aten.rand_like.default, aten.randn_like.default)
def _float_like(func: Any, x: Int8RowwiseTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    """State of torch.optim's optimizers: a plain float tensor, as 8 bits would not do for it."""
    return func(torch.empty(x.shape, dtype=dtype or x.dtype, device=device or x.device))


@OPS.implements(aten.full_like.default)
def _full_like(
    func: Any, x: Int8RowwiseTensor, value: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    """A plain float tensor, as of zeros_like."""
    return torch.full(x.shape, value, dtype=dtype or x.dtype, device=device or x.device)


@OPS.implements(aten.new_ones.default, aten.new_full.default)
def _new(
    func: Any, x: Int8RowwiseTensor, size: Any, *args: Any, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    """A plain float tensor of any size in the dtype and on the device of the weight."""
    source = torch.empty(0, dtype=dtype or x.dtype, device=device or x.device)
    return func(source, size, *args)


@OPS.implements(aten.copy_.default)
def _copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """load_state_dict, in three directions: int8 to int8 (exact), float to int8 (to nearest), int8 to float."""
    if not isinstance(x, Int8RowwiseTensor):
        return x.copy_(source.decode(x.dtype), non_blocking)  # type: ignore[attr-defined]
    source = source if isinstance(source, Tensor) else torch.full(x.shape, float(source))
    if x.shape != source.shape:
        raise ValueError(
            f"copy_ into an Int8RowwiseTensor takes its shape {tuple(x.shape)}, got {tuple(source.shape)}: "
            "broadcasting would change the row scales"
        )
    if isinstance(source, Int8RowwiseTensor) and source.scale_dim == x.scale_dim:
        if not x.whole_rows:
            _check_scales(x, source)
        x.int_data.copy_(source.int_data, non_blocking)
        x.scale.copy_(source.scale, non_blocking)
        x.count_as(source)
        return x.written()
    x.as_rows(x.int_data)  # refuses views of columns before any work is done
    value = source.decode(torch.float32) if isinstance(source, Int8RowwiseTensor) else source
    if not value.dtype.is_floating_point:
        raise TypeError(
            f"copy_ into an Int8RowwiseTensor takes a float tensor or an Int8RowwiseTensor, got {value.dtype}: "
            "use .float() for numbers, and Int8RowwiseTensor(int_data, scale) for codes"
        )
    if type(value) is Tensor or isinstance(value, torch.nn.Parameter):  # a trace can't look at values: NaN rows show
        math8.check_rows(x.as_rows(value), "source of copy_")
    return x.requantize_(value.to(x.device))


def _check_scales(columns: Int8RowwiseTensor, source: Int8RowwiseTensor) -> None:
    """ValueError unless the scales are equal: those of a view of some columns belong to the others, too."""
    if not torch.equal(columns.scale, source.scale.to(columns.scale.device)):
        raise ValueError(
            "columns of an Int8RowwiseTensor can only take columns of a weight with the same row scales, and these "
            "differ: copy whole rows. In torch.distributed.checkpoint these are parts of a weight whose columns are "
            "shared out (RowwiseParallel): if it was trained, each part has scales of its own and loads on as many "
            "ranks as it was saved on; else load it into a model of the same weights. Any other model takes a full "
            "state dict, StateDictOptions(full_state_dict=True)."
        )


@OPS.implements(aten.cat.default)
def _cat(func: Any, tensors: list[Tensor], dim: int = 0) -> Int8RowwiseTensor:
    """Concatenation of rows, with their scales; DTensor.full_tensor: of columns that were gathered into one memory."""
    first = tensors[0]
    refusal = "cat takes Int8RowwiseTensors of one orientation: call .dequantize() on them first"
    if not isinstance(first, Int8RowwiseTensor) or first.scale_dim is None:
        raise NotImplementedError(refusal)
    if not all(isinstance(x, Int8RowwiseTensor) and x.scale_dim == first.scale_dim for x in tensors):
        raise NotImplementedError(refusal)
    if dim % first.dim() != first.dim() + first.scale_dim:
        if all(_same_scales(first, x) for x in tensors):
            return first.like(torch.cat([x.int_data for x in tensors], dim), first.scale.clone(), whole_rows=True)  # type: ignore[attr-defined]
        memories = {x.int_data.untyped_storage()._cdata for x in tensors}  # type: ignore[attr-defined]
        shards = all(x.gathered for x in tensors) and len(memories) == 1  # type: ignore[attr-defined]
        if shards and first.dim() == 2 and first.scale_dim == -2:
            return join_columns(tensors)
        raise NotImplementedError(
            "cat of the columns of several Int8RowwiseTensors, whose rows have different scales: call .dequantize() on "
            "them first"
        )
    return first.like(
        torch.cat([x.int_data for x in tensors], dim),  # type: ignore[attr-defined]
        torch.cat([x.scale for x in tensors]),  # type: ignore[attr-defined]
        whole_rows=True,
    )


def _same_scales(a: Any, b: Any) -> bool:
    """Whether the rows of two weights have the same scales, so that their columns can stand side by side."""
    left, right = a.scale, b.scale
    if left.shape != right.shape or left.device != right.device:
        return False
    if (
        type(left) is not Tensor or type(right) is not Tensor or left.device.type == "meta"
    ):  # whose values can't be seen
        return left is right
    return left.data_ptr() == right.data_ptr() and left.stride() == right.stride() or torch.equal(left, right)


@OPS.implements(aten.index_select.default, aten.index.Tensor)
def _rows(func: Any, x: Int8RowwiseTensor, *args: Any) -> Int8RowwiseTensor:
    """`w[rows]`, `w.index_select(0, rows)`: a copy of some rows, by a 1-D index or mask."""
    if func is aten.index_select.default:
        dim, index = args
    else:
        dim, index = 0, args[0][0]
        if len(args[0]) != 1 or index is None or index.dim() != 1:
            raise NotImplementedError(
                "an Int8RowwiseTensor is indexed by rows with a 1-D index: call .dequantize() first"
            )
    if x.scale_dim is None or dim % x.dim() != x.dim() + x.scale_dim:
        raise NotImplementedError("an Int8RowwiseTensor is indexed by its rows: call .dequantize() first")
    pick = (lambda t, d: t.index_select(d, index)) if func is aten.index_select.default else (lambda t, d: t[index])
    return x.like(pick(x.int_data, dim), pick(x.scale, 0), whole_rows=True)


@OPS.implements(aten.embedding.default)
def _embedding(func: Any, weight: Int8RowwiseTensor, indices: Tensor, *args: Any) -> Tensor:
    """F.embedding with an int8 table: only the rows asked for are dequantized, to a plain tensor."""
    if not isinstance(weight, Int8RowwiseTensor) or weight.scale_dim != -2:
        raise NotImplementedError("embedding takes an Int8RowwiseTensor as its table, not transposed")
    index = indices.reshape(-1)
    rows = weight.like(weight.int_data.index_select(0, index), weight.scale.index_select(0, index))
    return rows.decode().view(*indices.shape, weight.shape[1])
