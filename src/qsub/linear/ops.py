"""The products as operators that `torch.compile` takes as one node each, with fake kernels and autograd formulas.

Being opaque keeps batch sizes symbolic, and keeps the float copy of the weight that a product may build inside from
being saved for backward. `Library.impl` dispatches in C++; `torch.library.custom_op` would add some 20 us to a call.

    qsub::int8_mm             (M, K), (N, K), (N,) -> (M, N)       x @ W.T + bias
    qsub::int8_mm_transposed  (M, N), (N, K), (N,) -> (M, K)       grad @ W
    qsub::dequantize_rowwise  (N, K), (N,) -> (N, K)               W in a float dtype
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qsub.linear import cpu, reference

_LIBRARY = torch.library.Library("qsub", "DEF")
_LIBRARY.define(
    "int8_mm(Tensor x, Tensor int_data, Tensor scale, Tensor? bias=None, *, bool int8_activations=False, "
    "float? outlier_threshold=None, bool int8_backward=False) -> Tensor"
)
_LIBRARY.define(
    "int8_mm_transposed(Tensor grad, Tensor int_data, Tensor scale, *, bool int8_grad=False) -> Tensor",
)
_LIBRARY.define("dequantize_rowwise(Tensor int_data, Tensor scale, ScalarType dtype) -> Tensor")

_mm = torch.ops.qsub.int8_mm.default
_mm_transposed = torch.ops.qsub.int8_mm_transposed.default
dequantize_rowwise = torch.ops.qsub.dequantize_rowwise.default


def _without_autocast(device: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` run with autocast off: a product inside must not be cast to the autocast dtype."""

    def kernel(*args, **kwargs):
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return kernel


