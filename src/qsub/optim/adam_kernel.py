"""The Triton kernel of the Adam step: the twin of `qsub.optim.step` for all parameters of a group at once.

Each program reads from a map which part of which parameter is its own, and addresses from a table in device memory. It
works on BLOCKS blocks of one parameter, or on as many elements where the state is fp32.
Kind of a chunk: `layout * 9 + dtype of parameter * 3 + dtype of gradient`. A launch compiles those it has (KINDS).
"""

# Triton's types are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from qsub.optim.codes_kernel import (
    HALF,
    decode_exp_avg,
    decode_exp_avg_sq,
    encode_exp_avg,
    encode_exp_avg_sq,
    exponent_range,
    load_scale,
    random_bits,
    store_param,
    store_scale,
)
from qsub.optim.scalars_kernel import ACTIVE, N_SCALARS, PARTS_OF_RAGGED, load_pointer, load_scalars
from qsub.optim.step import LEAST_ROOT

# Layouts. "Aligned": every address is a multiple of 16 bytes and every row length one of 16 elements, so that loads and
# stores are 16 bytes wide. The last chunk has a layout of its own where it isn't.
FLAT = tl.constexpr(0)  # 8-bit state, aligned, blocks follow each other without gaps
ROWS = tl.constexpr(1)  # 8-bit state, aligned, the last block of a row is short
QUADS = tl.constexpr(2)  # 8-bit state, every address a multiple of 16 bytes, every row length one of 4 elements
RAGGED = tl.constexpr(3)  # 8-bit state, any length and address
FLOAT = tl.constexpr(4)  # fp32 state, aligned
FLOAT_RAGGED = tl.constexpr(5)  # fp32 state, any length and address
N_KINDS = tl.constexpr(6 * 9)

# Columns of the table, int64.
MOMENT = tl.constexpr(0)  # 3 addresses, of exp_avg, exp_avg_sq, max_exp_avg_sq: codes, or fp32 values
SCALE = tl.constexpr(3)  # 3 addresses
LENGTH = tl.constexpr(6)  # elements per row; of the whole parameter in the layouts that have no rows
ROW_BLOCKS = tl.constexpr(7)  # blocks per row
BLOCK_COUNT = tl.constexpr(8)  # blocks of the parameter
FIRST_BLOCK = tl.constexpr(9)  # blocks (elements where the state is fp32) of the whole parameter before this shard
COUNT = tl.constexpr(10)  # elements of the parameter
N_COLUMNS = tl.constexpr(12)

_INF = tl.constexpr(float("inf"))
_LEAST_ROOT = tl.constexpr(LEAST_ROOT)


@triton.jit
def _adam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    largest,
    scalars,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    SMALL_EPS: tl.constexpr,
):
    """`qsub.optim.step.adam_step`, with fewer instructions: last bits may differ.

    Args:
        param: fp32, as those that follow.
        grad: gradient.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        largest: largest second moment so far (amsgrad).
        scalars: from `load_scalars`.
        DECOUPLED: AdamW rather than Adam.
        AMSGRAD: see `adam_kernel`.
        SMALL_EPS: see `adam_kernel`.

    Returns:
        New param, exp_avg, exp_avg_sq and largest second moment.
    """
    step_size, root_correction, beta1, beta2, rate1, rate2, eps, decay, _, _ = scalars
    if DECOUPLED:
        param = param * decay
    else:
        grad = grad + decay * param
    exp_avg = beta1 * exp_avg + rate1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + (rate2 * grad) * grad
    second = exp_avg_sq
    if AMSGRAD:
        # a comparison, not max: NaN spreads as in torch.maximum
        largest = tl.where(exp_avg_sq <= largest, largest, exp_avg_sq)
        second = largest
    # 1 / x as rsqrt(x)**2: two instructions, where a division takes ten
    root = tl.sqrt(second) * root_correction + eps
    if SMALL_EPS:
        root = tl.maximum(root, _LEAST_ROOT)
    root = tl.rsqrt(root)
    param = param - step_size * (exp_avg * root * root)
    return param, exp_avg, exp_avg_sq, largest


