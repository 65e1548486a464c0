"""The block codes and the random bits of `qsub.tensors.codes` as Triton functions, bit for bit.

Multiplying by 2**-120 (2**-112) moves the exponent field of fp32 onto that of the code, so the code's denormals are
fp32's, and code and value are one shift apart. This needs fp32 denormals, which CUDA and numpy keep.
"""

import triton
import triton.language as tl

_TOP = tl.constexpr(1.9375)
_SHIFT = tl.constexpr(19)
_HALF_CODE = tl.constexpr(1 << 18)
_SIGNED_DOWN = tl.constexpr(2.0**-120)
_SIGNED_UP = tl.constexpr(2.0**120)
_UNSIGNED_DOWN = tl.constexpr(2.0**-112)
_UNSIGNED_UP = tl.constexpr(2.0**112)
_SCALE_MAX = tl.constexpr(2.0**126)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
_MULTIPLIER_2 = tl.constexpr(0x846CA68B - (1 << 32))


@triton.jit
def block_scale(absmax):
    """Scale of each block in fp32 from its largest magnitude: rounded up to bf16, at least 2**-126 unless 0."""
    bits = (tl.minimum(absmax, _SCALE_MAX).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return tl.where(absmax > 0, tl.maximum(bits.to(tl.float32, bitcast=True), _SMALLEST_NORMAL), 0.0)


@triton.jit
def _per_scale(scale):
    top = tl.full(scale.shape, _TOP, tl.float32)
    return tl.where(scale > 0, tl.div_rn(top, tl.where(scale > 0, scale, 1.0)), 0.0)[:, None]


@triton.jit
def decode_signed(codes, scale):
    """exp_avg of (blocks, block_size) int32 codes and (blocks,) fp32 scales."""
    bits = ((codes & 127) << _SHIFT) | ((codes & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * _SIGNED_UP * (scale * (1.0 / _TOP))[:, None]


@triton.jit
def encode_signed(values, scale):
    """(blocks, block_size) uint8 codes of exp_avg, rounded to nearest."""
    bits = (values * _per_scale(scale) * _SIGNED_DOWN).to(tl.int32, bitcast=True)
    magnitude = tl.minimum(((bits & 0x7FFFFFFF) + _HALF_CODE) >> _SHIFT, 127)
    return (magnitude | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode_unsigned(codes, scale):
    """exp_avg_sq of (blocks, block_size) int32 codes and (blocks,) fp32 scales."""
    return (codes << _SHIFT).to(tl.float32, bitcast=True) * _UNSIGNED_UP * (scale * (1.0 / _TOP))[:, None]


@triton.jit
def encode_unsigned(values, scale, noise):
    """(blocks, block_size) uint8 codes of exp_avg_sq; `noise` in [0, 2**19), 2**18 to round to nearest."""
    bits = (values * _per_scale(scale) * _UNSIGNED_DOWN).to(tl.int32, bitcast=True)
    codes = tl.minimum((bits + noise) >> _SHIFT, 255)
    return tl.where(values > 0, tl.maximum(codes, 1), 0).to(tl.uint8)


@triton.jit
def encode_unsigned_nearest(values, scale):
    """`encode_unsigned` to nearest, for max_exp_avg_sq."""
    return encode_unsigned(values, scale, _HALF_CODE)


@triton.jit
def mix(bits):
    """The integer hash "lowbias32" on int32."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MULTIPLIER_1
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MULTIPLIER_2
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def random_bits(salt, place, lane):
    """Random int32 of each element, see `qsub.tensors.codes.random_bits`.

    Args:
        salt: scalar int32 of the seed and the step.
        place: (blocks, 1) int64, place of the block's first element in the whole parameter.
        lane: (1, block_size) int32.
    """
    high = mix(salt ^ (place >> 32).to(tl.int32))
    return mix(high ^ (place.to(tl.int32) + lane))


@triton.jit
def round_to_bf16(value, noise):
    """fp32 `value` rounded stochastically to a value of bf16 (still in fp32), NaN and Inf kept."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + ((noise >> 16) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(value) < float("inf"), rounded, value)
