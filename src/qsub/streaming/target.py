"""Write a checkpoint that appears only when it is whole.

Everything goes to `DST.<hex>.part`, which is renamed at the end and removed on any failure. A process that is killed
leaves the part file or folder, never DST.
"""

import contextlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsub.streaming.source import bits


@dataclass(frozen=True)
class Output:
    """A tensor to be stored: its name, dtype as safetensors has it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Step:
    """One tensor of a checkpoint on its way.

    Attributes:
        outputs: what is stored of it.
        chunks: yields the number of an output and its next piece, until all outputs are complete.
        nbytes: what is read, for the progress.
    """

    outputs: tuple[Output, ...]
    chunks: Callable[[], Iterable[tuple[int, Tensor | bytearray]]]
    nbytes: int


class NotWritten(OSError):
    """The target exists, has no folder to be in, or the system refuses to write it."""


def check_free(path: Path) -> None:
    """NotWritten if there is something at `path`, or no folder to put it in."""
    if os.path.lexists(path):
        raise NotWritten(f"{path} exists: remove it, or choose another name")
    if not path.absolute().parent.is_dir():
        raise NotWritten(f"{path.absolute().parent}: no such folder to write {path.name} into")


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which becomes `path` at the end of the block, or is removed if that fails.

    Raises:
        NotWritten: as `check_free`, before the block and at its end; or the system refused to write, within it.
    """
    check_free(path)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        check_free(path)
        os.rename(part, path)
    except BaseException as error:
        if os.path.isdir(part):
            shutil.rmtree(part)
        elif os.path.lexists(part):
            part.unlink()
        if isinstance(error, OSError) and _names(error, part):
            raise NotWritten(error.errno, error.strerror, str(path)) from error
        raise


def _names(error: OSError, part: Path) -> bool:
    """Whether an error is that of writing to `part`: writes to an open file, which have no name, or a name in it."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return error.errno is not None and (not names or any(name.startswith(str(part)) for name in names))


def write_file(path: Path, steps: list[Step], metadata: dict[str, str], progress: Callable[[int], Any]) -> None:
    """Write a safetensors file, step after step.

    Args:
        path: of a new file.
        steps: what to write; their outputs have different names.
        metadata: strings of the header.
        progress: called with the bytes of each step once it is written.
    """
    # As safetensors orders them: by size of an element, so that each tensor is aligned, and by name.
    outputs = [output for step in steps for output in step.outputs]
    outputs.sort(key=lambda o: (-bits(o.dtype, o.nbytes, o.shape), o.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    place: dict[str, int] = {}
    end = 0
    for output in outputs:
        if output.name in place:
            raise ValueError(f"{path.name}: two tensors would be stored as {output.name!r}: rename one of them")
        place[output.name] = end
        end += output.nbytes
        header[output.name] = {
            "dtype": output.dtype,
            "shape": output.shape,
            "data_offsets": [place[output.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", buffering=0) as file:
        write_all(file, struct.pack("<Q", len(text)) + text)
        for step in steps:
            written = [0] * len(step.outputs)
            for number, piece in step.chunks():
                data = as_bytes(piece)
                file.seek(8 + len(text) + place[step.outputs[number].name] + written[number])
                write_all(file, data)
                written[number] += len(data)
            if written != [output.nbytes for output in step.outputs]:
                raise RuntimeError(f"{step.outputs[0].name}: {written} bytes were written of {step.outputs}")
            progress(step.nbytes)
        os.fsync(file.fileno())


def write_all(file: Any, data: bytes | bytearray) -> None:
    """Write to an unbuffered file, which may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def as_bytes(piece: Tensor | bytearray) -> bytearray:
    """The elements of a tensor, in order; needs no numpy."""
    if isinstance(piece, bytearray):
        return piece
    buffer = bytearray(piece.numel() * piece.element_size())
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(piece.contiguous().view(-1).view(torch.uint8))
    return buffer
