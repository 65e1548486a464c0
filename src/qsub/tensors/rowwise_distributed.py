"""Int8RowwiseTensor on several ranks: shards and collectives. Each handler says who calls it."""

from typing import Any

import torch

from qsub.tensors import codes as math8
from qsub.tensors.dispatch import called_from, float_dtype, view_of
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor

aten = torch.ops.aten
COLLECTIVES: list[Any] = []  # the operators that take a process group


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
    made.keep_shard(x).shard_rows, made.trainable = size[0], x.trainable or x.requires_grad
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
    return view_of(func, x, args, lambda: x.like(x.int_data[: size[0]], x.scale[: size[0]]))


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

if torch.distributed.is_available():
    import torch.distributed._functional_collectives  # registers the operators

    _functional, _c10d = torch.ops._c10d_functional, torch.ops.c10d
    COLLECTIVES += [_functional.all_gather_into_tensor.default, _functional.wait_tensor.default, _c10d.scatter_.default]
    COLLECTIVES.append(_c10d.broadcast_.default)

    @OPS.implements(_functional.all_gather_into_tensor.default, _functional.wait_tensor.default)
    def _gather(func: Any, x: Int8RowwiseTensor, *group: Any) -> Int8RowwiseTensor:
        """DTensor.full_tensor and redistribute: rows of codes, and their scales."""
        if x.scale_dim != -2 or x.dim() != 2:
            raise NotImplementedError(f"{func} of an Int8RowwiseTensor takes the matrix, not a view of it")
        return x.like(func(x.int_data.contiguous(), *group), func(x.scale, *group))

    if hasattr(_functional, "_wrap_tensor_autograd"):  # since torch 2.13
        COLLECTIVES.append(_functional._wrap_tensor_autograd.default)

        @OPS.implements(_functional._wrap_tensor_autograd.default)
        def _wait(func: Any, x: Int8RowwiseTensor) -> Int8RowwiseTensor:
            """What was gathered, waited for at once rather than when it is first used."""
            return x.like(_functional.wait_tensor(x.int_data), _functional.wait_tensor(x.scale))

    @OPS.implements(_c10d.scatter_.default)
    def _scatter(func: Any, outputs: list[Any], inputs: list[list[Any]], *group: Any) -> Any:
        """distribute_tensor of a whole weight: codes, then scales."""
        _, work = func([x.int_data for x in outputs], [[x.int_data for x in row] for row in inputs], *group)
        if work is not None:
            work.wait()
        _, work = func([x.scale for x in outputs], [[x.scale for x in row] for row in inputs], *group)
        return outputs, work

    @OPS.implements(_c10d.broadcast_.default)
    def _broadcast(func: Any, tensors: list[Any], *group: Any) -> Any:
        """distribute_tensor to replicas: codes, then scales (DDP's buckets: FlatRows).

        set_model_state_dict(broadcast_from_rank0=True) receives in plain float tensors, so floats must be sent. All
        ranks encode them anew, the sender as well, or replicas of the same weight would go on from different ones.
        """
        if not called_from("torch.distributed._state_dict_utils"):
            _, work = func([x.int_data for x in tensors], *group)
            if work is not None:
                work.wait()
            return tensors, func([x.scale for x in tensors], *group)[1]
        values = [x.decode().contiguous() for x in tensors]
        _, work = func(values, *group)
        if work is not None:
            work.wait()
        for x, value in zip(tensors, values, strict=True):
            fresh = math8.quantize_rows(x.as_rows(value))
            x.int_data, x.scale = fresh[0].view(x.shape), fresh[1].view(x.scale.shape)  # the old ones may be shared
        return tensors, work
