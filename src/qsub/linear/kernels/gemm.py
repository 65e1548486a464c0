"""Int8 x int8 product with both scales, the outlier columns, the bias and the output cast in its epilogue.

    out[m, n] = (sum_k a[m, k] * b[n, k] * row_scale[m] / 127 + sum_c a_outlier[m, c] * b_outlier[n, c])
                * scale[n] / 127 + bias[n]

Both operands are contiguous along the sum, as Hopper's int8 tensor cores need. The sum is exact in int32.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qsub.kernel_launch import cdiv, has_tensor_copies, launch, multiprocessors
from qsub.linear.kernels.overlap import overlaps, wait_for_inputs
from qsub.linear.kernels.quantize import Outliers
from qsub.linear.reference import OUTLIER_COLUMNS


class Tile(NamedTuple):
    """Launch parameters: output rows and columns of a program, depth of a step, pipeline stages, warps."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int


@triton.jit
def _tile_of_program(program, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column of a tile: 8 rows of tiles at a time, so that operands are reused in L2."""
    GROUP: tl.constexpr = 8
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + (program % size), (program % (GROUP * tiles_n)) // size


@triton.jit
def _rescale(
    acc,
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
    """Results in fp32 of one tile of int32 sums."""
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
        result = tl.dot(a, b, result * factor[:, None], input_precision="tf32x3") * column_factor[None, :]
    elif SCALE:
        # The scale of W first: it is at most 65504, so nothing overflows before the result itself does.
        result = (result * column_factor[None, :]) * factor[:, None]
    else:
        result = result * factor[:, None]
    if BIAS:
        result += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=["M"])
def pointer_kernel(
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile, operands through pointers: any alignment, any device."""
    wait_for_inputs(OVERLAP)
    tile_m, tile_n = _tile_of_program(tl.program_id(0), M, N, BM, BN)
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
    result = _rescale(acc, row_scale, scale, bias, a_outlier, b_outlier, rows, columns, M, N, SCALE, BIAS, OUTLIERS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def descriptor_kernel(
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
    PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tiles in turn, operands and result through bulk tensor copies: `a`, `b` and `out` are tensor descriptors.

    Two programs share a multiprocessor, so that one multiplies while the other rescales and stores its tile, half by
    half. Loads of the next tile start early (`flatten`), but not with OUTLIERS: its operands would be loaded early too,
    and leave no room for a second program.
    """
    wait_for_inputs(OVERLAP)
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=OUTLIERS == 0):
        tile_m, tile_n = _tile_of_program(tile, M, N, BM, BN)
        acc = tl.zeros((BM, BN), dtype=tl.int32)
        for start in range(0, K, BK):
            acc = tl.dot(a.load([tile_m * BM, start]), b.load([tile_n * BN, start]).T, acc, out_dtype=tl.int32)
        rows = tile_m * BM + tl.arange(0, BM)
        columns = tile_n * BN + tl.arange(0, BN // 2)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        result = _rescale(
            left, row_scale, scale, bias, a_outlier, b_outlier, rows, columns, M, N, SCALE, BIAS, OUTLIERS
        )
        out.store([tile_m * BM, tile_n * BN], result.to(out.dtype))
        columns += BN // 2
        result = _rescale(
            right, row_scale, scale, bias, a_outlier, b_outlier, rows, columns, M, N, SCALE, BIAS, OUTLIERS
        )
        out.store([tile_m * BM, tile_n * BN + BN // 2], result.to(out.dtype))


def takes_descriptor(matrix: Tensor) -> bool:
    """Whether a matrix with contiguous rows can be loaded by bulk tensor copies: 16-byte alignment throughout."""
    row = matrix.stride(0) * matrix.element_size()
    return has_tensor_copies(matrix.device) and matrix.data_ptr() % 16 == 0 and row % 16 == 0


@functools.lru_cache(4096)
def _descriptor_tile(m: int, n: int, sms: int) -> Tile:
    """The largest tile that still gives most multiprocessors one; for the largest, two programs share each."""

    def tiles(bm: int, bn: int) -> int:
        return cdiv(m, bm) * cdiv(n, bn)

    if m > 64 and 2 * tiles(128, 128) >= 3 * sms:
        return Tile(128, 128, 128, 3, 4)
    if m <= 32:
        return Tile(32, 64, 256, 5, 4)
    if 5 * tiles(64, 128) >= 4 * sms:
        return Tile(64, 128, 256, 4, 4) if tiles(64, 128) <= sms else Tile(64, 128, 128, 4, 4)
    return Tile(64, 64, 256, 4, 4) if 5 * tiles(64, 64) >= 4 * sms else Tile(64, 32, 256, 5, 4)


def _pointer_tile(m: int, n: int, device: torch.device) -> Tile:
    if not has_tensor_copies(device):
        return Tile(16, 64, 128, 3, 4) if m <= 16 else Tile(64, 64, 128, 3, 4) if m <= 256 else Tile(128, 128, 64, 3, 8)
    if m <= 16:
        return Tile(16, 64, 256, 4, 4) if n >= 8192 else Tile(16, 32, 512, 4, 4)
    return Tile(64, 128, 128, 4, 4) if m <= 1024 else Tile(128, 256, 128, 3, 8)


def int8_gemm(
    a: Tensor,
    b: Tensor,
    row_scale: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    outliers: Outliers | None = None,
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
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, device=a.device, dtype=dtype)
    a_outlier, b_outlier = (None, None) if outliers is None else (outliers.x, outliers.weight)
    operands = (row_scale, scale, bias, a_outlier, b_outlier, m, n, k)
    overlap = overlaps(a.device)
    modes = (scale is not None, bias is not None, 0 if outliers is None else OUTLIER_COLUMNS)
    if m > 16 and takes_descriptor(a) and takes_descriptor(b) and takes_descriptor(out):
        sms = multiprocessors(a.device)
        tile = _descriptor_tile(m, n, sms)
        programs = min(cdiv(m, tile.bm) * cdiv(n, tile.bn), 2 * sms)
        descriptors = (
            TensorDescriptor(a, [m, k], [k, 1], [tile.bm, tile.bk]),
            TensorDescriptor(b, [n, k], [b.stride(0), 1], [tile.bn, tile.bk]),
            TensorDescriptor(out, [m, n], [n, 1], [tile.bm, tile.bn // 2]),
        )
        constants = (*modes, tile.bm, tile.bn, tile.bk, 2 * sms, overlap)
        grid, arguments = (programs, 1, 1), (*descriptors, *operands)
        launch(descriptor_kernel, grid, arguments, constants, tile.warps, tile.stages, launch_pdl=overlap)
        return out
    tile = _pointer_tile(m, n, a.device)
    grid = (cdiv(m, tile.bm) * cdiv(n, tile.bn), 1, 1)
    constants = (*modes, tile.bm, tile.bn, tile.bk, k % tile.bk == 0, overlap)
    arguments = (a, b, out, *operands, b.stride(0))
    launch(pointer_kernel, grid, arguments, constants, tile.warps, tile.stages, launch_pdl=overlap)
    return out
