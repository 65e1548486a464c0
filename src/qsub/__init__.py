"""qsub: int8 weights as a tensor subclass and 8-bit Adam for PyTorch."""

from qsub import optim
from qsub.quantize import dequantize_, quantize_
from qsub.serialization import load_file, save_file
from qsub.tensors import Blockwise8bitTensor, Int8RowwiseTensor

__version__ = "0.1.0"
__all__ = [
    "Blockwise8bitTensor",
    "Int8RowwiseTensor",
    "dequantize_",
    "load_file",
    "optim",
    "quantize_",
    "save_file",
]
