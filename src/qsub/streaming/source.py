"""A checkpoint to read from, see `qsub.checkpoint_files`.

Headers are read and checked when it is opened, data by ranges of rows when asked for. Files are read rather than
mapped: the pages of a mapped file count as memory of the process.
"""

import json
import math
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsub.checkpoint_files import INDEX, locate, read_json, weight_map
from qsub.interop.hf_names import MARK
from qsub.serialization import (
    HEADER,
    INNER,
    Joined,
    check_parts,
    join_headers,
    open_file,
    read_header,
    safetensors_package,
)

CHUNK = 1 << 22  # bytes that are read and written at a time
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """A tensor as it is stored.

    Attributes:
        name: key in the file, or the name that a model has for it.
        dtype: as safetensors names it.
        shape: of the tensor.
        file: that holds it.
        start: offset of its first byte in the file.
        nbytes: its size.
        key: in the file, where a model knows the tensor by another name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int
    key: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; of all for a tensor of no dimension."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        """The tensor, or its rows from `first` up to `last`."""
        shape, start, nbytes = self.shape, self.start, self.nbytes
        if last is not None:
            shape = (last - first, *shape[1:])
            start, nbytes = start + first * self.row_bytes, (last - first) * self.row_bytes
        if not nbytes:
            return torch.empty(shape, dtype=DTYPES[self.dtype], device="cpu")
        return torch.frombuffer(self._bytes(start, nbytes), dtype=DTYPES[self.dtype]).view(shape)

    def rows(self, limit: int = CHUNK) -> Iterator[tuple[int, Tensor]]:
        """Ranges of rows of up to `limit` bytes, or one row, each with the number of its first row."""
        step = max(1, limit // max(1, self.row_bytes))
        for first in range(0, self.shape[0], step):
            yield first, self.read(first, min(first + step, self.shape[0]))

    def raw(self, first: int = 0, last: int | None = None) -> Iterator[bytearray]:
        """All bytes, or those of the rows from `first` up to `last`, up to CHUNK at a time."""
        start = self.start + first * self.row_bytes
        nbytes = self.nbytes if last is None else (last - first) * self.row_bytes
        for offset in range(0, nbytes, CHUNK):
            yield self._bytes(start + offset, min(CHUNK, nbytes - offset))

    def equals(self, other: "Entry") -> bool:
        """Whether it has the bytes of another tensor of the same dtype and shape."""
        alike = (self.dtype, self.shape) == (other.dtype, other.shape)
        return alike and all(a == b for a, b in zip(self.raw(), other.raw(), strict=True))

    def _bytes(self, start: int, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        with open(self.file, "rb") as file:
            file.seek(start)
            try:
                read = file.readinto(buffer)
            except OSError as error:  # of a bad disk or a network; open names its file, this doesn't
                raise OSError(error.errno, error.strerror, str(self.file)) from error
        if read != nbytes:
            raise ValueError(f"{self.file}: {self.name!r} ends early: the file changed while it was read")
        return buffer


@dataclass
class Source:
    """What a checkpoint holds.

    Attributes:
        path: as it was given.
        kind: "file", "index" or "folder".
        files: the safetensors files, in order of their names.
        index: the index file, or None where there is one file.
        entries: stored tensors by name.
        quantized: names of quantized tensors to their fields in the header of their file.
        shared: names to the name of the tensor that they share.
        metadata: of each file, without qsub's entry.
        by_model_names: the file says that its names are those of the model, see `qsub.interop.hf_names`.
    """

    path: Path
    kind: str
    files: list[Path]
    index: Path | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    quantized: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict)
    by_model_names: bool = False

    def inner(self, name: str) -> list[Entry]:
        """The entries that a quantized tensor is stored in."""
        return [self.entries[f"{name}.{key}"] for key in INNER[self.quantized[name]["class"]]]

    def plain(self) -> dict[str, Entry]:
        """Entries that are no part of a quantized tensor."""
        taken = {entry.name for name in self.quantized for entry in self.inner(name)}
        return {name: entry for name, entry in self.entries.items() if name not in taken}

    def config(self) -> dict[str, Any] | None:
        """config.json of a Hugging Face folder, or None.

        Raises:
            ValueError: it is damaged.
        """
        if self.kind != "folder" or not (self.path / "config.json").is_file():
            return None
        config = read_json(self.path / "config.json")
        if not isinstance(config, dict):
            raise ValueError(f"{self.path / 'config.json'}: expected a JSON object, got a {type(config).__name__}")
        return config


def open_source(path: Path) -> Source:
    """Read and check all headers of a checkpoint.

    Raises:
        FileNotFoundError: it, or one of its files, is missing.
        ValueError: a file is damaged, or doesn't hold what its header or the index says; it is named.
    """
    kind, main = locate(path)
    index = main if main.name.endswith(INDEX) else None
    table = weight_map(index) if index else {}
    files = [main.with_name(name) for name in sorted(set(table.values()))] if index else [main]
    source = Source(path, kind, files, index)
    package = safetensors_package()
    with ExitStack() as stack:
        opened = [stack.enter_context(open_file(file, package)) for file in files]
        headers = [read_header(each, file) for each, file in zip(opened, files, strict=True)]
        header = join_headers(headers)
        source.by_model_names = any(each.get(MARK[0]) == MARK[1] for each in headers)
        for file in files:
            _read_file(source, file)
        joined, names = Joined(opened), set(source.entries)
        for name, fields in header["tensors"].items():
            check_parts(joined, names, name, fields, main)
    source.quantized, source.shared = header["tensors"], header["shared"]
    missing = [name for name in table if name not in source.entries]
    if missing:
        raise ValueError(f"{index}: {missing[0]!r} is in none of the files ({len(missing)} such tensors)")
    return source


def _read_file(source: Source, file: Path) -> None:
    entries, metadata = read_entries(file)
    for name, entry in entries.items():
        if name in source.entries:
            raise ValueError(f"{file}: {name!r} is in {source.entries[name].file.name} too")
        source.entries[name] = entry
    source.metadata[file] = {key: value for key, value in metadata.items() if key != HEADER}


def read_entries(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a safetensors file, which has been checked, by their names; and the strings of its header."""
    with open(file, "rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
        header = json.loads(opened.read(length))
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        entries[name] = Entry(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + begin, end - begin)
    return entries, metadata


def bits(dtype: str, nbytes: int, shape: tuple[int, ...]) -> int:
    """Bytes of an element, for the alignment of tensors in a file."""
    return DTYPES[dtype].itemsize if dtype in DTYPES else nbytes // max(1, math.prod(shape))
