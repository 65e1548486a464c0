"""One pass over an int8 weight: dequantize it, or transpose its codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import cdiv, launch, next_power_of_2


@triton.jit
def dequantize_kernel(int_data, scale, out, K, stride_wn, BLOCK: tl.constexpr):
    """A piece of one row: codes times the row's scale / 127 in fp32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(int_data + row * stride_wn + columns, mask=columns < K, other=0)
    factor = tl.load(scale + row).to(tl.float32) * (1.0 / 127.0)
    tl.store(out + row * K + columns, (codes.to(tl.float32) * factor).to(out.dtype.element_ty), mask=columns < K)


def dequantize(int_data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Float weight (N, K) in `dtype` (fp32, fp16 or bf16) from codes (N, K) and row magnitudes (N,)."""
    n, k = int_data.shape
    out = torch.empty(n, k, device=int_data.device, dtype=dtype)
    block = min(next_power_of_2(k), 4096)
    while block > 1024 and k % block:  # no half-empty piece at the end of each row, where that can be had
        block //= 2
    grid = (n, cdiv(k, block), 1)
    arguments = (int_data, scale, out, k, int_data.stride(0))
    launch(dequantize_kernel, grid, arguments, (block,), min(8, max(1, block // 512)))
    return out


@triton.jit
def transpose_kernel(int_data, out, N, K, stride_wn, BN: tl.constexpr, BK: tl.constexpr):
    """One (BN, BK) tile of codes, turned."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.program_id(1) * BK + tl.arange(0, BK)
    codes = tl.load(
        int_data + rows.to(tl.int64)[:, None] * stride_wn + columns[None, :],
        mask=(rows < N)[:, None] & (columns < K)[None, :],
    )
    tl.store(
        out + columns.to(tl.int64)[:, None] * N + rows[None, :],
        tl.trans(codes),
        mask=(columns < K)[:, None] & (rows < N)[None, :],
    )


def transpose(int_data: Tensor) -> Tensor:
    """Codes (N, K) as a contiguous (K, N): Hopper's int8 product takes operands contiguous along the sum only."""
    n, k = int_data.shape
    out = torch.empty(k, n, device=int_data.device, dtype=torch.int8)
    grid = (cdiv(n, 128), cdiv(k, 128), 1)
    launch(transpose_kernel, grid, (int_data, out, n, k, int_data.stride(0)), (128, 128), 4)
    return out
