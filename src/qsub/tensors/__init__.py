"""Quantized tensor subclasses."""

from qsub.tensors import (
    blockwise_ops,
    blockwise_rows,
    blockwise_shards,
    rowwise_arithmetic,
    rowwise_composites,
    rowwise_copies,
    rowwise_distributed,
    rowwise_matmul,
    rowwise_methods,
    rowwise_views,
)
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.rowwise import Int8RowwiseTensor

__all__ = ["Blockwise8bitTensor", "Int8RowwiseTensor"]

# The modules of handlers are imported for what they register.
del blockwise_ops, blockwise_rows, blockwise_shards, rowwise_arithmetic, rowwise_composites, rowwise_copies
del rowwise_distributed, rowwise_matmul, rowwise_methods, rowwise_views
