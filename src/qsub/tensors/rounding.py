"""How much of an update of an int8 weight is left after it was rounded, and which way it is rounded.

An update that is small against the steps of the codes is lost when it is rounded to nearest: codes change where it is
half a step or more. Of normally distributed changes with a standard deviation of .39 steps nine tenths are kept, of .3
two thirds, of .2 a sixth (2 s phi(1 / 2s) / s**2 for s under .4). So where more than a tenth is lost a slightly smaller
update loses most, and that is what the warning is for.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

ENOUGH = 0.9  # of an update; less is warned of
_LEVELS = (0.01, 0.1, 0.5, ENOUGH)  # few, so that Python shows a text once for all layers of a model
_SKIPPED = ("qsub", "torch", "peft")  # packages whose frames the warning doesn't point to


@dataclass
class Updates:
    """The updates within `collected`.

    Attributes:
        stochastic: whether updates of weights that don't require grad are rounded stochastically.
        kept: for each weight, <rounded update, update>.
        total: for each weight, <update, update>.
    """

    stochastic: bool = False
    kept: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """How much of all updates is left: the length of the rounded update along the update, over its own."""
        total = math.fsum(self.total)
        return math.fsum(self.kept) / total if total else 1.0


_collected: ContextVar[Updates | None] = ContextVar("qsub_updates", default=None)


@contextlib.contextmanager
def collected(stochastic: bool) -> Iterator[Updates]:
    """Add up the updates that are made within, instead of warning of each."""
    updates = Updates(stochastic)
    token = _collected.set(updates)
    try:
        yield updates
    finally:
        _collected.reset(token)


def is_stochastic() -> bool:
    """Whether weights that don't require grad are rounded stochastically, too."""
    updates = _collected.get()
    return updates is not None and updates.stochastic


def can_measure(value: Tensor) -> bool:
    """Whether the elements can be looked at: not in a trace, on meta, or while a CUDA graph is captured."""
    if type(value) is not Tensor or value.device.type == "meta" or not value.numel():
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def measure(before: Tensor, value: Tensor, after: Tensor) -> None:
    """Compare what an update made of a weight with what it asked for; reads two numbers from the device.

    Args:
        before: the weight, fp32.
        value: the weight and the update, fp32, same shape.
        after: the weight that is stored, fp32.
    """
    update = value - before
    kept, total = torch.stack([((after - before) * update).sum(dtype=torch.float64), _square(update)]).tolist()
    if not (total > 0 and math.isfinite(total)):
        return
    updates = _collected.get()
    if updates is not None:
        updates.kept.append(kept)
        updates.total.append(total)
    elif kept < ENOUGH * total:
        _warn(kept / total)


def _square(update: Tensor) -> Tensor:
    return update.square().sum(dtype=torch.float64)


def _warn(share: float) -> None:
    level = next(level for level in _LEVELS if share < level)
    warnings.warn(
        f"an update in place of an Int8RowwiseTensor kept less than {level:.0%} of itself: it is small against the "
        "steps of the int8 codes, to the nearest of which it was rounded. To merge an adapter use "
        "qsub.interop.peft.merge_and_unload, or call qsub.dequantize_ first; keep averages of weights in float.",
        stacklevel=_depth(),
    )


def _depth() -> int:
    """stacklevel, counted from `_warn`, of the first frame that is of no package in the middle."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        frame, depth = frame.f_back, depth + 1
    return depth
