"""Checkpoints of bitsandbytes: 8-bit layers and 8-bit Adam, both ways.

Of a Linear8bitLt it stores three entries: `weight` int8 (out, in), `SCB` fp32 (out,), the largest magnitude of each
row, and `weight_format`, 0 for rows. The value is weight * SCB / 127, as it is here, so codes carry over as they are.
SCB is the maximum of fp16 weights, which the fp16 scale holds exactly; an SCB that is no fp16 number is rounded, by
2**-11 of it at most (a sixteenth of a code step at the largest code), and the codes stay the nearest to the values.

Of an optimizer's parameter it stores the two moments as `state1` and `state2`, uint8 codes of the parameter's shape,
under `absmax1` and `absmax2`, the fp32 largest magnitude of each block of 256 elements in flat order, with the tables
of values `qmap1` and `qmap2`; of a small parameter `state1` and `state2` in fp32 alone. See `qsub.interop.adam_state`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qsub.interop.adam_state import (
    check_our_state_dict,
    check_part,
    check_state_dict,
    from_flat,
    our_moments,
    their_group,
    to_flat,
)
from qsub.tensors import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.tensors.codes import FP16_MAX
from qsub.tensors.dynamic_codes import dynamic_tables

# ---- Layers ----

_SUFFIXES = ("SCB", "weight_format")


def _read_layer(prefix: str, entries: Mapping[str, Any], dtype: torch.dtype) -> Int8RowwiseTensor:
    weight, scb = entries.get(f"{prefix}weight"), entries[f"{prefix}SCB"]
    if not isinstance(weight, Tensor) or weight.dtype != torch.int8:
        got = "nothing" if weight is None else getattr(weight, "dtype", type(weight).__name__)
        raise ValueError(f"{prefix}SCB comes with an int8 {prefix}weight in a bitsandbytes checkpoint, got {got}")
    layout = entries.get(f"{prefix}weight_format", 0)
    if int(layout) != 0:
        raise ValueError(
            f"{prefix}weight_format is {int(layout)}: only rows (0) are supported. Save the checkpoint again with "
            "bitsandbytes 0.45 or later, which writes rows."
        )
    if weight.dim() != 2 or tuple(scb.shape) != (weight.shape[0],):
        raise ValueError(
            f"{prefix}weight and {prefix}SCB must be (out, in) and (out,), "
            f"got {tuple(weight.shape)} and {tuple(scb.shape)}"
        )
    if scb.device.type != "meta" and not bool(((scb >= 0) & (scb <= FP16_MAX)).all()):
        raise ValueError(f"{prefix}SCB has a value that is negative, not finite or over {FP16_MAX:.0f}")
    codes = weight.data.as_subclass(Tensor)
    return Int8RowwiseTensor(codes, scb.to(torch.float16), dtype)  # type: ignore[call-overload]


def weights_from_bitsandbytes(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """A state dict of bitsandbytes' 8-bit layers as one that a qsub model loads.

    Args:
        state_dict: as saved by bitsandbytes; other entries are passed on. From a file: `qsub.load_file(path)` or
            `torch.load(path)`.
        dtype: float dtype that the weights show.

    Returns:
        A new dict, in which each `weight` with an `SCB` is an Int8RowwiseTensor that shares the int8 data, and `SCB`
        and `weight_format` are gone. Load it with `model.load_state_dict(result, assign=True)`.

    Raises:
        ValueError: entries are missing or don't fit; they are named.
    """
    layers = {key.removesuffix("SCB") for key in state_dict if key == "SCB" or key.endswith(".SCB")}
    result = {}
    for key, value in state_dict.items():
        prefix = next(
            (p for p in (key.removesuffix(s) for s in (*_SUFFIXES, "weight")) if p != key and p in layers), None
        )
        if prefix is None:
            result[key] = value
        elif key == f"{prefix}weight":
            result[key] = _read_layer(prefix, state_dict, dtype)
        elif f"{prefix}weight" not in state_dict:
            _read_layer(prefix, state_dict, dtype)  # raises, with the right text
    return result


def weights_to_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of a qsub model as one that bitsandbytes' 8-bit layers load.

    Args:
        state_dict: of a model with Int8RowwiseTensors; other entries are passed on.

    Returns:
        A new dict of plain tensors, with `SCB` and `weight_format` beside each int8 weight. The layers of the model
        that loads it must be quantized already (bitsandbytes asks for `.cuda()` or `.to(device)` before).

    Raises:
        ValueError: an Int8RowwiseTensor is not the weight of a layer, or is transposed.
    """
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(value, Int8RowwiseTensor):
            result[key] = value
            continue
        prefix = key.removesuffix("weight")
        if prefix == key or value.scale_dim != -2:
            raise ValueError(f"{key!r}: bitsandbytes has int8 only for the weight of a Linear, (out, in)")
        result[key] = value.int_data
        result[f"{prefix}SCB"] = value.scale.to(torch.float32)
        result[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8, device="cpu")
    return result


# ---- Optimizers ----

BLOCK_SIZE = 256  # of every 8-bit optimizer of bitsandbytes
_WRAPPED = "__bnb_optimizer_quant_state__"  # holds the tensors of a state since bitsandbytes 0.49, for FSDP
_MOMENTS = ("exp_avg", "exp_avg_sq")
_THEIR_OPTIONS = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # AdEMAMix's, in the groups of Adam too


