"""Product of a few rows of a gradient with an int8 weight, `grad @ W`, on the tensor cores.

The weight is read once as int8 and converted in registers, as in `few_rows`. Its row scales run along the sum here, so
the gradient is multiplied by them, which fp16 has no range for. The sum is split among programs, whose partial results
are added in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import cdiv, launch, multiprocessors, next_power_of_2
from qsub.linear.kernels.overlap import overlaps, prefetch, wait_for_inputs

MOST_ROWS = 128
LEAST_WEIGHTS = 1 << 25  # elements; for smaller weights it has not been compared with a dequantized one


class _Tile(NamedTuple):
    """Rows, depth of a step and columns of a program, stages, warps, programs per multiprocessor to split for."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int
    programs: int


def _tile(m: int) -> _Tile:
    """Measured on H200 for N and K of 4096 and 14336."""
    if m <= 16:
        return _Tile(16, 128, 128, 3, 4, 4)
    return _Tile(32, 32, 256, 5, 4, 4) if m <= 32 else _Tile(next_power_of_2(m), 64, 128, 4, 4, 2)


def takes(grad: Tensor, int_data: Tensor) -> bool:
    """Whether it is a product for this kernel: whole tiles, and a weight large enough."""
    n, k = int_data.shape
    whole = n % 128 == 0 and k % 256 == 0 and int_data.numel() >= LEAST_WEIGHTS
    return whole and grad.shape[0] <= MOST_ROWS and grad.dtype == torch.bfloat16


@triton.jit(do_not_specialize=["M", "SPLIT"])
def grad_kernel(
    grad,
    int_data,
    scale,
    out,
    M,
    N,
    K,
    stride_gm,
    stride_wn,
    SPLIT,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """(M, a slice of N) @ (that slice, BK columns) with M <= BM, into slice number `program_id(1)` of `out`.

    N is a multiple of BN, and K of BK.
    """
    columns = tl.program_id(0) * BK + tl.arange(0, BK)
    column_inside = columns < K
    length = tl.cdiv(tl.cdiv(N, BN), SPLIT) * BN
    begin = tl.program_id(1) * length
    rows = tl.arange(0, BM)
    row_inside = rows < M
    if OVERLAP:  # the part of W that the first step reads, by half lines
        ahead = begin + tl.arange(0, BN)
        half = tl.program_id(0) * BK + tl.arange(0, BK // 64) * 64
        address = int_data + tl.where(ahead < N, ahead, 0).to(tl.int64)[:, None] * stride_wn
        prefetch(address + tl.where(half < K, half, 0)[None, :])
    wait_for_inputs(OVERLAP)
    acc = tl.zeros((BM, BK), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + length, N), BN):
        depth = start + tl.arange(0, BN)
        pg = grad + rows.to(tl.int64)[:, None] * stride_gm + depth[None, :]
        pw = int_data + depth.to(tl.int64)[:, None] * stride_wn + columns[None, :]
        value = tl.load(pg, mask=row_inside[:, None], other=0.0)
        factor = tl.load(scale + depth)
        codes = tl.load(pw)
        folded = (value.to(tl.float32) * (factor.to(tl.float32) * (1.0 / 127.0))[None, :]).to(value.dtype)
        acc = tl.dot(folded, codes.to(value.dtype), acc)
    place = (tl.program_id(1) * M + rows).to(tl.int64)[:, None] * K + columns[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["SPLIT"])
def sum_kernel(partial, out, SIZE, SPLIT, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A piece of the sum of SPLIT partial results of SIZE elements each."""
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    result = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(SPLIT):
        result += tl.load(partial + part * SIZE + place, mask=inside, other=0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def few_rows_backward(grad: Tensor, int_data: Tensor, scale: Tensor) -> Tensor:
    """Product of a few rows: (M, N) x (N, K) -> (M, K) in the dtype of grad.

    Args:
        grad: (M, N) bf16, whose rows are contiguous; one that `takes` takes.
        int_data: (N, K) int8 whose rows are contiguous.
        scale: (N,) row magnitudes of W.
    """
    m, (n, k) = grad.shape[0], int_data.shape
    device, overlap = grad.device, overlaps(grad.device)
    tile = _tile(m)
    columns = cdiv(k, tile.bk)
    split = max(1, min(cdiv(n, tile.bn), tile.programs * multiprocessors(device) // columns))
    out = torch.empty(m, k, device=device, dtype=grad.dtype)
    target = out if split == 1 else torch.empty(split * m, k, device=device, dtype=torch.float32)
    arguments = (grad, int_data, scale, target, m, n, k, grad.stride(0), int_data.stride(0), split)
    constants = (tile.bm, tile.bn, tile.bk, overlap)
    launch(grad_kernel, (columns, split, 1), arguments, constants, tile.warps, tile.stages, launch_pdl=overlap)
    if split > 1:
        grid = (cdiv(m * k, 1024), 1, 1)
        launch(sum_kernel, grid, (target, out, m * k, split), (1024, overlap), 4, launch_pdl=overlap)
    return out
