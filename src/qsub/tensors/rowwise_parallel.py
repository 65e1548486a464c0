"""Int8RowwiseTensor as the local part of a DTensor: tensor parallel.

A shard of rows has these rows and their scales. A shard of columns has the scales of the whole rows, so that products
with the shards sum to the product with the weight, and shards put together again are the weight bit for bit.
"""

from typing import Any

import torch

from qsub.tensors.rowwise import Int8RowwiseTensor


def join_columns(pieces: list[Any]) -> Int8RowwiseTensor:
    """Columns of one weight, side by side: what ranks that hold columns of it have gathered.

    Pieces that an optimizer has updated have scales of their own. The largest scale of a row becomes that of the
    whole row, and codes of smaller scales are rounded to it, to nearest; equal scales leave all codes as they are.

    Args:
        pieces: matrices with the same number of rows.
    """
    scale = torch.stack([piece.scale for piece in pieces]).amax(0)  # (rows,), NaN where a piece has one
    divisor = torch.where(scale == 0, 1.0, scale.float()).unsqueeze(1)
    int_data = torch.empty(
        (scale.shape[0], sum(piece.shape[1] for piece in pieces)), dtype=torch.int8, device=scale.device
    )
    start = 0
    for piece in pieces:
        ratio = piece.scale.float().unsqueeze(1) / divisor
        int_data[:, start : start + piece.shape[1]] = (piece.int_data * ratio).round_()
        start += piece.shape[1]
    return pieces[0].like(int_data, scale, whole_rows=True)
