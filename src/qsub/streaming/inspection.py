"""What a checkpoint holds, and how far its int8 weights are from the float original."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsub.serialization import FLOAT_DTYPES, build
from qsub.streaming.converted import Tensors
from qsub.streaming.select import model_tensors
from qsub.streaming.source import CHUNK, DTYPES, FLOATS, Entry, Source
from qsub.tensors.codes import dequantize_rows


@dataclass
class Layer:
    """One tensor.

    Attributes:
        name: of the tensor.
        code: "int8 rows", "8-bit blocks", or the dtype of a plain tensor as safetensors names it.
        shape: of the tensor.
        shows: the float dtype that it decodes to; the dtype of a plain tensor.
        nbytes: stored size.
        sqnr_db: 10 log10(sum of squares of the original / sum of squares of the difference), or None: not asked for,
            not quantized, or no difference at all (`exact`).
        exact: whether it equals the original, or None if that was not asked for.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    shows: str
    nbytes: int
    sqnr_db: float | None = None
    exact: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


_CODES = {"Int8RowwiseTensor": "int8 rows", "Blockwise8bitTensor": "8-bit blocks"}


def layers(source: Source, original: Source | None = None) -> list[Layer]:
    """All tensors of a checkpoint, quantized ones first compared with those of the float original, if it is given.

    Raises:
        ValueError: the original lacks a quantized tensor, or has it in another shape or not in float.
    """
    result = []
    tensors = _by_the_names_of(source, original) if original is not None else {}
    for name, fields in source.quantized.items():
        inner = source.inner(name)
        layer = Layer(name, _CODES[fields["class"]], inner[0].shape, fields["dtype"], sum(e.nbytes for e in inner))
        if original is not None:
            layer.sqnr_db, layer.exact = _compare(name, inner, fields, original.path, tensors)
        result.append(layer)
    for name, entry in source.plain().items():
        result.append(Layer(name, entry.dtype, entry.shape, entry.dtype, entry.nbytes))
    return sorted(result, key=lambda layer: layer.name)


def _by_the_names_of(source: Source, original: Source) -> Tensors:
    """The tensors of the original by the names that the checkpoint has: the model's, or those that are stored."""
    return model_tensors(original) if source.by_model_names else dict(original.entries)


def _compare(
    name: str, inner: list[Entry], fields: dict[str, Any], path: Path, tensors: Tensors
) -> tuple[float | None, bool]:
    target = tensors.get(name)
    if target is None or target.dtype not in FLOATS or target.shape != inner[0].shape:
        got = "nothing" if target is None else f"{target.dtype} {target.shape}"
        raise ValueError(f"{path}: {name!r} must be a float tensor of shape {inner[0].shape} there, got {got}")
    signal = noise = 0.0
    for part, value in _decoded(inner, fields, target):
        wide = part.double()
        signal += float(wide.square().sum())
        noise += float((wide - value.double()).square().sum())
    if noise == 0:
        return None, True
    return (10 * math.log10(signal / noise) if signal else -math.inf), False


def _decoded(inner: list[Entry], fields: dict[str, Any], target: Any) -> Any:
    """Pairs of the original and the decoded tensor, by ranges of rows where the scales are those of rows."""
    codes, scale = inner
    if fields["class"] != "Int8RowwiseTensor" or fields.get("scale_dim", -2) != -2 or len(codes.shape) != 2:
        value: Any = build(fields["class"], [codes.read(), scale.read()], fields)
        yield target.read(), value.dequantize()
        return
    scales: Tensor = scale.read()
    for first, part in target.rows(CHUNK // 8):  # differences are in fp64
        last = first + part.shape[0]
        yield part, dequantize_rows(codes.read(first, last), scales[first:last], FLOAT_DTYPES[fields["dtype"]])


def shown(layer: Layer) -> str:
    """SQNR of a layer for people: dB, "exact", or nothing."""
    if layer.exact:
        return "exact"
    return "" if layer.sqnr_db is None else f"{layer.sqnr_db:.2f}"


def float_bytes(layer: Layer) -> int:
    """Bytes that the layer would take in the float dtype that it shows."""
    dtype = FLOAT_DTYPES.get(layer.shows) if layer.code in _CODES.values() else DTYPES.get(layer.shows)
    return math.prod(layer.shape) * (dtype or torch.uint8).itemsize if dtype else layer.nbytes
