"""Step one parameter with backend "eager" or "compile": bring it into blocks, step, write back what was a copy."""

from typing import Any

import torch
from torch import Tensor

from qsub.optim.compiled import run_step
from qsub.optim.hyper import HyperTensor
from qsub.optim.sharding import first_block, local, offsets
from qsub.optim.staging import Staged, pieces
from qsub.optim.state_dict import moment_keys
from qsub.optim.step import SKIP
from qsub.tensors import codes
from qsub.tensors.blocks import row_shape
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.rowwise import Int8RowwiseTensor
from qsub.tensors.state_codes import random_bits

WRITE_BACK = 0x51ED270B  # sets the random bits of int8 weights apart from those of the state


def step_parameter(
    backend: str, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], hyper: HyperTensor
) -> None:
    """One step in place.

    Args:
        backend: "eager" or "compile".
        group: options of its parameter group.
        param: any layout and float dtype; its local part is not empty.
        grad: of the same shape as that part, as the moments.
        state: of the parameter; its step is counted already.
        hyper: of the group, refreshed, on the device of the parameter.
    """
    moments = [state[key] for key in moment_keys(group)]
    coded = isinstance(moments[0], Blockwise8bitTensor)
    block_size, rows = (group["block_size"], moments[0].rows_per_block) if coded else (1, 1)
    part = local(param)
    value = part.dequantize(torch.float32) if isinstance(part, Int8RowwiseTensor) else _plain(part.detach())
    values = [moment.codes if isinstance(moment, Blockwise8bitTensor) else moment for moment in moments]
    scales = [moment.scale.flatten(0, 1) if isinstance(moment, Blockwise8bitTensor) else None for moment in moments]
    targets = [value, *values]
    flat = [target.contiguous().view(-1) for target in targets]
    flat_grad = _plain(grad).contiguous().view(-1)
    step = state["step"].to(part.device)
    stochastic = group["stochastic_round"] and value.dtype == torch.bfloat16
    scalars = (step, hyper.tensor, hyper.seed)
    first = first_block(param, block_size, rows)
    count = part.numel()
    for piece in pieces(*row_shape(part.shape, rows), count, block_size):
        here = slice(piece.block, piece.block + piece.blocks)
        cut = [x if piece.end - piece.start == count else x[piece.start : piece.end] for x in (*flat, flat_grad)]
        *staged, grad_staged = [Staged(x, piece.length, block_size) for x in cut]
        pairs: list[Any] = [
            entry.blocks if scale is None else (entry.blocks, scale[here])
            for entry, scale in zip(staged[1:], scales, strict=True)
        ]
        grad_blocks = grad_staged.blocks
        tensors = (staged[0].blocks, grad_blocks, *pairs, *([None] * (3 - len(pairs))))
        run_step(
            backend, tensors, scalars, first + piece.block, group["decoupled_weight_decay"], stochastic,
            group["state_code"],
        )  # fmt: skip
        for entry in staged:
            entry.finish()
    for target, values in zip(targets, flat, strict=True):
        if values.data_ptr() != target.data_ptr():  # it wasn't contiguous
            target.copy_(values.view(target.shape))
    if isinstance(part, Int8RowwiseTensor):
        write_back(part, value, step, hyper, offsets(param)[0])


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without a class that only overrides functions of torch: torch.compile would trace these, too."""
    kind: Any = type(tensor)
    base: Any = Tensor
    return tensor.as_subclass(base) if kind.__torch_dispatch__ is base.__torch_dispatch__ else tensor


def write_back(param: Tensor, value: Tensor, step: Tensor, hyper: HyperTensor, first_row: int = 0) -> None:
    """New value of a trainable int8 weight, through the row code with stochastic rounding.

    Args:
        param: the Int8RowwiseTensor.
        value: fp32, of its shape.
        step: 0-dim fp32, the number of this step.
        hyper: whose seed is drawn from, and whose SKIP leaves the weight as it is.
        first_row: rows of the whole weight before those of `param`.
    """
    weight: Any = param
    start = torch.full((), first_row, dtype=torch.int64, device=value.device)
    bits = random_bits(hyper.seed ^ WRITE_BACK, step.to(torch.int32), start, *value.shape)
    before = weight.int_data.clone(), weight.scale.clone()
    weight.requantize_(_storable(value, weight), noise=((bits >> 8) & 0xFFFFFF).float() * 2.0**-24)
    skipped = hyper.tensor[SKIP] != 0
    weight.int_data.copy_(torch.where(skipped, before[0], weight.int_data))
    weight.scale.copy_(torch.where(skipped, before[1], weight.scale))


def _storable(value: Tensor, weight: Int8RowwiseTensor) -> Tensor:
    """New value of an int8 weight as far as its row code holds it: one NaN or Inf would spoil the whole row.

    An element that is NaN keeps its old value; magnitudes over 65504 become that.
    """
    value = torch.where(value.isnan(), weight.dequantize(torch.float32), value)
    return value.clamp(-codes.FP16_MAX, codes.FP16_MAX)
