"""Float products of 2 to 16 rows with an int8 weight, on the tensor cores.

The weight is read once as int8 and converted in registers. Sixteen rows are one tensor-core tile, so the work is the
same for 2 rows as for 16. With enough outputs, a program takes 64 of them (`wide`); otherwise the warps of a program
split the depth among them, as a batch of products that is summed at the end (`deep`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import cdiv, has_tensor_copies, launch
from qsub.linear.kernels.overlap import LINE, overlaps, prefetch, wait_for_inputs

MOST_ROWS = 16
MOST_WEIGHTS = 5 << 19  # elements of a weight; for larger ones `digits` is faster, where it can be had


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    x,
    int_data,
    scale,
    bias,
    out,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """(M, K) @ (K, BN) with M <= BM."""
    wait_for_inputs(OVERLAP)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.arange(0, BM)
    depth = tl.arange(0, BK)
    px = x + rows.to(tl.int64)[:, None] * stride_xm + depth[None, :]
    pw = int_data + tl.where(columns < N, columns, 0).to(tl.int64)[None, :] * stride_wn + depth[:, None]
    factor = tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            value = tl.load(px, mask=(rows < M)[:, None], other=0.0)
            codes = tl.load(pw)
        else:
            value = tl.load(px, mask=(rows < M)[:, None] & (start + depth < K)[None, :], other=0.0)
            codes = tl.load(pw, mask=(start + depth < K)[:, None], other=0)
        acc = tl.dot(value, codes.to(value.dtype), acc)
        px += BK
        pw += BK
    result = acc * factor[None, :]
    if BIAS:
        result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def deep_kernel(
    x,
    int_data,
    scale,
    bias,
    out,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """(BN, K) @ (K, M) with M <= BM, as SLICES products of depth BK at a time, one or more per warp."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    if OVERLAP:  # the part of W that the first steps read
        line = tl.arange(0, 16) * LINE
        row = tl.where(columns < N, columns, 0).to(tl.int64)[:, None] * stride_wn
        prefetch(int_data + row + tl.where(line < K, line, 0)[None, :])
    wait_for_inputs(OVERLAP)
    rows = tl.arange(0, BM)
    depth = tl.arange(0, SLICES)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SLICES, BK)
    row_inside = (rows < M)[None, None, :]
    px = x + rows.to(tl.int64)[None, None, :] * stride_xm + depth[:, :, None]  # (SLICES, BK, BM)
    first = tl.where(columns < N, columns, 0).to(tl.int64)[None, :, None] * stride_wn
    pw = int_data + first + depth[:, None, :]  # (SLICES, BN, BK)
    acc = tl.zeros((SLICES, BN, BM), dtype=tl.float32)
    for start in range(0, K, BK * SLICES):
        if EVEN_K:
            value = tl.load(px, mask=row_inside, other=0.0)
            codes = tl.load(pw)
        else:
            value = tl.load(px, mask=row_inside & (start + depth < K)[:, :, None], other=0.0)
            codes = tl.load(pw, mask=(start + depth < K)[:, None, :], other=0)
        acc = tl.dot(codes.to(value.dtype), value, acc)
        px += BK * SLICES
        pw += BK * SLICES
    factor = tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
    result = tl.sum(acc, axis=0) * factor[:, None]
    if BIAS:
        result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    inside = (rows < M)[None, :] & (columns < N)[:, None]
    tl.store(out + rows.to(tl.int64)[None, :] * N + columns[:, None], result.to(out.dtype.element_ty), mask=inside)


def few_rows(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Product of a few rows: (M, K) x (N, K) -> (M, N) in the dtype of x.

    Args:
        x: (M, K) fp16 or bf16 with M <= 16, whose rows are contiguous.
        int_data: (N, K) int8 whose rows are contiguous.
        scale: (N,) row magnitudes of W.
        bias: (N,) any float dtype, or None.
    """
    (m, k), n = x.shape, int_data.shape[0]
    out = torch.empty(m, n, device=x.device, dtype=x.dtype)
    arguments = (x, int_data, scale, bias, out, m, n, k, x.stride(0), int_data.stride(0))
    has_bias = bias is not None
    overlap = overlaps(x.device)
    stages = 4 if has_tensor_copies(x.device) else 2  # earlier devices have less shared memory
    if n >= 8192:
        grid = (cdiv(n, 64), 1, 1)
        constants = (has_bias, k % 256 == 0, MOST_ROWS, 64, 256, overlap)
        launch(wide_kernel, grid, arguments, constants, 4, stages, launch_pdl=overlap)
    else:
        bn, bk = (32, 64) if n >= 4096 else (16, 128)
        grid = (cdiv(n, bn), 1, 1)
        constants = (has_bias, k % (4 * bk) == 0, MOST_ROWS, bn, bk, 4, overlap)
        stages = stages + 1 if bk == 64 else stages
        launch(deep_kernel, grid, arguments, constants, 4, stages, launch_pdl=overlap)
    return out
