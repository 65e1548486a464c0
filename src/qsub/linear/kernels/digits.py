"""Products of few rows of x, as one or two int8 digits, on the int8 tensor cores.

With int8 activations a row of x is one digit. Weight-only, converting the weight to bf16 would cost more than the
product, so each row of x becomes two digits instead:

    x[m] ~ (high[m] * 254 + low[m]) * step[m],    step[m] = max|x[m]| / (127 * 254)

The remainder is at most half a step, 2**-16 of the row's largest magnitude: a small part of the rounding of the bf16
result, unless the weight ignores inputs that are hundreds of times larger than the others. So where most elements of a
row are that small, their remainders become two more digits, with a step of their own. Only tiles with such a row read
them, in a second pass over their part of the weight, which the first one has brought into L2.

Products are exact. The weight is the left operand, of which the tensor cores take 64 rows at a time; the digits are the
right one, of which they take as few as 8.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qsub.kernel_launch import cdiv, launch, multiprocessors, next_power_of_2
from qsub.linear.kernels.gemm import takes_descriptor
from qsub.linear.kernels.overlap import LINE, overlaps, prefetch, wait_for_inputs
from qsub.linear.kernels.quantize import magnitude_bits, quantize_rows, reciprocal_of_scale

MOST_ROWS = 256
MOST_INT8_ROWS = 64  # with int8 activations; the tiles of `gemm` are faster from there on
LARGEST_ROW = 32768  # columns of a row that one program holds in registers
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity
SMALL = tl.constexpr(2.0**-9)  # of the row's largest element: what two digits hold to 2**-7 of itself


class _Tile(NamedTuple):
    """Digits, weight rows and depth of a program's step, stages, and programs that share an output."""

    digits: int
    bn: int
    bk: int
    stages: int
    split: int


@triton.jit
def _load_row(x, columns, K):
    return tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _digits(scaled):
    """Two digits of |scaled| <= 127 and what remains. To nearest integers, as by `quantize.round_to_int8`."""
    high = scaled + 12582912.0
    rest = scaled - (high - 12582912.0)
    low = rest * 254.0 + 12582912.0
    remaining = rest - (low - 12582912.0) * (1.0 / 254.0)
    return high.to(tl.int32, bitcast=True).to(tl.int8), low.to(tl.int32, bitcast=True).to(tl.int8), remaining


@triton.jit
def _store_digits(scaled, codes, columns, K):
    high, low, _ = _digits(scaled)
    tl.store(codes + columns, high, mask=columns < K)
    tl.store(codes + K + columns, low, mask=columns < K)


