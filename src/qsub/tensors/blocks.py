"""Where the blocks of a tensor lie: along its rows, several narrow rows to a block if need be."""

import math

import torch
from torch import Tensor


def row_shape(shape: torch.Size | tuple[int, ...], rows_per_block: int = 1) -> tuple[int, int]:
    """(rows, elements per row) of a parameter: dim 0 and the product of the rest; up to 1-D it is one row.

    Args:
        shape: of the parameter.
        rows_per_block: narrow rows that share a block and count as one; the last of these may have fewer elements.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return -(-shape[0] // rows_per_block), math.prod(shape[1:]) * rows_per_block


def fitting_rows(shape: torch.Size | tuple[int, ...], block_size: int) -> int:
    """How many whole rows of a parameter share a block: 1 where a row is longer than half of it.

    It is the number that steps fastest on a GPU: as many as fit in, or fewer that have a multiple of 4 or 16 elements,
    which are read at a time.
    """
    length = row_shape(shape)[1]
    if len(shape) < 2 or not 0 < length <= block_size // 2:
        return 1
    times = {16: 5, 8: 7, 4: 7, 2: 9, 1: 9}  # of a block, by that multiple: ratios measured on an H200
    return min(range(block_size // length, 0, -1), key=lambda rows: times[math.gcd(rows * length, 16)] / rows)


def is_dynamic(code: str) -> bool:
    """Whether `code` is one of the dynamic tree, with an fp32 scale, rather than one of two bytes a block."""
    return code.startswith("dynamic")


def scale_shape(
    shape: torch.Size | tuple[int, ...], block_size: int, code: str, rows_per_block: int = 1
) -> tuple[int, ...]:
    """Shape of the scales, (rows, blocks per row) or (rows, blocks per row, 2), with rows as in `row_shape`.

    The last block of a row may be short.
    """
    rows, length = row_shape(shape, rows_per_block)
    blocks = -(-length // block_size)
    return (rows, blocks) if is_dynamic(code) else (rows, blocks, 2)


def scale_dtype(code: str) -> torch.dtype:
    """Dtype of the scales of `code`."""
    return torch.float32 if is_dynamic(code) else torch.uint8


def to_blocks(flat: Tensor, shape: torch.Size | tuple[int, ...], block_size: int, rows_per_block: int = 1) -> Tensor:
    """View or zero-padded copy (blocks, block_size) of a contiguous tensor of shape `shape`; rows as in `row_shape`."""
    rows, length = row_shape(shape, rows_per_block)
    if rows * length > flat.numel():
        flat = torch.nn.functional.pad(flat.reshape(-1), (0, rows * length - flat.numel()))
    short = -length % block_size
    if short:
        flat = torch.nn.functional.pad(flat.reshape(rows, length), (0, short))
    return flat.reshape(-1, block_size)


def from_blocks(blocks: Tensor, shape: torch.Size | tuple[int, ...], rows_per_block: int = 1) -> Tensor:
    """Inverse of `to_blocks`: (blocks, block_size) without the padding, in shape `shape`."""
    rows, length = row_shape(shape, rows_per_block)
    row = -(-length // blocks.shape[1]) * blocks.shape[1]
    flat = blocks.reshape(rows, row)[:, :length].reshape(-1)
    return flat[: math.prod(shape)].reshape(shape)
