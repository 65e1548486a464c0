"""What makes Int8RowwiseTensor a weight that `fully_shard` can shard: codes and scales are gathered, never floats."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Parameter


class GatheredByRows:
    """The hooks that FSDP2 calls on the local part of a weight.

    FSDP2 cuts a weight into ranges of rows, all of one size but the last ones, which it pads to that size. The hook
    that is told the shape of the whole weight must return tensors of the padded shape of the local part, which a
    scale isn't; so this is the hook of one argument, and the local part knows the number of rows by itself.
    """

    # What a tensor knows besides its inner tensors, where torch.compile doesn't look. Views, copies and shards of a
    # weight keep the last three, and views share the last; views of whole ranges of rows and moves keep the first.
    shard_rows: int | None = None  # rows gathered from each rank; None for those that the tensor has
    gathered: bool = False  # by a collective, from all ranks: ranges of rows may be columns of the same rows
    trainable: bool = False  # made of a weight that requires grad, which a shard itself never does
    keeps_requires_grad: bool = False  # requires_grad is the user's choice, which quantize_(trainable=True) keeps
    _updates: list[int] | None = None  # one number, once it is asked for; saved with the weight

    @property
    def updates(self) -> list[int]:
        """One number: how often it was rounded stochastically. The list is that of the weight for its views, too."""
        if self._updates is None:  # a file of an earlier version sets fields without the constructor
            self._updates = [0]
        return self._updates

    @property
    def count(self) -> int:
        """How often the weight was rounded stochastically: part of its state, since the random bits depend on it."""
        return 0 if self._updates is None else self._updates[0]

    def count_as(self, source: Any) -> None:
        """Go on counting from where `source`, whose content this tensor has taken over, is."""
        if source.count != self.count:
            self.updates[0] = source.count

    def is_trained(self) -> bool:
        """Whether an update in place is one of training. A parameter says so by itself, and may have been frozen."""
        tensor: Any = self
        return tensor.requires_grad or (self.trainable and not isinstance(tensor, Parameter))

    def keep_shard(self, source: Any) -> Any:
        """Take over the number of rows that `source` gathers; returns self."""
        self.shard_rows = source.shard_rows
        return self

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, Tensor], None]:
        """What is gathered from this rank: int8 codes and fp16 scales, with rows of zeros up to the common number.

        Args:
            mesh: of the ranks that gather, unused.
        """
        weight: Any = self
        missing = (self.shard_rows or weight.shape[0]) - weight.shape[0]
        int_data, scale = weight.int_data.contiguous(), weight.scale
        return (F.pad(int_data, (0, 0, 0, missing)), F.pad(scale, (0, missing))) if missing else (int_data, scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """The whole weight, on the gathered memory; FSDP2 cuts off the rows of padding (as_strided).

        Args:
            outputs: (ranks * rows, in_features) int8 codes and (ranks * rows,) fp16 scales. On one rank FSDP2
                copies the first tensor alone, and the scales are this tensor's.
            metadata: None.
            param_dtype: the dtype to show, that of the mixed precision policy.
            out: the weight as returned by an earlier call, whose memory was freed and is allocated again.

        Returns:
            The weight and no further tensors to free; None if there is `out`.
        """
        weight: Any = self
        int_data = outputs[0]
        scale = outputs[1] if len(outputs) > 1 else weight.scale.to(int_data.device, copy=True)
        if out is None:
            return weight.like(int_data, scale, dtype=param_dtype, whole_rows=True), ()
        whole = getattr(out, "_local_tensor", out)  # a DTensor where the model is tensor parallel, too
        rows = whole.shape[0]
        for held, gathered in ((whole.int_data, int_data), (whole.scale, scale)):
            if held.data_ptr() != gathered.data_ptr():
                with _unsafe_preserve_version_counter(held):  # what autograd saved is gathered again
                    held.copy_(gathered[:rows])
        self.trainable = out.requires_grad
        return None
