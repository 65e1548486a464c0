"""The int8 linear in plain torch: the definition of every mode, and the fallback for any device.

    W[n, k] = int_data[n, k] * scale[n] / 127                      (N, K), scale = largest magnitude of the row
    X[m, k] ~ codes[m, k] * row_scale[m] / 127                     (M, K), the same code for the rows of the input

Products accumulate in fp32 (fp64 for an fp64 input) and both scales are applied before the result is cast, so a
result is finite wherever the product with the float weight is.
"""

import torch
from torch import Tensor

from qsub.tensors.codes import dequantize_rows

QMAX = 127
OUTLIER_COLUMNS = 64
"""Input columns that the mixed decomposition computes in float. LLM.int8() (arXiv 2208.07339, section 4) finds at most
seven outlier feature dimensions in models up to 13B parameters; 64 is one tile of a tensor-core product."""

MAX_INT32_TERMS = (2**31 - 1) // QMAX**2
"""Terms of magnitude 127 * 127 that an int32 accumulator holds: longer products accumulate in float."""

_SMALLEST_SCALE = {torch.float32: 1e-30, torch.float64: 1e-300}
"""Rows whose magnitudes are all below this have a reciprocal near the limit of their dtype; they are coded as zero."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scales and sums for an input of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 code per row: `codes = round(x * 127 / scale)`, half to even.

    Args:
        x: (M, K), any float dtype, K > 0.

    Returns:
        `codes` (M, K) int8 and `scale` (M,), the row's largest magnitude, in fp32 (fp64 for an fp64 input). A row with
        NaN or Inf keeps a scale that isn't finite, so its products aren't either.
    """
    x = x.to(accumulation_dtype(x.dtype))
    scale = x.abs().amax(dim=-1)  # (M,)
    reciprocal = torch.where(scale < _SMALLEST_SCALE[x.dtype], 0.0, QMAX / scale)
    return (x * reciprocal.unsqueeze(-1)).round_().to(torch.int8), scale


def outlier_columns(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Columns of `x` that the mixed decomposition keeps in float, without a data-dependent shape.

    Args:
        x: (M, K) with M > 0 and K > 0.
        threshold: a column is an outlier if any of its magnitudes is over this.

    Returns:
        `index` (C,), the columns of largest magnitude with C = min(OUTLIER_COLUMNS, K), and `is_outlier` (C,) bool:
        which of them exceed the threshold. Outlier columns past the C largest are not listed: they stay in int8.
    """
    largest = x.abs().amax(dim=0).to(accumulation_dtype(x.dtype))  # (K,)
    top = largest.topk(min(OUTLIER_COLUMNS, x.shape[1]))
    return top.indices, ~(top.values <= threshold)  # a column with NaN is one


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of int8 codes as fp32: (M, K) @ (K, N) with fp32 sums, where no integer product is at hand."""
    return a.to(torch.float32) @ b.to(torch.float32)


def rescale(product: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`product * row_scale * scale / 127**2 + bias`, cast to `dtype` last.

    Args:
        product: (M, N) sums of products of codes, int32 or float.
        row_scale: (M,) row magnitudes of x, in the accumulation dtype.
        scale: (N,) row magnitudes of W.
        bias: (N,) any float dtype, or None.
        dtype: float dtype of the result.
    """
    out = product.to(row_scale.dtype)
    # The scale of W first: it is at most 65504, so nothing overflows before the result itself does.
    out = out.mul_(scale.to(out.dtype) / QMAX).mul_((row_scale / QMAX).unsqueeze(-1))
    if bias is not None:
        out.add_(bias)
    return out.to(dtype)


def empty_product(x: Tensor, out_features: int, bias: Tensor | None) -> Tensor | None:
    """Result (M, N) if one of M, N and K is 0: the bias alone; None if there is something to multiply."""
    if x.numel() and out_features:
        return None
    out = x.new_zeros(x.shape[0], out_features)
    return out if bias is None else out.add_(bias)


def int8_mm(
    x: Tensor,
    int_data: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    int8_activations: bool = False,
    outlier_threshold: float | None = None,
    int8_backward: bool = False,
) -> Tensor:
    """Product `x @ W.T + bias`, (M, K) -> (M, N), in the dtype of x. See `qsub.linear.int8_mm`."""
    empty = empty_product(x, int_data.shape[0], bias)
    if empty is not None:
        return empty
    if int8_activations:
        return int8_activation_mm(x, int_data, scale, bias, outlier_threshold, int_product)
    out = x @ dequantize_rows(int_data, scale, x.dtype).t()
    return out if bias is None else (out.to(accumulation_dtype(x.dtype)) + bias).to(x.dtype)


def int8_activation_mm(x, int_data, scale, bias, outlier_threshold, product) -> Tensor:
    """Int8 x int8 product with both scales; `product(codes, int_data.t())` multiplies the codes.

    With a threshold, LLM.int8() (arXiv 2208.07339, section 3.2): outlier columns are cleared before the rows are
    quantized, and their product with the dequantized weight is added in float.
    """
    if outlier_threshold is None:
        codes, row_scale = quantize_rows(x)
        return rescale(product(codes, int_data.t()), row_scale, scale, bias, x.dtype)

    index, is_outlier = outlier_columns(x, outlier_threshold)  # (C,)
    inside = x.index_copy(1, index, x[:, index].masked_fill(is_outlier, 0))  # (M, K)
    codes, row_scale = quantize_rows(inside)
    out = rescale(product(codes, int_data.t()), row_scale, scale, bias, row_scale.dtype)
    x_outlier = x[:, index].masked_fill(~is_outlier, 0).to(out.dtype)  # (M, C)
    return out.addmm_(x_outlier, dequantize_rows(int_data[:, index], scale, out.dtype).t()).to(x.dtype)


def int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor, *, int8_grad: bool = False) -> Tensor:
    """Product `grad @ W`, (M, N) -> (M, K), in the dtype of grad. See `qsub.linear.int8_mm_transposed`."""
    empty = empty_product(grad, int_data.shape[1], None)
    if empty is not None:
        return empty
    if int8_grad:
        return int8_grad_mm(grad, int_data, scale, int_product)
    return grad @ dequantize_rows(int_data, scale, grad.dtype)


def int8_grad_mm(grad, int_data, scale, product) -> Tensor:
    """Backward product on int8 gradients (SwitchBack, arXiv 2304.13013, algorithm 1).

    The row scales of W lie along the summed dimension, so they are folded into grad before its rows are quantized:
    what remains is a product of codes with one scale per row of grad.
    """
    folded = grad.to(accumulation_dtype(grad.dtype)) * (scale.to(accumulation_dtype(grad.dtype)) / QMAX)
    codes, row_scale = quantize_rows(folded)
    out = product(codes, int_data).to(row_scale.dtype)
    return out.mul_((row_scale / QMAX).unsqueeze(-1)).to(grad.dtype)


def dequantize(int_data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Float weight (N, K) in `dtype`, contiguous whatever the layout of the codes."""
    return dequantize_rows(int_data.contiguous(), scale, dtype)
