"""Optimizer state: its form for each parameter, loading, and exchange with torch.optim."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsub.optim.hyper import is_capturing
from qsub.optim.options import QSUB_OPTIONS, check_group
from qsub.optim.sharding import as_dtensor, local, part_of, raise_together, rows_per_block
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.dispatch import is_dtensor

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_CODES = {  # of exp_avg and of the second moments, by `state_code`
    "block_float8": ("float8_signed", "float8_unsigned"),
    "dynamic": ("dynamic_signed", "dynamic_unsigned"),
}
# What a state dict decides of the form of state and parameters, and what it is where nobody asked for another.
_FORM = {
    "block_size": 64,
    "min_8bit_size": 4096,
    "state_bits": 8,
    "state_code": "block_float8",
    "stochastic_round": False,
}
# How a step is carried out, not what it computes: never taken over from another optimizer's state dict.
_IMPLEMENTATION = ("foreach", "fused", "differentiable")


def moment_keys(group: dict[str, Any]) -> list[str]:
    """Keys of the moments that a parameter of this group has."""
    return list(_MOMENTS if group["amsgrad"] else _MOMENTS[:2])


def is_8bit(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether the moments of `param` are kept in 8 bits: by the size of the whole parameter, on all ranks alike.

    The shards of a DTensor of one dimension are no whole rows; it is small, a bias or a norm, and its state fp32.
    """
    if is_dtensor(param) and param.dim() < 2:
        return False
    return group["state_bits"] == 8 and param.numel() >= max(1, group["min_8bit_size"])


def code_of(group: dict[str, Any], key: str) -> str:
    """Name of the code of the moment `key`, as Blockwise8bitTensor has it."""
    return _CODES[group["state_code"]][key != "exp_avg"]


def step_device(param: Tensor, group: dict[str, Any]) -> torch.device:
    """Where the step count of `param` is: on a GPU always, so that a step a GradScaler skips needs no sync."""
    device = local(param).device
    return device if group["capturable"] or device.type == "cuda" else torch.device("cpu")


def zero_moment(param: Tensor, group: dict[str, Any], key: str) -> Tensor:
    """The moment of a parameter, of what this rank holds of it, before its first step."""
    part = local(param)
    if is_8bit(param, group) and is_coded(group, key):
        size, rows = group["block_size"], rows_per_block(param, group["block_size"])
        return Blockwise8bitTensor.zeros(part.shape, size, code_of(group, key), part.device, rows)
    return torch.zeros(part.shape, dtype=torch.float32, device=part.device)


