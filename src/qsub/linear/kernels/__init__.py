"""Triton kernels of the int8 linear, one concern a file. Importing this package needs Triton."""
