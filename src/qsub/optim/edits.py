"""State that a user edited: brought into the form that a step takes, before anything is stepped.

What is assigned to `optimizer.state[param]["exp_avg"]` may be any float tensor of the parameter's shape, and "step" any
number: 8-bit state is encoded from it, fp32 state takes it over. A state may move to a parameter of another shape with
its moments cut or extended alike.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qsub.optim.hyper import is_capturing
from qsub.optim.sharding import as_dtensor, check_flattened, local, rows_per_block
from qsub.optim.state_dict import (
    check_form,
    code_of,
    is_8bit,
    is_coded,
    is_started,
    moment_keys,
    moment_of,
    step_device,
)
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.dispatch import is_dtensor
from qsub.tensors.rowwise import Int8RowwiseTensor


def take_edits(
    all_states: Mapping[Tensor, dict[str, Any]], work: list[tuple[dict[str, Any], list[Tensor]]], owner: str
) -> None:
    """Bring the states of parameters that are about to be stepped into form. Those that are cost a look.

    Args:
        all_states: the optimizer's state.
        work: groups, with those of their parameters that have a gradient.
        owner: name of the optimizer, for error texts.

    Raises:
        ValueError: a state doesn't fit its parameter, or has values that can't be encoded. Nothing is changed then.
        NotImplementedError: a parameter is one that FSDP1 flattened, and would have 8-bit state.
        RuntimeError: there is something to encode while a CUDA graph is captured.
    """
    found = []
    for group, params in work:
        for param in group["params"]:
            check_flattened(param, group, owner)  # on a rank that holds nothing of it, without a gradient, too
        for param in params:
            state = all_states.get(param)
            if state and not has_form(param, group, state) and is_started(state):
                check_form(param, group, state)
                found.append((state, _in_form(param, group, state)))
    for state, values in found:
        state.update(values)


def has_form(param: Tensor, group: dict[str, Any], state: dict[str, Any] | None) -> bool:
    """Whether `state` is one of this parameter, in the form that a step takes."""
    if state is None or not _is_count(state.get("step")):
        return False
    form = _form(param, group)
    return all(_fits(group, key, state.get(key), *form) for key in moment_keys(group))


def _is_count(step: Any) -> bool:
    return isinstance(step, Tensor) and step.dtype == torch.float32 and step.dim() == 0


def _in_form(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """What must take the place of entries of a state."""
    where = f"state of a parameter of shape {tuple(param.shape)} on {param.device}"
    form = _form(param, group)
    loose = [key for key in moment_keys(group) if not _fits(group, key, state[key], *form)]
    counted = _is_count(state["step"])
    if counted and not loose:
        return {}
    if is_capturing(local(param).device):
        raise RuntimeError(f"{where} was edited: take one step outside of the capture of a CUDA graph first")
    values = {} if counted else {"step": _count(state["step"], where, step_device(param, group))}
    moments = {key: _whole(param, state[key]) for key in moment_keys(group)}
    rows = rows_per_block(param, group["block_size"])
    for key in loose:
        value = moment_of(moments, param, group, key, f"{where}, {key}", of_torch=True)
        if isinstance(value, Blockwise8bitTensor) and value.rows_per_block != rows:
            # A new tensor: what shares the memory of the old one must not be written to any more.
            value = value.grouped(rows, local(moments["exp_avg_sq"]) if key == "exp_avg" else None)
        values[key] = value
    return values


def _form(param: Tensor, group: dict[str, Any]) -> tuple[Tensor, bool, int]:
    """What all moments of a parameter have in common: its local part, 8 bits or not, rows that share a block."""
    eight = is_8bit(param, group)
    return local(param), eight, rows_per_block(param, group["block_size"]) if eight else 1


def _fits(group: dict[str, Any], key: str, moment: Any, part: Tensor, eight: bool, rows: int) -> bool:
    if not isinstance(moment, Tensor) or moment.shape != part.shape or moment.device != part.device:
        return False
    inner = isinstance(moment, (Blockwise8bitTensor, Int8RowwiseTensor)) or is_dtensor(moment)
    if not inner:
        plain = moment.dtype == torch.float32 and moment.is_contiguous() and not moment.requires_grad
        return plain and not (eight and is_coded(group, key))
    if not isinstance(moment, Blockwise8bitTensor) or not (eight and is_coded(group, key)):
        return False
    same = moment.code == code_of(group, key) and moment.block_size == group["block_size"]
    same = same and moment.rows_per_block == rows
    return same and moment.codes.is_contiguous() and moment.scale.is_contiguous()


def _whole(param: Tensor, moment: Any) -> Tensor:
    """A moment of the local part of a parameter as one of the parameter."""
    if isinstance(moment, Int8RowwiseTensor):  # zeros_like of an int8 weight
        moment = moment.dequantize(torch.float32)
    if is_dtensor(param) and not is_dtensor(moment) and moment.shape == local(param).shape:
        return as_dtensor(param, moment)
    return moment


def _count(count: Any, where: str, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(count, dtype=torch.float32).detach().reshape(()).to(device, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: step must be a number or a tensor of one, got {count!r}") from error