@triton.jit
def _step_8bit(
    addresses,
    row,
    chunk,
    scalars,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SMALL_EPS: tl.constexpr,
):
    """`qsub.optim.step.step_8bit` on BLOCKS blocks."""
    ALIGNED: tl.constexpr = LAYOUT != RAGGED
    param_ptr = load_pointer(addresses, PARAM, ALIGNED)
    grad_ptr = load_pointer(addresses + 1, GRAD, ALIGNED)
    first_ptr = load_pointer(row + MOMENT, tl.uint8, ALIGNED)
    # With amsgrad exp_avg_sq is fp32, so that the maximum keeps no rounding errors.
    second_ptr = load_pointer(row + (MOMENT + 1), tl.float32 if AMSGRAD else tl.uint8, ALIGNED)
    first_scale_ptr = load_pointer(row + SCALE, tl.uint16, False)
    second_scale_ptr = load_pointer(row + (SCALE + (2 if AMSGRAD else 1)), tl.uint16, False)
    # All scalars are loaded ahead of the data: a load among the arithmetic would be waited for by itself.
    length = tl.load(row + LENGTH)
    block_count = tl.load(row + BLOCK_COUNT)
    first_block = tl.load(row + FIRST_BLOCK)
    row_blocks = tl.load(row + ROW_BLOCKS).to(tl.int32)
    STEP: tl.constexpr = 16 if LAYOUT == ROWS else (4 if LAYOUT == QUADS else 1)
    length = tl.multiple_of(length, 1 if LAYOUT == FLAT else STEP)
    if AMSGRAD:
        largest_ptr = load_pointer(row + (MOMENT + 2), tl.uint8, ALIGNED)
    if LAYOUT == RAGGED:
        count = tl.load(row + COUNT)
    number, lane = tl.arange(0, BLOCKS), tl.arange(0, BLOCK_SIZE)[None, :]
    start = chunk.to(tl.int64) * BLOCKS  # block
    exists = number < (block_count - start).to(tl.int32)
    # Elements are counted from the first one here, in 32 bits.
    if LAYOUT == FLAT:
        origin = start * BLOCK_SIZE
        inner = number[:, None] * BLOCK_SIZE + lane
        left = tl.multiple_of(tl.minimum(length - origin, BLOCKS * BLOCK_SIZE).to(tl.int32), 16)
        mask = inner < left
    else:
        first = start.to(tl.int32)
        first_row = first // row_blocks
        first_column = (first - first_row * row_blocks).to(tl.int64) * BLOCK_SIZE
        origin = first_row.to(tl.int64) * length + first_column
        row_number = (first + number) // row_blocks
        column = (first + number - row_number * row_blocks).to(tl.int64) * BLOCK_SIZE
        place = (row_number - first_row).to(tl.int64) * length + column - first_column
        left = length - column
        if LAYOUT == RAGGED:  # the last of rows that share a block may be fewer
            left = tl.minimum(left, count - origin - place)
        left = tl.multiple_of(tl.minimum(left, BLOCK_SIZE).to(tl.int32), STEP)
        inner = place.to(tl.int32)[:, None] + lane
        mask = (lane < left[:, None]) & exists[:, None]

    param = tl.load(param_ptr + origin + inner, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + origin + inner, mask=mask, other=0.0).to(tl.float32)
    first_codes = tl.load(first_ptr + origin + inner, mask=mask, other=0).to(tl.int32)
    if AMSGRAD:
        exp_avg_sq = tl.load(second_ptr + origin + inner, mask=mask, other=0.0)
        second_codes = tl.load(largest_ptr + origin + inner, mask=mask, other=0).to(tl.int32)
    else:
        second_codes = tl.load(second_ptr + origin + inner, mask=mask, other=0).to(tl.int32)
    first_low, first_density = load_scale(first_scale_ptr + start + number, exists)
    second_low, second_density = load_scale(second_scale_ptr + start + number, exists)

    exp_avg = decode_exp_avg(first_codes, first_low, first_density)
    largest = decode_exp_avg_sq(second_codes, second_low, second_density)
    if not AMSGRAD:
        exp_avg_sq = largest
    param, exp_avg, exp_avg_sq, largest = _adam(
        param, grad, exp_avg, exp_avg_sq, largest, scalars, DECOUPLED, AMSGRAD, SMALL_EPS
    )

    place = ((first_block + start) + number) * BLOCK_SIZE
    bits = random_bits(scalars[8], scalars[9], place[:, None], lane)
    store_param(param_ptr + origin + inner, param, bits, mask, PARAM, STOCHASTIC)

    # An element whose v is not finite restarts from zero state. One look at the largest exponent of all spares the
    # usual case a test of each element.
    low, high = exponent_range(exp_avg_sq)
    if tl.max(high, axis=0) >= 255:
        finite = exp_avg_sq < _INF
        exp_avg = tl.where(finite, exp_avg, 0.0)
        exp_avg_sq = tl.where(finite, exp_avg_sq, 0.0)
        if AMSGRAD:
            largest = tl.where(finite, largest, 0.0)
        low, high = exponent_range(exp_avg_sq)
    codes, knee, density = encode_exp_avg(exp_avg, low, bits & 0x7FFFFF)
    tl.store(first_ptr + origin + inner, codes, mask=mask)
    store_scale(first_scale_ptr + start + number, knee, density, exists)
    if AMSGRAD:
        tl.store(second_ptr + origin + inner, exp_avg_sq, mask=mask)
        low, high = exponent_range(largest)
        codes, low, density = encode_exp_avg_sq(largest, low, high, HALF)
        tl.store(largest_ptr + origin + inner, codes, mask=mask)
    else:
        codes, low, density = encode_exp_avg_sq(exp_avg_sq, low, high, (bits >> 9) & 0x7FFFFF)
        tl.store(second_ptr + origin + inner, codes, mask=mask)
    store_scale(second_scale_ptr + start + number, low, density, exists)


