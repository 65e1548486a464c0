"""The row code of weights as pure math on plain tensors: one fp16 scale per row, the row's largest magnitude."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qsub.tensors.state_codes import mix

FP16_MAX = 65504.0
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CHUNK = 1 << 18  # elements that a chunked pass over rows holds in fp32 at a time


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


def check_matrix(weight: Tensor, name: str = "weight") -> None:
    """Raise ValueError unless `weight` is a dense float matrix, and not quantized in another way.

    Args:
        weight: any tensor; what this rank holds, where it is distributed.
        name: of the weight, for the text.
    """
    foreign = is_traceable_wrapper_subclass(weight)
    if weight.layout != torch.strided or weight.dtype not in _DTYPES or weight.dim() != 2 or foreign:
        kind = f"{type(weight).__name__} " if foreign else ""
        raise ValueError(
            f"{name} must be (out_features, in_features), dense, in fp64, fp32, bf16 or fp16, got {kind}{weight.layout}"
            f", {weight.dtype}, shape {tuple(weight.shape)}. Leave it as it is (quantize_: filter_fn)."
        )


def check_rows(weight: Tensor, name: str = "weight", first: int = 0) -> None:
    """Raise ValueError unless every row of `weight` is finite and at most 65504 in magnitude.

    Args:
        weight: (rows, columns), any float dtype.
        name: of the weight, for the text.
        first: number of the first row, where `weight` is a range of rows.
    """
    if weight.device.type == "meta":
        return
    good = row_absmax(weight) <= FP16_MAX
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(
            f"{name}: row {first + row} has NaN, Inf or a magnitude over {FP16_MAX:.0f}, which an fp16 row scale can't "
            f"hold (largest magnitude found: {float(row_absmax(weight[row : row + 1])):g}). "
            "Repair the weight, or leave it in float (quantize_: filter_fn)."
        )


def quantize_rows(
    weight: Tensor,
    noise: Tensor | None = None,
    absmax: Tensor | None = None,
    held: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode a float matrix: `scale = fp16(max|row|)`, `codes = round(row * 127 / scale)`.

    The division uses the rounded scale, in fp32. With `noise` the codes are rounded stochastically, and the scale
    is rounded up so that no element is clamped: the expected value of the result is the input. A value that a code
    stands for exactly, as `dequantize_rows` in fp32 gives it, becomes that code, whatever the noise.

    Args:
        weight: (rows, columns), any float dtype; finite, at most 65504 in magnitude.
        noise: (rows, columns) fp32, uniform in [0, 1), or None to round to nearest (half to even).
        absmax: (rows,) fp32, the largest magnitude of each row, where `weight` has only some of its columns.
        held: codes and scale that are to be replaced. A row whose value they are already keeps them: coded anew, a row
            whose largest code is under 127 would get another scale, and other codes.

    Returns:
        int8 codes (rows, columns) in [-127, 127] and the fp16 scale (rows,). A zero row has scale 0 and codes 0.
    """
    absmax = row_absmax(weight) if absmax is None else absmax
    scale = absmax.to(torch.float16)  # (rows,)
    if noise is not None:
        above = (scale.view(torch.int16) + 1).view(torch.float16)
        reach = torch.maximum(
            scale.float(), row_step(scale) * 127.0
        )  # code 127 may stand for a bit more than the scale
        scale = torch.where(reach < absmax, above, scale)
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        divisor = scale[part].float().unsqueeze(1)
        value = weight[part].float()
        scaled = (value * 127.0).div_(torch.where(divisor > 0, divisor, 1.0))
        if noise is None:
            scaled = scaled.round_()
        else:
            nearest = (scaled + 0.5).floor_()
            exact = value == nearest * row_step(scale[part]).unsqueeze(1)
            scaled = torch.where(exact, nearest, scaled.add_(noise[part]).floor_())
        scaled = torch.where(divisor > 0, scaled.clamp_(-127.0, 127.0), 0.0).to(torch.int8)
        if held is not None:
            wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
            kept = (weight[part].to(wide) == dequantize_rows(held[0][part], held[1][part], wide)).all(1)
            scaled = torch.where(kept.unsqueeze(1), held[0][part], scaled)
            scale[part] = torch.where(kept, held[1][part], scale[part])
        codes[part] = scaled
    return codes, scale


def row_step(scale: Tensor) -> Tensor:
    """What one code stands for, in fp32: `scale / 127`, as `dequantize_rows` and the kernels form it."""
    return scale.float() * (1.0 / 127.0)


def row_noise(weight: Tensor, update: int) -> Tensor:
    """Stateless noise for `quantize_rows`: a hash of the row's values, the number of the update, and the column.

    Args:
        weight: (rows, columns) fp32, what is to be encoded.
        update: differs from call to call, so that values that stay the same are not rounded alike for ever.

    Returns:
        (rows, columns) fp32, uniform in [0, 1).
    """
    lane = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device)
    values = mix(weight.contiguous().view(torch.int32) ^ mix(lane))
    row = values.sum(1).to(torch.int32)  # (rows,), of integers: the same in any order
    bits = mix(mix(row + (update & 0x7FFFFFFF)).unsqueeze(1) ^ lane)
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


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
