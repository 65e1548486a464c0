"""Copies, views and in-place updates of Int8RowwiseTensor. Each handler says who calls it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from qsub.tensors import codes as math8
from qsub.tensors.dispatch import float_dtype
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor

aten = torch.ops.aten


# ---- Aliases and views ----


def _view(func: Any, x: Int8RowwiseTensor, args: tuple[Any, ...], int_data: Tensor, **changes: Any) -> Any:
    """Result of a view operator. Under inference_mode a view of a normal tensor is a normal tensor."""
    with torch.inference_mode(x.is_inference()):
        result = x.like(int_data, x.scale, **changes)
    return return_and_correct_aliasing(func, (x, *args), {}, result)


@OPS.implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, x: Int8RowwiseTensor) -> Any:
    """nn.Parameter, state_dict, .data, autograd's saved tensors."""
    return _view(func, x, (), func(x.int_data))


@OPS.implements(aten.t.default)
def _t(func: Any, x: Int8RowwiseTensor) -> Any:
    """Used by linear and the backward of mm."""
    return _view(func, x, (), x.int_data.t(), scale_dim=-3 - x.scale_dim)


@OPS.implements(aten.permute.default)
def _permute(func: Any, x: Int8RowwiseTensor, dims: list[int]) -> Any:
    """`w.T`, `w.permute(1, 0)`: the scale stays with its dimension."""
    order = [dim % x.dim() for dim in dims]
    scale_dim = order.index(x.dim() + x.scale_dim) - x.dim()
    if scale_dim not in (-2, -1):
        raise NotImplementedError(
            f"permute must leave the rows of an Int8RowwiseTensor in its last two dims, got {dims}"
        )
    return _view(func, x, (dims,), func(x.int_data, dims), scale_dim=scale_dim)


@OPS.implements(aten.transpose.int)
def _transpose(func: Any, x: Int8RowwiseTensor, dim0: int, dim1: int) -> Any:
    """`w.mT`, `w.transpose(0, 1)`: a permutation of two dimensions."""
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(aten.permute.default, x, dims)


# ---- Copies ----


@OPS.implements(aten.clone.default)
def _clone(func: Any, x: Int8RowwiseTensor, *, memory_format: Any = torch.preserve_format) -> Int8RowwiseTensor:
    """clone, deepcopy, contiguous."""
    return x.like(x.int_data.clone(memory_format=memory_format), x.scale.clone())


@OPS.implements(aten._to_copy.default)
def _to_copy(func: Any, x: Int8RowwiseTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """`.to`, `.half`, `.cpu`, `.cuda`, autocast: the dtype changes in appearance only, the device moves both."""
    shown = float_dtype(dtype, x.dtype, "Int8RowwiseTensor")
    if options.get("layout") not in (None, torch.strided):
        raise NotImplementedError(f"an Int8RowwiseTensor is strided, got layout={options['layout']}")
    move = {"device": device, "non_blocking": options.get("non_blocking", False), "copy": True}
    return x.like(x.int_data.to(**move), x.scale.to(**move), dtype=shown)


@OPS.implements(aten.empty_like.default)
def _empty_like(func: Any, x: Int8RowwiseTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Module.to_empty: an Int8RowwiseTensor with uninitialized content."""
    shown = float_dtype(dtype, x.dtype, "Int8RowwiseTensor")
    return x.like(torch.empty_like(x.int_data, device=device), torch.empty_like(x.scale, device=device), dtype=shown)


@OPS.implements(aten.zeros_like.default)
def _zeros_like(func: Any, x: Int8RowwiseTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    """State of torch.optim's optimizers: a plain float tensor, as 8 bits would not do for it."""
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device)


@OPS.implements(aten.copy_.default)
def _copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """load_state_dict, in three directions: int8 to int8 (exact), float to int8 (to nearest), int8 to float."""
    if not isinstance(x, Int8RowwiseTensor):
        return x.copy_(source.dequantize(x.dtype), non_blocking)  # type: ignore[attr-defined]
    if x.shape != source.shape:
        raise ValueError(
            f"copy_ into an Int8RowwiseTensor takes its shape {tuple(x.shape)}, got {tuple(source.shape)}: "
            "broadcasting would change the row scales"
        )
    if isinstance(source, Int8RowwiseTensor) and source.scale_dim == x.scale_dim:
        x.int_data.copy_(source.int_data, non_blocking)
        x.scale.copy_(source.scale, non_blocking)
        return x
    value = source.dequantize(torch.float32) if isinstance(source, Int8RowwiseTensor) else source
    rows = value if x.scale_dim == -2 else value.t()
    math8.check_rows(rows, "source of copy_")
    return x.requantize_(value.to(x.device))


# ---- In-place arithmetic: dequantize, update in fp32, encode again ----


def _update(func: Any, x: Int8RowwiseTensor, *args: Any, **kwargs: Any) -> Int8RowwiseTensor:
    value = x.dequantize(torch.float32)
    func(value, *(_plain(arg) for arg in args), **kwargs)
    noise = torch.rand_like(value) if x.requires_grad else None
    return x.requantize_(value, noise=noise)


def _plain(value: Any) -> Any:
    return value.dequantize(torch.float32) if isinstance(value, Int8RowwiseTensor) else value


@OPS.implements(
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.sub_.Tensor,
    aten.sub_.Scalar,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.addcdiv_.default,
    aten.addcmul_.default,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
)
def _in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.optim's single-tensor optimizers, and the merge of an adapter."""
    if not isinstance(x, Int8RowwiseTensor):
        return func(x, *(_plain(arg) for arg in args), **kwargs)
    return _update(func, x, *args, **kwargs)


@OPS.implements(
    aten._foreach_add_.List,
    aten._foreach_add_.Scalar,
    aten._foreach_add_.ScalarList,
    aten._foreach_add_.Tensor,
    aten._foreach_mul_.List,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.ScalarList,
    aten._foreach_mul_.Tensor,
    aten._foreach_addcdiv_.Scalar,
    aten._foreach_addcdiv_.ScalarList,
    aten._foreach_addcdiv_.Tensor,
)
def _foreach_in_place(func: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """torch.optim's foreach optimizers, in fp32 on the whole list."""
    values = [x.dequantize(torch.float32) if isinstance(x, Int8RowwiseTensor) else x for x in tensors]
    func(values, *([_plain(v) for v in arg] if isinstance(arg, (list, tuple)) else arg for arg in args), **kwargs)
    for x, value in zip(tensors, values, strict=True):
        if isinstance(x, Int8RowwiseTensor):
            x.requantize_(value, noise=torch.rand_like(value) if x.requires_grad else None)


@OPS.implements(aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default)
def _fused(func: Any, *args: Any, **kwargs: Any) -> None:
    """torch.optim with fused=True, whose kernels read raw floats."""
    raise NotImplementedError(
        "torch.optim's fused=True can't update an Int8RowwiseTensor. Use qsub.optim.AdamW8bit, or torch.optim with "
        "fused=False (foreach works too)."
    )
