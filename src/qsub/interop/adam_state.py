"""State of 8-bit Adam as bitsandbytes and torchao keep it: blocks of moments that run flat over the parameter.

Codes and values are those of `qsub.tensors.dynamic_codes`. The blocks are ours too in a parameter of one row (1-D,
say), and where a row is a whole number of blocks or a block a whole number of rows. Then codes and scales carry over as
they are. In any other parameter the moment is decoded and encoded anew, within half a step of the code.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qsub.optim.state_dict import QSUB_OPTIONS
from qsub.tensors import Blockwise8bitTensor
from qsub.tensors.blocks import fitting_rows, row_shape, scale_shape
from qsub.tensors.dynamic_codes import dynamic_tables

# Options of a group that neither of them has.
_OURS = {*QSUB_OPTIONS, "maximize", "capturable", "decoupled_weight_decay", "foreach", "fused", "differentiable"}
_CODES = {True: "dynamic_signed", False: "dynamic_unsigned"}


def same_blocks(shape: torch.Size | tuple[int, ...], block_size: int) -> bool:
    """Whether flat blocks of a parameter of this shape are also blocks of its rows."""
    rows, length = row_shape(shape)
    return rows <= 1 or length == 0 or length % block_size == 0 or block_size % length == 0


def _recode(moment: Blockwise8bitTensor, shape: torch.Size | tuple[int, ...], block_size: int) -> Blockwise8bitTensor:
    value = moment.dequantize(torch.float32).reshape(shape)
    rows = fitting_rows(shape, block_size)
    return Blockwise8bitTensor.from_float(value, block_size, moment.code, rows_per_block=rows)


def check_part(value: Any, name: str, dtype: torch.dtype) -> Tensor:
    """`value` as a plain tensor, or ValueError unless it is one of `dtype`, contiguous."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = "nothing" if value is None else getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"{name} must be a tensor of {dtype}, got {got}")
    if not value.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {value.stride()} of shape {tuple(value.shape)}: whether its "
            "blocks follow memory or indices can't be told. Store it contiguous, in the order of the blocks."
        )
    return value.detach()


def from_flat(codes: Any, scale: Any, table: Any, signed: bool, block_size: int, name: str) -> Blockwise8bitTensor:
    """A moment in flat blocks as one in blocks of rows.

    Args:
        codes: uint8, of the parameter's shape.
        scale: fp32 (ceil(numel / block_size),), the largest magnitude of each block.
        table: fp32 (256,), the value of each code, which must be the dynamic tree's.
        signed: whether this is exp_avg.
        block_size: elements per block.
        name: of the moment, for errors.

    Returns:
        The moment, which shares the memory of `codes` and `scale` where these carry over.

    Raises:
        ValueError: a part has another dtype or shape, another table is used, or a scale is negative or not finite.
    """
    codes = check_part(codes, f"{name}, codes,", torch.uint8)
    scale = check_part(scale, f"{name}, scale,", torch.float32)
    table = check_part(table, f"{name}, table of values,", torch.float32).cpu()
    blocks = -(-codes.numel() // block_size)
    if tuple(scale.shape) != (blocks,):
        raise ValueError(
            f"{name}: {codes.numel()} codes in blocks of {block_size} have {blocks} scales, got {tuple(scale.shape)}"
        )
    expected = dynamic_tables("cpu")[0 if signed else 1]
    # Up to the last bits, which depend on how torch.linspace rounds on a machine.
    if table.shape != expected.shape or not torch.allclose(table, expected, rtol=1e-6, atol=0.0):
        raise ValueError(
            f"{name}: its table of values is not the {'signed' if signed else 'unsigned'} dynamic map of 256 values. "
            "Only state in that code can be read: load the parameters alone, and let the optimizer start anew."
        )
    if scale.device.type != "meta" and not bool(((scale >= 0) & (scale <= 1e38)).all()):
        raise ValueError(f"{name}: a scale is negative, not finite or over 1e38; load that of a healthy run")
    code = _CODES[signed]
    if same_blocks(codes.shape, block_size):
        rows = fitting_rows(codes.shape, block_size)
        scale = scale.view(scale_shape(codes.shape, block_size, code, rows))
        return Blockwise8bitTensor(codes, scale, block_size, code, torch.float32, rows)  # type: ignore[call-overload]
    flat = codes.reshape(-1)
    moment = Blockwise8bitTensor(flat, scale.view(scale_shape(flat.shape, block_size, code)), block_size, code)
    return _recode(moment, codes.shape, block_size)


def to_flat(moment: Blockwise8bitTensor, signed: bool, block_size: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment in flat blocks: copies, uint8 of its shape and fp32 (blocks,).

    Args:
        moment: in any code and block size; other than the dynamic code in `block_size` is encoded anew.
        signed: whether this is exp_avg.
        block_size: elements per flat block.
    """
    code = _CODES[signed]
    if (moment.code, moment.block_size) == (code, block_size) and same_blocks(moment.shape, block_size):
        copy = moment.grouped(fitting_rows(moment.shape, block_size))
        return copy.codes, copy.scale.flatten()
    value = moment.dequantize(torch.float32).reshape(math.prod(moment.shape))
    coded = Blockwise8bitTensor.from_float(value, block_size, code)
    return coded.codes.reshape(moment.shape), coded.scale.flatten()


def check_state_dict(state_dict: Any, owner: str) -> None:
    """ValueError unless this is a state dict of an optimizer."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"expected the state dict of {owner}, with 'state' and 'param_groups', got {got}")


def check_our_state_dict(state_dict: Any) -> None:
    """ValueError unless this is a state dict of `qsub.optim` whose options others have too."""
    check_state_dict(state_dict, "qsub.optim")
    for number, group in enumerate(state_dict["param_groups"]):
        missing = [key for key in ("betas", "amsgrad", "maximize", "decoupled_weight_decay") if key not in group]
        if missing:
            raise ValueError(f"group {number} lacks {missing}: not a state dict of qsub.optim; it has {sorted(group)}")
        if group["maximize"]:
            raise ValueError(
                f"group {number} has maximize=True, which the other library's 8-bit Adam doesn't have. Set it to False "
                "in the dict, and negate the loss there."
            )


def their_group(group: dict[str, Any]) -> dict[str, Any]:
    """A group of `qsub.optim` without the options that only it has, its numbers as floats."""
    numbers = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
    betas = tuple(float(beta) for beta in group["betas"])
    return {**{key: value for key, value in group.items() if key not in _OURS}, **numbers, "betas": betas}


def our_moments(entry: dict[str, Any], index: Any, keys: list[str]) -> list[Tensor]:
    """The moments of a parameter in a qsub state dict, as they are, or ValueError where one is missing."""
    missing = [key for key in ("step", *keys) if key not in entry]
    if missing:
        raise ValueError(f"state of parameter {index} lacks {missing}: not a state of qsub.optim; it has {list(entry)}")
    return [entry[key].detach() for key in keys]
