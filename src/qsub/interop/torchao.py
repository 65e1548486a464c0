"""Checkpoints of torchao.optim.Adam8bit and AdamW8bit, both ways.

torchao keeps a moment as a tensor subclass, OptimState8bit: `codes`, uint8 of the parameter's shape, under `scale`, the
fp32 largest magnitude of each block in flat order, with the table of values `qmap`, `signed` or not. The block size is
256 unless the optimizer was made with another; a parameter whose size is no multiple of it has plain moments in its own
dtype. See `qsub.interop.adam_state` for what carries over as it is.

torchao is imported only to write its tensors. To read a file of theirs with `torch.load`, import torchao.optim first.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qsub.interop.adam_state import (
    check_our_state_dict,
    check_state_dict,
    from_flat,
    our_moments,
    their_group,
    to_flat,
)
from qsub.optim.state_dict import moment_keys
from qsub.tensors import Blockwise8bitTensor
from qsub.tensors.dynamic_codes import dynamic_tables

BLOCK_SIZE = 256  # torchao's default


def _is_8bit(value: Any) -> bool:
    return all(hasattr(value, part) for part in ("codes", "scale", "qmap", "signed"))


def _block_size(value: Any) -> int:
    return max(1, value.codes.numel() // max(1, value.scale.numel()))


def _read_moment(value: Any, key: str, index: Any) -> Tensor:
    name = f"{key} of parameter {index}"
    if not _is_8bit(value):
        if type(value) is Tensor and value.dtype.is_floating_point:
            return value.detach()
        kind = value.dtype if type(value) is Tensor else type(value).__name__
        raise ValueError(
            f"{name} must be an OptimState8bit of torchao or a plain float tensor, got {kind}. Call .full_tensor() on "
            "a DTensor first; 4-bit and fp8 state can't be read."
        )
    signed = key == "exp_avg"
    if bool(value.signed) != signed:
        raise ValueError(f"{name} must be {'signed' if signed else 'unsigned'}, got signed={value.signed}")
    return from_flat(value.codes, value.scale, value.qmap, signed, _block_size(value), name)


def _common_block_size(moments: list[Any]) -> int:
    """Block size of a group: that of its 8-bit moments, or torchao's default where ours can't be the same."""
    sizes = {_block_size(value) for value in moments if _is_8bit(value)}
    size = sizes.pop() if len(sizes) == 1 else BLOCK_SIZE
    return size if 16 <= size <= 4096 and not size & (size - 1) else BLOCK_SIZE


def optimizer_from_torchao(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of torchao.optim.Adam8bit or AdamW8bit as one of `qsub.optim`.

    Codes and scales carry over as they are in parameters of one row, or with rows that are a multiple of the block
    size. In the others the moments are decoded and encoded anew. Load it into the class of the same name: torchao's
    dict doesn't tell Adam from AdamW.

    Args:
        state_dict: of torchao's optimizer, without DTensors.

    Returns:
        A new dict for `load_state_dict`, with the options state_code="dynamic" and the block size of its groups; it
        shares tensors with `state_dict`.

    Raises:
        ValueError: the state is not Adam's in 8 bits, in another code than the dynamic one, or damaged.
    """
    check_state_dict(state_dict, "torchao's Adam8bit or AdamW8bit")
    state, groups = {}, []
    for group in state_dict["param_groups"]:
        keys = moment_keys({"amsgrad": group.get("amsgrad", False)})
        found = []
        for index in group["params"]:
            entry = state_dict["state"].get(index)
            if not entry:
                continue
            missing = [key for key in ("step", *keys) if key not in entry]
            if missing:
                raise ValueError(
                    f"state of parameter {index} lacks {missing}: not a state of torchao's Adam or AdamW; "
                    f"it has {sorted(entry)}"
                )
            found += [entry[key] for key in keys]
            moments = {key: _read_moment(entry[key], key, index) for key in keys}
            if len({moment.shape for moment in moments.values()}) > 1:
                raise ValueError(f"the moments of parameter {index} must have its shape, got different ones")
            state[index] = {"step": torch.tensor(float(entry["step"]), device="cpu"), **moments}
        options = {"maximize": False, "block_size": _common_block_size(found), "state_code": "dynamic"}
        groups.append({"amsgrad": False, **group, **options})
    return {"state": state, "param_groups": groups}


def optimizer_to_torchao(state_dict: Mapping[str, Any], block_size: int = BLOCK_SIZE) -> dict[str, Any]:
    """A state dict of `qsub.optim` as one that the class of the same name of torchao.optim loads and goes on from.

    State in the dynamic code with the same block size is written as it is, where blocks don't cross rows (see
    `optimizer_from_torchao`); other 8-bit state is encoded anew. A parameter whose size is no multiple of `block_size`
    gets plain fp32 moments, which torchao casts to the parameter's dtype. Options that torchao doesn't have (stochastic
    rounding by seed, say) are left out.

    Args:
        state_dict: of `Adam8bit` or `AdamW8bit`.
        block_size: what the optimizer that loads it was made with.

    Returns:
        A new dict of copies.

    Raises:
        ValueError: maximize=True, or this is no state dict of `qsub.optim`.
        ImportError: torchao is not installed.
    """
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError("optimizer_to_torchao makes tensors of torchao 0.12 or later: pip install torchao") from error
    check_our_state_dict(state_dict)
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for saved_group in state_dict["param_groups"]:
        group = their_group(saved_group)
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cpu")  # its step takes a tensor only
        groups.append(group)
        keys = moment_keys(group)
        for index in group["params"]:
            saved = state_dict["state"].get(index)
            if not saved:
                continue
            entry = state[index] = {"step": saved["step"].detach().float().cpu().clone()}
            for key, moment in zip(keys, our_moments(saved, index, keys), strict=True):
                if not isinstance(moment, Blockwise8bitTensor):
                    entry[key] = moment.clone()
                elif moment.numel() % block_size:
                    entry[key] = moment.dequantize(torch.float32)
                else:
                    signed = key == "exp_avg"
                    codes, scale = to_flat(moment, signed, block_size)
                    table = dynamic_tables(codes.device)[0 if signed else 1].clone()
                    entry[key] = OptimState8bit(codes, scale, table, signed)
    return {"state": state, "param_groups": groups}
