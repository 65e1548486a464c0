"""PEFT: merging an adapter into int8 weights."""

import warnings
from typing import Any

from torch import nn

from qsub.float_weights import owners
from qsub.quantize import dequantize_
from qsub.tensors import Int8RowwiseTensor
from qsub.tensors import rounding as updates

_ROUNDINGS = ("stochastic", "nearest", "float")


def merge_and_unload(model: Any, rounding: str = "stochastic", **kwargs: Any) -> nn.Module:
    """PEFT's `merge_and_unload`, with a choice of what becomes of changes that are small against the int8 codes.

    The change that an adapter makes is often a hundredth of the distance of two codes. PEFT adds it in place, and
    rounding to nearest, which is right for a weight, then throws most of it away. docs/integrations.md has figures.

    Args:
        model: a PeftModel whose base has int8 weights.
        rounding: "stochastic" moves each code to one of its two neighbours with the probability that makes the expected
            value exact; the same draws each time. "nearest" is what PEFT does by itself. "float" dequantizes the
            weights that have an adapter, which are float in the result.
        **kwargs: of PEFT's merge_and_unload.

    Returns:
        The base model with the adapter merged.

    Raises:
        ValueError: there is no such rounding.
        TypeError: the model has no merge_and_unload.

    Warns:
        UserWarning: less than nine tenths of the change is left; once for all weights, with the share that is left.
    """
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(_ROUNDINGS)}, got {rounding!r}")
    if not hasattr(model, "merge_and_unload"):
        raise TypeError(f"merge_and_unload takes a PeftModel whose adapters can be merged, got {type(model).__name__}")
    if rounding == "float":
        _dequantize_adapted(model)
    with updates.collected(rounding == "stochastic") as found:
        merged = model.merge_and_unload(**kwargs)
    if not any(isinstance(param, Int8RowwiseTensor) for param in merged.parameters()):
        dequantize_(merged)  # so that nothing takes it for an int8 model
    if found.share < updates.ENOUGH:
        lost = sum(kept < updates.ENOUGH * total for kept, total in zip(found.kept, found.total, strict=True))
        warnings.warn(
            f"{found.share:.1%} of the adapter's change is left in the int8 weights ({lost} of {len(found.total)} lost "
            'more than a tenth): pass rounding="stochastic" or "float", or keep the adapter beside the int8 model',
            stacklevel=2,
        )
    return merged


def _dequantize_adapted(model: nn.Module) -> None:
    """Make the int8 weights float that have an adapter; those that share one go on sharing it."""
    layers = {id(module.get_base_layer()) for module in model.modules() if hasattr(module, "get_base_layer")}  # type: ignore[operator]
    for places in owners(model).values():
        weight = places[0][1]._parameters[places[0][2]]
        if isinstance(weight, Int8RowwiseTensor) and any(id(module) in layers for _, module, _ in places):
            new = nn.Parameter(weight.decode(), requires_grad=weight.requires_grad)
            for _, module, key in places:
                module._parameters[key] = new
