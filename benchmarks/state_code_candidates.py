"""Block codes of Adam's two moments that benchmarks/state_codes.py compares, as pure functions.

A code takes both moments, (blocks, block_size) fp32, to what they are after a round trip through their 8-bit codes:

    first, second = code(first, second, bits)       bits: (blocks, block_size) random int32

None of them takes a non-zero second moment to zero: beside a first moment it would make an update of m / eps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qsub.tensors import state_codes

_GOLDEN = 0x9E3779B9 - (1 << 32)  # as in state_codes
_FINEST_STEP = 0.125  # of the smallest value of a block: how fine the format must be that `by_flag` picks


# ---- The code of qsub, and parts of it left out ----


def block_float8(first: Tensor, second: Tensor, bits: Tensor, nearest: str = "") -> tuple[Tensor, Tensor]:
    """The default of qsub.optim; `nearest` names moments ("m", "v") that are rounded to nearest instead."""
    low, high = state_codes.exponent_range(second)
    first_noise = state_codes.HALF if "m" in nearest else state_codes.noise_of(bits, 0)
    second_noise = state_codes.HALF if "v" in nearest else state_codes.noise_of(bits, 1)
    return (
        state_codes.decode_exp_avg(*state_codes.encode_exp_avg(first, low, first_noise)),
        state_codes.decode_exp_avg_sq(*state_codes.encode_exp_avg_sq(second, low, high, second_noise)),
    )


# ---- Codes by a table ----


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic tree code (arXiv 2110.02861, section 1.3), as create_dynamic_map of bitsandbytes.

    Bits after the sign: a run of zeros (a power of ten), a one, and a linear fraction in what is left.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def _by_table(value: Tensor, table: Tensor) -> Tensor:
    scale = value.abs().amax(1, keepdim=True)
    codes = torch.bucketize(value / torch.where(scale > 0, scale, 1.0), (table[1:] + table[:-1]) / 2)
    return table[codes] * scale


_SIGNED_MAP, _UNSIGNED_MAP = dynamic_map(True), dynamic_map(False)


def dynamic_tree(first: Tensor, second: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Both by the dynamic tree, to nearest, under an fp32 scale (bitsandbytes and torchao, in blocks of 256)."""
    decoded = _by_table(second, _UNSIGNED_MAP)
    least = _UNSIGNED_MAP[1] * second.amax(1, keepdim=True)  # entry 0 is zero
    return _by_table(first, _SIGNED_MAP), torch.where(second > 0, torch.maximum(decoded, least), 0.0)


# ---- Codes by a formula, under a scale in bf16 ----


