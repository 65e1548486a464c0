"""The Triton kernels of the Adam step: the twin of `qsub.optim.step` for all parameters of a group at once.

`prepare_kernel` counts the step of each parameter and forms its scalars; `adam_kernel` then takes the step. Each of
its programs reads which part of which parameter is its own from a map, and the addresses from a table in device
memory. A program works on BLOCKS blocks of one parameter, or on as many elements where the state is fp32.

The kind of a parameter is `layout * 9 + dtype of the parameter * 3 + dtype of the gradient`. Only the kinds that a
launch has are compiled into it (the bits of KINDS).
"""

import triton
import triton.language as tl

from qsub.optim import step as definition
from qsub.optim.codes_kernel import (
    block_scale,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    encode_unsigned_nearest,
    mix,
    random_bits,
    round_to_bf16,
)

# Layouts. "Aligned": every address is a multiple of 16 bytes and every row length one of 16 elements, so that
# loads and stores are 16 bytes wide.
FLAT = tl.constexpr(0)  # 8-bit state, aligned, blocks follow each other without gaps
ROWS = tl.constexpr(1)  # 8-bit state, aligned, the last block of a row is short
RAGGED = tl.constexpr(2)  # 8-bit state, any length and address
FLOAT = tl.constexpr(3)  # fp32 state, aligned
FLOAT_RAGGED = tl.constexpr(4)  # fp32 state, any length and address
N_KINDS = tl.constexpr(5 * 9)

# Columns of the table, int64. Moments come in the order exp_avg, exp_avg_sq, max_exp_avg_sq.
MOMENT = tl.constexpr(0)  # 3 addresses: codes, or fp32 values
SCALE = tl.constexpr(3)  # 3 addresses
LENGTH = tl.constexpr(6)  # elements per row; of the whole parameter in the layouts that have no rows
ROW_BLOCKS = tl.constexpr(7)  # blocks per row
BLOCK_COUNT = tl.constexpr(8)  # blocks of the parameter
FIRST_BLOCK = tl.constexpr(9)  # blocks (elements where the state is fp32) of the whole parameter before this shard
KIND = tl.constexpr(10)
N_COLUMNS = tl.constexpr(12)

# Columns of the scalars of a parameter, int32
STEP_SIZE = tl.constexpr(0)  # lr / (1 - beta1**step), bits of fp32
ROOT_CORRECTION = tl.constexpr(1)  # (1 - beta2**step)**-0.5, bits of fp32
SALT = tl.constexpr(2)
ACTIVE = tl.constexpr(3)
N_SCALARS = tl.constexpr(4)

_LR = tl.constexpr(definition.LR)
_BETA1 = tl.constexpr(definition.BETA1)
_BETA2 = tl.constexpr(definition.BETA2)
_ONE_MINUS_BETA1 = tl.constexpr(definition.ONE_MINUS_BETA1)
_ONE_MINUS_BETA2 = tl.constexpr(definition.ONE_MINUS_BETA2)
_LOG_BETA1 = tl.constexpr(definition.LOG_BETA1)
_LOG_BETA2 = tl.constexpr(definition.LOG_BETA2)
_EPS = tl.constexpr(definition.EPS)
_WEIGHT_DECAY = tl.constexpr(definition.WEIGHT_DECAY)
_GRAD_FACTOR = tl.constexpr(definition.GRAD_FACTOR)
_SKIP = tl.constexpr(definition.SKIP)
_INF = tl.constexpr(float("inf"))


