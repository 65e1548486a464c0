"""The block code "block_float8" of optimizer state, and its random bits, as pure math on plain tensors.

A float's bit pattern, read as an integer, is a piecewise linear logarithm of it: 2**23 to the octave. Each block of a
moment is coded on that scale with a range of its own, fitted to what the block holds, in two bytes: the exponent that
the codes start from, and the number of codes to the octave (`per_octave`, k below).

    exp_avg_sq  v    bits(v) = bits(2**low) + (code - 1) * 2**23 / k        code 1 to 255; code 0 is zero
    exp_avg     m    bits(|m| + c) = bits(c) + code * 2**23 / k             7 bits and a sign; c = 2**knee

The codes of v run from the exponent of the block's smallest non-zero v to its largest one. Those of m are linear below
c, half the root of the smallest v: as the update is m / sqrt(v), finer steps there change nothing. Both are rounded
stochastically: beta2 = .999 moves v by less than half a code a step, which rounding to nearest would lose, and a moment
that creeps would stop short of its value.

Only integer arithmetic on fp32 bits is used: no table, logarithm or root, and no fp32 denormals, so a flush-to-zero
mode of the CPU changes no code. benchmarks/state_codes.py compares this code with others, by the error of the update.
"""

import torch
from torch import Tensor

_OCTAVE = 1 << 23  # fp32 bit patterns from one power of two to the next
HALF = _OCTAVE >> 1  # in place of random bits, rounds to nearest
_SIGNED_CODES, _UNSIGNED_CODES = 127, 254  # codes above the one that stands for the start of the range
_SIGNED_OCTAVES, _UNSIGNED_OCTAVES = 20, 40  # widest range of a block, below its largest magnitude
_LARGE = 2.0**127  # the smallest non-zero v of a block without one: its exponent is 254
_WINDOW = 5  # 2**5 steps share a phase of the random sequence
_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 divided by the golden ratio, odd, as int32


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _power(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, from a biased exponent."""
    return (exponent << 23).view(torch.float32)


def _quotient(number: float, divisor: Tensor) -> Tensor:
    """Whole part of `number / divisor` in fp32; integer division is slow on both CPU and GPU.

    For a number of n + 1/2 with n below 2**22 this is n // divisor exactly: no such quotient lies nearer to a whole
    number than its rounding error.
    """
    return (number / divisor.float()).to(torch.int32)


def _step(per_octave: Tensor) -> Tensor:
    """Bit patterns from one code to the next, (blocks, 1)."""
    return (_OCTAVE / per_octave.clamp(min=1).float() + 0.5).to(torch.int32).unsqueeze(1)


def _pack(exponent: Tensor, per_octave: Tensor) -> Tensor:
    return torch.stack([exponent, per_octave], dim=-1).to(torch.uint8)


def _unpack(scale: Tensor) -> tuple[Tensor, Tensor]:
    exponent, per_octave = scale.to(torch.int32).unbind(-1)
    return exponent, per_octave


def exponent_range(second: Tensor) -> tuple[Tensor, Tensor]:
    """Biased exponents of the smallest non-zero and of the largest second moment of each block.

    Args:
        second: (blocks, block_size) fp32, finite and not negative.

    Returns:
        Two (blocks,) int32; 254 and 0 where all of a block is zero.
    """
    smallest = torch.where(second > 0, second, _LARGE).amin(1)
    return _bits(smallest) >> 23, _bits(second.amax(1)) >> 23


def encode_exp_avg_sq(second: Tensor, low: Tensor, high: Tensor, noise: Tensor | int = HALF) -> tuple[Tensor, Tensor]:
    """Code of a second moment. A non-zero value never gets code 0.

    Args:
        second: (blocks, block_size) fp32, finite and not negative.
        low: (blocks,) from `exponent_range`, as `high`.
        high: see `low`.
        noise: int32 uniform in [0, 2**23) for stochastic rounding; the default rounds to nearest.

    Returns:
        Codes (blocks, block_size) and scale (blocks, 2), both uint8.
    """
    low = torch.minimum(torch.maximum(low, high - _UNSIGNED_OCTAVES), high).clamp(min=1)
    per_octave = _quotient(_UNSIGNED_CODES + 0.5, (high - low + 1).clamp(min=1))
    distance = (_bits(second) - (low << 23).unsqueeze(1)).clamp(min=0)  # times per_octave: under 254 * 2**23
    codes = 1 + ((distance * per_octave.unsqueeze(1) + noise) >> 23)
    return torch.where(second > 0, codes, 0).to(torch.uint8), _pack(low, per_octave)


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_exp_avg_sq`: (blocks, block_size) and (blocks, 2) uint8 to fp32."""
    low, per_octave = _unpack(scale)
    wide = codes.to(torch.int32)
    value = ((low << 23).unsqueeze(1) + (wide - 1) * _step(per_octave)).view(torch.float32)
    return torch.where(wide > 0, value, 0.0)


def encode_exp_avg(first: Tensor, low: Tensor, noise: Tensor | int = HALF) -> tuple[Tensor, Tensor]:
    """Code of a first moment.

    Args:
        first: (blocks, block_size) fp32, magnitudes up to 1e38.
        low: (blocks,), the exponent of the block's smallest non-zero second moment, from `exponent_range`.
        noise: int32 uniform in [0, 2**23) for stochastic rounding; the default rounds to nearest.

    Returns:
        Codes (blocks, block_size) and scale (blocks, 2), both uint8.
    """
    magnitude = first.abs()
    largest = magnitude.amax(1)
    top = _bits(largest) >> 23
    # Half the root of 2**low: (low - 127) / 2 - 1 + 127, rounded down.
    knee = torch.maximum(torch.minimum((low + 125) >> 1, top + 1), top - _SIGNED_OCTAVES).clamp(1, 253)
    offset, start = _power(knee), knee << 23
    quarters = ((_bits(largest + offset) - start) >> 21) + 1  # of an octave, so that the range seldom changes
    per_octave = _quotient(4 * _SIGNED_CODES + 0.5, quarters).clamp(max=255)
    distance = _bits(magnitude + offset.unsqueeze(1)) - start.unsqueeze(1)  # times per_octave: at most 127 * 2**23
    codes = ((distance * per_octave.unsqueeze(1) + noise) >> 23).clamp(max=_SIGNED_CODES)
    return torch.where(first < 0, codes + 128, codes).to(torch.uint8), _pack(knee, per_octave)


def decode_exp_avg(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_exp_avg`: (blocks, block_size) and (blocks, 2) uint8 to fp32."""
    knee, per_octave = _unpack(scale)
    wide, start = codes.to(torch.int32), (knee << 23).unsqueeze(1)
    magnitude = (start + (wide & 127) * _step(per_octave)).view(torch.float32) - start.view(torch.float32)
    return torch.where(wide >= 128, -magnitude, magnitude)


# ---- Stateless random bits ----


def mix(bits: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of xor-shift and multiply, "lowbias32"), on int32 with wrap-around."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return bits ^ ((bits >> 16) & 0xFFFF)


def random_bits(seed: Tensor, step: Tensor, first_block: Tensor, blocks: int, block_size: int) -> Tensor:
    """Random int32 of each element, a pure function of seed, step and the element's place in the whole parameter.

    Each element has a phase of its own, which is drawn anew every 32 steps and advances by the golden ratio at each
    step in between (a Weyl sequence). At any step the bits are uniform; over the steps of a window they fill the range
    evenly, so that the errors of stochastic rounding cancel rather than add up to a random walk.

    Args:
        seed: 0-dim int32.
        step: 0-dim int32.
        first_block: 0-dim int64, number of blocks of the whole parameter before the first one here (a shard's offset).
        blocks: number of blocks here.
        block_size: elements per block.

    Returns:
        (blocks, block_size) int32; the lowest 7 bits are not quite independent between neighbours.
    """
    salt = mix(seed ^ mix(step >> _WINDOW))
    place = (torch.arange(blocks, device=seed.device) + first_block) * block_size  # (blocks,) int64
    block = mix(mix(salt ^ (place >> 32).to(torch.int32)) ^ place.to(torch.int32))  # (blocks,)
    # A full hash for each block; for a lane in it the two multiplications of another one are enough.
    lane = torch.arange(block_size, dtype=torch.int32, device=seed.device)
    phase = (block.unsqueeze(1) ^ lane) * 0x21F0AAAD
    phase = (phase ^ ((phase >> 15) & 0x1FFFF)) * (0xD35A2D97 - (1 << 32))
    return phase + step * _GOLDEN


def noise_of(bits: Tensor, moment: int) -> Tensor:
    """The 23 random bits that moment 0 (exp_avg) or 1 (exp_avg_sq) is rounded with: the low or the high ones."""
    return (bits >> 9 if moment else bits) & (_OCTAVE - 1)