def _read_moment(entry: dict[str, Any], number: int, name: str) -> Tensor:
    codes = entry[f"state{number}"]
    if isinstance(codes, Tensor) and codes.dtype == torch.float32:
        return check_part(codes, name, torch.float32)
    if f"absmax{number}" not in entry:
        raise ValueError(f"{name}: no absmax{number}, which blockwise 8-bit state has; it has {sorted(entry)}")
    table = entry.get(f"qmap{number}")
    return from_flat(codes, entry[f"absmax{number}"], table, number == 1, BLOCK_SIZE, name)


def optimizer_from_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of bitsandbytes' Adam8bit, AdamW8bit or their 32-bit and paged kin as one of `qsub.optim`.

    Codes and scales carry over as they are where blocks of 256 don't cross rows: in parameters of one row, or with rows
    that are a multiple of 256. In the others the moments are decoded and encoded anew. bitsandbytes always decouples
    weight decay: `qsub.optim.AdamW8bit` is what goes on alike.

    Args:
        state_dict: as saved by bitsandbytes, with its tensors wrapped (0.49 and later) or not.

    Returns:
        A new dict for `load_state_dict`, with the options state_code="dynamic" and block_size=256; it shares tensors
        with `state_dict`. Parameters of fewer than `min_8bit_size` elements take fp32 state, as there.

    Raises:
        ValueError: the state is not Adam's, not blockwise, in another code than the dynamic one, or damaged.
    """
    check_state_dict(state_dict, "bitsandbytes' 8-bit Adam or AdamW")
    state: dict[Any, dict[str, Any]] = {}
    for index, saved in state_dict["state"].items():
        if not isinstance(saved, dict):
            raise ValueError(f"state of parameter {index} must be a dict, got {type(saved).__name__}")
        entry = {**{key: value for key, value in saved.items() if key != _WRAPPED}, **saved.get(_WRAPPED, {})}
        missing = [key for key in ("step", "state1", "state2") if key not in entry]
        if missing:
            raise ValueError(
                f"state of parameter {index} lacks {missing}: not a state of bitsandbytes' Adam or AdamW; "
                f"it has {sorted(entry)}"
            )
        first, second = (_read_moment(entry, n, f"state{n} of parameter {index}") for n in (1, 2))
        if first.shape != second.shape:
            shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
            raise ValueError(f"state1 and state2 of parameter {index} must have its shape, got {shapes}")
        state[index] = {
            "step": torch.tensor(float(entry["step"]), device="cpu"),
            "exp_avg": first,
            "exp_avg_sq": second,
        }
    groups = []
    for group in state_dict["param_groups"]:
        if len(group.get("betas", ())) != 2:
            raise ValueError(f"a group of bitsandbytes' Adam has two betas, got {group.get('betas')!r}")
        kept = {key: value for key, value in group.items() if key not in _THEIR_OPTIONS}
        groups.append({**kept, "amsgrad": False, "maximize": False, "block_size": BLOCK_SIZE, "state_code": "dynamic"})
    return {"state": state, "param_groups": groups}


def _write_group(group: dict[str, Any], number: int) -> dict[str, Any]:
    if group["amsgrad"]:
        raise ValueError(
            f"group {number} has amsgrad=True, which bitsandbytes' 8-bit Adam doesn't have. Set it to False in the "
            "dict to go on without."
        )
    if float(group["weight_decay"]) and not group["decoupled_weight_decay"]:
        raise ValueError(
            f"group {number} has weight_decay={group['weight_decay']} added to the gradient, as Adam does: "
            "bitsandbytes only has AdamW's. Set weight_decay=0 or use AdamW8bit."
        )
    return {**{key: value for key, value in their_group(group).items() if key != "amsgrad"}, **_THEIR_OPTIONS}


def optimizer_to_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of `qsub.optim.AdamW8bit` as one that bitsandbytes' AdamW8bit loads and goes on from.

    State in the dynamic code with block_size=256 is written as it is, where blocks don't cross rows (see
    `optimizer_from_bitsandbytes`); other 8-bit state is encoded anew. fp32 state stays fp32. Options that bitsandbytes
    doesn't have (stochastic rounding, say) are left out.

    Args:
        state_dict: of `Adam8bit` or `AdamW8bit`.

    Returns:
        A new dict of copies, not wrapped, so that every bitsandbytes loads it.

    Raises:
        ValueError: it can't go on alike there (amsgrad, maximize, weight decay that is not decoupled), or this is no
            state dict of `qsub.optim`.
    """
    check_our_state_dict(state_dict)
    groups = [_write_group(group, number) for number, group in enumerate(state_dict["param_groups"])]
    state: dict[Any, dict[str, Any]] = {}
    for index, saved in state_dict["state"].items():
        moments = our_moments(saved, index, list(_MOMENTS))
        entry = state[index] = {"step": int(saved["step"])}
        for number, moment in enumerate(moments, 1):
            if isinstance(moment, Blockwise8bitTensor):
                codes, absmax = to_flat(moment, number == 1, BLOCK_SIZE)
                table = dynamic_tables(codes.device)[number - 1].clone()
                entry |= {f"state{number}": codes, f"absmax{number}": absmax, f"qmap{number}": table}
            else:
                entry[f"state{number}"] = moment.clone()
    return {"state": state, "param_groups": groups}
