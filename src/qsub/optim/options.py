"""Checks of what a user passes to the optimizers: each error states the rule, what came and the remedy."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from qsub.optim.sharding import local
from qsub.tensors.rowwise import Int8RowwiseTensor

BACKENDS = ("triton", "compile", "eager")
STATE_CODES = ("block_float8", "dynamic")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay", "stochastic_round")
# Options that torch.optim.Adam doesn't have, as they are spelt, and how alike a misspelt one is (a ratio of difflib).
QSUB_OPTIONS = ("block_size", "min_8bit_size", "state_bits", "state_code", "stochastic_round", "seed")
_ALIKE = 0.82


def check_param(param: Any, owner: str) -> None:
    """TypeError unless `param` is a tensor of 16 to 64 bit floats. What is no tensor torch.optim refuses."""
    if isinstance(param, Tensor) and param.dtype not in _DTYPES:
        raise TypeError(
            f"{owner} takes parameters of 16, 32 or 64 bit floats, got {param.dtype} of shape {tuple(param.shape)}. "
            "Leave it out, or give it to an optimizer of torch.optim."
        )


def checked_grad(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient, or a copy that has its values in memory; an error if it isn't of the parameter as it is now."""
    if grad.is_complex():
        raise TypeError(f"the gradient of a parameter of {param.dtype} must be real, got {grad.dtype}")
    if grad.shape != param.shape:
        shapes = f"{tuple(grad.shape)}, not {tuple(param.shape)} as its parameter"
        raise ValueError(f"a gradient has shape {shapes}: call zero_grad() when the data of a parameter is replaced")
    return grad.clone() if grad._is_zerotensor() or grad.is_neg() else grad


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} as a tensor must have 1 element, got shape {tuple(value.shape)}")
    if not hasattr(value, "__float__"):  # text, as YAML reads 1e-3, has none
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")


def _check_scalar(name: str, value: Any, upper: float | None = None) -> None:
    _check_number(name, value)
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not 0.0 <= number or (upper is not None and not number < upper):
        bound = "at least 0" if upper is None else f"in [0, {upper:g})"
        raise ValueError(f"{name} must be {bound}, got {number}")


def check_keys(group: Collection[str]) -> None:
    """TypeError for a key of a parameter group that looks like a misspelt option of qsub, which no step would read.

    Any other key is the user's own (lr_mult, name), a scheduler's or a wrapper's: kept, as torch.optim does.
    """
    for key in group:
        if key in QSUB_OPTIONS or not isinstance(key, str):
            continue
        if key == "backend":
            raise TypeError("backend is an option of the optimizer, not of a parameter group: pass it as an argument")
        alike = difflib.get_close_matches(key.lower().replace("-", "_"), QSUB_OPTIONS[:5], 1, _ALIKE)
        if alike:
            raise TypeError(
                f"a parameter group has {key!r}, which no step reads: write {alike[0]!r} if you mean that option, or "
                "give a key of your own a name that is less like it"
            )


def check_rounding(options: dict[str, Any], params: Iterable[Any]) -> None:
    """ValueError where stochastic_round is asked for parameters that it doesn't round: those of fp16."""
    if not options["stochastic_round"]:
        return
    for entry in params:
        param = entry[1] if isinstance(entry, tuple) else entry
        half = isinstance(param, Tensor) and param.dtype == torch.float16
        if half and not isinstance(local(param), Int8RowwiseTensor):
            raise ValueError(
                f"stochastic_round=True rounds bf16 parameters, got one of fp16 of shape {tuple(param.shape)}. Keep it "
                "in bf16 or fp32, or put it in a group with stochastic_round=False."
            )


def check_options(options: dict[str, Any], backend: str | None) -> None:
    """ValueError or TypeError for an option that is out of range or not supported."""
    _check_scalar("lr", options["lr"])
    _check_scalar("eps", options["eps"])
    _check_scalar("weight_decay", options["weight_decay"])
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be a pair, got {betas!r}")
    for index, beta in enumerate(betas):
        _check_scalar(f"betas[{index}]", beta, 1.0)
    _check_flags(options)
    if options["fused"] and backend == "eager":
        raise ValueError("fused=True contradicts backend='eager': drop one of them")
    check_state_options(options)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {BACKENDS}, got {backend!r}")


def _check_flags(options: dict[str, Any]) -> None:
    for name in (*_FLAGS, "foreach", "fused"):
        if not isinstance(options[name], int) and (name in _FLAGS or options[name] is not None):
            raise TypeError(f"{name} must be True or False, got {options[name]!r}")
    if options["foreach"]:
        raise ValueError("foreach=True is not supported: leave it None and choose with backend='compile' or 'eager'")
    if options["differentiable"]:
        raise ValueError("differentiable=True is not supported: 8-bit state has no gradient; use torch.optim.Adam(W)")


def check_group(group: dict[str, Any]) -> None:
    """ValueError or TypeError for what was written to a group later, and would make nonsense of state or parameters.

    As in torch.optim the sign of a number is not looked at, and a tensor may be on any device: no waiting for one.
    """
    check_state_options(group)
    for name in ("lr", "eps", "weight_decay"):
        if not isinstance(group[name], (float, int)):
            _check_number(name, group[name])
    if len(group["betas"]) != 2:
        raise ValueError(f"betas must be a pair, got {group['betas']!r}")
    for index, beta in enumerate(group["betas"]):
        if isinstance(beta, Tensor):
            _check_number(f"betas[{index}]", beta)
        elif not isinstance(beta, (float, int)) or not 0.0 <= beta < 1.0:
            _check_scalar(f"betas[{index}]", beta, 1.0)
    _check_flags(group)
    check_rounding(group, group["params"])


def check_state_options(options: dict[str, Any]) -> None:
    """ValueError or TypeError for a bad option of those that torch.optim doesn't have; a loaded one, say."""
    block_size = options["block_size"]
    if not isinstance(block_size, int) or not 16 <= block_size <= 4096 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two from 16 to 4096, got {block_size!r}")
    if not isinstance(options["min_8bit_size"], int) or options["min_8bit_size"] < 0:
        raise ValueError(f"min_8bit_size must be a whole number of elements, got {options['min_8bit_size']!r}")
    if options["state_bits"] not in (8, 32):
        raise ValueError(f"state_bits must be 8 or 32, got {options['state_bits']!r}")
    if options["state_code"] not in STATE_CODES:
        raise ValueError(f"state_code must be one of {STATE_CODES}, got {options['state_code']!r}")
    if not isinstance(options["seed"], int):
        raise TypeError(f"seed must be an int, got {type(options['seed']).__name__}")
