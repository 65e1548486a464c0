"""Weight-only products of 17 to 256 rows of bf16, on the int8 tensor cores.

Converting the weight to bf16 costs more here than the product. Instead each row of x becomes two int8 digits:

    x[m] ~ (high[m] * 254 + low[m]) * step[m],    step[m] = max|x[m]| / (127 * 254)

The remainder is at most half a step, 2**-16 of the row's largest magnitude, a small part of the rounding of the bf16
result. Both products are exact, and share one read of the weight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qsub.kernel_launch import launch, multiprocessors
from qsub.linear.kernels.quantize import magnitude_bits, reciprocal_of_scale, round_to_int8

MOST_ROWS = 256
LARGEST_ROW = 32768  # columns of a row that one program holds in registers


class _Tile(NamedTuple):
    """Rows, columns and depth of a program's step, pipeline stages, and programs that share an output."""

    bm: int
    bn: int
    bk: int
    stages: int
    split: int


@triton.jit(do_not_specialize=["M"])
def quantize_digits_kernel(x, codes, step, M, K, stride_xm, BLOCK: tl.constexpr):
    """One row into rows m (high) and M + m (low) of `codes`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride_xm + columns, mask=columns < K, other=0.0).to(tl.float32)
    scale = tl.max(magnitude_bits(value), axis=0).to(tl.float32, bitcast=True)
    scaled = value * reciprocal_of_scale(scale)
    high = (scaled + 12582912.0) - 12582912.0  # to the nearest integer, as `round_to_int8`
    tl.store(codes + row * K + columns, high.to(tl.int8), mask=columns < K)
    tl.store(codes + (M + row) * K + columns, round_to_int8((scaled - high) * 254.0), mask=columns < K)
    tl.store(step + row, scale * (1.0 / (127.0 * 254.0)))


@triton.jit(do_not_specialize=["M"])
def digit_gemm_kernel(
    a,
    b,
    out,
    step,
    scale,
    bias,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile: both digits against one tile of W. With SPLIT > 1, a slice of the depth, stored as an fp32 partial."""
    tiles_n = tl.cdiv(N, BN)
    first_row = (tl.program_id(0) // tiles_n) * BM
    first_column = (tl.program_id(0) % tiles_n) * BN
    slice_k = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    begin = tl.program_id(1) * slice_k
    high = tl.zeros((BM, BN), dtype=tl.int32)
    low = tl.zeros((BM, BN), dtype=tl.int32)
    for start in range(begin, tl.minimum(begin + slice_k, K), BK):
        codes = b.load([first_column, start]).T
        high = tl.dot(a.load([first_row, start]), codes, high, out_dtype=tl.int32)
        low = tl.dot(a.load([M + first_row, start]), codes, low, out_dtype=tl.int32)
    rows = first_row + tl.arange(0, BM)
    columns = first_column + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    result = high.to(tl.float32) * 254.0 + low.to(tl.float32)
    if SPLIT == 1:
        factor = tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
        result = (result * factor[None, :]) * tl.load(step + rows, mask=rows < M, other=0.0)[:, None]
        if BIAS:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    else:
        rows = tl.program_id(1) * M + rows
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def sum_partials_kernel(
    partial, out, step, scale, bias, M, N, BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of one output row: the sum of its partials, rescaled."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    result = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        result += tl.load(partial + (part * M + row) * N + columns, mask=inside, other=0.0)
    factor = tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32) * (1.0 / 127.0)
    result = (result * factor) * tl.load(step + row)
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, result.to(out.dtype.element_ty), mask=inside)


def _tile(m: int, n: int, sms: int) -> _Tile:
    """Tile by the number of programs it makes: about one per multiprocessor, by splitting the depth if need be."""
    if m <= 32:
        tiles = triton.cdiv(n, 64)
        return _Tile(32, 64, 256, 4, 4 if 2 * tiles <= sms else 2 if tiles <= sms else 1)
    tiles = triton.cdiv(m, 64) * triton.cdiv(n, 128)
    if 5 * tiles >= 4 * sms:
        return _Tile(64, 128, 128, 4, 1)
    tiles = triton.cdiv(m, 64) * triton.cdiv(n, 64)
    return _Tile(64, 64, 256, 3, min(4, max(1, sms // tiles)))


def digit_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Product of up to 256 rows: (M, K) x (N, K) -> (M, N) in the dtype of x.

    Args:
        x: (M, K) bf16 whose rows are contiguous, K <= LARGEST_ROW and a multiple of 16.
        int_data: (N, K) int8 that a tensor descriptor takes: aligned to 16 bytes, rows too.
        scale: (N,) row magnitudes of W.
        bias: (N,) any float dtype, or None.
    """
    (m, k), n = x.shape, int_data.shape[0]
    device = x.device
    codes = torch.empty(2 * m, k, device=device, dtype=torch.int8)
    step = torch.empty(m, device=device, dtype=torch.float32)
    block = triton.next_power_of_2(k)
    launch(
        quantize_digits_kernel, (m, 1, 1), (x, codes, step, m, k, x.stride(0)), (block,), min(16, max(1, block // 512))
    )

    tile = _tile(m, n, multiprocessors(device))
    out = torch.empty(m, n, device=device, dtype=x.dtype)
    target = out if tile.split == 1 else torch.empty(tile.split * m, n, device=device, dtype=torch.float32)
    a = TensorDescriptor(codes, [2 * m, k], [k, 1], [tile.bm, tile.bk])
    b = TensorDescriptor(int_data, [n, k], [int_data.stride(0), 1], [tile.bn, tile.bk])
    grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn), tile.split, 1)
    constants = (bias is not None, tile.bm, tile.bn, tile.bk, tile.split)
    launch(digit_gemm_kernel, grid, (a, b, target, step, scale, bias, m, n, k), constants, 4, tile.stages)
    if tile.split > 1:
        arguments = (target, out, step, scale, bias, m, n)
        constants = (bias is not None, tile.split, 1024)
        launch(sum_partials_kernel, (triton.cdiv(n, 1024), m, 1), arguments, constants, 4)
    return out