@triton.jit
def prepare_kernel(addresses, steps, scalars, hyper, seed, count, LANES: tl.constexpr):
    """Count the step of each parameter that has a gradient, unless the step is skipped, and form its scalars.

    Args:
        addresses: (count, 2) int64, of the parameter and of its gradient; 0 stands for no gradient.
        steps: (count,) fp32, in place.
        scalars: (count, N_SCALARS) int32, output.
        hyper: (N_HYPER,) fp32.
        seed: 0-dim int32.
        count: number of parameters.
        LANES: parameters per program.
    """
    index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = index < count
    has_grad = tl.load(addresses + 2 * index + 1, mask=inside, other=0) != 0
    active = has_grad.to(tl.float32) * tl.where(tl.load(hyper + _SKIP) == 0.0, 1.0, 0.0)
    step = tl.load(steps + index, mask=inside, other=0.0) + active
    tl.store(steps + index, step, mask=inside)
    # fp64, because fp32 would cancel: beta2**step is .999 at first
    taken = tl.maximum(step, 1.0)
    correction1 = 1.0 - tl.exp((taken * tl.load(hyper + _LOG_BETA1)).to(tl.float64))
    correction2 = 1.0 - tl.exp((taken * tl.load(hyper + _LOG_BETA2)).to(tl.float64))
    step_size = tl.load(hyper + _LR) / correction1
    row = scalars + index * N_SCALARS
    tl.store(row + STEP_SIZE, step_size.to(tl.float32).to(tl.int32, bitcast=True), mask=inside)
    root = 1.0 / tl.sqrt(correction2)
    tl.store(row + ROOT_CORRECTION, root.to(tl.float32).to(tl.int32, bitcast=True), mask=inside)
    tl.store(row + SALT, mix(tl.load(seed) ^ mix(step.to(tl.int32))), mask=inside)
    tl.store(row + ACTIVE, active.to(tl.int32), mask=inside)


@triton.jit
def _adam(param, grad, exp_avg, exp_avg_sq, largest, scalar, hyper, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr):
    """`qsub.optim.step.adam_step`: new param, exp_avg, exp_avg_sq and the largest second moment (amsgrad)."""
    step_size = tl.load(scalar + STEP_SIZE).to(tl.float32, bitcast=True)
    root_correction = tl.load(scalar + ROOT_CORRECTION).to(tl.float32, bitcast=True)
    decay = tl.load(hyper + _WEIGHT_DECAY)
    grad = grad * tl.load(hyper + _GRAD_FACTOR)
    if DECOUPLED:
        param = param * (1.0 - tl.load(hyper + _LR) * decay)
    else:
        grad = grad + decay * param
    exp_avg = tl.load(hyper + _BETA1) * exp_avg + tl.load(hyper + _ONE_MINUS_BETA1) * grad
    exp_avg_sq = tl.load(hyper + _BETA2) * exp_avg_sq + tl.load(hyper + _ONE_MINUS_BETA2) * (grad * grad)
    second = exp_avg_sq
    if AMSGRAD:
        # a comparison, not max: NaN spreads as in torch.maximum
        largest = tl.where((exp_avg_sq <= largest), largest, exp_avg_sq)
        second = largest
    param = param - step_size * (exp_avg / (tl.sqrt(second) * root_correction + tl.load(hyper + _EPS)))
    return param, exp_avg, exp_avg_sq, largest