def _bf16_scale(value: Tensor) -> Tensor:
    """Largest magnitude of each block, rounded up to bf16: (blocks, 1). 1 for a block of zeros."""
    largest = value.abs().amax(1, keepdim=True)
    scale = ((largest.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(scale > 0, scale, 1.0)


def linear(first: Tensor, second: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Linear in m and in sqrt(v), to nearest."""
    scale, root = _bf16_scale(first), second.sqrt()
    root_scale = _bf16_scale(root)
    codes = torch.round(root * (255 / root_scale)).clamp(min=1)
    root = torch.where(second > 0, codes * (root_scale / 255), 0.0)
    return torch.round(first * (127 / scale)) * (scale / 127), root * root


def _float(value: Tensor, scale: Tensor, mantissa: Tensor, exponent: Tensor, noise: Tensor | float) -> Tensor:
    """Magnitudes through an 8-bit float with subnormals whose largest value is `scale`.

    Args:
        value: (blocks, block_size), not negative.
        scale: (blocks, 1).
        mantissa: number of mantissa bits, (blocks, 1) fp32, as `exponent`.
        exponent: number of exponent bits. No code is left for Inf or NaN.
        noise: uniform in [0, 1) for stochastic rounding, 1/2 for rounding to nearest.
    """
    ulp = torch.exp2(-mantissa)
    top = (2 - ulp) * torch.exp2(torch.exp2(exponent) - 2)  # 1 is the smallest normal value
    scaled = value * (top / scale)
    octave = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=1)
    step = octave * ulp
    rounded = torch.minimum(torch.floor(scaled / step + noise) * step, top)
    return rounded * (scale / top)


def _floats(
    first: Tensor, second: Tensor, bits: Tensor, first_mantissa: Tensor, second_mantissa: Tensor, stochastic: str
) -> tuple[Tensor, Tensor]:
    """Both by 8-bit floats of the given mantissa bits, (blocks, 1); `stochastic` names the moments rounded so."""
    noises = [state_codes.noise_of(bits, i) / 2**23 if name in stochastic else 0.5 for i, name in enumerate("mv")]
    scale = _bf16_scale(second)
    magnitude = _float(first.abs(), _bf16_scale(first), first_mantissa, 7 - first_mantissa, noises[0])
    decoded = _float(second, scale, second_mantissa, 8 - second_mantissa, noises[1])
    least = scale * _smallest(second_mantissa, 8 - second_mantissa)
    return torch.copysign(magnitude, first), torch.where(second > 0, torch.maximum(decoded, least), 0.0)


def _smallest(mantissa: Tensor, exponent: Tensor) -> Tensor:
    """Smallest non-zero value of a float format over its largest."""
    ulp = torch.exp2(-mantissa)
    return ulp / ((2 - ulp) * torch.exp2(torch.exp2(exponent) - 2))


def float8(first: Tensor, second: Tensor, bits: Tensor, mantissa: int, stochastic: str = "v") -> tuple[Tensor, Tensor]:
    """A float with sign for m (e3m4 for mantissa = 4) and one without for v (e4m4), the same for all blocks."""
    same = torch.full_like(first[:, :1], mantissa)
    return _floats(first, second, bits, same, same, stochastic)


def by_flag(first: Tensor, second: Tensor, bits: Tensor, stochastic: str = "v") -> tuple[Tensor, Tensor]:
    """One of three floats for each block: the finest whose subnormals are fine enough for the smallest value in it."""

    def pick(largest: Tensor, smallest: Tensor, exponent_and_mantissa: int) -> Tensor:
        chosen = torch.full_like(largest, 3)
        for mantissa in (4.0, 5.0):
            form = torch.full_like(largest, mantissa)
            fine = largest * _smallest(form, exponent_and_mantissa - form) <= _FINEST_STEP * smallest
            chosen = torch.where(fine, form, chosen)
        return chosen

    smallest = torch.where(second > 0, second, torch.inf).amin(1, keepdim=True)
    first_mantissa = pick(_bf16_scale(first), smallest.sqrt(), 7)
    return _floats(first, second, bits, first_mantissa, pick(_bf16_scale(second), smallest, 8), stochastic)


# ---- Random bits ----


def windowed_bits(seed: int, step: int, blocks: int, block_size: int) -> Tensor:
    """Those of qsub.optim: a Weyl sequence with a new phase every 32 steps."""
    as_int32 = torch.tensor([seed, step], dtype=torch.int32)
    return state_codes.random_bits(as_int32[0], as_int32[1], torch.tensor(0), blocks, block_size)


def independent_bits(seed: int, step: int, blocks: int, block_size: int) -> Tensor:
    """A new hash at each step."""
    fresh = state_codes.mix(torch.tensor(seed * 1_000_003 + step, dtype=torch.int32))
    return windowed_bits(int(fresh), 0, blocks, block_size)


def weyl_bits(seed: int, step: int, blocks: int, block_size: int) -> Tensor:
    """A Weyl sequence with one phase for all steps."""
    return windowed_bits(seed, 0, blocks, block_size) + step * torch.tensor(_GOLDEN, dtype=torch.int32)


# ---- The list ----


@dataclass(frozen=True)
class Candidate:
    """A code with its block size and random bits.

    Attributes:
        code: see the top of this file; further arguments are in `options`.
        block_size: elements that share a scale.
        scale_bits: of both moments of a block together.
        bits: source of the random bits.
        options: arguments of `code`.
    """

    code: Callable[..., tuple[Tensor, Tensor]]
    block_size: int = 64
    scale_bits: int = 32
    bits: Callable[[int, int, int, int], Tensor] = windowed_bits
    options: tuple[tuple[str, int | str], ...] = ()

    def __call__(self, first: Tensor, second: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        return self.code(first, second, bits, **dict(self.options))

    @property
    def bytes_per_parameter(self) -> float:
        return 2 + self.scale_bits / 8 / self.block_size


DEFAULT = "block_float8"
CANDIDATES = {
    DEFAULT: Candidate(block_float8),
    "dynamic tree, 256": Candidate(dynamic_tree, 256, 64),
    "linear, sqrt(v) linear": Candidate(linear),
    "e3m4, e4m4": Candidate(float8, options=(("mantissa", 4),)),
    "e3m4, e4m4, m stochastic too": Candidate(float8, options=(("mantissa", 4), ("stochastic", "mv"))),
    "e4m3, e5m3": Candidate(float8, options=(("mantissa", 3),)),
    "three floats by flag": Candidate(by_flag, scale_bits=36),
    "three floats by flag, m stochastic too": Candidate(by_flag, scale_bits=36, options=(("stochastic", "mv"),)),
    "m to nearest": Candidate(block_float8, options=(("nearest", "m"),)),
    "v to nearest": Candidate(block_float8, options=(("nearest", "v"),)),
    "independent bits": Candidate(block_float8, bits=independent_bits),
    "Weyl, no windows": Candidate(block_float8, bits=weyl_bits),
    "blocks of 32": Candidate(block_float8, 32),
    "blocks of 128": Candidate(block_float8, 128),
    "blocks of 256": Candidate(block_float8, 256),
}
