"""Arithmetic with Int8RowwiseTensor: plain float results, and updates in place through the row code."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors import rounding
from qsub.tensors.codes import row_noise
from qsub.tensors.dispatch import foreach_operators, plain_operators
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor

aten = torch.ops.aten


def _plain(value: Any, dtype: torch.dtype | None = None) -> Any:
    """The value with each Int8RowwiseTensor in it dequantized, and each float tensor in `dtype` if that is given."""
    if isinstance(value, Int8RowwiseTensor):
        return value.decode(dtype)
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    return [_plain(entry, dtype) for entry in value] if isinstance(value, (list, tuple)) else value


# ---- Plain results ----


@OPS.implements(*plain_operators())
def _plain_result(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on the dequantized weight, in the dtype that it shows; the result is a plain tensor."""
    return func(*(_plain(arg) for arg in args), **{key: _plain(value) for key, value in kwargs.items()})


@OPS.implements(aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default)
def _weight_norm(func: Any, *args: Any) -> Any:
    """torch.nn.utils.weight_norm, whose direction is the int8 weight: plain tensors."""
    return _plain_result(func, *args)


@OPS.implements(*foreach_operators(in_place=False))
def _foreach_plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Weight decay in torch.optim's foreach optimizers: plain tensors, as of the operators on one."""
    return _plain_result(func, *args, **kwargs)


# ---- In place: dequantize, update in fp32, encode again ----


def noise(x: Int8RowwiseTensor, value: Tensor) -> Tensor | None:
    """Random numbers for stochastic rounding, where an optimizer would be at work (on a trainable weight) or a merge.

    Replicas of a weight (DDP) must draw the same ones though their generators may differ, and shards (FSDP2) those of
    the whole weight: so they follow from the values of each row and the number of the update.
    """
    if not (x.is_trained() or rounding.is_stochastic()):
        return None
    if type(value) is not Tensor:  # a trace of torch.compile, which would fix the number of the update
        return torch.rand_like(value, dtype=torch.float32)
    x.updates[0] += 1
    drawn = torch.empty_like(value)
    x.as_rows(drawn).copy_(row_noise(x.as_rows(value), x.updates[0]))
    return drawn


def _store(x: Int8RowwiseTensor, value: Tensor) -> Int8RowwiseTensor:
    """Encode the value of an update in fp32; what rounding to nearest loses of it is measured."""
    if x.is_trained() or not rounding.can_measure(value):
        return x.requantize_(value, noise=noise(x, value))
    before = x.decode(torch.float32)
    x.requantize_(value, noise=noise(x, value))
    rounding.measure(before, value, x.decode(torch.float32))
    return x


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
    aten.pow_.Scalar,
    aten.neg_.default,
    aten.abs_.default,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
)
def _in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.optim's single-tensor optimizers, and the merge of an adapter."""
    if not isinstance(x, Int8RowwiseTensor):
        return func(x, *(_plain(arg) for arg in args), **kwargs)
    x.as_rows(x.int_data)  # refuses views that can't be updated before any work is done
    value = x.decode(torch.float32)
    func(value, *(_plain(arg, torch.float32) for arg in args), **kwargs)
    return _store(x, value)


@OPS.implements(*foreach_operators(in_place=True))
def _foreach_in_place(func: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """torch.optim's foreach optimizers, on the whole list in fp32, or in fp64 where it has such tensors.

    The list may hold plain tensors, the biases of the layers.
    """
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    # Decoded in fp32 first: what no update has changed is then recognized by its value.
    values = [x.decode(torch.float32).to(dtype) if isinstance(x, Int8RowwiseTensor) else x.to(dtype) for x in tensors]
    func(values, *(_plain(arg, dtype) for arg in args), **kwargs)
    for x, value in zip(tensors, values, strict=True):
        if isinstance(x, Int8RowwiseTensor):
            _store(x, value.float())
        elif value is not x:
            x.copy_(value)


@OPS.implements(aten._foreach_copy_.default)
def _foreach_copy_(func: Any, tensors: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """copy_ for each: exact between int8 weights."""
    for x, source in zip(tensors, sources, strict=True):
        x.copy_(source, non_blocking)


@OPS.implements(
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adagrad_.default,
    aten._fused_adagrad_.tensor_lr,
)
def _fused(func: Any, *args: Any, **kwargs: Any) -> None:
    """torch.optim with fused=True, whose kernels read raw floats."""
    raise NotImplementedError(
        "torch.optim's fused=True can't update an Int8RowwiseTensor. Use qsub.optim.AdamW8bit, or torch.optim with "
        "fused=False (foreach works too)."
    )
