"""What can be done to one tensor of a checkpoint while it passes by: copy, quantize, dequantize, convert."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qsub import Int8RowwiseTensor
from qsub.interop.bitsandbytes import weights_from_bitsandbytes, weights_to_bitsandbytes
from qsub.serialization import FLOAT_DTYPES, build, describe
from qsub.streaming.converted import Result, Rows
from qsub.streaming.source import CHUNK, DTYPES, Entry
from qsub.streaming.target import Output, Step
from qsub.tensors.codes import check_rows, dequantize_rows, quantize_rows

Fields = dict[str, Any]
_SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}


def _output(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Output:
    return Output(name, _SAFETENSORS[dtype], tuple(shape), math.prod(shape) * dtype.itemsize)


def copy(entry: Entry | Rows | Result, name: str | None = None) -> Step:
    """The tensor as it is, of any dtype; under another name if one is given."""
    output = Output(name or entry.name, entry.dtype, entry.shape, entry.nbytes)
    return Step((output,), lambda: ((0, piece) for piece in entry.raw()), entry.nbytes)


def quantize(entry: Entry | Rows | Result, modes: Fields) -> tuple[Step, Fields]:
    """A float matrix as int8 codes and scales, a range of rows at a time; also its fields for the header.

    Args:
        entry: (out_features, in_features), float.
        modes: activations and outlier_threshold of the result.
    """

    def chunks() -> Iterator[tuple[int, Tensor]]:
        for first, rows in entry.rows():
            check_rows(rows, f"{entry.file}: {entry.name}", first)
            yield from enumerate(quantize_rows(rows))

    inner = torch.empty(entry.shape, dtype=torch.int8, device="meta")
    scale = torch.empty(entry.shape[0], dtype=torch.float16, device="meta")
    fields = describe(Int8RowwiseTensor(inner, scale, DTYPES[entry.dtype], **modes))  # type: ignore[call-overload]
    outputs = tuple(
        _output(f"{entry.name}.{key}", part.dtype, tuple(part.shape))
        for key, part in (("int_data", inner), ("scale", scale))
    )
    return Step(outputs, chunks, entry.nbytes), fields


def dequantize(name: str, inner: list[Entry], fields: Fields) -> Step:
    """A quantized tensor as a float one: by ranges of rows where the scales are those of rows, else as a whole."""
    dtype = FLOAT_DTYPES[fields["dtype"]]
    codes, scale = inner

    def chunks() -> Iterator[tuple[int, Tensor]]:
        if fields["class"] != "Int8RowwiseTensor" or fields.get("scale_dim", -2) != -2 or len(codes.shape) != 2:
            yield 0, build(fields["class"], [codes.read(), scale.read()], fields).dequantize()  # type: ignore[attr-defined]
            return
        scales = scale.read()
        for first, rows in codes.rows(CHUNK // 8):  # of 8 bytes each as fp64
            yield 0, dequantize_rows(rows, scales[first : first + rows.shape[0]], dtype)

    return Step((_output(name, dtype, codes.shape),), chunks, sum(entry.nbytes for entry in inner))


def from_bitsandbytes(
    weight: Entry, others: list[Entry], dtype: torch.dtype, modes: Fields, name: str
) -> tuple[Step, Fields]:
    """An 8-bit layer of bitsandbytes as int8 codes and scales; also its fields for the header.

    Args:
        weight: int8 (out_features, in_features).
        others: SCB and, where there is one, weight_format.
        dtype: float dtype that the weight shows.
        modes: activations and outlier_threshold of the result.
        name: of the result.

    Raises:
        ValueError: the parts don't fit; when the step runs.
    """

    def chunks() -> Iterator[tuple[int, Tensor]]:
        state = {entry.name: entry.read() for entry in (weight, *others)}
        result = weights_from_bitsandbytes(state, dtype)[weight.name]
        yield 0, result.int_data
        yield 1, result.scale

    inner = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    scale = torch.empty(weight.shape[:1], dtype=torch.float16, device="meta")
    fields = describe(Int8RowwiseTensor(inner, scale, dtype, **modes))  # type: ignore[call-overload]
    outputs = (
        _output(f"{name}.int_data", torch.int8, weight.shape),
        _output(f"{name}.scale", torch.float16, weight.shape[:1]),
    )
    return Step(outputs, chunks, weight.nbytes + sum(entry.nbytes for entry in others)), fields


def to_bitsandbytes(name: str, inner: list[Entry], fields: Fields) -> Step:
    """A quantized weight as the entries that bitsandbytes stores of an 8-bit layer.

    Raises:
        ValueError: it is not the weight of a Linear.
    """

    def convert(device: str | None) -> dict[str, Tensor]:
        parts = [
            torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device) if device else entry.read()
            for entry in inner
        ]
        return weights_to_bitsandbytes({name: build(fields["class"], parts, fields)})

    result = convert("meta")
    outputs = tuple(_output(key, value.dtype, tuple(value.shape)) for key, value in result.items())
    return Step(outputs, lambda: enumerate(convert(None).values()), sum(entry.nbytes for entry in inner))
