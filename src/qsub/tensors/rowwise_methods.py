"""Methods of torch.Tensor that never reach an operator, and that would go wrong or do nothing on a wrapper subclass."""

import copy
from typing import Any

import torch
from torch import Tensor

from qsub.tensors import codes as math8
from qsub.tensors import rounding
from qsub.tensors.no_memory import NoMemory
from qsub.tensors.rowwise import FUNCTIONS, Int8RowwiseTensor
from qsub.tensors.rowwise_arithmetic import noise


def _set_data(tensor: Int8RowwiseTensor, value: Tensor) -> None:
    """`p.data = value`, which torch would ignore: share the int8 data of the value, or encode a float value.

    (torch asks the class of the tensor that is assigned to, not that of the value: a float parameter can't be guarded.)
    """
    if value.shape != tensor.shape or value.device != tensor.device:
        raise ValueError(
            f".data of an Int8RowwiseTensor must keep its shape {tuple(tensor.shape)} and device {tensor.device}, got "
            f"{tuple(value.shape)} on {value.device}: assign a new parameter to the module instead"
        )
    if isinstance(value, Int8RowwiseTensor) and value.scale_dim == tensor.scale_dim:
        if value.dtype != tensor.dtype:
            raise ValueError(
                f".data of an Int8RowwiseTensor must keep its dtype {tensor.dtype}, got {value.dtype}: "
                f"use value.to({tensor.dtype}), or call .to({value.dtype}) on the module first"
            )
        tensor.int_data, tensor.scale, tensor.whole_rows = value.int_data, value.scale, value.whole_rows
        tensor._updates = value.updates
        return
    with torch.no_grad():  # into new memory: a graph may have kept the old one for its backward
        made: Any = _encoded(tensor, value.detach())
    tensor.int_data, tensor.scale, tensor.whole_rows = made.int_data, made.scale, made.whole_rows


def _encoded(tensor: Int8RowwiseTensor, value: Tensor) -> Int8RowwiseTensor:
    """A copy of the weight with another value, to nearest as of `copy_`; in a merge that asks for it, stochastically.

    It may be an update (`w.data = w.data + delta`), so that what rounding loses is measured.
    """
    made: Any = tensor.detach().clone()
    if not (rounding.can_measure(value) and value.is_floating_point()):
        return made.copy_(value)
    before = tensor.decode(value.dtype).float()  # what the value was computed from
    value = value.float()
    if rounding.is_stochastic():
        math8.check_rows(made.as_rows(value), "value of .data")
        made.requantize_(value, noise=noise(made, value))
    else:
        made.copy_(value)
    rounding.measure(before, value, made.decode(torch.float32))
    return made


def _deepcopy(tensor: Int8RowwiseTensor, memo: dict[int, Any]) -> Any:
    """copy.deepcopy: torch would copy the storage of a view with an offset. A parameter's goes without grad."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("deepcopy of an Int8RowwiseTensor that autograd has made: call .detach() on it first")
    made = tensor.detach().clone()
    for key in tensor.__dict__.keys() - made.__dict__.keys():  # that it is a parameter, and what users have noted on it
        setattr(made, key, copy.deepcopy(getattr(tensor, key), memo))
    if tensor.grad is not None and not isinstance(tensor, torch.nn.Parameter):
        made.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    return made


for _name, _method in vars(NoMemory).items():  # the unbound methods of Tensor
    if callable(_method) and hasattr(Tensor, _name):
        FUNCTIONS[getattr(Tensor, _name)] = _method
FUNCTIONS[Tensor.__cuda_array_interface__.__get__] = NoMemory.__cuda_array_interface__.__get__  # type: ignore[attr-defined]
FUNCTIONS[Tensor.__deepcopy__] = _deepcopy
FUNCTIONS[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]
FUNCTIONS[Tensor.element_size] = FUNCTIONS[Tensor.itemsize.__get__] = lambda tensor: 1  # type: ignore[attr-defined]
FUNCTIONS[Tensor.nbytes.__get__] = lambda tensor: tensor.int_data.nbytes + tensor.scale.nbytes  # type: ignore[attr-defined]
FUNCTIONS[Tensor.__format__] = lambda tensor, spec: format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)
