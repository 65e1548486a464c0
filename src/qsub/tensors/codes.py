"""Pure quantization math on plain tensors: the row code of weights and the block codes of optimizer state.

Nothing here knows of subclasses, autograd or devices. The float codes are drawn from fp32 bit patterns with
integer arithmetic alone, without fp32 denormals, so a flush-to-zero mode of the CPU changes no code.
"""

import torch
from torch import Tensor

FP16_MAX = 65504.0
_MANTISSA_SHIFT = 19  # an fp32 mantissa of 23 bits keeps its top 4
_HALF_CODE = 1 << (_MANTISSA_SHIFT - 1)
_TOP = 1.9375  # largest mantissa of 4 bits: the value of the top code before scaling
_CHUNK = 1 << 18  # elements that a chunked pass over rows holds in fp32 at a time
_SCALE_MAX = 2.0**126  # the reciprocal of a larger scale is denormal in fp32


# ---- Row code (weights): one fp16 scale per row, the largest magnitude of the row ----


def row_absmax(weight: Tensor) -> Tensor:
    """Largest magnitude of each row in fp32. NaN where the row has a NaN.

    Args:
        weight: (rows, columns), any float dtype.

    Returns:
        (rows,) fp32.
    """
    if weight.shape[1] == 0:
        return weight.new_zeros(weight.shape[0], dtype=torch.float32)
    low, high = torch.aminmax(weight, dim=1)
    return torch.maximum(-low, high).float()


def check_rows(weight: Tensor, name: str = "weight") -> None:
    """Raise ValueError unless every row of `weight` is finite and at most 65504 in magnitude."""
    if weight.device.type == "meta":
        return
    good = row_absmax(weight) <= FP16_MAX
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(
            f"{name}: row {row} has NaN, Inf or a magnitude over {FP16_MAX:.0f}, which an fp16 row scale can't hold "
            f"(largest magnitude found: {float(row_absmax(weight[row : row + 1])):g}). "
            "Repair the weight, or leave it in float (quantize_: filter_fn)."
        )


