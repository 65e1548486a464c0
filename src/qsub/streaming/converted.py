"""The tensors of a float checkpoint by the names that a model of transformers has for its parameters.

`qsub.interop.hf_names` says how each parameter comes from stored tensors. Most are one under another name; those that
are rows of one, or rows of several one after the other, are read a few rows at a time as stored ones are. What is left
(permutations, joins of columns) is computed by transformers' own code when it is asked for: the tensors of one rule at
a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsub.interop.hf_names import Move, moves
from qsub.streaming.source import CHUNK, DTYPES, Entry

Piece = tuple[Entry, int, int]  # rows of a stored tensor, from the first up to the last
_SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Rows:
    """A tensor that consists of rows of stored ones, one after the other; it is read like an `Entry`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def file(self) -> Path:
        """That holds the first rows."""
        return self.pieces[0][0].file

    @property
    def nbytes(self) -> int:
        """Size."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def rows(self, limit: int = CHUNK) -> Iterator[tuple[int, Tensor]]:
        """Ranges of rows of a matrix of up to `limit` bytes, or one row, each with the number of its first row."""
        number = 0
        for entry, first, last in self.pieces:
            step = max(1, limit // max(1, entry.row_bytes))
            for start in range(first, last, step):
                part = entry.read(start, min(start + step, last))
                yield number, part
                number += part.shape[0]

    def raw(self) -> Iterator[bytearray]:
        """All bytes, up to CHUNK at a time."""
        for entry, first, last in self.pieces:
            yield from entry.raw(first, last)

    def read(self) -> Tensor:
        """All of it."""
        return torch.cat([entry.read(first, last) for entry, first, last in self.pieces]).view(self.shape)


class _Computed:
    """The results of one rule, which are computed together and each given out once."""

    def __init__(self, move: Move, model: Any, stored: dict[str, Entry]) -> None:
        self._move = move
        self._model = model
        self._stored = stored
        self._ready: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        if name not in self._ready:
            self._ready = self._move.apply(self._model, lambda key: self._stored[key].read())
        return self._ready.pop(name)


@dataclass(frozen=True)
class Result:
    """A tensor that transformers' code computes of stored ones; it is read like an `Entry`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    computed: _Computed = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Size."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def rows(self, limit: int = CHUNK) -> Iterator[tuple[int, Tensor]]:
        """As `Entry.rows`, of a tensor that is in memory while this runs."""
        whole = self.read()
        step = max(1, limit // max(1, self.nbytes // max(1, self.shape[0])))
        for first in range(0, self.shape[0], step):
            yield first, whole[first : first + step]

    def raw(self) -> Iterator[Tensor]:
        """All of it."""
        yield self.read()

    def read(self) -> Tensor:
        """All of it."""
        return self.computed.take(self.name)


Tensors = dict[str, "Entry | Rows | Result"]


def by_model_names(stored: dict[str, Entry], model: Any) -> tuple[Tensors, list[Move]]:
    """What a checkpoint of floats holds for a model.

    Args:
        stored: its tensors.
        model: of transformers, on the meta device.

    Returns:
        The model's tensors by its names, and those of the checkpoint that it has no use for by theirs; and how
        they come about.

    Raises:
        ValueError: a rule of transformers fails on them.
    """
    found = moves(model, stored)
    result: Tensors = {}
    used: set[str] = set()
    for move in found:
        sources = [stored[key] for _, key in move.sources]
        used |= {entry.name for entry in sources}
        if move.rule is None:
            result[move.target] = replace(sources[0], name=move.target, key=sources[0].name)
        else:
            result.update(_by_rule(move, model, stored))
    return {**{name: entry for name, entry in stored.items() if name not in used}, **result}, found


def _by_rule(move: Move, model: Any, stored: dict[str, Entry]) -> Tensors:
    computed = _Computed(move, model, stored)
    first = stored[move.sources[0][1]]
    made: dict[str, Tensor]
    try:
        made = move.apply(model, lambda key: torch.empty(stored[key].shape, dtype=_dtype(stored[key]), device="meta"))
    except Exception as failure:  # a rule may look at values
        try:
            made = move.apply(model, lambda key: stored[key].read())
        except Exception as error:
            keys = ", ".join(key for _, key in move.sources[:3])
            raise ValueError(f"{first.file}: transformers can't make {move.target} of {keys} ({error})") from failure
    blocks = _blocks(move, model, stored)
    result: Tensors = {}
    for number, (name, value) in enumerate(made.items()):
        shape = tuple(value.shape)
        if blocks is not None and len(blocks) == len(made) and blocks[number].shape == shape:
            result[name] = Rows(name, first.dtype, shape, tuple(blocks[number].pieces))
        else:
            result[name] = Result(name, _SAFETENSORS[value.dtype], shape, first.file, computed)
    return result


def _dtype(entry: Entry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.file}: {entry.name} is {entry.dtype}, which is not converted")
    return DTYPES[entry.dtype]


# ---- Rules that only move rows ----


@dataclass
class _Block:
    """Rows of stored tensors; `members`, if it is a stack of such."""

    shape: tuple[int, ...]
    pieces: list[Piece]
    members: list["_Block"] | None = None


def _blocks(move: Move, model: Any, stored: dict[str, Entry]) -> list[_Block] | None:
    """The results of a rule as rows of stored tensors, in the order of its targets; None if that can't be told.

    Operations are told by the names of their classes, seen in transformers 5.6 to 5.24.
    """
    entries = [stored[key] for _, key in move.sources]
    if len({entry.dtype for entry in entries}) > 1 or any(not entry.shape for entry in entries):
        return None
    values: dict[str, list[_Block]] = {}
    for pattern, key in move.sources:
        entry = stored[key]
        values.setdefault(pattern, []).append(_Block(entry.shape, [(entry, 0, entry.shape[0])]))
    results: list[_Block] | None = None
    for operation in move.rule.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", None)
        if getattr(operation, "num_shards_attribute", None) is not None or results is not None:
            return None
        if kind == "MergeModulelist" and dim == 0:
            values = {pattern: [_stack(items)] for pattern, items in values.items()}
        elif kind == "Concatenate" and dim in (0, 1):
            ordered = [item for pattern in move.rule.source_patterns for item in values.get(pattern, [])]
            joined = _concatenate(ordered) if dim == 0 else _concatenate_members(ordered)
            if joined is None:
                return None
            values = {move.rule.source_patterns[0]: [joined]}
        elif kind in ("Chunk", "Split") and dim == 0 and len(entries) == 1:
            results = _split(next(iter(values.values()))[0], kind, move, model)
        else:
            return None
    return results or [item for items in values.values() for item in items]


def _stack(items: list[_Block]) -> _Block:
    return _Block((len(items), *items[0].shape), [piece for item in items for piece in item.pieces], items)


def _concatenate(items: list[_Block]) -> _Block | None:
    if any(item.members is not None for item in items):
        return None
    rows = sum(item.shape[0] for item in items)
    return _Block((rows, *items[0].shape[1:]), [piece for item in items for piece in item.pieces])


def _concatenate_members(items: list[_Block]) -> _Block | None:
    """Along the second dimension of stacks: member by member along the first."""
    if any(item.members is None for item in items) or len({item.shape[0] for item in items}) > 1:
        return None
    joined = [_concatenate(list(members)) for members in zip(*(item.members or () for item in items), strict=True)]
    return None if any(member is None for member in joined) else _stack([m for m in joined if m is not None])


def _split(block: _Block, kind: str, move: Move, model: Any) -> list[_Block] | None:
    targets = move.rule.target_patterns
    if kind == "Chunk":  # as torch.chunk
        step = -(-block.shape[0] // len(targets))
        sizes = [min(step, block.shape[0] - first) for first in range(0, block.shape[0], step)]
    else:
        names = [move.target.replace(targets[0], target) for target in targets]
        sizes = [model.get_parameter(name).shape[0] for name in names]
    (entry, start, _), rest = block.pieces[0], block.shape[1:]
    ends = [start + sum(sizes[: number + 1]) for number in range(len(sizes))]
    if ends[-1] != block.shape[0]:
        return None
    return [_Block((size, *rest), [(entry, end - size, end)]) for size, end in zip(sizes, ends, strict=True)]