@triton.jit(do_not_specialize=["M"])
def quantize_digits_kernel(x, codes, step, ratio, M, K, stride_xm, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One row into rows 2 m (high) and 2 m + 1 (low) of `codes`, and 2 M rows further the digits of what remains.

    `ratio` is the step of the latter in steps of the former, 0 if there are none: their codes aren't written then.
    """
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_xm
    columns = tl.arange(0, BLOCK)
    value = _load_row(x, columns, K)
    bits = magnitude_bits(value)
    largest, exponents = tl.max(bits, axis=0), tl.sum(bits >> 23, axis=0)
    scale = largest.to(tl.float32, bitcast=True)
    reciprocal = reciprocal_of_scale(scale)
    scaled = value * reciprocal
    _store_digits(scaled, codes + 2 * row * K, columns, K)
    tl.store(step + row, scale * (1.0 / 254.0))
    rest_scale = tl.zeros((), dtype=tl.float32)
    # True if half of the exponents are 9 below the largest, as in zeros.
    if (largest >> 23) * K - exponents >= 4 * K or largest == INFINITE:
        value = _load_row(x, columns, K)  # again: to keep it in registers slows down all rows
        scaled = value * reciprocal
        small = tl.abs(scaled) < 127.0 * SMALL
        if largest == INFINITE:
            tl.debug_barrier()
            scaled = tl.where(tl.abs(value) < float("inf"), 0.0, tl.where(value > 0, 127.0, -127.0))
            _store_digits(scaled, codes + 2 * row * K, columns, K)
        elif tl.sum(tl.where(scaled == 0.0, 0, tl.where(small, 1, -1)), axis=0) > 0:
            _, _, remaining = _digits(scaled)
            remaining = tl.where(small, remaining, 0.0)
            rest_scale = tl.max(magnitude_bits(remaining), axis=0).to(tl.float32, bitcast=True)
            scaled = remaining * reciprocal_of_scale(rest_scale)
            _store_digits(scaled, codes + 2 * (M + row) * K, columns, K)
    tl.store(ratio + row, rest_scale * (1.0 / 127.0))


@triton.jit
def _products(
    a,
    b,
    first_digit,
    first_column,
    begin,
    end,
    DIGITS: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Products of BN rows of W with BD digits from `begin` to `end`, in steps of the rows of x: (BN, BD / DIGITS)."""
    acc = tl.zeros((BN, BD), dtype=tl.int32)
    for start in range(begin, end, BK):
        acc = tl.dot(b.load([first_column, start]), a.load([first_digit, start]).T, acc, out_dtype=tl.int32)
    if DIGITS == 1:
        return acc.to(tl.float32)
    else:
        high, low = tl.split(tl.reshape(acc, (BN, BD // 2, 2)))
        return high.to(tl.float32) * 254.0 + low.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def digit_gemm_kernel(
    a,
    b,
    int_data,
    out,
    row_scale,
    ratio,
    scale,
    bias,
    M,
    N,
    K,
    stride_wn,
    BIAS: tl.constexpr,
    DIGITS: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of W against BD digits. With SPLIT > 1, a slice of the depth, stored as an fp32 partial."""
    BM: tl.constexpr = BD // DIGITS
    tiles_n = tl.cdiv(N, BN)
    tile_m = tl.program_id(0) // tiles_n
    first_column = (tl.program_id(0) % tiles_n) * BN
    slice_k = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    begin = tl.program_id(1) * slice_k
    end = tl.minimum(begin + slice_k, K)
    columns = first_column + tl.arange(0, BN)
    if OVERLAP:  # the part of W that the first steps read
        depth = begin + tl.arange(0, 4) * LINE
        row = tl.where(columns < N, columns, 0).to(tl.int64)[:, None] * stride_wn
        prefetch(int_data + row + tl.where(depth < K, depth, 0)[None, :])
    wait_for_inputs(OVERLAP)
    # What the end needs is loaded first: its latency is hidden by the products'.
    rows = tile_m * BM + tl.arange(0, BM)
    if DIGITS == 2:
        row_ratio = tl.load(ratio + rows, mask=rows < M, other=0.0)
    if SPLIT == 1:
        factor = tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
        row_factor = tl.load(row_scale + rows, mask=rows < M, other=0.0) * (1.0 / 127.0)
        if BIAS:
            summand = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    result = _products(a, b, tile_m * BD, first_column, begin, end, DIGITS, BD, BN, BK)
    if DIGITS == 2:
        if tl.max(row_ratio, axis=0) > 0.0:
            # A row without further digits has arbitrary codes there, and ratio 0.
            result += _products(a, b, 2 * M + tile_m * BD, first_column, begin, end, 2, BD, BN, BK) * row_ratio[None, :]
    inside = (columns < N)[:, None] & (rows < M)[None, :]
    if SPLIT == 1:
        # The scale of W first: it is at most 65504, so nothing overflows before the result itself does.
        result = (result * factor[:, None]) * row_factor[None, :]
        if BIAS:
            result += summand[:, None]
    else:
        rows = tl.program_id(1) * M + rows
    tl.store(out + rows.to(tl.int64)[None, :] * N + columns[:, None], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def sum_partials_kernel(
    partial,
    out,
    row_scale,
    scale,
    bias,
    M,
    N,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A piece of one output row: the sum of its partials, rescaled."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    result = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        result += tl.load(partial + (part * M + row) * N + columns, mask=inside, other=0.0)
    factor = tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32) * (1.0 / 127.0)
    result = (result * factor) * (tl.load(row_scale + row) * (1.0 / 127.0))
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, result.to(out.dtype.element_ty), mask=inside)


@functools.lru_cache(4096)
def _tile(digits: int, n: int, sms: int) -> _Tile:
    """Tile for that many digits (rows of x times digits of each); small products are split along the depth.

    With less than one program per multiprocessor, each keeps as much of W in flight as its memory holds; with more,
    two share one. Measured on H200 for N and K from 512 to 128256.
    """
    bd = min(128, max(16, next_power_of_2(digits)))
    if bd <= 32:
        bn = 128 if bd == 32 and cdiv(n, 64) > sms else 64
    else:
        bn = 128 if digits > 128 and cdiv(digits, bd) * cdiv(n, 128) > sms else 64
    tiles = cdiv(digits, bd) * cdiv(n, bn)
    if bd == 16:
        bk, stages = (512, 3) if tiles <= sms else (256, 5)
    elif bd == 32:
        bk, stages = (256, 4) if bn == 128 else (256, 5)
    elif bd == 64:
        bk, stages = (256, 4) if tiles <= sms else (128, 5)
    else:
        bk, stages = (256, 3) if tiles <= sms else (128, 3 if bn == 128 else 4)
    split = 1
    while split < 8 and 2 * split * tiles <= sms:
        split *= 2
    return _Tile(bd, bn, bk, stages, split)


def takes(x: Tensor, int_data: Tensor) -> bool:
    """Whether the tensors can be loaded by bulk tensor copies, and a row of x by one program."""
    return x.shape[1] % 16 == 0 and x.shape[1] <= LARGEST_ROW and takes_descriptor(int_data)


def digit_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None, int8_activations: bool = False) -> Tensor:
    """Product of a few rows: (M, K) x (N, K) -> (M, N) in the dtype of x.

    Args:
        x: (M, K) whose rows are contiguous and which `takes` takes; bf16 unless `int8_activations`.
        int_data: (N, K) int8.
        scale: (N,) row magnitudes of W.
        bias: (N,) any float dtype, or None.
        int8_activations: one digit in place of two.
    """
    (m, k), n = x.shape, int_data.shape[0]
    device, overlap = x.device, overlaps(x.device)
    if int8_activations:
        count = 1
        codes, row_scale = quantize_rows(x)
        ratio = None
    else:
        count = 2
        codes = torch.empty(4 * m, k, device=device, dtype=torch.int8)
        row_scale, ratio = torch.empty(2, m, device=device, dtype=torch.float32).unbind()
        block = next_power_of_2(k)
        warps = min(16, max(1, block // 512))
        arguments = (x, codes, row_scale, ratio, m, k, x.stride(0))
        launch(quantize_digits_kernel, (m, 1, 1), arguments, (block, overlap), warps, launch_pdl=overlap)

    tile = _tile(count * m, n, multiprocessors(device))
    out = torch.empty(m, n, device=device, dtype=x.dtype)
    target = out if tile.split == 1 else torch.empty(tile.split * m, n, device=device, dtype=torch.float32)
    a = TensorDescriptor(codes, list(codes.shape), [k, 1], [tile.digits, tile.bk])
    b = TensorDescriptor(int_data, [n, k], [int_data.stride(0), 1], [tile.bn, tile.bk])
    grid = (cdiv(count * m, tile.digits) * cdiv(n, tile.bn), tile.split, 1)
    arguments = (a, b, int_data, target, row_scale, ratio, scale, bias, m, n, k, int_data.stride(0))
    constants = (bias is not None, count, tile.digits, tile.bn, tile.bk, tile.split, overlap)
    launch(digit_gemm_kernel, grid, arguments, constants, 4, tile.stages, launch_pdl=overlap)
    if tile.split > 1:
        arguments = (target, out, row_scale, scale, bias, m, n)
        constants = (bias is not None, tile.split, 1024, overlap)
        grid = (cdiv(n, 1024), m, 1)
        launch(sum_partials_kernel, grid, arguments, constants, 4, launch_pdl=overlap)
    return out
