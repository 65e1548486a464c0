"""The int8 linear on plain tensors: int8 codes, fp16 row scales and a float input."""

from qsub.linear.ops import int8_mm, int8_mm_transposed

__all__ = ["int8_mm", "int8_mm_transposed"]
