"""Hyper-parameters of a group on the device: one small tensor, refreshed in place and without a sync."""

import math
from typing import Any

import torch
from torch import Tensor

from qsub.optim import step as definition
from qsub.optim.step import N_HYPER


def upload(target: Tensor, values: Tensor) -> None:
    """Copy a CPU tensor to `target` without waiting for the device (pinned memory lives on until it was read)."""
    if target.device.type == "cuda":
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream of `device`."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_capture(group: dict[str, Any], device: torch.device, owner: str) -> None:
    """RuntimeError where a step of a group that isn't capturable is captured."""
    if not group["capturable"] and is_capturing(device):
        raise RuntimeError(
            f"step() of {owner} was captured in a CUDA graph with capturable=False. Pass capturable=True."
        )


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _fill(slot: Tensor, value: Tensor) -> None:
    slot.copy_(value.reshape(()), non_blocking=True)


class HyperTensor:
    """The (N_HYPER,) fp32 tensor that a step reads, and the int32 seed.

    What is formed from a beta (1 - beta2, log(beta2)) needs more than fp32 and is formed in double precision. Values
    that live on a device (a CUDA tensor as lr or beta, the scale of a GradScaler) are copied there each step, all
    others only when one changed.

    Args:
        device: where the step runs.
    """

    @torch.inference_mode(False)  # it outlives a step that is taken in that mode
    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(N_HYPER, dtype=torch.float32, device=device)
        self.seed = torch.zeros((), dtype=torch.int32, device=device)
        self._values: list[float | None] | None = None  # None: a value that is copied on the device
        self._changed: list[float] | None = None
        self._seed = 0

    def refresh(
        self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None, by_kernel: bool = False
    ) -> None:
        """Bring the tensors up to date with the options of `group` and the attributes that a GradScaler sets.

        Args:
            group: options of the parameter group.
            grad_scale: on the device, or None.
            found_inf: on the device, or None.
            by_kernel: the launch that follows may write the values, see `take_changed`.
        """
        lr, (beta1, beta2) = group["lr"], group["betas"]
        sign = -1.0 if group["maximize"] else 1.0
        values: list[float | None] = [None] * N_HYPER
        if not _on_device(lr):
            values[definition.LR] = float(lr)
        for number, beta in enumerate((beta1, beta2)):
            if not _on_device(beta):
                beta = float(beta)
                values[definition.BETA1 + number] = beta
                values[definition.ONE_MINUS_BETA1 + number] = 1.0 - beta
                values[definition.LOG_BETA1 + number] = math.log(beta) if beta > 0 else -math.inf
        values[definition.EPS] = float(group["eps"])
        values[definition.WEIGHT_DECAY] = float(group["weight_decay"])
        if grad_scale is None:
            values[definition.GRAD_FACTOR] = sign
        if found_inf is None:
            values[definition.SKIP] = 0.0
        self._write(values, by_kernel)

        if values[definition.LR] is None:
            _fill(self.tensor[definition.LR], lr)
        for number, beta in enumerate((beta1, beta2)):
            if values[definition.BETA1 + number] is None:
                wide = beta.double()
                _fill(self.tensor[definition.BETA1 + number], wide)
                _fill(self.tensor[definition.ONE_MINUS_BETA1 + number], 1.0 - wide)
                _fill(self.tensor[definition.LOG_BETA1 + number], wide.log())
        if grad_scale is not None:
            _fill(self.tensor[definition.GRAD_FACTOR], sign / grad_scale)
        if found_inf is not None:
            _fill(self.tensor[definition.SKIP], found_inf)
        if group["seed"] != self._seed:
            self._seed = group["seed"]
            self.seed.fill_((self._seed + (1 << 31)) % (1 << 32) - (1 << 31))

    def take_changed(self) -> list[float] | None:
        """The values that the caller's kernel is to write to `tensor`, or None if the tensor has its values.

        A kernel that is launched anyway takes them as arguments, which costs the device nothing; a copy would.
        """
        changed, self._changed = self._changed, None
        if changed is not None:
            self._values = list(changed)
        return changed

    def _write(self, values: list[float | None], by_kernel: bool) -> None:
        before, self._changed = self._values, None
        if values == before:
            return
        known = [value for value in values if value is not None]
        if by_kernel and len(known) == N_HYPER:
            self._changed = known
            return
        self._values = values
        if is_capturing(self.tensor.device):
            # A graph would copy from pinned memory again at each replay; a fill keeps its value by itself.
            for place, value in enumerate(values):
                if value is not None and (before is None or before[place] != value):
                    self.tensor[place].fill_(value)
        else:
            filled = [value or 0.0 for value in values]
            upload(self.tensor, torch.tensor(filled, dtype=torch.float32, device="cpu"))
