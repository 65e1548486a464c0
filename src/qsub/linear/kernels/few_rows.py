"""Products of a few rows, bound by reading the int8 weight once: decoding.

`gemv` multiplies on the fp32 units (one row); `few_rows` on the tensor cores, with the weight as the left operand so
that its conversion happens in registers:

    out.T (N, M) = W (N, K) @ x.T (K, M)

Both take the float input, or quantize its rows as they read them (`quantize=True`): no other kernel runs before.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsub.linear.kernels.launch import launch
from qsub.linear.kernels.quantize import magnitude_bits, reciprocal_of_scale, round_to_int8


class RowTile(NamedTuple):
    """Launch parameters: weight rows and rows of x of a program, depth of a step, pipeline stages, warps."""

    bn: int
    bm: int
    bk: int
    stages: int
    warps: int


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
    QUANTIZE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One row of x times BN rows of W."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    factor = tl.load(scale + rows, mask=rows < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
    if QUANTIZE:
        largest = tl.zeros((BK,), dtype=tl.int32)
        for start in range(0, K, BK):
            largest = tl.maximum(largest, magnitude_bits(tl.load(x + start + depth, mask=start + depth < K, other=0.0)))
        row_scale = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
        reciprocal = reciprocal_of_scale(row_scale)
    pw = int_data + tl.where(rows < N, rows, 0).to(tl.int64)[:, None] * stride_wn + depth[None, :]
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            codes = tl.load(pw)
            value = tl.load(x + start + depth).to(tl.float32)
        else:
            codes = tl.load(pw, mask=(start + depth < K)[None, :], other=0)
            value = tl.load(x + start + depth, mask=start + depth < K, other=0.0).to(tl.float32)
        if QUANTIZE:
            value = round_to_int8(value * reciprocal).to(tl.float32)
        acc += codes.to(tl.float32) * value[None, :]
        pw += BK
    result = tl.sum(acc, axis=1) * factor
    if QUANTIZE:
        result = result * (row_scale * (1.0 / 127.0))
    if BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=rows < N)


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
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
    QUANTIZE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """BM rows of x times BN rows of W."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    depth = tl.arange(0, BK)
    factor = tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32) * (1.0 / 127.0)
    row_inside = rows < M
    px = x + tl.where(row_inside, rows, 0).to(tl.int64)[:, None] * stride_xm + depth[None, :]
    pw = int_data + tl.where(columns < N, columns, 0).to(tl.int64)[:, None] * stride_wn + depth[None, :]
    if QUANTIZE:
        largest = tl.zeros((BM, BK), dtype=tl.int32)
        for start in range(0, K, BK):
            value = tl.load(px + start, mask=(start + depth < K)[None, :], other=0.0)
            largest = tl.maximum(largest, magnitude_bits(value))
        row_scale = tl.max(largest, axis=1).to(tl.float32, bitcast=True)
        reciprocal = reciprocal_of_scale(row_scale)
        acc = tl.zeros((BN, BM), dtype=tl.int32)
    else:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            codes = tl.load(pw)
            value = tl.load(px)
        else:
            inside = (start + depth < K)[None, :]
            codes = tl.load(pw, mask=inside, other=0)
            value = tl.load(px, mask=inside, other=0.0)
        if QUANTIZE:
            x_codes = round_to_int8(value.to(tl.float32) * reciprocal[:, None])
            acc = tl.dot(codes, tl.trans(x_codes), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(codes.to(value.dtype), tl.trans(value), acc)
        px += BK
        pw += BK
    result = acc.to(tl.float32) * factor[:, None]
    if QUANTIZE:
        result = result * (row_scale * (1.0 / 127.0))[None, :]
    if BIAS:
        result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + rows.to(tl.int64)[None, :] * N + columns[:, None],
        result.to(out.dtype.element_ty),
        mask=row_inside[None, :] & (columns < N)[:, None],
    )


def gemv(
    x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None, quantize: bool, tile: RowTile | None = None
) -> Tensor:
    """Product of one row: (1, K) x (N, K) -> (1, N) in the dtype of x."""
    n, k = int_data.shape
    tile = tile or RowTile(16 if n >= 8192 else 8 if n > 1024 else 4, 1, 512, 3, 4)
    out = torch.empty(1, n, device=x.device, dtype=x.dtype)
    arguments = (x, int_data, scale, bias, out, n, k, int_data.stride(0))
    constants = (bias is not None, quantize, k % tile.bk == 0, tile.bn, tile.bk)
    grid = (triton.cdiv(n, tile.bn), 1, 1)
    launch(gemv_kernel, grid, arguments, constants, num_warps=tile.warps, num_stages=tile.stages)
    return out


def few_rows(
    x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None, quantize: bool, tile: RowTile | None = None
) -> Tensor:
    """Product of a few rows of fp16 or bf16: (M, K) x (N, K) -> (M, N) in the dtype of x."""
    (m, k), n = x.shape, int_data.shape[0]
    tile = tile or RowTile(64, 16, 256, 4, 4)
    out = torch.empty(m, n, device=x.device, dtype=x.dtype)
    arguments = (x, int_data, scale, bias, out, m, n, k, x.stride(0), int_data.stride(0))
    constants = (bias is not None, quantize, k % tile.bk == 0, tile.bn, tile.bm, tile.bk)
    grid = (triton.cdiv(n, tile.bn), triton.cdiv(m, tile.bm), 1)
    launch(few_rows_kernel, grid, arguments, constants, num_warps=tile.warps, num_stages=tile.stages)
    return out