def quantize_rows(weight: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode a float matrix: `scale = fp16(max|row|)`, `codes = round(row * 127 / scale)`.

    The division uses the rounded scale, in fp32. With `noise` the codes are rounded stochastically, and the scale
    is rounded up so that no element is clamped: the expected value of the result is the input.

    Args:
        weight: (rows, columns), any float dtype; finite, at most 65504 in magnitude.
        noise: (rows, columns) fp32, uniform in [0, 1), or None to round to nearest (half to even).

    Returns:
        int8 codes (rows, columns) in [-127, 127] and the fp16 scale (rows,). A zero row has scale 0 and codes 0.
    """
    absmax = row_absmax(weight)
    scale = absmax.to(torch.float16)  # (rows,)
    if noise is not None:
        above = (scale.view(torch.int16) + 1).view(torch.float16)
        scale = torch.where(scale.float() < absmax, above, scale)
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        divisor = scale[part].float().unsqueeze(1)
        scaled = (weight[part].float() * 127.0).div_(torch.where(divisor > 0, divisor, 1.0))
        scaled = scaled.round_() if noise is None else scaled.add_(noise[part]).floor_()
        codes[part] = torch.where(divisor > 0, scaled.clamp_(-127.0, 127.0), 0.0).to(torch.int8)
    return codes, scale


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype, dim: int | None = -2) -> Tensor:
    """Decode to `codes * scale / 127`, formed in fp32 (fp64 for an fp64 result) and rounded once to `dtype`.

    Args:
        codes: int8, any shape and strides.
        scale: fp16, of shape (codes.shape[dim],), or () where `dim` is None.
        dtype: float dtype of the result.
        dim: negative index of the dimension that `scale` runs along: -2 for (rows, columns), -1 for its transpose,
            None for a single row.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    step = scale.to(wide) * (1.0 / 127.0)
    return (codes * (step if dim is None else step.view(-1, *[1] * (-1 - dim)))).to(dtype)


# ---- Block code "block_float8" (optimizer state): one bf16 scale per block, the block's maximum rounded up ----
#
#   exp_avg     s eee mmmm   sign, 3 exponent and 4 mantissa bits, rounded to nearest
#   exp_avg_sq    eeee mmmm  4 exponent and 4 mantissa bits, rounded stochastically; never 0 for a non-zero value
#
# Code c > 0 with exponent field e and mantissa m is worth scale / 1.9375 * 2**(e - top) * (1 + m / 16), where top is
# 7 or 15: the top code is worth the scale itself. Field 0 holds the denormals, 2**(1 - top) * m / 16.

# The fp32 bit pattern of a magnitude, less that of the smallest normal, has the code in its bits from 19 up.

_SIGNED_BASE = (127 - 6) << 23  # fp32 pattern of 2**-6, the smallest normal of exp_avg's code before scaling
_UNSIGNED_BASE = (127 - 14) << 23  # of 2**-14, that of exp_avg_sq's
_FIELD = 1 << 23  # one step of fp32's exponent field


def block_scale(absmax: Tensor) -> Tensor:
    """Scale of a block: its largest magnitude rounded up to bf16, in [2**-126, 2**126] unless the block is zero.

    Larger values (a second moment of gradients over 9e18, whose squares are about to overflow) saturate.

    Args:
        absmax: fp32, finite, non-negative.

    Returns:
        fp32 tensor of the same shape whose values bf16 holds exactly.
    """
    bits = (absmax.clamp(max=_SCALE_MAX).view(torch.int32) + 0xFFFF) & -0x10000
    return torch.where(absmax > 0, bits.view(torch.float32).clamp_min(2.0**-126), 0.0)


def _normalize(values: Tensor, scale: Tensor) -> Tensor:
    """Values of (blocks, block_size) as multiples of scale / 1.9375; 0 in a zero block."""
    return values * torch.where(scale > 0, _TOP / scale, 0.0).unsqueeze(-1)


def _to_bits(values: Tensor, base: int) -> Tensor:
    smallest = 2.0 ** ((base >> 23) - 127)
    below = (values + smallest).view(torch.int32) - base  # linear: adding `smallest` aligns the mantissa
    above = values.view(torch.int32) - (base - _FIELD)
    return torch.where(values < smallest, below, above)


def _from_codes(codes: Tensor, base: int) -> Tensor:
    smallest = 2.0 ** ((base >> 23) - 127)
    bits = codes << _MANTISSA_SHIFT
    below = (bits + base).view(torch.float32) - smallest
    above = (bits + (base - _FIELD)).view(torch.float32)
    return torch.where(codes < 16, below, above)


def encode_signed(values: Tensor, scale: Tensor) -> Tensor:
    """Code of exp_avg: sign e3m4, rounded to nearest.

    Args:
        values: (blocks, block_size) fp32, finite, magnitudes at most `scale`.
        scale: (blocks,) fp32 from `block_scale`.

    Returns:
        (blocks, block_size) uint8.
    """
    scaled = _normalize(values, scale)
    codes = ((_to_bits(scaled.abs(), _SIGNED_BASE) + _HALF_CODE) >> _MANTISSA_SHIFT).clamp(max=127)
    return torch.where(scaled < 0, codes + 128, codes).to(torch.uint8)


def decode_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_signed`: (blocks, block_size) uint8 and (blocks,) scale to fp32."""
    wide = codes.to(torch.int32)
    magnitude = _from_codes(wide & 127, _SIGNED_BASE)
    return torch.where(wide >= 128, -magnitude, magnitude) * (scale * (1.0 / _TOP)).unsqueeze(-1)


def encode_unsigned(values: Tensor, scale: Tensor, noise: Tensor | int = _HALF_CODE) -> Tensor:
    """Code of exp_avg_sq: e4m4 without sign. A non-zero value never gets code 0.

    Args:
        values: (blocks, block_size) fp32, finite, in [0, scale].
        scale: (blocks,) fp32 from `block_scale`.
        noise: int32 uniform in [0, 2**19) for stochastic rounding; the default rounds to nearest.

    Returns:
        (blocks, block_size) uint8.
    """
    codes = ((_to_bits(_normalize(values, scale), _UNSIGNED_BASE) + noise) >> _MANTISSA_SHIFT).clamp(max=255)
    return torch.where(values > 0, codes.clamp(min=1), 0).to(torch.uint8)


def decode_unsigned(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_unsigned`: (blocks, block_size) uint8 and (blocks,) scale to fp32."""
    return _from_codes(codes.to(torch.int32), _UNSIGNED_BASE) * (scale * (1.0 / _TOP)).unsqueeze(-1)


# ---- Stateless random bits ----


def mix(bits: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of xor-shift and multiply, "lowbias32"), on int32 with wrap-around."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return bits ^ ((bits >> 16) & 0xFFFF)


def random_bits(salt: Tensor, first_block: Tensor, blocks: int, block_size: int) -> Tensor:
    """Random int32 of each element, a pure function of the salt and of the element's place in the whole parameter.

    Args:
        salt: 0-dim int32, mixed from seed and step.
        first_block: 0-dim int64, number of blocks of the whole parameter before the first one here (a shard's offset).
        blocks: number of blocks here.
        block_size: elements per block.

    Returns:
        (blocks, block_size) int32.
    """
    place = (torch.arange(blocks, device=salt.device) + first_block) * block_size  # (blocks,) int64
    high = mix(salt ^ (place >> 32).to(torch.int32))  # (blocks,): the salt, varied every 2**32 elements
    lane = torch.arange(block_size, dtype=torch.int32, device=salt.device)
    return mix(high.unsqueeze(1) ^ (place.to(torch.int32).unsqueeze(1) + lane))
