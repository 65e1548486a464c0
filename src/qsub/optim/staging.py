"""Rows of any length as whole blocks, a bounded part of a parameter at a time.

Where rows are multiples of the block, or there is one row, their blocks are a view of the memory. Short blocks at the
ends of rows are padded copies, which are written back.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

_PADDED = 1 << 19  # elements of a copy: it stays in a CPU's cache, and a GPU's temporaries under 64 MiB


class Piece(NamedTuple):
    """A range of the flat elements of a parameter, and of its blocks."""

    start: int
    end: int
    length: int  # of a row; the range holds whole ones, or a part of one that begins where a block does
    block: int
    blocks: int


def pieces(rows: int, length: int, count: int, block_size: int) -> Iterator[Piece]:
    """What a parameter is stepped in.

    Args:
        rows: of the parameter; the last one may be short.
        length: elements per row.
        count: elements in all.
        block_size: elements per block.
    """
    if length % block_size == 0:
        rows, length = 1, count
    row_blocks = -(-length // block_size)
    if rows == 1 or length > _PADDED:
        for row in range(rows):
            yield from _one_row(row * length, min((row + 1) * length, count), row * row_blocks, block_size)
        return
    some = max(1, _PADDED // (row_blocks * block_size))
    whole = count // length
    for row in range(0, whole, some):
        last = min(row + some, whole)
        yield Piece(row * length, last * length, length, row * row_blocks, (last - row) * row_blocks)
    if whole < rows:
        yield from _one_row(whole * length, count, whole * row_blocks, block_size)


def _one_row(start: int, end: int, block: int, block_size: int) -> Iterator[Piece]:
    """Its whole blocks, as a view, and the short one at the end."""
    blocks = (end - start) // block_size
    body = start + blocks * block_size
    if blocks:
        yield Piece(start, body, blocks * block_size, block, blocks)
    if body < end:
        yield Piece(body, end, end - body, block + blocks, 1)


class Staged:
    """Flat elements of whole rows as `blocks`, (blocks, block_size), to be changed in place.

    Args:
        target: contiguous, of one dimension.
        length: elements per row.
        block_size: elements per block.
    """

    def __init__(self, target: Tensor, length: int, block_size: int) -> None:
        self.target, self.length = target, length
        short = -length % block_size
        rows = target.view(-1, length)
        self.blocks = (pad(rows, (0, short)) if short else rows).view(-1, block_size)
        self.copied = bool(short)

    def finish(self) -> None:
        """Write `blocks` back where they are a copy."""
        if self.copied:
            rows = self.target.view(-1, self.length)
            rows.copy_(self.blocks.view(len(rows), -1)[:, : self.length])
