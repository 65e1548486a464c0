"""Row quantization of the input, and the choice of outlier columns for the mixed decomposition, on the device.

The row code is `reference.quantize_rows`. Magnitudes are compared as the bits of their fp32 value without the sign:
the order is the same, and NaN, whose bits are the largest, is never lost in a maximum.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import cdiv, launch, next_power_of_2
from qsub.linear.kernels.overlap import overlaps, wait_for_inputs
from qsub.linear.reference import OUTLIER_COLUMNS

_LARGEST_BLOCK = 16384  # columns of a row that one program holds in registers
_SELECT_BLOCK = 16384


@triton.jit
def magnitude_bits(x):
    """Bits of |x| in fp32, ordered as |x| is."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def reciprocal_of_scale(scale):
    """127 / scale, and 0 for rows so small that their reciprocal is near fp32's limit."""
    return tl.where(scale < 1e-30, 0.0, tl.div_rn(127.0, tl.where(scale < 1e-30, 1.0, scale)))


@triton.jit
def round_to_int8(x):
    """Nearest integer, half to even, of |x| <= 127: adding 1.5 * 2**23 leaves it in the low bits of the sum."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _load_piece(x, fold, is_outlier, columns, K, FOLD: tl.constexpr, OUTLIERS: tl.constexpr):
    inside = columns < K
    value = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if FOLD:
        value = value * (tl.load(fold + columns, mask=inside, other=0.0).to(tl.float32) * (1.0 / 127.0))
    if OUTLIERS > 0:
        value = tl.where(tl.load(is_outlier + columns, mask=inside, other=0) != 0, 0.0, value)
    return value


@triton.jit
def quantize_rows_kernel(
    x,
    fold,
    is_outlier,
    index,
    codes,
    row_scale,
    x_outlier,
    K,
    stride_xm,
    FOLD: tl.constexpr,
    OUTLIERS: tl.constexpr,
    ONE_PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row. With OUTLIERS, it also gathers the row's outlier columns and quantizes the others."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_xm
    codes += row * K
    columns = tl.arange(0, BLOCK)
    if ONE_PIECE:
        value = _load_piece(x, fold, is_outlier, columns, K, FOLD, OUTLIERS)
        scale = tl.max(magnitude_bits(value), axis=0).to(tl.float32, bitcast=True)
        tl.store(codes + columns, round_to_int8(value * reciprocal_of_scale(scale)), mask=columns < K)
    else:
        largest = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, K, BLOCK):
            value = _load_piece(x, fold, is_outlier, start + columns, K, FOLD, OUTLIERS)
            largest = tl.maximum(largest, magnitude_bits(value))
        scale = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
        reciprocal = reciprocal_of_scale(scale)
        for start in range(0, K, BLOCK):
            value = _load_piece(x, fold, is_outlier, start + columns, K, FOLD, OUTLIERS)
            tl.store(codes + start + columns, round_to_int8(value * reciprocal), mask=start + columns < K)
    tl.store(row_scale + row, scale)
    if OUTLIERS > 0:
        slot = tl.arange(0, OUTLIERS)
        column = tl.load(index + slot)
        tl.store(x_outlier + row * OUTLIERS + slot, tl.load(x + column, mask=column >= 0, other=0.0))


def quantize_rows(x: Tensor, fold: Tensor | None = None, outliers: "Outliers | None" = None) -> tuple[Tensor, Tensor]:
    """Codes (M, K) int8 and row magnitudes (M,) fp32 of `x` (M, K), whose rows are contiguous.

    Args:
        x: (M, K) fp32, fp16 or bf16.
        fold: (K,) fp16 scales; `x * fold / 127` is quantized in place of x.
        outliers: columns to leave out of the codes; they are gathered into `outliers.x`.
    """
    m, k = x.shape
    codes = torch.empty(m, k, device=x.device, dtype=torch.int8)
    row_scale = torch.empty(m, device=x.device, dtype=torch.float32)
    block = min(next_power_of_2(k), _LARGEST_BLOCK)
    arguments = (x, fold, None, None, codes, row_scale, None, k, x.stride(0))
    if outliers is not None:
        arguments = (x, fold, outliers.mask, outliers.index, codes, row_scale, outliers.x, k, x.stride(0))
    constants = (fold is not None, 0 if outliers is None else OUTLIER_COLUMNS, k <= block, block)
    overlap = overlaps(x.device)
    warps = min(16, max(1, block // 1024))
    launch(quantize_rows_kernel, (m, 1, 1), arguments, (*constants, overlap), warps, launch_pdl=overlap)
    return codes, row_scale


@triton.jit(do_not_specialize=["M", "ROWS"])
def column_magnitude_kernel(
    x, largest, M, K, stride_xm, ROWS, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """Bits of the largest magnitude of each column over ROWS rows, combined across programs by an atomic maximum."""
    columns = tl.program_id(0) * BK + tl.arange(0, BK)
    first = tl.program_id(1) * ROWS
    bits = tl.zeros((BM, BK), dtype=tl.int32)
    for start in tl.range(first, first + ROWS, BM, num_stages=STAGES):
        rows = start + tl.arange(0, BM)
        inside = (rows < M)[:, None] & (columns < K)[None, :]
        value = tl.load(x + rows.to(tl.int64)[:, None] * stride_xm + columns[None, :], mask=inside, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(value))
    tl.atomic_max(largest + columns, tl.max(bits, axis=0), mask=columns < K, sem="relaxed")


@triton.jit
def select_outliers_kernel(largest, threshold_bits, index, is_outlier, K, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Columns over the threshold, the LIMIT of largest magnitude at most, in the order of their numbers.

    One program. If more than LIMIT are over, the magnitude of the last one kept is found by bisection of its bits.
    """
    count = tl.zeros((), dtype=tl.int32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        bits = tl.load(largest + columns, mask=columns < K, other=-2147483648)
        count += tl.sum((bits > threshold_bits).to(tl.int32), axis=0)

    cut = threshold_bits + 0  # keep bits > cut, and the first `ties` columns equal to it
    ties = tl.zeros((), dtype=tl.int32)
    if count > LIMIT:
        low = threshold_bits + 0  # more than LIMIT columns are over `low`, and at most LIMIT over `high`
        high = tl.full((), 0x7FFFFFFF, dtype=tl.int32)
        above = tl.zeros((), dtype=tl.int32)
        while high - low > 1:
            middle = low + (high - low) // 2
            over = tl.zeros((), dtype=tl.int32)
            for start in range(0, K, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                bits = tl.load(largest + columns, mask=columns < K, other=-2147483648)
                over += tl.sum((bits > middle).to(tl.int32), axis=0)
            if over > LIMIT:
                low = middle
            else:
                high = middle
                above = over
        cut = high
        ties = LIMIT - above

    kept = tl.zeros((), dtype=tl.int32)
    tied = tl.zeros((), dtype=tl.int32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        bits = tl.load(largest + columns, mask=columns < K, other=-2147483648)
        keep = bits > cut
        if ties > 0:
            equal = (bits == cut).to(tl.int32)
            keep = keep | ((equal > 0) & (tied + tl.cumsum(equal, axis=0) <= ties))
            tied += tl.sum(equal, axis=0)
        position = kept + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(index + position, columns, mask=keep)
        tl.store(is_outlier + columns, keep.to(tl.int8), mask=columns < K)
        kept += tl.sum(keep.to(tl.int32), axis=0)
    slot = tl.arange(0, LIMIT)
    tl.store(index + slot, tl.full((LIMIT,), -1, dtype=tl.int32), mask=slot >= kept)


@triton.jit
def gather_weight_kernel(int_data, index, out, N, stride_wn, BN: tl.constexpr, OUTLIERS: tl.constexpr):
    """Codes of the outlier columns of W as floats, (N, OUTLIERS); 0 where the index is -1."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    slot = tl.arange(0, OUTLIERS)
    column = tl.load(index + slot)
    inside = (rows < N)[:, None]
    codes = tl.load(
        int_data + rows.to(tl.int64)[:, None] * stride_wn + column[None, :],
        mask=inside & (column >= 0)[None, :],
        other=0,
    )
    tl.store(out + rows.to(tl.int64)[:, None] * OUTLIERS + slot[None, :], codes.to(out.dtype.element_ty), mask=inside)


def _bits(threshold: float) -> int:
    """Bits of an fp32 number as a signed integer: negative numbers are below every magnitude."""
    return struct.unpack("<i", struct.pack("<f", min(threshold, torch.finfo(torch.float32).max)))[0]


class Outliers:
    """Outlier columns of one input, found on the device: no value is read back.

    Attributes:
        index: (C,) int32 column numbers, then -1 where there are fewer than C = OUTLIER_COLUMNS.
        mask: (K,) int8, 1 for an outlier column.
        x: (M, C) the input's outlier columns, filled in by `quantize_rows`.
        weight: (N, C) codes of W's outlier columns in the dtype of x.
    """

    def __init__(self, x: Tensor, int_data: Tensor, threshold: float):
        (m, k), n = x.shape, int_data.shape[0]
        largest = torch.zeros(k, device=x.device, dtype=torch.int32)
        rows, columns, stages = 16, 128, 4
        # Enough programs of two warps to fill the device. Measured on H200.
        per_program = cdiv(m * cdiv(k, columns), 512 * rows) * rows
        grid = (cdiv(k, columns), cdiv(m, per_program), 1)
        arguments = (x, largest, m, k, x.stride(0), per_program)
        launch(column_magnitude_kernel, grid, arguments, (rows, columns, stages), warps=2)

        self.index = torch.empty(OUTLIER_COLUMNS, device=x.device, dtype=torch.int32)
        self.mask = torch.empty(k, device=x.device, dtype=torch.int8)
        block = min(next_power_of_2(k), _SELECT_BLOCK)
        arguments = (largest, _bits(threshold), self.index, self.mask, k)
        launch(select_outliers_kernel, (1, 1, 1), arguments, (OUTLIER_COLUMNS, block), 8)

        self.x = torch.empty(m, OUTLIER_COLUMNS, device=x.device, dtype=x.dtype)
        self.weight = torch.empty(n, OUTLIER_COLUMNS, device=x.device, dtype=x.dtype)
        arguments = (int_data, self.index, self.weight, n, int_data.stride(0))
        launch(gather_weight_kernel, (cdiv(n, 16), 1, 1), arguments, (16, OUTLIER_COLUMNS), 4)
