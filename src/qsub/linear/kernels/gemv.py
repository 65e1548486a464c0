"""One row of floats times an int8 weight: bound by reading the weight once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import cdiv, launch


@triton.jit
def int8_to_float(codes):
    """Exact fp32 value of int8 codes, without the conversion unit, which is too slow to keep up with memory.

    The code plus 128 is the low byte of a float between 2**23 and 2**23 + 255; subtracting 2**23 + 128 leaves the code.
    """
    low_byte = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int32)
    return (low_byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def gemv_kernel(
    x,
    int_data,
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
):
    """BN outputs."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    factor = tl.load(scale + rows, mask=rows < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
    pw = int_data + tl.where(rows < N, rows, 0).to(tl.int64)[:, None] * stride_wn + depth[None, :]
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN_K:
            codes = tl.load(pw + start)
            value = tl.load(x + start + depth).to(tl.float32)
        else:
            codes = tl.load(pw + start, mask=(start + depth < K)[None, :], other=0)
            value = tl.load(x + start + depth, mask=start + depth < K, other=0.0).to(tl.float32)
        acc += int8_to_float(codes) * value[None, :]
    result = tl.sum(acc, axis=1) * factor
    if BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=rows < N)


def gemv(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Product of one row: (1, K) x (N, K) -> (1, N) in the dtype of x.

    Args:
        x: (1, K) fp32, fp16 or bf16.
        int_data: (N, K) int8 whose rows are contiguous.
        scale: (N,) row magnitudes of W.
        bias: (N,) any float dtype, or None.
    """
    n, k = int_data.shape
    # (weight rows, depth, warps) of a program. Many small programs keep the most loads in flight; few outputs need
    # more warps along the depth. Measured on H200 for N from 512 to 128256.
    bn, bk, warps = (4, 512, 1) if n >= 4096 else (4, 512, 2) if n > 1024 else (4, 1024, 4)
    out = torch.empty(1, n, device=x.device, dtype=x.dtype)
    arguments = (x, int_data, scale, bias, out, n, k, int_data.stride(0))
    constants = (bias is not None, k % bk == 0, bn, bk, 4)
    launch(gemv_kernel, (cdiv(n, bn), 1, 1), arguments, constants, warps)
    return out
