"""CPU paths of the int8 linear, on oneDNN's int8 product (`torch._int_mm`) and on cache-sized pieces of the weight.

What each case uses, fastest first (4096 x 4096, benchmarks/results has the times):

| mode | rows | product |
|---|---|---|
| weight only | bf16: up to `_BF16_ROWS` | rows of x as two or more int8 digits each, int8 x int8 (`cpu_digits`) |
| weight only | other dtypes: any | the same with three or more |
| weight only | bf16: more; small weights: any | W dequantized in pieces that stay in cache, then the float product |
| int8 activations | up to `_GEMV_ROWS` | int8 x int8 one row at a time |
| int8 activations | more | int8 x int8 |

oneDNN multiplies one row by a plain (N, K) weight directly; for more rows it reorders the weight first, which costs as
much as about 8 rows. Without AVX512-VNNI, AVX-VNNI or AMX its int8 product is slow, or saturates 16-bit sums: then the
plain torch definitions are used.
"""

import functools

import torch
from torch import Tensor

from qsub.linear import cpu_digits, reference
from qsub.linear.reference import MAX_INT32_TERMS, QMAX

_GEMV_ROWS = 8
_DIGIT_WEIGHTS = 1 << 18  # elements of W: for fewer, converting them costs less than splitting x
_BF16_ROWS = 32  # with more rows bf16 products are faster than those of digits
_PIECE = 1 << 20  # elements of W dequantized at a time: 4 MiB of fp32


