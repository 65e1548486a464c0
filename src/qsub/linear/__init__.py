"""The int8 linear on plain tensors: int8 codes, fp16 row scales and a float input."""

from qsub.linear.functional import AUTOCAST_DEVICES, dequantize, int8_linear
from qsub.linear.ops import int8_mm, int8_mm_transposed
from qsub.linear.reference import OUTLIER_COLUMNS

__all__ = ["AUTOCAST_DEVICES", "OUTLIER_COLUMNS", "dequantize", "int8_linear", "int8_mm", "int8_mm_transposed"]
