"""fp32 parameters with fp32 state on the CPU, biases and norms mostly: torch's own fused kernel, all in one call.

It computes what `qsub.optim.step` defines; a compiled call for each would cost more than its arithmetic.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qsub.optim.sharding import local
from qsub.optim.state_dict import is_8bit, moment_keys
from qsub.optim.step import LEAST_ROOT

_LANES = 16  # fp32 elements of the widest vector


def takes(param: Tensor, grad: Tensor, group: dict[str, Any]) -> bool:
    """Whether torch's kernel does this parameter. It has no least divisor, which a tiny eps needs."""
    part = local(param)
    return (
        type(part) in (Tensor, torch.nn.Parameter)
        and part.device.type == "cpu"
        and part.dtype == grad.dtype == torch.float32
        and not is_8bit(param, group)
        and part.numel() > 0
        and float(group["eps"]) >= LEAST_ROOT
    )


def step(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step in place.

    Args:
        group: options of the parameter group.
        params: those of it that `takes` names.
        grads: their local gradients.
        states: their states, with fp32 moments.
        grad_scale: of a GradScaler, on the CPU; gradients are divided by it.
        found_inf: of a GradScaler: unless 0, nothing changes.
    """
    steps = [state["step"] for state in states]
    private: Any = torch  # the type checker doesn't know these
    private._foreach_add_(steps, 1.0 if found_inf is None else 1.0 - float(found_inf))
    parts = [local(param) for param in params]
    targets = [parts, *([state[key] for state in states] for key in moment_keys(group))]
    values = [[_whole_vectors(target) for target in column] for column in targets]
    if grad_scale is not None:  # the kernel would divide in place
        grads = private._foreach_div(grads, grad_scale)
    beta1, beta2 = group["betas"]
    function = private._fused_adamw_ if group["decoupled_weight_decay"] else private._fused_adam_
    function(
        values[0],
        [_whole_vectors(grad) for grad in grads],
        *values[1:],
        *([[]] if len(values) == 3 else []),
        steps,
        amsgrad=group["amsgrad"],
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=group["maximize"],
        found_inf=found_inf,
    )
    for target, value in zip(chain(*targets), chain(*values), strict=True):
        if value is not target:
            target.copy_(value[: target.numel()].view(target.shape))


def _whole_vectors(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous padded copy: the kernel walks through memory, vector by vector.

    It computes what is left over with other instructions, that differ in last bits; then a shard would not get the
    values that the whole parameter does.
    """
    if tensor.numel() % _LANES == 0:
        return tensor.contiguous()
    return torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % _LANES))
