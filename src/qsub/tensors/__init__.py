"""Quantized tensor subclasses."""

from qsub.tensors import rowwise_matmul, rowwise_ops
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.rowwise import Int8RowwiseTensor

__all__ = ["Blockwise8bitTensor", "Int8RowwiseTensor", "rowwise_matmul", "rowwise_ops"]
