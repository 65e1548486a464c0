"""Parameters that are DTensors: the part of one that this rank holds, its place in the whole, and its state as DTensor.

A step works on that part alone and calls no collective. State is kept as plain tensors of the part's shape; a state
dict shows it as DTensors with the placements of the parameter, which torch.distributed.checkpoint can re-shard.
"""

import copy
import math
import sys
from typing import Any

import torch
from torch import Tensor

from qsub.tensors.blocks import fitting_rows
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.dispatch import is_dtensor


def local(tensor: Tensor) -> Any:
    """The part of a DTensor that this rank holds, the same object each time; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    return _waited(tensor._local_tensor)  # type: ignore[attr-defined]  # to_local() makes a view of a parameter's


def _waited(part: Any) -> Any:
    """The tensor itself, where a collective may still be writing it."""
    return part if type(part) is Tensor or not hasattr(part, "wait") else part.wait()


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """The part of a gradient that belongs to the local part of its parameter.

    Gradients have the placements of their parameters, unless autograd left them to be summed up (a replicated
    parameter in a tensor parallel region, say): these are brought to them here, by the collective that a step of
    torch.optim would call.
    """
    if not is_dtensor(param):
        return grad
    there: Any = param
    here: Any = grad
    if not is_dtensor(grad):
        raise TypeError(f"the gradient of a DTensor must be one, too, got {type(grad).__name__}. Set it by backward().")
    if here.placements != there.placements:
        here = here.redistribute(there.device_mesh, there.placements)
    return _waited(here._local_tensor)


def offsets(param: Tensor) -> tuple[int, ...]:
    """Index of the first element of the local part in the whole parameter, one number a dimension."""
    if not is_dtensor(param):
        return (0,) * param.dim()
    whole: Any = param
    return tuple(whole.__create_chunk_list__()[0].offsets)  # as torch.distributed.checkpoint asks


def rows_per_block(param: Tensor, block_size: int) -> int:
    """How many narrow rows of a parameter share a block of its moments, on all ranks alike; 1 for others.

    Those of shards do where no block lies on two ranks: shards are slices of codes and scales then as well, and hold
    what the whole would. A block on two ranks would need a collective at each step; rows have one each instead.
    """
    rows = fitting_rows(local(param).shape, block_size)
    if rows == 1 or not is_dtensor(param):
        return rows
    whole: Any = param
    sharded = [dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate()]
    if not sharded:
        return rows
    # A strided shard (tensor parallel below fully_shard) is a class of its own.
    simple = len(sharded) == 1 and type(whole.placements[sharded[0]]).__name__ == "Shard"
    if not simple or whole.placements[sharded[0]].dim != 0:
        return 1
    return rows if -(-param.shape[0] // whole.device_mesh.size(sharded[0])) % rows == 0 else 1


def check_flattened(param: Tensor, group: dict[str, Any], owner: str) -> None:
    """NotImplementedError for a parameter of FSDP1, which cuts flattened parameters anywhere: its shards are no rows.

    fp32 state needs no rows, and works. The rule goes by an option that is the same on all ranks: sizes of shards are
    not, and a rank that goes on alone would wait for ever.
    """
    # What torch.distributed.fsdp marks a FlatParameter and the parameters in it with, seen in torch 2.11 to 2.13.
    if getattr(param, "_fsdp_flattened", False) and param.requires_grad and group["state_bits"] == 8:
        raise NotImplementedError(
            f"{owner} keeps 8-bit state by rows, and FullyShardedDataParallel (FSDP1) flattens parameters and "
            "cuts them anywhere. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2; in accelerate "
            "fsdp_version=2), or keep fp32 state with state_bits=32."
        )


def first_block(param: Tensor, block_size: int, rows: int = 1) -> int:
    """Number of blocks of the whole parameter before the local part, for the random bits.

    Parts that are whole rows of dim 0 draw the bits that the whole parameter would. The blocks of other parts (shards
    of a later dimension) are numbered as if the parts lay one after the other.

    Args:
        param: a parameter, DTensor or not.
        block_size: elements per block; 1 numbers the elements.
        rows: how many share a block, see `rows_per_block`.
    """
    if not is_dtensor(param):
        return 0
    start, part = offsets(param), local(param)
    if part.numel() == 0:
        return 0  # no rows, or not a rank of its mesh
    if rows > 1:
        return start[0] // rows
    if param.dim() < 2:
        return sum(start) // block_size
    row_blocks = -(-math.prod(part.shape[1:]) // block_size)
    column = sum(
        place * math.prod(param.shape[dim + 1 :]) for dim, place in enumerate(start) if dim > 0
    )  # in the flattened row
    return start[0] * row_blocks + -(-column // block_size) * param.shape[0]


def as_dtensor(param: Tensor, value: Tensor) -> Tensor:
    """A moment of the shape of the local part, as a DTensor placed as the parameter is; storage is shared."""
    whole: Any = param
    spec = copy.copy(whole._spec)
    stride = torch.empty(param.shape, device="meta").stride()
    spec.tensor_meta = spec.tensor_meta._replace(dtype=value.dtype, stride=stride)
    # Not from_local, which moves state that is offloaded to the CPU to the device of the mesh.
    return sys.modules["torch.distributed.tensor"].DTensor(value, spec, requires_grad=False)


def part_of(value: Tensor, param: Tensor) -> Any:
    """What a saved moment of the whole parameter's shape holds for the local part of `param`.

    Args:
        value: a DTensor placed as `param` is, or the whole moment as a plain tensor.
        param: the parameter, DTensor or not.

    Raises:
        ValueError: `value` is a DTensor that is placed otherwise.
    """
    if is_dtensor(value):
        saved: Any = value
        there: Any = param
        if not is_dtensor(param) or (saved.device_mesh, saved.placements) != (there.device_mesh, there.placements):
            placed = f"{there.placements} on {there.device_mesh}" if is_dtensor(param) else "not distributed"
            raise ValueError(
                f"it is placed as {saved.placements} on {saved.device_mesh}, its parameter is {placed}. Load it with "
                "torch.distributed.checkpoint, which re-shards, or load a full state dict."
            )
    elif is_dtensor(param):
        try:
            return _cut(value, param)
        except NotImplementedError:  # within blocks of an 8-bit moment
            return _cut(value.dequantize(), param)
    return local(value)


def _cut(value: Tensor, param: Tensor) -> Tensor:
    """The local part of a whole moment."""
    value = value.by_rows() if isinstance(value, Blockwise8bitTensor) else value  # a slice would do that in place
    for dim, (start, size) in enumerate(zip(offsets(param), local(param).shape, strict=True)):
        value = value if size == param.shape[dim] else value.narrow(dim, start, size)
    return value


def raise_together(error: Exception | None, params: list[Tensor]) -> None:
    """Raise `error`, and on the ranks that share a mesh with this one an error that tells of it.

    A rank that failed alone, on what only its part of the state holds, would leave the others waiting for it in their
    next collective. Where no parameter is a DTensor the ranks hold the same, and nothing is exchanged.

    Args:
        error: of this rank, or None.
        params: of the optimizer, on all of these ranks alike.
    """
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))  # type: ignore[attr-defined]
    failed = error is not None
    for mesh in meshes:
        for group in mesh.get_all_groups() if mesh.get_coordinate() is not None else ():
            flag = torch.tensor(float(failed), device=mesh.device_type)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
            failed = bool(flag)
    if error is not None:
        raise error
    if failed:
        raise ValueError(
            "another rank could not load its part of the state; its error tells why. The optimizer is left as it was."
        )