@triton.jit
def _step_float32(
    addresses,
    row,
    chunk,
    scalars,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LAYOUT: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SMALL_EPS: tl.constexpr,
):
    """`qsub.optim.step.step_float32` on PARTS * PART elements."""
    ALIGNED: tl.constexpr = LAYOUT == FLOAT
    length = tl.load(row + LENGTH)
    for part in range(PARTS):  # few elements at a time, to take no more registers than the 8-bit step
        start = (chunk.to(tl.int64) * PARTS + part) * PART
        inner = tl.arange(0, PART)
        left = tl.minimum(length - start, PART).to(tl.int32)
        if ALIGNED:
            left = tl.multiple_of(left, 16)
        mask = inner < left
        param_ptr = load_pointer(addresses, PARAM, ALIGNED) + start
        grad_ptr = load_pointer(addresses + 1, GRAD, ALIGNED) + start
        first_ptr = load_pointer(row + MOMENT, tl.float32, ALIGNED) + start
        second_ptr = load_pointer(row + (MOMENT + 1), tl.float32, ALIGNED) + start
        largest_ptr = second_ptr
        param = tl.load(param_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        exp_avg = tl.load(first_ptr + inner, mask=mask, other=0.0)
        exp_avg_sq = tl.load(second_ptr + inner, mask=mask, other=0.0)
        largest = exp_avg_sq
        if AMSGRAD:
            largest_ptr = load_pointer(row + (MOMENT + 2), tl.float32, ALIGNED) + start
            largest = tl.load(largest_ptr + inner, mask=mask, other=0.0)
        param, exp_avg, exp_avg_sq, largest = _adam(
            param, grad, exp_avg, exp_avg_sq, largest, scalars, DECOUPLED, AMSGRAD, SMALL_EPS
        )
        bits = inner
        if STOCHASTIC and PARAM == tl.bfloat16:
            bits = random_bits(scalars[8], scalars[9], tl.load(row + FIRST_BLOCK) + start + inner, 0)
        store_param(param_ptr + inner, param, bits, mask, PARAM, STOCHASTIC)
        tl.store(first_ptr + inner, exp_avg, mask=mask)
        tl.store(second_ptr + inner, exp_avg_sq, mask=mask)
        if AMSGRAD:
            tl.store(largest_ptr + inner, largest, mask=mask)


@triton.jit
def _step_kind(
    addresses,
    row,
    chunk,
    scalars,
    KIND_NUMBER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SMALL_EPS: tl.constexpr,
):
    """The step of one program's part of a parameter whose kind is known at compile time."""
    LAYOUT: tl.constexpr = KIND_NUMBER // 9
    P: tl.constexpr = KIND_NUMBER // 3 % 3
    G: tl.constexpr = KIND_NUMBER % 3
    PARAM: tl.constexpr = tl.float32 if P == 0 else (tl.bfloat16 if P == 1 else tl.float16)
    GRAD: tl.constexpr = tl.float32 if G == 0 else (tl.bfloat16 if G == 1 else tl.float16)
    if LAYOUT >= FLOAT:
        PART: tl.constexpr = BLOCKS * BLOCK_SIZE // 4
        _step_float32(
            addresses, row, chunk, scalars, PARAM, GRAD, LAYOUT, 4, PART, DECOUPLED, AMSGRAD, STOCHASTIC, SMALL_EPS
        )
    else:
        # Where accesses are narrow, a thread works on many blocks: all at a time would not fit into its registers.
        WANTED: tl.constexpr = 1 if LAYOUT <= ROWS else (2 if LAYOUT == QUADS else PARTS_OF_RAGGED)
        PARTS: tl.constexpr = WANTED if BLOCKS > WANTED else BLOCKS
        parts = PARTS
        if PARTS > 1:  # the last chunk has fewer blocks
            left = tl.load(row + BLOCK_COUNT) - chunk.to(tl.int64) * BLOCKS
            parts = tl.minimum(tl.cdiv(left.to(tl.int32), BLOCKS // PARTS), PARTS)
        for part in range(parts):
            _step_8bit(
                addresses, row, chunk * PARTS + part, scalars, PARAM, GRAD, LAYOUT, BLOCK_SIZE, BLOCKS // PARTS,
                DECOUPLED, AMSGRAD, STOCHASTIC, SMALL_EPS,
            )  # fmt: skip


@triton.jit
def adam_kernel(
    programs,
    table,
    addresses,
    scalars,
    KINDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SMALL_EPS: tl.constexpr,
):
    """The step of every parameter, in place.

    Args:
        programs: (grid / PROGRAMS, 3) int32: parameter, first chunk (of BLOCKS * BLOCK_SIZE elements), and their kind
            with the number of chunks in the bits from the ninth on.
        table: (count, N_COLUMNS) int64.
        addresses: (count, 2) int64, of the parameter and of its gradient.
        scalars: (count, N_SCALARS) int32, from `prepare_kernel`.
        KINDS: bit k is set if there is a chunk of kind k.
        BLOCK_SIZE: elements per block.
        BLOCKS: blocks per program.
        PROGRAMS: programs per row of `programs`.
        DECOUPLED: AdamW rather than Adam.
        AMSGRAD: keep and use the largest second moment.
        STOCHASTIC: round bf16 parameters stochastically.
        SMALL_EPS: eps is so small that it doesn't keep the update from division by zero.
    """
    program = tl.program_id(0)
    entry = programs + (program // PROGRAMS) * 3
    number = program % PROGRAMS
    index = tl.load(entry)
    chunk = tl.load(entry + 1) + number
    kind = tl.load(entry + 2)
    scalar_row = scalars + index * N_SCALARS
    address = addresses + index * 2
    row = table + index * N_COLUMNS
    values = load_scalars(scalar_row)
    if (tl.load(scalar_row + ACTIVE) != 0) & (number < kind >> 8):
        for k in tl.static_range(N_KINDS):
            if (KINDS >> k) & 1:
                if (kind & 255) == k:
                    _step_kind(
                        address, row, chunk, values, k, BLOCK_SIZE, BLOCKS, DECOUPLED, AMSGRAD, STOCHASTIC, SMALL_EPS
                    )