def _on_cuda(name: str) -> Callable[..., Tensor]:
    """A function of `qsub.linear.cuda`, imported at the first CUDA tensor and run on that tensor's device."""
    found: list[Callable[..., Tensor]] = []

    def kernel(first: Tensor, *args, **kwargs):
        if not found:
            from qsub.linear import cuda

            found.append(getattr(cuda, name))
        function = found[0]
        if first.get_device() == torch.cuda.current_device():
            return function(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return function(first, *args, **kwargs)

    return _without_autocast("cuda", kernel)


_LIBRARY.impl("int8_mm", _without_autocast("cpu", reference.int8_mm), "CompositeExplicitAutograd")
_LIBRARY.impl("int8_mm", _without_autocast("cpu", cpu.int8_mm), "CPU")
_LIBRARY.impl("int8_mm", _on_cuda("int8_mm"), "CUDA")
_LIBRARY.impl("int8_mm_transposed", _without_autocast("cpu", reference.int8_mm_transposed), "CompositeExplicitAutograd")
_LIBRARY.impl("int8_mm_transposed", _without_autocast("cpu", cpu.int8_mm_transposed), "CPU")
_LIBRARY.impl("int8_mm_transposed", _on_cuda("int8_mm_transposed"), "CUDA")
_LIBRARY.impl("dequantize_rowwise", reference.dequantize, "CompositeExplicitAutograd")
_LIBRARY.impl("dequantize_rowwise", _on_cuda("dequantize"), "CUDA")


def _fake_mm(x, int_data, scale, bias=None, *, int8_activations=False, outlier_threshold=None, int8_backward=False):
    torch._check(x.dim() == 2 and int_data.dim() == 2, lambda: "int8_mm takes 2-D x and int_data")
    torch._check(x.shape[1] == int_data.shape[1], lambda: f"int8_mm: {tuple(x.shape)} @ {tuple(int_data.shape)}.T")
    return x.new_empty(x.shape[0], int_data.shape[0])


def _fake_mm_transposed(grad, int_data, scale, *, int8_grad=False):
    torch._check(grad.dim() == 2 and int_data.dim() == 2, lambda: "int8_mm_transposed takes 2-D grad and int_data")
    return grad.new_empty(grad.shape[0], int_data.shape[1])


def _fake_dequantize(int_data, scale, dtype):
    return torch.empty_like(int_data, dtype=dtype, memory_format=torch.contiguous_format)


torch.library.register_fake("qsub::int8_mm", _fake_mm, lib=_LIBRARY)
torch.library.register_fake("qsub::int8_mm_transposed", _fake_mm_transposed, lib=_LIBRARY)
torch.library.register_fake("qsub::dequantize_rowwise", _fake_dequantize, lib=_LIBRARY)


def check_operands(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
    """What torch says of a product with a float weight, and kernels that convert or read raw memory would not.

    Args:
        x: the float operand.
        int_data: (N, K) int8 codes.
        scale: (N,).
        bias: (N,) float, or one element for all outputs.

    Raises:
        RuntimeError: x or the bias is not floating point, the operands are on different devices, the bias doesn't fit,
            or the weight is not int8 codes and a scale for each row. (Not a TypeError, which `@` would take for an
            operand that it doesn't know.)
    """
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"a product with an int8 weight takes a float input, got {x.dtype}: convert it first")
    if int_data.dtype != torch.int8 or scale.shape != int_data.shape[:1] or scale.device != int_data.device:
        raise RuntimeError(
            "expected an int8 weight of codes (N, K) and scales (N,) on one device, got "
            f"{int_data.dtype} {tuple(int_data.shape)} on {int_data.device} and {tuple(scale.shape)} on {scale.device}"
        )
    if x.device != int_data.device or (bias is not None and bias.device != x.device):
        others = f"the int8 weight on {int_data.device}" + ("" if bias is None else f" and the bias on {bias.device}")
        raise RuntimeError(f"expected all tensors to be on the same device, got the input on {x.device}, {others}")
    if bias is not None and not bias.dtype.is_floating_point:
        raise RuntimeError(f"a product with an int8 weight takes a float bias, got {bias.dtype}: convert it first")
    if bias is not None and (bias.dim() > 1 or bias.numel() not in (1, int_data.shape[0])):
        raise RuntimeError(f"expected a bias of shape ({int_data.shape[0]},), got {tuple(bias.shape)}")


def check_modes(activations: str | None, outlier_threshold: float | None, backward: str | None) -> None:
    """ValueError unless the modes of a product are known and fit together."""
    if activations not in (None, "int8"):
        raise ValueError(f'activations must be None or "int8", got {activations!r}')
    if backward not in (None, "int8"):
        raise ValueError(f'backward must be None or "int8", got {backward!r}')
    if outlier_threshold is not None and activations is None:
        raise ValueError(f'outlier_threshold={outlier_threshold} needs activations="int8"')
    if outlier_threshold is not None and not outlier_threshold > 0:
        raise ValueError(f"outlier_threshold must be positive, got {outlier_threshold}")


def _check_matrices(a: Tensor, int_data: Tensor, dim: int) -> None:
    """RuntimeError unless `a` is a matrix with as many columns as `int_data` has along `dim`."""
    if a.dim() != 2 or int_data.dim() != 2 or a.shape[1] != int_data.shape[dim]:
        raise RuntimeError(
            f"expected a matrix with {int_data.shape[dim]} columns for an int8 weight of shape "
            f"{tuple(int_data.shape)}, got {tuple(a.shape)}"
        )


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of `grad` (M, N) over its rows in the dtype of the bias, (N,)."""
    return grad.sum(dim=0, dtype=dtype)


def _setup_mm(ctx, inputs, keyword_only_inputs, output):
    _, int_data, scale, bias = inputs
    ctx.save_for_backward(int_data, scale)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.int8_backward = keyword_only_inputs["int8_backward"]


def _backward_mm(ctx, grad):
    int_data, scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _mm_transposed(grad, int_data, scale, int8_grad=ctx.int8_backward)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
        grad_bias = bias_gradient(grad, ctx.bias_dtype)
    return grad_x, None, None, grad_bias


def _setup_mm_transposed(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward_mm_transposed(ctx, grad):
    return _mm(grad, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None, None, None


torch.library.register_autograd("qsub::int8_mm", _backward_mm, setup_context=_setup_mm, lib=_LIBRARY)
torch.library.register_autograd(
    "qsub::int8_mm_transposed", _backward_mm_transposed, setup_context=_setup_mm_transposed, lib=_LIBRARY
)


def int8_mm(
    x: Tensor,
    int_data: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: str | None = None,
    outlier_threshold: float | None = None,
    backward: str | None = None,
) -> Tensor:
    """Product `x @ W.T + bias` with an int8 weight, as one operator.

    Args:
        x: (M, K), any float dtype.
        int_data: (N, K) int8 codes of W.
        scale: (N,) row magnitudes of W, fp16.
        bias: (N,) any float dtype, or None. It is added in fp32.
        activations: None for the float input, "int8" to quantize its rows and multiply int8 x int8.
        outlier_threshold: with "int8", columns of x with a magnitude over this are multiplied in float (LLM.int8(),
            arXiv 2208.07339): the `OUTLIER_COLUMNS` (64) of largest magnitude at most, the others stay in int8.
        backward: None for the exact gradient of x, "int8" for the product of quantized gradients.

    Returns:
        (M, N) in the dtype of `x`, accumulated in fp32 (fp64 for an fp64 input).

    Raises:
        ValueError: a mode is not known, or doesn't fit the others.
        RuntimeError: the shapes don't fit, x or the bias is not floating point, or the tensors are on different
            devices.
    """
    check_modes(activations, outlier_threshold, backward)
    check_operands(x, int_data, scale, bias)
    _check_matrices(x, int_data, 1)
    return _mm(
        x,
        int_data,
        scale,
        bias,
        int8_activations=activations is not None,
        outlier_threshold=outlier_threshold,
        int8_backward=backward is not None,
    )


def int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor, *, backward: str | None = None) -> Tensor:
    """Product `grad @ W` with an int8 weight: the gradient of `int8_mm` with respect to its input.

    Args:
        grad: (M, N), any float dtype.
        int_data: (N, K) int8 codes of W.
        scale: (N,) row magnitudes of W, fp16.
        backward: "int8" to quantize the rows of `grad * scale` and multiply int8 x int8 (SwitchBack,
            arXiv 2304.13013): an error of about 1% of the gradient's norm (SQNR near 40 dB). None for the float
            product.

    Returns:
        (M, K) in the dtype of `grad`.

    Raises:
        ValueError: `backward` is not known.
        RuntimeError: the shapes don't fit, or `grad` is not floating point or on another device than the weight.
    """
    check_modes(None, None, backward)
    check_operands(grad, int_data, scale)
    _check_matrices(grad, int_data, 0)
    return _mm_transposed(grad, int_data, scale, int8_grad=backward is not None)
