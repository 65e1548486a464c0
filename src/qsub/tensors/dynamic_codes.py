"""The block code "dynamic" of optimizer state: the 8-bit dynamic tree of arXiv 2110.02861, as bitsandbytes has it.

A block of values is divided by its largest magnitude (fp32 absmax, the scale), and each quotient takes the nearest of
256 values. Their bits, after the sign: a run of zeros that tells the power of ten, a one, and a linear fraction in what
is left. So decade e, from 10**(e - 7) to 10**(e - 6) for e = 0 to 6, is cut into FIRST * 2**e cells of equal width, of
which the table has the middles; FIRST is 1 with a sign (exp_avg) and 2 without (exp_avg_sq). The values 0 and 1 make up
the 256.

    signed      codes 0 to 126: negative, 127: 0, 128 to 254: positive, 255: 1
    unsigned    code 0: 0, 1 to 254: positive, 255: 1

Inside a decade the nearest middle is that of the cell that a value lies in, which is found in closed form: ten times as
fast as `torch.bucketize` in compiled code on a CPU. Decoding reads the table, so that values are those of bitsandbytes
to the last bit.
"""

import torch
from torch import Tensor

_DECADES = 7
_ZERO = 127  # the signed code of 0
_TINY = torch.finfo(torch.float32).tiny


def _values(signed: bool) -> tuple[float, ...]:
    """create_dynamic_map of bitsandbytes.functional, in its order of fp32 roundings."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, dtype=torch.float32, device="cpu")
        middles = (10 ** (decade - _DECADES + 1) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    return tuple(sorted(values))


_SIGNED, _UNSIGNED = _values(True), _values(False)


def dynamic_tables(device: torch.device | str | None = None) -> Tensor:
    """Values of the codes, ascending: (2, 256) fp32, row 0 signed (exp_avg) and row 1 unsigned (exp_avg_sq)."""
    return torch.tensor([_SIGNED, _UNSIGNED], dtype=torch.float32, device=device)


def _absmax(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale (blocks,) and the quotients, magnitudes up to 1; 0 in a block of zeros."""
    scale = blocks.abs().amax(1)
    return scale, blocks / torch.where(scale > 0, scale, 1.0).unsqueeze(1)


def _place(magnitude: Tensor, first: int) -> Tensor:
    """Number, from 1, of the positive value that is nearest to each magnitude in [0, 1], or 0 for zero.

    Args:
        magnitude: fp32.
        first: cells of the smallest decade.

    Returns:
        fp32 whole numbers. Within 2**-15 of a cell of the middle between two values it may be either's.
    """

    def line(decade: int) -> tuple[float, float]:  # place = floor(slope * magnitude + offset)
        cells = first * 2**decade
        return 10.0 ** (_DECADES - 1 - decade) * cells / 0.9, -0.1 * cells / 0.9 + cells - first + 1

    slope, offset = (torch.full_like(magnitude, number) for number in line(0))
    last = torch.full_like(magnitude, float(first))
    for decade in range(1, _DECADES):
        # Halfway between the last middle of the decade below and the first of this one.
        below = magnitude < 10.0 ** (decade - _DECADES) * (1 + 0.9 / (first * 2 ** (decade - 1)))
        steeper, further = line(decade)
        slope, offset = torch.where(below, slope, steeper), torch.where(below, offset, further)
        last = torch.where(below, last, float(first * (2 ** (decade + 1) - 1)))
    place = torch.minimum(torch.floor(magnitude * slope + offset), last)
    top = first * 2 ** (_DECADES - 1)  # cells of the largest decade
    place = torch.where(magnitude < 1 - 0.225 / top, place, float(2 * top - first + 1))
    smallest = (0.1 + 0.45 / first) * 10.0 ** (1 - _DECADES)
    return torch.where(magnitude < 0.5 * smallest, 0.0, place)


def encode_signed(first: Tensor) -> tuple[Tensor, Tensor]:
    """Code of a first moment, to nearest.

    Args:
        first: (blocks, block_size) fp32, finite.

    Returns:
        Codes (blocks, block_size) uint8 and scale (blocks,) fp32. The tree has no -1: that is coded -.993.
    """
    scale, quotient = _absmax(first)
    place = _place(quotient.abs(), 1).to(torch.int32)
    return torch.where(quotient < 0, _ZERO - place.clamp(max=_ZERO), _ZERO + place).to(torch.uint8), scale


def encode_unsigned(second: Tensor) -> tuple[Tensor, Tensor]:
    """Code of a second moment, to nearest, but that a non-zero value never gets code 0: it is divided by.

    Args:
        second: (blocks, block_size) fp32, finite and not negative.

    Returns:
        Codes (blocks, block_size) uint8 and scale (blocks,) fp32.
    """
    scale, quotient = _absmax(second)
    place = _place(quotient, 2).to(torch.int32)
    return torch.where(second > 0, place.clamp(min=1), 0).to(torch.uint8), scale


def decode_signed(codes: Tensor, scale: Tensor, tables: Tensor | None = None) -> Tensor:
    """Inverse of `encode_signed`: (blocks, block_size) uint8 and (blocks,) fp32 to fp32.

    Args:
        codes: see above.
        scale: see above.
        tables: `dynamic_tables` on the device of the codes, if they are at hand.
    """
    tables = dynamic_tables(codes.device) if tables is None else tables
    return tables[0][codes.to(torch.int32)] * scale.unsqueeze(1)


def decode_unsigned(codes: Tensor, scale: Tensor, tables: Tensor | None = None) -> Tensor:
    """Inverse of `encode_unsigned`, of the same arguments as `decode_signed`.

    A product under the normal numbers of fp32 becomes the smallest of them, so that no code but 0 decodes to zero.
    """
    tables = dynamic_tables(codes.device) if tables is None else tables
    floor = torch.where(scale > 0, _TINY, 0.0).unsqueeze(1)
    value = torch.maximum(tables[1][codes.to(torch.int32)] * scale.unsqueeze(1), floor)
    return torch.where(codes.to(torch.int32) > 0, value, 0.0)