def init(state: dict[str, Any], group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """The state of a parameter, made if there was no step yet.

    Raises:
        RuntimeError: it isn't there, and a CUDA graph is being captured.
    """
    if not is_started(state):
        if is_capturing(local(param).device):
            raise RuntimeError(
                "state can't be made while a CUDA graph is captured (each replay would reset it): take one step "
                "outside of the capture first"
            )
        state["step"] = torch.zeros((), dtype=torch.float32, device=step_device(param, group))
        for key in moment_keys(group):
            state[key] = zero_moment(param, group, key)
    return state


def is_coded(group: dict[str, Any], key: str) -> bool:
    """Whether the moment `key` has 8 bits where the state of a parameter has.

    With amsgrad exp_avg_sq is fp32 in the default code, which rounds it stochastically: the maximum would keep the
    upward errors of all steps (docs/optimizers.md).
    """
    return key != "exp_avg_sq" or not group["amsgrad"] or group["state_code"] != "block_float8"


def is_started(state: dict[str, Any] | None) -> bool:
    """Whether a step has made this state. Notes of a wrapper (SAM, Lookahead) may be in it before."""
    return bool(state) and any(key in state for key in ("step", *_MOMENTS))


def check_form(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    """ValueError where `state` doesn't fit its parameter, or the options of its group, any more."""
    where = f"state of a parameter of shape {tuple(param.shape)} on {param.device}"
    missing = [key for key in ("step", *moment_keys(group)) if key not in state]
    if missing == ["max_exp_avg_sq"]:
        raise ValueError(
            f"{where} lacks {missing}, its group asks for amsgrad={group['amsgrad']}. "
            "Set amsgrad before the first step."
        )
    if missing:
        raise ValueError(
            f"{where} lacks {missing}. Assign what is missing, or remove the state (optimizer.state.pop(param)) to "
            "start anew."
        )
    for key in moment_keys(group):
        _check_moment(param, group, key, state[key], where)


def _check_moment(param: Tensor, group: dict[str, Any], key: str, moment: Any, where: str) -> None:
    if not isinstance(moment, Tensor) or not moment.dtype.is_floating_point:
        kind = moment.dtype if isinstance(moment, Tensor) else type(moment).__name__
        raise ValueError(
            f"{where}: {key} must be a float tensor or a Blockwise8bitTensor, got {kind}. Assign one of that shape."
        )
    if moment.shape not in (local(param).shape, param.shape):
        raise ValueError(
            f"{where} has shape {tuple(moment.shape)}: the parameter was changed, or {key} was. Edit both alike (rows "
            "of state are indexed and concatenated as those of a tensor), remove the state "
            "(optimizer.state.pop(param)) to start anew, or make a new optimizer."
        )
    if not isinstance(moment, Blockwise8bitTensor) or not (is_8bit(param, group) and is_coded(group, key)):
        return
    if moment.block_size != group["block_size"]:
        raise ValueError(
            f"{where} has blocks of {moment.block_size}, its group asks for block_size={group['block_size']}. "
            "Load the state with load_state_dict to encode it anew."
        )
    if moment.code != code_of(group, key):
        raise ValueError(
            f"{where} is coded as {moment.code!r}, its group asks for state_code={group['state_code']!r}. "
            "Load the state with load_state_dict to encode it anew."
        )


def moment_of(
    saved: dict[str, Any], param: Tensor, group: dict[str, Any], key: str, where: str, of_torch: bool
) -> Tensor:
    """A copy of a saved moment in the form that `group` asks for.

    Args:
        saved: all moments of the parameter.
        param: the parameter, DTensor or not.
        group: options of its group.
        key: of the moment.
        where: for error texts.
        of_torch: its floats are those of an optimizer, the two moments of one step.

    Raises:
        ValueError: it is no float tensor of the parameter's shape, or has values that can't be encoded.
    """
    value = saved[key]
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where}: expected a float tensor or a Blockwise8bitTensor, got {kind}")
    if hasattr(local(value), "qmap"):  # torchao's class, which has next to no operators
        raise ValueError(
            f"{where}: a {type(local(value)).__name__} of torchao. Read the state dict with "
            "qsub.interop.torchao.optimizer_from_torchao first."
        )
    if value.shape != param.shape:
        raise ValueError(f"{where}: shape {tuple(value.shape)} doesn't match its parameter's {tuple(param.shape)}")
    target = zero_moment(param, group, key)
    second = saved["exp_avg_sq"]
    try:
        value = part_of(value, param)
        if isinstance(target, Blockwise8bitTensor) and not target.same_layout(value):
            # A float of qsub's own may come from a broadcast of 8-bit state, whose sender encodes without `second`.
            use = key == "exp_avg" and second.shape == param.shape and (of_torch or isinstance(value, type(target)))
            second = _plain(part_of(second, param)) if use else None
            rows = target.rows_per_block
            value = Blockwise8bitTensor.from_float(_plain(value), target.block_size, target.code, second, rows)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return target.copy_(value)


def _plain(value: Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, Blockwise8bitTensor) else value


def _param_state(
    saved: dict[str, Any], param: Tensor, group: dict[str, Any], index: Any, of_torch: bool
) -> dict[str, Any]:
    if not saved:
        return {}
    needed = ["step", *moment_keys(group)]
    missing = [key for key in needed if key not in saved]
    if missing:
        bitsandbytes = {"state1", "__bnb_optimizer_quant_state__"} & set(saved)
        reader = ". Read it with qsub.interop.bitsandbytes.optimizer_from_bitsandbytes first" if bitsandbytes else ""
        raise ValueError(
            f"state of parameter {index} lacks {missing}: not a state of Adam or AdamW; it has {list(saved)}{reader}"
        )
    device = step_device(param, group)
    state = copy.deepcopy({key: value for key, value in saved.items() if key not in (*needed, "max_exp_avg_sq")})
    state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32).reshape(()).to(device, copy=True)
    for key in moment_keys(group):
        state[key] = moment_of(saved, param, group, key, f"state of parameter {index}, {key}", of_torch)
    return state


def _of_torch(group: dict[str, Any]) -> bool:
    """Whether a saved group is one of torch.optim."""
    return any(key not in group for key in QSUB_OPTIONS)


