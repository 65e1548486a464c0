"""Float products on the CPU's int8 product: rows of x as fixed-point numbers of several int8 digits.

    x[m] = (digits[0, m] * 254**2 + digits[1, m] * 254 + digits[2, m]) * step[m]        with three

The remainder is at most half a step. Three digits hold an element of the row's largest magnitude to 2**-24, as fp32
does, and two, for bf16, to 2**-16. Products of digits are exact, and the int8 instructions of VNNI multiply so much
faster than those for floats that even three of them are ahead of one fp32 product.

Elements far below the largest may be all that meets a weight that isn't 0: of an input with an outlier and weights
that ignore it. Rows with many of them get more digits if x has a few rows, and are left to the float product if it has
more, a fixed number of rows together: the result of a row doesn't depend on what the others hold.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qsub.linear.reference import QMAX

MOST_FEW_ROWS = 2  # oneDNN multiplies one row by a plain (N, K) weight directly, and reorders the weight for more
_BASE = 2 * QMAX  # a remainder of half a step is the next digit's full range
_SMALL = 2.0**-8  # of the row's largest magnitude
_SMALL_SHARE, _MORE_DIGITS = 8, 3  # see _digit_counts
_SMALLEST_ROW = 1e-30  # largest magnitude of a row whose reciprocal is an fp32 number, with some room
_PIECE = 1 << 23  # elements of W multiplied by a few rows at a time
_BLOCK, _SUMS = 512, 1 << 24  # rows of x whose digits are multiplied at a time, and sums of more than 64 rows
_FLOAT_ROWS = 32  # rows that are multiplied together in float
_CACHED = 1 << 17  # elements of x or of the result that a thread works on at a time: 512 KiB of fp32

FloatProduct = Callable[[Tensor, int], Tensor]
"""The product of some rows of x in float, so many of them together as the second argument says."""


def least_digits(dtype: torch.dtype) -> int:
    """Digits of an element that is not much smaller than its row's largest."""
    return 2 if dtype == torch.bfloat16 else 3


def _digit_counts(x: Tensor) -> list[int | None]:
    """How many digits each of a few rows needs, or None if a few more don't do.

    If elements under 1/256 of the row's largest are more than one in eight, each further digit holds elements that are
    254 times smaller. A row with NaN or Inf has no digits.
    """
    least = least_digits(x.dtype)
    magnitude = x.abs().to(torch.float32)
    bound = magnitude.amax(dim=-1, keepdim=True).mul_(_SMALL)
    bound.masked_fill_(bound.isinf(), torch.nan)  # which nothing reaches
    if max((magnitude >= bound).logical_not_().sum(dim=-1).tolist()) * _SMALL_SHARE <= x.shape[1]:
        return [least] * x.shape[0]
    present = magnitude > 0
    some = present.sum(dim=-1)
    counts: list[int | None] = [None] * x.shape[0]
    for more in reversed(range(_MORE_DIGITS + 1)):
        small = (present & (magnitude >= bound / _BASE**more).logical_not_()).sum(dim=-1)
        for row, enough in enumerate((small * _SMALL_SHARE <= some).tolist()):
            counts[row] = least + more if enough else counts[row]
    return counts


