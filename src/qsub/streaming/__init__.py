"""Checkpoints on disk, converted a few rows at a time: neither the float model nor the int8 one is ever in memory."""
