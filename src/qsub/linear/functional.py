"""`int8_linear`, the differentiable linear on N-D inputs: low overhead in eager, one operator under `torch.compile`."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qsub.linear.ops import (
    bias_gradient,
    check_modes,
    check_operands,
    dequantize_rowwise,
    int8_mm,
    int8_mm_transposed,
)

# Asked once: torch.compile of torch 2.11 can't trace the question.
AUTOCAST_DEVICES = tuple(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))

_mm = torch.ops.qsub.int8_mm.default
_mm_transposed = torch.ops.qsub.int8_mm_transposed.default


class _Int8Linear(torch.autograd.Function):
    """The eager autograd node: half the overhead of the operator's own formula. Saves the codes and scales only."""

    @staticmethod
    def forward(ctx, x, int_data, scale, bias, int8_activations, outlier_threshold, int8_backward):
        ctx.save_for_backward(int_data, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.int8_backward = int8_backward
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return _product(x, int_data, scale, bias, int8_activations, outlier_threshold, int8_backward)

    @staticmethod
    def backward(ctx, grad):
        int_data, scale = ctx.saved_tensors
        grad2d = _as_matrix(grad)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():  # a gradient of the gradient is asked for
                grad_x = _mm_transposed(grad2d, int_data, scale, int8_grad=ctx.int8_backward)
            else:
                with torch._C._AutoDispatchBelowADInplaceOrView():
                    grad_x = _mm_transposed(grad2d, int_data, scale, int8_grad=ctx.int8_backward)
            if grad.dim() != 2:
                grad_x = grad_x.view(*grad.shape[:-1], int_data.shape[1])
        if ctx.needs_input_grad[3]:
            grad_bias = bias_gradient(grad2d, ctx.bias_dtype)
        return grad_x, None, None, grad_bias, None, None, None


def _as_matrix(x: Tensor) -> Tensor:
    """(..., K) as (M, K). flatten takes no batched gradients, and reshape(-1, K) no K of 0."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _product(x, int_data, scale, bias, int8_activations, outlier_threshold, int8_backward) -> Tensor:
    out = _mm(
        _as_matrix(x),
        int_data,
        scale,
        bias,
        int8_activations=int8_activations,
        outlier_threshold=outlier_threshold,
        int8_backward=int8_backward,
    )
    return out if x.dim() == 2 else out.view(*x.shape[:-1], int_data.shape[0])


def int8_linear(
    x: Tensor,
    int_data: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: str | None = None,
    outlier_threshold: float | None = None,
    backward: str | None = None,
) -> Tensor:
    """Linear layer `x @ W.T + bias` with an int8 weight, differentiable in `x` and `bias`.

    The weight is a constant here: backward keeps its codes and scales, and neither `x` nor a float copy of the weight.
    Under autocast, x is cast to the autocast dtype as `torch.nn.functional.linear` does.

    Args:
        x: (..., K), any float dtype; the gradient passes a quantized input straight through.
        int_data: (N, K) int8 codes of W.
        scale: (N,) row magnitudes of W, fp16: `W = int_data * scale / 127`.
        bias: (N,) in any float dtype, or None. It is added in fp32; its gradient has its dtype.
        activations: None for the float input, "int8" to quantize its rows and multiply int8 x int8.
        outlier_threshold: with "int8", input columns with a magnitude over this are multiplied in float: the 64 of
            largest magnitude at most, the others stay in int8. None for no float columns.
        backward: None for the float product of gradients, "int8" to quantize the rows of the gradient.

    Returns:
        (..., N) in the dtype of x (of autocast, where it is on).

    Raises:
        ValueError: if `activations` or `backward` is neither None nor "int8", if `outlier_threshold` isn't positive or
            comes without `activations="int8"`, or if the last dimension of x isn't K.
        RuntimeError: if x or the bias is not floating point, the tensors are on different devices, or the bias isn't
            (N,).
        NotImplementedError: for a forward-mode derivative.
    """
    check_modes(activations, outlier_threshold, backward)
    if x.dim() == 0 or x.shape[-1] != int_data.shape[1]:
        raise ValueError(f"x must have shape (..., {int_data.shape[1]}) for this weight, got {tuple(x.shape)}")
    check_operands(x, int_data, scale, bias)
    device = x.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))

    arguments = (x, int_data, scale, bias, activations is not None, outlier_threshold, backward is not None)
    if torch.compiler.is_compiling():
        return _product(*arguments)
    floats = (x,) if bias is None else (x, bias)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in floats):
        raise NotImplementedError(
            "forward-mode derivatives of int8_linear: call torch.nn.functional.linear with an Int8RowwiseTensor"
        )
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Int8Linear.apply(*arguments)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _product(*arguments)


def dequantize(int_data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Float weight (N, K) in `dtype` from codes (N, K) and row magnitudes (N,): `int_data * scale / 127`."""
    return dequantize_rowwise(int_data, scale, dtype)


__all__ = ["dequantize", "int8_linear", "int8_mm", "int8_mm_transposed"]
