"""8-bit Adam and AdamW with the surface of torch.optim."""

from qsub.optim.adam import Adam8bit, AdamW8bit

__all__ = ["Adam8bit", "AdamW8bit"]
