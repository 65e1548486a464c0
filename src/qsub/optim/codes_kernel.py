"""The block code and the random bits of `qsub.tensors.state_codes` as Triton functions, bit for bit.

A tile is (blocks, block_size). Exponents and numbers of codes per octave are (blocks,) int32.
"""

# What Triton's functions take and return is the compiler's matter, not that of a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

_OCTAVE = tl.constexpr(1 << 23)
HALF = tl.constexpr(1 << 22)  # in place of noise, rounds to nearest
_SIGNED_OCTAVES = tl.constexpr(20)
_UNSIGNED_OCTAVES = tl.constexpr(40)
_MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
_MULTIPLIER_2 = tl.constexpr(0x846CA68B - (1 << 32))
_LANE_MULTIPLIER_1 = tl.constexpr(0x21F0AAAD)
_LANE_MULTIPLIER_2 = tl.constexpr(0xD35A2D97 - (1 << 32))
_MULTIPLIER_3 = tl.constexpr(747796405)


@triton.jit
def load_scale(address, mask):
    """Exponent and codes per octave of each block, from their two bytes."""
    pair = tl.load(address, mask=mask, other=0).to(tl.int32)
    return pair & 255, pair >> 8


@triton.jit
def store_scale(address, exponent, per_octave, mask):
    """Inverse of `load_scale`."""
    tl.store(address, (exponent | (per_octave << 8)).to(tl.uint16), mask=mask)


@triton.jit
def _step(per_octave):
    divisor = tl.maximum(per_octave, 1).to(tl.float32)
    return (tl.div_rn(tl.full(divisor.shape, _OCTAVE, tl.float32), divisor) + 0.5).to(tl.int32)


@triton.jit
def decode_exp_avg(codes, exponent, per_octave):
    """exp_avg of int32 codes."""
    start = exponent << 23
    bits = start[:, None] + (codes & 127) * _step(per_octave)[:, None]
    magnitude = bits.to(tl.float32, bitcast=True) - start.to(tl.float32, bitcast=True)[:, None]
    return (magnitude.to(tl.int32, bitcast=True) ^ ((codes & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def decode_exp_avg_sq(codes, exponent, per_octave):
    """exp_avg_sq of int32 codes."""
    step = _step(per_octave)
    bits = ((exponent << 23) - step)[:, None] + codes * step[:, None]
    return tl.where(codes > 0, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def exponent_range(second):
    """Biased exponents of the smallest non-zero and of the largest value of each block; 254 and 0 if all are 0.

    The second one is over 254 where a value is Inf or NaN.
    """
    bits = second.to(tl.int32, bitcast=True)
    # Less one and without a sign, zero is the largest number of all.
    smallest = tl.min((bits - 1).to(tl.uint32, bitcast=True), axis=1).to(tl.int32, bitcast=True)
    low = tl.where(smallest == -1, 254, (smallest + 1) >> 23)
    largest = tl.max(bits.to(tl.uint32, bitcast=True), axis=1)
    return low, (largest >> 23).to(tl.int32)


@triton.jit
def encode_exp_avg_sq(second, low, high, noise):
    """Codes (uint8) of a second moment, exponent and codes per octave of its blocks.

    Args:
        second: tile of fp32, finite and not negative.
        low: from `exponent_range`, as `high`.
        high: see `low`.
        noise: 23 random bits, or HALF.
    """
    low = tl.maximum(tl.minimum(tl.maximum(low, high - _UNSIGNED_OCTAVES), high), 1)
    per_octave = (254.5 / tl.maximum(high - low + 1, 1).to(tl.float32)).to(tl.int32)
    bits = second.to(tl.int32, bitcast=True)
    distance = tl.maximum(bits - (low << 23)[:, None], 0)
    # Zero has distance 0 and so gets code 0 here, any other value 1 more.
    codes = ((distance * per_octave[:, None] + noise) >> 23) + tl.minimum(bits, 1)
    return codes.to(tl.uint8), low, per_octave


@triton.jit
def encode_exp_avg(first, low, noise):
    """Codes (uint8) of a first moment, exponent and codes per octave of its blocks.

    Args:
        first: tile of fp32, magnitudes up to 1e38.
        low: from `exponent_range` of the second moment.
        noise: 23 random bits.
    """
    magnitude = tl.abs(first)
    largest = tl.max(magnitude, axis=1)
    top = largest.to(tl.int32, bitcast=True) >> 23
    knee = tl.maximum(tl.minimum((low + 125) >> 1, top + 1), top - _SIGNED_OCTAVES)
    knee = tl.minimum(tl.maximum(knee, 1), 253)
    start = knee << 23
    offset = start.to(tl.float32, bitcast=True)
    quarters = (((largest + offset).to(tl.int32, bitcast=True) - start) >> 21) + 1
    per_octave = tl.minimum((508.5 / quarters.to(tl.float32)).to(tl.int32), 255)
    distance = (magnitude + offset[:, None]).to(tl.int32, bitcast=True) - start[:, None]
    codes = (distance * per_octave[:, None] + noise) >> 23  # at most 127, as distance * per_octave < 127 * 2**23
    return (codes | ((first.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8), knee, per_octave


@triton.jit
def mix(bits):
    """The integer hash "lowbias32" on int32."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MULTIPLIER_1
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MULTIPLIER_2
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def random_bits(salt, advance, place, lane):
    """Random int32 of each element, see `qsub.tensors.state_codes.random_bits`.

    Args:
        salt: scalar int32 of the seed and the window of steps.
        advance: scalar int32, the step times the golden ratio.
        place: (blocks, 1) int64, place of the block's first element in the whole parameter.
        lane: (1, block_size) int32.
    """
    block = mix(mix(salt ^ (place >> 32).to(tl.int32)) ^ place.to(tl.int32))
    phase = (block ^ lane) * _LANE_MULTIPLIER_1
    return (phase ^ ((phase >> 15) & 0x1FFFF)) * _LANE_MULTIPLIER_2 + advance


@triton.jit
def round_to_bf16(value, bits):
    """fp32 `value` rounded stochastically to a value of bf16 (still in fp32), NaN and Inf kept."""
    noise = ((bits * _MULTIPLIER_3) >> 16) & 0xFFFF
    rounded = ((value.to(tl.int32, bitcast=True) + noise) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(value) < float("inf"), rounded, value)


@triton.jit
def store_param(address, value, bits, mask, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store an fp32 parameter in its dtype."""
    if STOCHASTIC and DTYPE == tl.bfloat16:
        value = round_to_bf16(value, bits)
    if DTYPE == tl.float32:
        tl.store(address, value, mask=mask)
    else:
        tl.store(address, value.to(DTYPE, fp_downcast_rounding="rtne"), mask=mask)
