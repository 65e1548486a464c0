"""One row of int8 codes times an int8 weight: eight products at a time, bound by reading the weight once.

Without the conversions of `gemv` to floats, there is so little work per weight that only memory counts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import cdiv, launch
from qsub.linear.kernels.overlap import LINE, overlaps, prefetch, wait_for_inputs


class _Tile(NamedTuple):
    """Weight rows of a program, codes of each at a time, stages, warps, and cache lines of each row asked for early."""

    bn: int
    bk: int
    stages: int
    warps: int
    lines: int


def _tile(n: int) -> _Tile:
    """Few outputs leave room to ask for more of each row. Measured on H200 for N and K from 512 to 128256."""
    return _Tile(4, 1024, 6, 1, 8) if n <= 4224 else _Tile(4, 512, 6, 1, 4)


@triton.jit
def _dot8(a, b, acc, ON_DEVICE: tl.constexpr):
    """`acc` plus the products of the eight int8 values that each int64 of `a` and `b` holds."""
    if ON_DEVICE:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 a_low, a_high, b_low, b_high, sum;
                mov.b64 {a_low, a_high}, $1;
                mov.b64 {b_low, b_high}, $2;
                dp4a.s32.s32 sum, a_low, b_low, $3;
                dp4a.s32.s32 $0, a_high, b_high, sum;
            }
            """,
            "=r,l,l,r",
            [a, b, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for byte in tl.static_range(8):  # Triton's interpreter
        acc += ((a << (56 - 8 * byte)) >> 56).to(tl.int32) * ((b << (56 - 8 * byte)) >> 56).to(tl.int32)
    return acc


@triton.jit
def code_gemv_kernel(
    codes,
    int_data,
    row_scale,
    scale,
    bias,
    out,
    N,
    K,
    stride_wn,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BN outputs, BK codes of each at a time, as int64 of eight."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    first = int_data + tl.where(rows < N, rows, 0).to(tl.int64) * stride_wn
    if OVERLAP and LINES > 0:
        line = tl.arange(0, LINES) * LINE
        prefetch(first[:, None] + tl.where(line < K, line, 0)[None, :])
    wait_for_inputs(OVERLAP)
    eight = tl.arange(0, BK // 8)
    pa = codes.to(tl.pointer_type(tl.int64)) + eight
    pb = first.to(tl.pointer_type(tl.int64))[:, None] + eight[None, :]
    factor = tl.load(scale + rows, mask=rows < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
    row_factor = tl.load(row_scale) * (1.0 / 127.0)
    acc = tl.zeros((BN, BK // 8), dtype=tl.int32)
    for start in tl.range(0, K // 8, BK // 8, num_stages=STAGES):
        if EVEN_K:
            a = tl.load(pa + start)
            b = tl.load(pb + start)
        else:
            inside = start + eight < K // 8
            a = tl.load(pa + start, mask=inside, other=0)
            b = tl.load(pb + start, mask=inside[None, :], other=0)
        acc = _dot8(tl.broadcast_to(a[None, :], (BN, BK // 8)), b, acc, ON_DEVICE)
    # The scale of W first: it is at most 65504, so nothing overflows before the result itself does.
    result = (tl.sum(acc, axis=1).to(tl.float32) * factor) * row_factor
    if BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=rows < N)


def takes(int_data: Tensor) -> bool:
    """Whether the rows of a weight are whole int64s."""
    return int_data.shape[1] % 8 == 0 and int_data.stride(0) % 8 == 0 and int_data.data_ptr() % 8 == 0


def code_gemv(
    codes: Tensor, int_data: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Rescaled product of one row of codes: (1, K) x (N, K) -> (1, N) in `dtype`.

    Args:
        codes: (1, K) int8, contiguous and aligned to 8 bytes.
        int_data: (N, K) int8 whose rows are contiguous, which `takes` takes.
        row_scale: (1,) fp32 magnitude of the row.
        scale: (N,) row magnitudes of W.
        bias: (N,) any float dtype, or None.
        dtype: fp32, fp16 or bf16.
    """
    n, k = int_data.shape
    tile = _tile(n)
    out = torch.empty(1, n, device=codes.device, dtype=dtype)
    overlap = overlaps(codes.device)
    arguments = (codes, int_data, row_scale, scale, bias, out, n, k, int_data.stride(0))
    constants = (bias is not None, k % tile.bk == 0, tile.bn, tile.bk, tile.stages, tile.lines, codes.is_cuda, overlap)
    launch(code_gemv_kernel, (cdiv(n, tile.bn), 1, 1), arguments, constants, tile.warps, launch_pdl=overlap)
    return out
