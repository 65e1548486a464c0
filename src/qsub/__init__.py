"""qsub: int8 weights as a tensor subclass and 8-bit Adam for PyTorch."""

__version__ = "0.1.0"