def _digits(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`digits` (D, M, K) int8, the highest first, and `step` (M,) fp64 of a few rows."""
    rest = x.to(torch.float64)
    unit = rest.abs().amax(dim=-1, keepdim=True).div_(QMAX)  # (M, 1)
    unit.masked_fill_(unit == 0, 1.0)
    digits = torch.empty(count, *x.shape, dtype=torch.int8)
    for position in range(count):
        digit = (rest / unit).round_()
        digits[position] = digit
        if position < count - 1:
            rest = rest.addcmul(digit, unit, value=-1)
            unit = unit / _BASE
    return digits, unit.squeeze(-1)


def few_rows_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None, float_mm: FloatProduct) -> Tensor:
    """`x @ W.T + bias` of up to `MOST_FEW_ROWS` rows; `float_mm` is the same in float."""
    counts = _digit_counts(x)
    if counts.count(counts[0]) < len(counts):  # each row by itself
        return torch.cat([few_rows_mm(row, int_data, scale, bias, float_mm) for row in x.split(1)])
    if counts[0] is None:
        return float_mm(x, 1)
    digits, step = _digits(x, counts[0])
    n, k = int_data.shape
    codes = digits.view(-1, k)  # (D * M, K)
    sums = torch.empty(codes.shape[0], n, dtype=torch.int32)
    # In pieces that stay in cache, so that W comes from memory once and not once per digit and row.
    rows = max(1, _PIECE // k)
    for start in range(0, n, rows):
        piece = int_data[start : start + rows].t()
        for row in range(codes.shape[0]):
            out = sums[row : row + 1, start : start + rows]
            torch._int_mm(codes[row : row + 1], piece, out=out)  # type: ignore[attr-defined]
    out, *lower = sums.view(-1, x.shape[0], n).to(torch.float64).unbind()
    for digit in lower:
        out.mul_(_BASE).add_(digit)
    out.mul_((step / QMAX).unsqueeze(-1)).mul_(scale)
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype)


def many_rows_mm(
    x: Tensor,
    weight: Tensor,
    float_mm: FloatProduct,
    *,
    in_factor: Tensor | None = None,
    out_factor: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`(x * in_factor) @ weight * out_factor + bias` in the dtype of x, with as many digits as that needs at least.

    Args:
        x: (M, T) fp32, fp16 or bf16.
        weight: (T, P) int8.
        float_mm: the same in float, for rows that the digits don't hold well enough.
        in_factor: (T,) fp32.
        out_factor: (P,) fp32.
        bias: (P,).
    """
    (m, terms), columns = x.shape, weight.shape[1]
    count = least_digits(x.dtype)
    out = torch.empty(m, columns, dtype=x.dtype)
    in_float = []
    rows = min(m, max(64, min(_BLOCK, _SUMS // (count * columns))))
    codes = torch.empty(count * rows, terms, dtype=torch.int8)
    sums = torch.empty(count * rows, columns, dtype=torch.int32)
    step = torch.empty(rows, 1, dtype=torch.float32)
    for block, result in zip(x.split(rows), out.split(rows), strict=True):
        n = block.shape[0]
        in_float.append(_store_digits(block, in_factor, codes[: count * n].view(count, n, terms), step))
        torch._int_mm(codes[: count * n], weight, out=sums[: count * n])  # type: ignore[attr-defined]
        _store_result(sums[: count * n].view(count, n, columns), step, out_factor, bias, result)
    index = torch.cat(in_float).nonzero().squeeze(1)
    if index.numel():
        rest = torch.nn.functional.pad(x[index], (0, 0, 0, -index.numel() % _FLOAT_ROWS))
        out[index] = float_mm(rest, _FLOAT_ROWS)[: index.numel()]
    return out


def _rows_in_cache(m: int, columns: int) -> int:
    return min(m, max(1, _CACHED * torch.get_num_threads() // columns))


def _store_digits(x: Tensor, in_factor: Tensor | None, codes: Tensor, step: Tensor) -> Tensor:
    """Digits of `x * in_factor` into `codes` (D, M, T), steps into `step` (M, 1); returns which rows (M,) aren't held.

    Those are the rows most of whose elements other than 0 are under `_SMALL` of the largest, and those that are not
    finite or too small for the reciprocal of their step.
    """
    count, m, terms = codes.shape
    rows = _rows_in_cache(m, terms)
    buffer, other_buffer = torch.empty(2, rows, terms, dtype=torch.float32).unbind()
    not_held = torch.empty(m, dtype=torch.bool)
    for start in range(0, m, rows):
        part = slice(start, min(m, start + rows))
        value, other = buffer[: part.stop - start], other_buffer[: part.stop - start]
        value.copy_(x[part])
        if in_factor is not None:
            value.mul_(in_factor)
        torch.abs(value, out=other)
        largest = other.amax(dim=1, keepdim=True)  # (rows, 1)
        small = torch.count_nonzero(other < largest * _SMALL, dim=1)
        bad = 2 * small > terms  # zeros included
        if bad.any():
            present = torch.count_nonzero(other, dim=1)
            bad = 2 * (small - terms + present) > present
        usable = (largest >= _SMALLEST_ROW) & largest.isfinite()
        if not usable.all():
            bad |= ~(usable | (largest == 0)).squeeze(1)
            value.masked_fill_(~usable, 0)
            largest = largest.masked_fill(~usable, 1.0)
        not_held[part] = bad
        value.mul_(QMAX / largest)
        for position in range(count):
            torch.round(value, out=other)
            codes[position, part] = other
            if position < count - 1:
                value.sub_(other).mul_(_BASE)
        step[part] = largest / (QMAX * float(_BASE) ** (count - 1))
    return not_held


def _store_result(sums: Tensor, step: Tensor, out_factor: Tensor | None, bias: Tensor | None, result: Tensor) -> None:
    """`sums` (D, M, P) of the digits, put together and rescaled, into `result` (M, P)."""
    count, m, columns = sums.shape
    rows = _rows_in_cache(m, columns)
    buffer = None if result.dtype == torch.float32 else torch.empty(rows, columns, dtype=torch.float32)
    for start in range(0, m, rows):
        part = slice(start, min(m, start + rows))
        out = result[part] if buffer is None else buffer[: part.stop - start]
        out.copy_(sums[0, part])
        for position in range(1, count):
            out.mul_(_BASE).add_(sums[position, part])
        if out_factor is not None:  # at most 65504 / 127: nothing overflows before the result itself does
            out.mul_(out_factor)
        out.mul_(step[part])
        if bias is not None:
            out.add_(bias)
        if buffer is not None:
            result[part] = out
