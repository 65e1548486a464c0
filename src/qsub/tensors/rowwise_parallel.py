"""Int8RowwiseTensor as the local part of a DTensor: tensor parallel.

A shard of rows has these rows and their scales. A shard of columns has the scales of the whole rows, so that products
with the shards sum to the product with the weight, and shards put together again are the weight bit for bit.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qsub.tensors import codes as math8
from qsub.tensors.dispatch import is_dtensor
from qsub.tensors.rowwise import Int8RowwiseTensor


def join_columns(pieces: list[Any]) -> Int8RowwiseTensor:
    """Columns of one weight, side by side: what ranks that hold columns of it have gathered.

    Pieces that an optimizer has updated have scales of their own. The largest scale of a row becomes that of the
    whole row, and codes of smaller scales are rounded to it, to nearest; equal scales leave all codes as they are.

    Args:
        pieces: matrices with the same number of rows.
    """
    scale = torch.stack([piece.scale for piece in pieces]).amax(0)  # (rows,), NaN where a piece has one
    divisor = torch.where(scale == 0, 1.0, scale.float()).unsqueeze(1)
    int_data = torch.empty(
        (scale.shape[0], sum(piece.shape[1] for piece in pieces)), dtype=torch.int8, device=scale.device
    )
    start = 0
    for piece in pieces:
        ratio = piece.scale.float().unsqueeze(1) / divisor
        int_data[:, start : start + piece.shape[1]] = (piece.int_data * ratio).round_()
        start += piece.shape[1]
    return pieces[0].like(int_data, scale, whole_rows=True)


# ---- quantize_ and dequantize_ on distributed parameters ----


def local_part(param: Any) -> Any:
    """What this rank holds of a parameter: the local tensor of a DTensor, else the parameter itself."""
    return param.detach().to_local() if is_dtensor(param) else param


def held_tensor(param: Any) -> Any:
    """The very tensor that a parameter keeps on this rank, to change what it knows: `local_part` is an alias of it."""
    return param._local_tensor if is_dtensor(param) else param


def check_placements(param: Any, name: str) -> None:
    """ValueError unless the DTensor `param` is cut into rows or columns, or whole on each rank. No communication."""
    if is_dtensor(param) and any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"{name} is placed as {param.placements}: a sum that the ranks hold parts of can't be quantized. "
            "Call .redistribute(placements=[Replicate()]) on it first."
        )


def bad_ranks(params: list[Any], bad: list[bool]) -> list[int]:
    """For each parameter, a rank on which it is bad, or -1: the same on all ranks that share a DTensor among them.

    Collective where one of `params` is a DTensor; else each rank judges by itself.

    Args:
        params: in the same order on all ranks.
        bad: for each, whether the part of this rank is bad.
    """
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    rank = torch.distributed.get_rank() if meshes else 0
    found = [rank if here else -1 for here in bad]
    for mesh in meshes:
        reduced = torch.tensor(found, dtype=torch.int32, device=mesh.device_type)
        _reduce_max(reduced, mesh, range(mesh.ndim))
        found = reduced.tolist()
    return found


def _reduce_max(values: Tensor, mesh: Any, dims: Iterable[int]) -> None:
    """Maximum over the ranks along `dims` of a mesh, in place; nothing on a rank outside of it."""
    for dim in dims if mesh.get_coordinate() is not None else ():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))


def encode(param: Any, **modes: Any) -> Any:
    """The int8 weight of a float one that was checked. Of a DTensor: a DTensor, as if it had been cut afterwards.

    Collective where columns are cut: the scales are those of the whole rows.

    Args:
        param: (out_features, in_features).
        **modes: as of `Int8RowwiseTensor.from_float`.
    """
    if not is_dtensor(param):
        return Int8RowwiseTensor.from_float(param, **modes)
    local, mesh = local_part(param), param.device_mesh
    local = local if local.dim() == 2 else local.new_empty(0, param.shape[1])  # on a rank outside of the mesh
    absmax = math8.row_absmax(local)
    cut = [dim for dim, placement in enumerate(param.placements) if getattr(placement, "dim", 0) % 2 == 1]
    if cut and local.device.type != "meta":
        shared = absmax.to(mesh.device_type)  # the local part may be offloaded
        _reduce_max(shared, mesh, cut)
        absmax = shared.to(local.device)
    codes, scale = math8.quantize_rows(local, absmax=absmax)
    return _placed_as(param, Int8RowwiseTensor(codes, scale, param.dtype, **modes))


def decode(param: Any) -> Any:
    """The float weight of an int8 one; of a DTensor, a DTensor. No communication."""
    return _placed_as(param, local_part(param).decode()) if is_dtensor(param) else param.decode()


def _placed_as(param: Any, local: Tensor) -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def fully_sharded(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Names of the modules that `fully_shard` was called on, each with its state."""
    named = [(name, getattr(module, "_get_fsdp_state", None)) for name, module in model.named_modules()]
    return [(name, get_state()) for name, get_state in named if get_state is not None]


def check_not_gathered(model: torch.nn.Module, caller: str) -> None:
    """ValueError if `fully_shard` has taken hold of the parameters of `model`, which it does in its first forward.

    From then on it would put its own ones in the place of new ones.

    Args:
        model: any module.
        caller: name of the function, for the text.
    """
    for name, state in fully_sharded(model):
        if getattr(state, "_is_root", None) is not None:
            raise ValueError(
                f"{name or 'the model'} was sharded by fully_shard and has run since, which keeps its parameters from "
                f"being replaced: call {caller} before the first forward or before fully_shard"
            )


def forget_shards(model: torch.nn.Module) -> None:
    """Free the shards of the replaced parameters, which `fully_shard` keeps until the first forward looks for new ones.

    Without this it would also compare memory with the new ones, which an int8 weight has none of.
    """
    for _, state in fully_sharded(model):
        if getattr(state, "_is_root", None) is not None:
            continue  # it has run: nothing was replaced
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (param for group in groups if group is not None for param in group.fsdp_params):
            if hasattr(param, "_sharded_param_data"):
                param._sharded_param_data = torch.empty(0)
