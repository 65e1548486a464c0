"""Int8 x int8 product with both scales, the outlier columns, the bias and the output cast in its epilogue.

    out[m, n] = (sum_k a[m, k] * b[n, k] * row_scale[m] / 127 + sum_c a_outlier[m, c] * b_outlier[n, c])
                * scale[n] / 127 + bias[n]

Both operands are contiguous along the sum, as Hopper's int8 tensor cores need. The sum is exact in int32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.linear.kernels.launch import launch
from qsub.linear.kernels.quantize import Outliers
from qsub.linear.reference import OUTLIER_COLUMNS


class Tile(NamedTuple):
    """Launch parameters: output rows and columns of a program, depth of a step, pipeline stages, warps, row group."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int
    group: int = 8
    tma: bool = False


@triton.jit
def _tile_of_program(program, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a program's tile: GROUP rows of tiles at a time, so that operands are reused in L2."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + (program % size), (program % (GROUP * tiles_n)) // size


@triton.jit
def _finish(
    acc,
    out,
    row_scale,
    scale,
    bias,
    a_outlier,
    b_outlier,
    rows,
    columns,
    M,
    N,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    OUTLIERS: tl.constexpr,
):
    """Rescale one tile of int32 sums and store it."""
    row_inside = rows < M
    column_inside = columns < N
    result = acc.to(tl.float32)
    factor = tl.load(row_scale + rows, mask=row_inside, other=0.0) * (1.0 / 127.0)
    if SCALE:
        column_factor = tl.load(scale + columns, mask=column_inside, other=0.0).to(tl.float32) * (1.0 / 127.0)
    if OUTLIERS > 0:
        slot = tl.arange(0, OUTLIERS)
        pa = a_outlier + rows.to(tl.int64)[:, None] * OUTLIERS + slot[None, :]
        pb = b_outlier + columns.to(tl.int64)[None, :] * OUTLIERS + slot[:, None]
        a = tl.load(pa, mask=row_inside[:, None], other=0.0)
        b = tl.load(pb, mask=column_inside[None, :], other=0.0)
        # Accumulating on top of the rescaled sums keeps one tile in registers, not two.
        result = tl.dot(a, b, result * factor[:, None], input_precision="ieee") * column_factor[None, :]
    elif SCALE:
        # The scale of W first: it is at most 65504, so nothing overflows before the result itself does.
        result = (result * column_factor[None, :]) * factor[:, None]
    else:
        result = result * factor[:, None]
    if BIAS:
        result += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * N + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )


@triton.jit(do_not_specialize=["M"])
def int8_gemm_kernel(
    a,
    b,
    out,
    row_scale,
    scale,
    bias,
    a_outlier,
    b_outlier,
    M,
    N,
    K,
    stride_bn,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program per tile, operands through pointers."""
    tile_m, tile_n = _tile_of_program(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    # Rows past the end read row 0; their results are not stored.
    pa = a + tl.where(rows < M, rows, 0).to(tl.int64)[:, None] * K + depth[None, :]
    pb = b + tl.where(columns < N, columns, 0).to(tl.int64)[None, :] * stride_bn + depth[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.int32)
    for start in range(0, K, BK):
        if EVEN_K:
            acc = tl.dot(tl.load(pa), tl.load(pb), acc, out_dtype=tl.int32)
        else:
            inside = start + depth < K
            codes_a = tl.load(pa, mask=inside[None, :], other=0)
            codes_b = tl.load(pb, mask=inside[:, None], other=0)
            acc = tl.dot(codes_a, codes_b, acc, out_dtype=tl.int32)
        pa += BK
        pb += BK
    _finish(acc, out, row_scale, scale, bias, a_outlier, b_outlier, rows, columns, M, N, SCALE, BIAS, OUTLIERS)


@triton.jit(do_not_specialize=["M"])
def int8_gemm_tma_kernel(
    a,
    b,
    out,
    row_scale,
    scale,
    bias,
    a_outlier,
    b_outlier,
    M,
    N,
    K,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program per tile, operands through Hopper's bulk tensor copies: `a` and `b` are tensor descriptors."""
    tile_m, tile_n = _tile_of_program(tl.program_id(0), M, N, BM, BN, GROUP)
    acc = tl.zeros((BM, BN), dtype=tl.int32)
    for start in range(0, K, BK):
        codes_a = a.load([tile_m * BM, start])
        codes_b = b.load([tile_n * BN, start])
        acc = tl.dot(codes_a, codes_b.T, acc, out_dtype=tl.int32)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    _finish(acc, out, row_scale, scale, bias, a_outlier, b_outlier, rows, columns, M, N, SCALE, BIAS, OUTLIERS)


def _tile(m: int, n: int) -> Tile:
    if m <= 16:
        return Tile(16, 64, 256, 4, 4)
    if m <= 64:
        return Tile(64, 64, 128, 4, 4)
    if m * n <= 512 * 4096:
        return Tile(64, 128, 128, 4, 4)
    return Tile(128, 256, 128, 3, 8)


def int8_gemm(
    a: Tensor,
    b: Tensor,
    row_scale: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    outliers: Outliers | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Rescaled product of codes, (M, K) x (N, K) -> (M, N) in `dtype`.

    Args:
        a: (M, K) int8, contiguous.
        b: (N, K) int8 whose rows are contiguous.
        row_scale: (M,) fp32 row magnitudes of the left operand.
        scale: (N,) fp16 row magnitudes of the right operand, or None for codes whose step is 1.
        bias: (N,) any float dtype, or None.
        dtype: fp32, fp16 or bf16.
        outliers: float columns to add; needs `scale`.
        tile: launch parameters in place of the table's.
    """
    (m, k), n = a.shape, b.shape[0]
    tile = tile or _tile(m, n)
    out = torch.empty(m, n, device=a.device, dtype=dtype)
    grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn), 1, 1)
    a_outlier, b_outlier = (None, None) if outliers is None else (outliers.x, outliers.weight)
    modes = (scale is not None, bias is not None, 0 if outliers is None else OUTLIER_COLUMNS)
    blocks = (tile.bm, tile.bn, tile.bk, tile.group)
    operands = (out, row_scale, scale, bias, a_outlier, b_outlier, m, n, k)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.tma and k % 16 == 0 and b.stride(0) % 16 == 0 and b.data_ptr() % 16 == 0:
        from triton.tools.tensor_descriptor import TensorDescriptor

        descriptors = (
            TensorDescriptor(a, [m, k], [k, 1], [tile.bm, tile.bk]),
            TensorDescriptor(b, [n, k], [b.stride(0), 1], [tile.bn, tile.bk]),
        )
        launch(int8_gemm_tma_kernel, grid, (*descriptors, *operands), (*modes, *blocks), **options)
    else:
        constants = (*modes, k % tile.bk == 0, *blocks)
        launch(int8_gemm_kernel, grid, (a, b, *operands, b.stride(0)), constants, **options)
    return out