def _merge_group(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """A saved group with the options that it lacks, or that are not its to decide, from the current one."""
    # NAdam, RAdam and Adamax of torch have betas, too, but not amsgrad, which Adam of other packages may lack.
    needed = ("betas", "eps", "amsgrad") if "foreach" in saved else ("betas", "eps")
    lacking = [key for key in needed if key not in saved]
    if lacking:
        raise ValueError(
            f"a parameter group of the state dict lacks {lacking}: it is not one of Adam or AdamW; it has "
            f"{sorted(map(str, saved.keys() - {'params'}))}. Load it into the optimizer that it is of."
        )
    merged = {**{key: value for key, value in current.items() if key != "params"}, **saved}
    merged["decoupled_weight_decay"] = current["decoupled_weight_decay"]
    if _of_torch(saved):
        merged.update({key: current[key] for key in _IMPLEMENTATION})
    check_group({**merged, "params": current["params"]})
    return merged


def _warn_of_form(merged: list[dict[str, Any]], groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Tell which options of those that were asked for give way to the ones of a state dict.

    Those that are what they are by default, or what the last load made them (`before`), were not asked for: to be
    restored is what they are in a state dict for.
    """
    for index, (group, current) in enumerate(zip(merged, groups, strict=True)):
        known = before[index] if index < len(before) else {}
        lost = [
            key for key, default in _FORM.items() if current[key] not in (default, group[key], known.get(key, default))
        ]
        if lost:
            asked = ", ".join(f"{key}={current[key]!r}" for key in lost)
            restored = ", ".join(f"{key}={group[key]!r}" for key in lost)
            warnings.warn(
                f"parameter group {index} asks for {asked}; the state dict has {restored}, which is restored, as "
                "torch.optim does with all options. To keep what was asked for, set it in param_groups of the state "
                "dict before it is loaded.",
                stacklevel=9,  # above load_state_dict
            )


def shown(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of `optimizer` with the moments of parameters that are DTensors as such."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(map(is_dtensor, params)):
        return state_dict  # which a hook may have made anything of
    for index, entry in state_dict["state"].items():
        if isinstance(index, int) and is_dtensor(params[index]):
            state_dict["state"][index] = {
                key: as_dtensor(params[index], value) if key in _MOMENTS else value for key, value in entry.items()
            }
    return state_dict


def load(optimizer: Any, state_dict: dict[str, Any], load_groups: Callable[[dict[str, Any]], None]) -> None:
    """Load `state_dict`: the groups through torch.optim, the state here.

    torch.optim would cast each moment to the dtype of its parameter, and share memory with the saved one.
    """
    new_state: dict[Any, dict[str, Any]] = {}

    def prepare(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        prepared, failure = saved, None
        try:
            prepared = convert(saved)
        except Exception as error:
            failure = error
        raise_together(failure, [param for group in optimizer.param_groups for param in group["params"]])
        return prepared

    def convert(saved: dict[str, Any]) -> dict[str, Any]:
        groups = optimizer.param_groups
        if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in groups]:
            return saved  # torch.optim raises, with its own text
        merged = [_merge_group(s, g) for s, g in zip(saved["param_groups"], groups, strict=True)]
        _warn_of_form(merged, groups, optimizer._restored_forms)
        known = set()
        for group, old, current in zip(merged, saved["param_groups"], groups, strict=True):
            for index, param in zip(group["params"], current["params"], strict=True):
                known.add(index)
                state = _param_state(saved["state"].get(index, {}), param, group, index, _of_torch(old))
                if state:
                    new_state[param] = state
        others = {key: value for key, value in saved["state"].items() if key not in known}
        return {**saved, "param_groups": merged, "state": others}

    def install(_: Any) -> None:
        optimizer.state.update(new_state)
        optimizer._restored_forms = [{key: group[key] for key in _FORM} for group in optimizer.param_groups]

    # The last of the hooks before, so that it sees what others made of the dict; the first of those after.
    before = optimizer.register_load_state_dict_pre_hook(prepare)
    after = optimizer.register_load_state_dict_post_hook(install, prepend=True)
    try:
        load_groups(state_dict)
    finally:
        before.remove()
        after.remove()


def _copy_as_float(value: Tensor) -> Tensor:
    if is_dtensor(value):
        return as_dtensor(value, _copy_as_float(local(value)))
    return value.dequantize() if isinstance(value, Blockwise8bitTensor) else value.clone()


def to_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A qsub state dict as one of torch.optim.Adam(W): fp32 moments, and only the options that it knows."""
    capturable = {index: group["capturable"] for group in state_dict["param_groups"] for index in group["params"]}
    state = {
        index: {key: _copy_as_float(value) for key, value in entry.items() if isinstance(value, Tensor)}
        for index, entry in state_dict["state"].items()
    }
    for index, entry in state.items():
        if not capturable[index]:
            entry["step"] = entry["step"].cpu()
    groups = [
        {key: value for key, value in group.items() if key not in QSUB_OPTIONS} for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}
