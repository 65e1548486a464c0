"""Checkpoints of bitsandbytes.nn.Linear8bitLt: read into Int8RowwiseTensor, and written from it.

bitsandbytes stores three entries a layer: `weight` int8 (out, in), `SCB` fp32 (out,), the largest magnitude of each
row, and `weight_format`, 0 for rows. The value is weight * SCB / 127, as it is here, so codes carry over as they are.
SCB is the maximum of fp16 weights, which the fp16 scale holds exactly; an SCB that is no fp16 number is rounded, by
2**-11 of it at most (a sixteenth of a code step at the largest code), and the codes stay the nearest to the values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qsub.tensors import Int8RowwiseTensor
from qsub.tensors.codes import FP16_MAX

_SUFFIXES = ("SCB", "weight_format")


def _read_layer(prefix: str, entries: Mapping[str, Any], dtype: torch.dtype) -> Int8RowwiseTensor:
    weight, scb = entries.get(f"{prefix}weight"), entries[f"{prefix}SCB"]
    if not isinstance(weight, Tensor) or weight.dtype != torch.int8:
        got = "nothing" if weight is None else getattr(weight, "dtype", type(weight).__name__)
        raise ValueError(f"{prefix}SCB comes with an int8 {prefix}weight in a bitsandbytes checkpoint, got {got}")
    layout = entries.get(f"{prefix}weight_format", 0)
    if int(layout) != 0:
        raise ValueError(
            f"{prefix}weight_format is {int(layout)}: only rows (0) are supported. Save the checkpoint again with "
            "bitsandbytes 0.45 or later, which writes rows."
        )
    if weight.dim() != 2 or tuple(scb.shape) != (weight.shape[0],):
        raise ValueError(
            f"{prefix}weight and {prefix}SCB must be (out, in) and (out,), "
            f"got {tuple(weight.shape)} and {tuple(scb.shape)}"
        )
    if scb.device.type != "meta" and not bool(((scb >= 0) & (scb <= FP16_MAX)).all()):
        raise ValueError(f"{prefix}SCB has a value that is negative, not finite or over {FP16_MAX:.0f}")
    codes = weight.data.as_subclass(Tensor)
    return Int8RowwiseTensor(codes, scb.to(torch.float16), dtype)  # type: ignore[call-overload]


def weights_from_bitsandbytes(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """A state dict of bitsandbytes' 8-bit layers as one that a qsub model loads.

    Args:
        state_dict: as saved by bitsandbytes; other entries are passed on. From a file: `qsub.load_file(path)` or
            `torch.load(path)`.
        dtype: float dtype that the weights show.

    Returns:
        A new dict, in which each `weight` with an `SCB` is an Int8RowwiseTensor that shares the int8 data, and `SCB`
        and `weight_format` are gone. Load it with `model.load_state_dict(result, assign=True)`.

    Raises:
        ValueError: entries are missing or don't fit; they are named.
    """
    layers = {key.removesuffix("SCB") for key in state_dict if key == "SCB" or key.endswith(".SCB")}
    result = {}
    for key, value in state_dict.items():
        prefix = next(
            (p for p in (key.removesuffix(s) for s in (*_SUFFIXES, "weight")) if p != key and p in layers), None
        )
        if prefix is None:
            result[key] = value
        elif key == f"{prefix}weight":
            result[key] = _read_layer(prefix, state_dict, dtype)
        elif f"{prefix}weight" not in state_dict:
            _read_layer(prefix, state_dict, dtype)  # raises, with the right text
    return result


def weights_to_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of a qsub model as one that bitsandbytes' 8-bit layers load.

    Args:
        state_dict: of a model with Int8RowwiseTensors; other entries are passed on.

    Returns:
        A new dict of plain tensors, with `SCB` and `weight_format` beside each int8 weight. The layers of the model
        that loads it must be quantized already (bitsandbytes asks for `.cuda()` or `.to(device)` before).

    Raises:
        ValueError: an Int8RowwiseTensor is not the weight of a layer, or is transposed.
    """
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(value, Int8RowwiseTensor):
            result[key] = value
            continue
        prefix = key.removesuffix("weight")
        if prefix == key or value.scale_dim != -2:
            raise ValueError(f"{key!r}: bitsandbytes has int8 only for the weight of a Linear, (out, in)")
        result[key] = value.int_data
        result[f"{prefix}SCB"] = value.scale.to(torch.float32)
        result[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return result
