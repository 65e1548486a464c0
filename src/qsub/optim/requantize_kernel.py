"""Write-back of trainable int8 weights after a launch: the row code with stochastic rounding, a launch for each weight.

It computes what `qsub.optim.per_parameter.write_back` defines, bit for bit.
"""

# What Triton's functions take and return is the compiler's matter, not that of a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from qsub.kernel_launch import launch, next_power_of_2
from qsub.optim import step as definition
from qsub.optim.codes_kernel import mix, random_bits
from qsub.optim.hyper import HyperTensor
from qsub.optim.per_parameter import WRITE_BACK, write_back
from qsub.optim.scalars_kernel import GOLDEN, WINDOW
from qsub.tensors.codes import FP16_MAX
from qsub.tensors.rowwise import Int8RowwiseTensor

_SEED = tl.constexpr(WRITE_BACK)
_SKIP = tl.constexpr(definition.SKIP)
_LARGEST = tl.constexpr(FP16_MAX)


@triton.jit
def _storable(value, codes, columns, K, old_step):
    """New values as far as the row code holds them; an element that is NaN keeps its old value."""
    inside = columns < K
    new = tl.load(value + columns, mask=inside, other=0.0)
    lost = new != new
    new = tl.minimum(tl.maximum(new, -_LARGEST), _LARGEST)
    old = tl.load(codes + columns, mask=inside & lost, other=0).to(tl.float32) * old_step
    return tl.where(lost, old, new)


@triton.jit
def requantize_kernel(value, int_data, scale, hyper, seed, step, first_row, K, stride_wn, BLOCK: tl.constexpr):
    """One row. It stays as it is where its value has not changed.

    Args:
        value: (rows, K) fp32, contiguous.
        int_data: (rows, K) int8, in place, rows `stride_wn` apart.
        scale: (rows,) fp16, in place.
        hyper: (N_HYPER,) fp32, whose SKIP leaves the weight as it is.
        seed: 0-dim int32.
        step: 0-dim fp32, the number of this step.
        first_row: rows of the whole weight before these.
        K: columns.
        stride_wn: elements between rows of `int_data`.
        BLOCK: columns at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(hyper + _SKIP) == 0.0:
        value += row * K
        int_data += row * stride_wn
        old_step = tl.load(scale + row).to(tl.float32) * (1.0 / 127.0)
        largest = tl.zeros((BLOCK,), dtype=tl.int32)
        moved = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, K, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            new = _storable(value, int_data, columns, K, old_step)
            largest = tl.maximum(largest, new.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # keeps NaN
            old = tl.load(int_data + columns, mask=columns < K, other=0).to(tl.float32) * old_step
            moved |= (new != old).to(tl.int32)
        if tl.max(moved, axis=0) != 0:  # else the codes are of this value already
            absmax = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
            new_scale = absmax.to(tl.float16)
            above = (new_scale.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(tl.float16, bitcast=True)
            nearest_scale = new_scale.to(tl.float32)
            reach = tl.maximum(nearest_scale, nearest_scale * (1.0 / 127.0) * 127.0)
            new_scale = tl.where(reach < absmax, above, new_scale)
            divisor = new_scale.to(tl.float32)
            new_step = divisor * (1.0 / 127.0)
            count = tl.load(step).to(tl.int32)
            salt = mix(tl.load(seed) ^ _SEED ^ mix(count >> WINDOW))
            for start in range(0, K, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                new = _storable(value, int_data, columns, K, old_step)
                bits = random_bits(salt, count * GOLDEN, (row + first_row) * K, columns)
                noise = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
                scaled = tl.div_rn(new * 127.0, tl.where(divisor > 0, divisor, 1.0))
                nearest = tl.floor(scaled + 0.5)
                exact = new == nearest * new_step
                codes = tl.where(exact, nearest, tl.floor(scaled + noise))
                codes = tl.where(divisor > 0, tl.minimum(tl.maximum(codes, -127.0), 127.0), 0.0)
                tl.store(int_data + columns, codes.to(tl.int8), mask=columns < K)
            tl.store(scale + row, new_scale)


def requantize(param: Int8RowwiseTensor, value: Tensor, step: Tensor, hyper: HyperTensor, first_row: int) -> None:
    """New value of a trainable int8 weight; arguments as those of `write_back`."""
    int_data, scale = param.int_data, param.scale
    rows = param.scale_dim == -2 and param.whole_rows and int_data.stride(1) == 1 and scale.is_contiguous()
    if not rows or not value.is_contiguous():
        write_back(param, value, step, hyper, first_row)
        return
    block = min(4096, next_power_of_2(param.shape[1]))
    arguments = (value, int_data, scale, hyper.tensor, hyper.seed, step, first_row, param.shape[1], int_data.stride(0))
    launch(requantize_kernel, (param.shape[0], 1, 1), arguments, (block,), max(1, block // 512))