@triton.jit
def _store_param(address, value, noise, mask, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and DTYPE == tl.bfloat16:
        value = round_to_bf16(value, noise)
    if DTYPE == tl.float32:
        tl.store(address, value, mask=mask)
    else:
        tl.store(address, value.to(DTYPE, fp_downcast_rounding="rtne"), mask=mask)


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _step_8bit(
    addresses,
    row,
    chunk,
    scalar,
    hyper,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """`qsub.optim.step.step_8bit` on BLOCKS blocks."""
    ALIGNED: tl.constexpr = LAYOUT != RAGGED
    param_ptr = _pointer(addresses, PARAM, ALIGNED)
    grad_ptr = _pointer(addresses + 1, GRAD, ALIGNED)
    first_ptr = _pointer(row + MOMENT, tl.uint8, ALIGNED)
    second_ptr = _pointer(row + (MOMENT + 1), tl.uint8, ALIGNED)
    first_scale_ptr = _pointer(row + SCALE, tl.bfloat16, False)
    second_scale_ptr = _pointer(row + (SCALE + 1), tl.bfloat16, False)
    length = tl.load(row + LENGTH)

    start = chunk.to(tl.int64) * BLOCKS  # block
    number = tl.arange(0, BLOCKS)
    lane = tl.arange(0, BLOCK_SIZE)[None, :]
    exists = number < (tl.load(row + BLOCK_COUNT) - start).to(tl.int32)
    if LAYOUT == FLAT:
        origin = start * BLOCK_SIZE
        inner = number[:, None] * BLOCK_SIZE + lane
        left = tl.multiple_of(tl.minimum(length - origin, BLOCKS * BLOCK_SIZE).to(tl.int32), 16)
        mask = inner < left
        param_ptr += origin
        grad_ptr += origin
        first_ptr += origin
        second_ptr += origin
    else:
        row_blocks = tl.load(row + ROW_BLOCKS).to(tl.int32)
        block = start.to(tl.int32) + number
        row_number = block // row_blocks
        column = (block - row_number * row_blocks).to(tl.int64) * BLOCK_SIZE
        left = tl.minimum(length - column, BLOCK_SIZE).to(tl.int32)
        if LAYOUT == ROWS:
            length = tl.multiple_of(length, 16)
            left = tl.multiple_of(left, 16)
        inner = (row_number.to(tl.int64) * length + column)[:, None] + lane
        mask = (lane < left[:, None]) & exists[:, None]

    param = tl.load(param_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    first_codes = tl.load(first_ptr + inner, mask=mask, other=0).to(tl.int32)
    second_codes = tl.load(second_ptr + inner, mask=mask, other=0).to(tl.int32)
    first_scale = tl.load(first_scale_ptr + start + number, mask=exists, other=0.0).to(tl.float32)
    second_scale = tl.load(second_scale_ptr + start + number, mask=exists, other=0.0).to(tl.float32)
    largest = param
    if AMSGRAD:
        largest_ptr = _pointer(row + (MOMENT + 2), tl.uint8, ALIGNED)
        largest_scale_ptr = _pointer(row + (SCALE + 2), tl.bfloat16, False)
        if LAYOUT == FLAT:
            largest_ptr += start * BLOCK_SIZE
        largest_codes = tl.load(largest_ptr + inner, mask=mask, other=0).to(tl.int32)
        largest_scale = tl.load(largest_scale_ptr + start + number, mask=exists, other=0.0).to(tl.float32)
        largest = decode_unsigned(largest_codes, largest_scale)

    exp_avg = decode_signed(first_codes, first_scale)
    exp_avg_sq = decode_unsigned(second_codes, second_scale)
    param, exp_avg, exp_avg_sq, largest = _adam(
        param, grad, exp_avg, exp_avg_sq, largest, scalar, hyper, DECOUPLED, AMSGRAD
    )

    place = ((tl.load(row + FIRST_BLOCK) + start) + number) * BLOCK_SIZE
    bits = random_bits(tl.load(scalar + SALT), place[:, None], lane)
    noise = mix(bits) if STOCHASTIC and PARAM == tl.bfloat16 else bits
    _store_param(param_ptr + inner, param, noise, mask, PARAM, STOCHASTIC)

    finite = exp_avg_sq < _INF  # false for NaN too; such an element restarts from zero state
    exp_avg = tl.where(finite, exp_avg, 0.0)
    exp_avg_sq = tl.where(finite, exp_avg_sq, 0.0)
    scale = block_scale(tl.max(tl.abs(exp_avg), axis=1))
    tl.store(first_ptr + inner, encode_signed(exp_avg, scale), mask=mask)
    tl.store(first_scale_ptr + start + number, scale.to(tl.bfloat16), mask=exists)
    scale = block_scale(tl.max(exp_avg_sq, axis=1))
    tl.store(second_ptr + inner, encode_unsigned(exp_avg_sq, scale, bits & 0x7FFFF), mask=mask)
    tl.store(second_scale_ptr + start + number, scale.to(tl.bfloat16), mask=exists)
    if AMSGRAD:
        largest = tl.where(finite, largest, 0.0)
        scale = block_scale(tl.max(largest, axis=1))
        tl.store(largest_ptr + inner, encode_unsigned_nearest(largest, scale), mask=mask)
        tl.store(largest_scale_ptr + start + number, scale.to(tl.bfloat16), mask=exists)


@triton.jit
def _step_float32(
    addresses,
    row,
    chunk,
    scalar,
    hyper,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """`qsub.optim.step.step_float32` on TILE elements."""
    ALIGNED: tl.constexpr = LAYOUT == FLOAT
    start = chunk.to(tl.int64) * TILE
    inner = tl.arange(0, TILE)
    left = tl.minimum(tl.load(row + LENGTH) - start, TILE).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    mask = inner < left
    param_ptr = _pointer(addresses, PARAM, ALIGNED) + start
    grad_ptr = _pointer(addresses + 1, GRAD, ALIGNED) + start
    first_ptr = _pointer(row + MOMENT, tl.float32, ALIGNED) + start
    second_ptr = _pointer(row + (MOMENT + 1), tl.float32, ALIGNED) + start
    largest_ptr = second_ptr
    param = tl.load(param_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    exp_avg = tl.load(first_ptr + inner, mask=mask, other=0.0)
    exp_avg_sq = tl.load(second_ptr + inner, mask=mask, other=0.0)
    largest = exp_avg_sq
    if AMSGRAD:
        largest_ptr = _pointer(row + (MOMENT + 2), tl.float32, ALIGNED) + start
        largest = tl.load(largest_ptr + inner, mask=mask, other=0.0)
    param, exp_avg, exp_avg_sq, largest = _adam(
        param, grad, exp_avg, exp_avg_sq, largest, scalar, hyper, DECOUPLED, AMSGRAD
    )
    noise = inner
    if STOCHASTIC and PARAM == tl.bfloat16:
        noise = random_bits(tl.load(scalar + SALT), tl.load(row + FIRST_BLOCK) + start + inner, 0)
    _store_param(param_ptr + inner, param, noise, mask, PARAM, STOCHASTIC)
    tl.store(first_ptr + inner, exp_avg, mask=mask)
    tl.store(second_ptr + inner, exp_avg_sq, mask=mask)
    if AMSGRAD:
        tl.store(largest_ptr + inner, largest, mask=mask)


@triton.jit
def _step_kind(
    addresses,
    row,
    chunk,
    scalar,
    hyper,
    KIND_NUMBER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The step of one program's part of a parameter whose kind is known at compile time."""
    LAYOUT: tl.constexpr = KIND_NUMBER // 9
    P: tl.constexpr = KIND_NUMBER // 3 % 3
    G: tl.constexpr = KIND_NUMBER % 3
    PARAM: tl.constexpr = tl.float32 if P == 0 else (tl.bfloat16 if P == 1 else tl.float16)
    GRAD: tl.constexpr = tl.float32 if G == 0 else (tl.bfloat16 if G == 1 else tl.float16)
    if LAYOUT >= FLOAT:
        TILE: tl.constexpr = BLOCKS * BLOCK_SIZE
        _step_float32(addresses, row, chunk, scalar, hyper, PARAM, GRAD, LAYOUT, TILE, DECOUPLED, AMSGRAD, STOCHASTIC)
    else:
        _step_8bit(
            addresses, row, chunk, scalar, hyper, PARAM, GRAD, LAYOUT, BLOCK_SIZE, BLOCKS, DECOUPLED, AMSGRAD,
            STOCHASTIC,
        )  # fmt: skip


@triton.jit
def adam_kernel(
    programs,
    table,
    addresses,
    scalars,
    hyper,
    KINDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The step of every parameter, in place.

    Args:
        programs: (grid / PROGRAMS, 2) int32: parameter, and first chunk (of BLOCKS * BLOCK_SIZE elements).
        table: (count, N_COLUMNS) int64.
        addresses: (count, 2) int64, of the parameter and of its gradient.
        scalars: (count, N_SCALARS) int32, from `prepare_kernel`.
        hyper: (N_HYPER,) fp32.
        KINDS: bit k is set if a parameter of kind k is in the table.
        BLOCK_SIZE: elements per block.
        BLOCKS: blocks per program.
        PROGRAMS: programs per row of `programs`.
        DECOUPLED: AdamW rather than Adam.
        AMSGRAD: keep and use the largest second moment.
        STOCHASTIC: round bf16 parameters stochastically.
    """
    program = tl.program_id(0)
    entry = programs + (program // PROGRAMS) * 2
    index = tl.load(entry)
    chunk = tl.load(entry + 1) + program % PROGRAMS
    scalar = scalars + index * N_SCALARS
    address = addresses + index * 2
    row = table + index * N_COLUMNS
    kind = tl.load(row + KIND)
    if tl.load(scalar + ACTIVE) != 0:
        for k in tl.static_range(N_KINDS):
            if (KINDS >> k) & 1:
                if kind == k:
                    _step_kind(
                        address, row, chunk, scalar, hyper, k, BLOCK_SIZE, BLOCKS, DECOUPLED, AMSGRAD, STOCHASTIC
                    )