@functools.cache
def has_int8_product() -> bool:
    """Whether this CPU has a fast and exact int8 product (VNNI or AMX, and torch built with oneDNN)."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


@functools.cache
def _has_bf16_product() -> bool:
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


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
    """Product `x @ W.T + bias` on CPU; arguments as in `reference.int8_mm`."""
    empty = reference.empty_product(x, int_data.shape[0], bias)
    if empty is not None:
        return empty
    if int8_activations:
        return reference.int8_activation_mm(x, int_data, scale, bias, outlier_threshold, int_product)
    if x.dtype == torch.float64:
        return reference.int8_mm(x, int_data, scale, bias)

    def float_mm(x: Tensor, rows_at_a_time: int) -> Tensor:
        return _piecewise_mm(x, int_data, scale, bias, rows_at_a_time)

    if not _by_digits(x, int_data):
        return float_mm(x, x.shape[0])
    int_data = _not_expanded(int_data)
    if x.shape[0] <= cpu_digits.MOST_FEW_ROWS:
        return cpu_digits.few_rows_mm(x, int_data, scale, bias, float_mm)
    return cpu_digits.many_rows_mm(x, int_data.t(), float_mm, out_factor=scale.to(torch.float32) / QMAX, bias=bias)


def int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor, *, int8_grad: bool = False) -> Tensor:
    """Product `grad @ W` on CPU; arguments as in `reference.int8_mm_transposed`."""
    empty = reference.empty_product(grad, int_data.shape[1], None)
    if empty is not None:
        return empty
    if int8_grad:
        return reference.int8_grad_mm(grad, int_data, scale, int_product)

    def float_mm(grad: Tensor, rows_at_a_time: int) -> Tensor:
        return _piecewise_mm_transposed(grad, int_data, scale, rows_at_a_time)

    if not _by_digits(grad, int_data):
        return float_mm(grad, grad.shape[0])
    return cpu_digits.many_rows_mm(grad, _not_expanded(int_data), float_mm, in_factor=scale.to(torch.float32) / QMAX)


def _by_digits(x: Tensor, int_data: Tensor) -> bool:
    """Whether the digits of x (M, T) are multiplied by W faster than x itself is."""
    if x.dtype == torch.float64 or int_data.numel() < _DIGIT_WEIGHTS or not _can_multiply_codes(x.shape[1]):
        return False
    return x.dtype != torch.bfloat16 or x.shape[0] <= _BF16_ROWS or not _has_bf16_product()


def _can_multiply_codes(terms: int) -> bool:
    return has_int8_product() and terms <= MAX_INT32_TERMS


def _not_expanded(codes: Tensor) -> Tensor:
    return codes.contiguous() if 0 in codes.stride() else codes


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of codes (M, K) @ (K, N): int32 and exact where the CPU has an int8 product, else fp32."""
    if not _can_multiply_codes(a.shape[1]) or min(b.shape) == 1:
        return reference.int_product(a, b)
    # torch._int_mm misreads vectors whose strides are those of another layout (as t() leaves them): plain strides for a
    # single row of x, and the branch above for a weight with one row or column. And a weight with a stride of 0.
    a, b = a.contiguous().view(-1).view(a.shape), _not_expanded(b)
    if a.shape[0] == 1 or a.shape[0] > _GEMV_ROWS or b.stride(0) != 1:
        return torch._int_mm(a, b)  # type: ignore[attr-defined]
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.int32)
    for row in range(a.shape[0]):
        torch._int_mm(a[row : row + 1], b, out=out[row : row + 1])  # type: ignore[attr-defined]
    return out


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype that the float product of an input of `dtype` runs in: fp16 products on CPU are slower than fp32 ones."""
    return torch.float32 if dtype == torch.float16 or (dtype == torch.bfloat16 and not _has_bf16_product()) else dtype


def _dequantize_into(out: Tensor, fp32: Tensor, codes: Tensor, factor: Tensor) -> Tensor:
    """`out = codes * factor` for one piece; `fp32` is `out` itself or a buffer of its shape."""
    fp32.copy_(codes).mul_(factor)
    return out if out is fp32 else out.copy_(fp32)


def _buffers(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.empty(rows, columns, dtype=dtype)
    accumulate = reference.accumulation_dtype(dtype)
    return out, out if dtype == accumulate else torch.empty(rows, columns, dtype=accumulate)


def _mm_by_rows(a: Tensor, b: Tensor, out: Tensor, rows_at_a_time: int) -> None:
    """`out = a @ b`. The number of rows that are multiplied together decides how their sums are rounded."""
    for rows, result in zip(a.split(rows_at_a_time), out.split(rows_at_a_time), strict=True):
        torch.mm(rows, b, out=result)


def _piecewise_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None, rows_at_a_time: int) -> Tensor:
    """`x @ W.T + bias`, a few rows of W at a time."""
    n, k = int_data.shape
    a = x.to(_product_dtype(x.dtype))
    factor = (scale.to(torch.float32) / QMAX).unsqueeze(-1)  # (N, 1)
    rows = min(n, max(16, _PIECE // k))
    weight, fp32 = _buffers(rows, k, a.dtype)
    out = torch.empty(x.shape[0], n, dtype=a.dtype)
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        piece = slice(0, stop - start)
        part = weight[piece]
        _dequantize_into(part, part if weight is fp32 else fp32[piece], int_data[start:stop], factor[start:stop])
        _mm_by_rows(a, part.t(), out[:, start:stop], rows_at_a_time)
    if bias is not None:
        out = out.add_(bias) if out.dtype == torch.float32 else out.to(torch.float32).add_(bias)
    return out.to(x.dtype)


def _piecewise_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor, rows_at_a_time: int) -> Tensor:
    """`grad @ W`, a few columns of W at a time, so that every sum is completed in one product."""
    n, k = int_data.shape
    a = grad.to(_product_dtype(grad.dtype))
    factor = (scale.to(reference.accumulation_dtype(grad.dtype)) / QMAX).unsqueeze(-1)  # (N, 1)
    columns = min(k, max(16, 2 * _PIECE // n))
    out = torch.empty(grad.shape[0], k, dtype=a.dtype)
    for start in range(0, k, columns):
        stop = min(k, start + columns)
        weight, fp32 = _buffers(n, stop - start, a.dtype)
        _dequantize_into(weight, fp32, int_data[:, start:stop], factor)
        _mm_by_rows(a, weight, out[:, start:stop], rows_at_a_time)
    return out.to(grad.dtype)
