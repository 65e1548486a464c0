"""CPU paths of the int8 linear, on oneDNN's int8 product (`torch._int_mm`) and on cache-sized pieces of the weight.

What each case uses, fastest first (4096 x 4096, benchmarks/results has the times):

| mode | rows | product |
|---|---|---|
| weight only | up to `_DIGIT_ROWS` | rows of x as two or more int8 digits each, int8 x int8 one row at a time |
| weight only | more | W dequantized piece by piece into a buffer that stays in cache, then the float product |
| int8 activations | up to `_GEMV_ROWS` | int8 x int8 one row at a time |
| int8 activations | more | int8 x int8 |

oneDNN multiplies one row by a plain (N, K) weight directly; for more rows it reorders the weight first, which costs as
much as about 8 rows. Without AVX512-VNNI, AVX-VNNI or AMX its int8 product is slow, or saturates 16-bit sums: then the
plain torch definitions are used.
"""

import functools

import torch
from torch import Tensor

from qsub.linear import reference
from qsub.linear.reference import MAX_INT32_TERMS, QMAX

_GEMV_ROWS = 8
_DIGIT_ROWS = 4
_DIGIT_WEIGHTS = 1 << 18  # elements of W: for fewer, converting them costs less than splitting x
_DIGIT_BASE = 2 * QMAX  # a remainder of half a step is the next digit's full range
_SMALL, _SMALL_SHARE, _MORE_DIGITS = 2.0**-8, 8, 3  # see _digit_counts
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
    few_rows = x.shape[0] <= _DIGIT_ROWS and int_data.numel() >= _DIGIT_WEIGHTS
    if few_rows and _can_multiply_codes(x.shape[1]):
        return _digit_mm(x, int_data, scale, bias)
    return _piecewise_mm(x, int_data, scale, bias)


def int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor, *, int8_grad: bool = False) -> Tensor:
    """Product `grad @ W` on CPU; arguments as in `reference.int8_mm_transposed`."""
    empty = reference.empty_product(grad, int_data.shape[1], None)
    if empty is not None:
        return empty
    if int8_grad:
        return reference.int8_grad_mm(grad, int_data, scale, int_product)
    return _piecewise_mm_transposed(grad, int_data, scale)


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


def _digit_counts(x: Tensor) -> list[int | None]:
    """How many digits each row of x needs, or None if a few more don't do.

    Three hold an element of the largest magnitude to 2**-24, as fp32 does, and two, for bf16, to 2**-16. Elements under
    1/256 of it may be all that meets a weight that isn't 0: of an input with an outlier and weights that ignore it. If
    they are more than one in eight, each further digit holds elements that are 254 times smaller. A row with NaN or Inf
    has no digits.
    """
    least = 2 if x.dtype == torch.bfloat16 else 3
    magnitude = x.abs().to(torch.float32)
    bound = magnitude.amax(dim=-1, keepdim=True).mul_(_SMALL)
    bound.masked_fill_(bound.isinf(), torch.nan)  # which nothing reaches
    if max((magnitude >= bound).logical_not_().sum(dim=-1).tolist()) * _SMALL_SHARE <= x.shape[1]:
        return [least] * x.shape[0]
    present = magnitude > 0
    some = present.sum(dim=-1)
    counts: list[int | None] = [None] * x.shape[0]
    for more in reversed(range(_MORE_DIGITS + 1)):
        small = (present & (magnitude >= bound / _DIGIT_BASE**more).logical_not_()).sum(dim=-1)
        for row, enough in enumerate((small * _SMALL_SHARE <= some).tolist()):
            counts[row] = least + more if enough else counts[row]
    return counts


def _digits(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of x as fixed-point numbers of `count` int8 digits, the highest first.

        x[m] = (digits[0, m] * 254**2 + digits[1, m] * 254 + digits[2, m]) * step[m]        with three

    The remainder is at most half a step.

    Returns:
        `digits` (D, M, K) int8 and `step` (M,) fp64.
    """
    rest = x.to(torch.float64)
    unit = rest.abs().amax(dim=-1, keepdim=True).div_(QMAX)  # (M, 1)
    unit.masked_fill_(unit == 0, 1.0)
    digits = torch.empty(count, *x.shape, dtype=torch.int8)
    for position in range(count):
        digit = (rest / unit).round_()
        digits[position] = digit
        if position < count - 1:
            rest = rest.addcmul(digit, unit, value=-1)
            unit = unit / _DIGIT_BASE
    return digits, unit.squeeze(-1)


def _digit_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Weight-only product of a few rows, on exact int8 products of the digits of x."""
    counts = _digit_counts(x)
    if counts.count(counts[0]) < len(counts):  # each row by itself: its result doesn't depend on the others
        return torch.cat([_digit_mm(row, int_data, scale, bias) for row in x.split(1)])
    if counts[0] is None:
        return _piecewise_mm(x, int_data, scale, bias, rows_at_a_time=1)
    digits, step = _digits(x, counts[0])
    n, k = int_data.shape
    int_data = _not_expanded(int_data)
    codes = digits.view(-1, k)  # (D * M, K)
    sums = torch.empty(codes.shape[0], n, dtype=torch.int32)
    # In pieces that stay in cache, so that W comes from memory once and not once per digit and row.
    rows = max(1, 8 * _PIECE // k)
    for start in range(0, n, rows):
        piece = int_data[start : start + rows].t()
        for row in range(codes.shape[0]):
            out = sums[row : row + 1, start : start + rows]
            torch._int_mm(codes[row : row + 1], piece, out=out)  # type: ignore[attr-defined]
    out, *lower = sums.view(-1, x.shape[0], n).to(torch.float64).unbind()
    for digit in lower:
        out.mul_(_DIGIT_BASE).add_(digit)
    out.mul_((step / QMAX).unsqueeze(-1)).mul_(scale)
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype)


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


def _piecewise_mm(
    x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None, rows_at_a_time: int | None = None
) -> Tensor:
    """`x @ W.T + bias`, a few rows of W at a time. The number of rows of x at a time (None: all) rounds sums."""
    n, k = int_data.shape
    a = x.to(_product_dtype(x.dtype))
    factor = (scale.to(torch.float32) / QMAX).unsqueeze(-1)  # (N, 1)
    rows = min(n, max(16, _PIECE // k))
    weight, fp32 = _buffers(rows, k, a.dtype)
    out = torch.empty(x.shape[0], n, dtype=a.dtype)
    together = rows_at_a_time or x.shape[0]
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        piece = slice(0, stop - start)
        part = weight[piece]
        _dequantize_into(part, part if weight is fp32 else fp32[piece], int_data[start:stop], factor[start:stop])
        for rows_a, rows_out in zip(a.split(together), out[:, start:stop].split(together), strict=True):
            torch.mm(rows_a, part.t(), out=rows_out)
    if bias is not None:
        out = out.add_(bias) if out.dtype == torch.float32 else out.to(torch.float32).add_(bias)
    return out.to(x.dtype)


def _piecewise_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor) -> Tensor:
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
        torch.mm(a, weight, out=out[:, start:stop])
    return out.to(grad.dtype)
