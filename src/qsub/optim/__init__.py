"""8-bit Adam and AdamW with the surface of torch.optim."""

from qsub.optim.adam import Adam8bit, AdamW8bit
from qsub.optim.groups import param_groups

__all__ = ["Adam8bit", "AdamW8bit", "param_groups"]
