"""CUDA paths of the int8 linear: which kernel runs for which mode and number of rows."""

import torch
from torch import Tensor

from qsub.kernel_launch import has_triton
from qsub.linear import reference
from qsub.linear.reference import MAX_INT32_TERMS

if has_triton():
    from qsub.linear.kernels import code_gemv, digits, few_rows, few_rows_backward, gemm, gemv, quantize, weight

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _use_kernels(dtype: torch.dtype) -> bool:
    return dtype in _KERNEL_DTYPES and has_triton()


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


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
    """Product `x @ W.T + bias` on CUDA; arguments as in `reference.int8_mm`."""
    empty = reference.empty_product(x, int_data.shape[0], bias)
    if empty is not None:
        return empty
    if not _use_kernels(x.dtype) or (int8_activations and x.shape[1] > MAX_INT32_TERMS):
        return reference.int8_mm(
            x, int_data, scale, bias, int8_activations=int8_activations, outlier_threshold=outlier_threshold
        )
    x, int_data, scale = _rows_contiguous(x), _rows_contiguous(int_data), scale.contiguous()
    bias = None if bias is None else bias.expand(int_data.shape[0]).contiguous()
    rows = x.shape[0]
    if outlier_threshold is not None:
        outliers = quantize.Outliers(x, int_data, outlier_threshold)
        codes, row_scale = quantize.quantize_rows(x, outliers=outliers)
        return gemm.int8_gemm(codes, int_data, row_scale, scale, bias, x.dtype, outliers)
    if int8_activations:
        if 1 < rows <= digits.MOST_INT8_ROWS and digits.takes(x, int_data):
            return digits.digit_mm(x, int_data, scale, bias, int8_activations=True)
        codes, row_scale = quantize.quantize_rows(x)
        if rows == 1 and code_gemv.takes(int_data):
            return code_gemv.code_gemv(codes, int_data, row_scale, scale, bias, x.dtype)
        return gemm.int8_gemm(codes, int_data, row_scale, scale, bias, x.dtype)
    if rows == 1:
        return gemv.gemv(x, int_data, scale, bias)
    by_digits = rows <= digits.MOST_ROWS and x.dtype == torch.bfloat16 and digits.takes(x, int_data)
    if rows <= few_rows.MOST_ROWS and x.dtype != torch.float32:
        if not by_digits or int_data.numel() <= few_rows.MOST_WEIGHTS:
            return few_rows.few_rows(x, int_data, scale, bias)
    if by_digits:
        return digits.digit_mm(x, int_data, scale, bias)
    return _dequantized_mm(x, int_data, scale, bias)


def _dequantized_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Weight-only product of many rows: one pass over the weight, then cuBLAS."""
    weight = dequantize(int_data, scale, x.dtype).t()
    if bias is None:
        return torch.mm(x, weight)
    if bias.dtype == x.dtype:
        return torch.addmm(bias, x, weight)
    return torch.mm(x, weight).to(torch.float32).add_(bias).to(x.dtype)


def int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor, *, int8_grad: bool = False) -> Tensor:
    """Product `grad @ W` on CUDA; arguments as in `reference.int8_mm_transposed`."""
    empty = reference.empty_product(grad, int_data.shape[1], None)
    if empty is not None:
        return empty
    if not int8_grad:
        if has_triton() and few_rows_backward.takes(grad, int_data):
            grad, int_data = _rows_contiguous(grad), _rows_contiguous(int_data)
            return few_rows_backward.few_rows_backward(grad, int_data, scale.contiguous())
        return torch.mm(grad, dequantize(int_data, scale, grad.dtype))
    if not _use_kernels(grad.dtype) or grad.shape[1] > MAX_INT32_TERMS:
        return reference.int8_mm_transposed(grad, int_data, scale, int8_grad=True)
    codes, row_scale = quantize.quantize_rows(_rows_contiguous(grad), fold=scale.contiguous())
    return gemm.int8_gemm(codes, weight.transpose(_rows_contiguous(int_data)), row_scale, None, None, grad.dtype)


def dequantize(int_data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Float weight (N, K) in `dtype` on CUDA."""
    if not int_data.numel() or not _use_kernels(dtype):
        return reference.dequantize(int_data, scale, dtype)
    return weight.dequantize(_rows_contiguous(int_data), scale.contiguous(), dtype)
