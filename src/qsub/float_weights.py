"""Where the weights of a model are registered, and why `quantize_` leaves some of them as they are."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

FilterFn = Callable[[str, nn.Module], bool]
Places = list[tuple[str, nn.Module, str]]  # of one parameter: (module name, module, parameter name)


def owners(model: nn.Module) -> dict[int, Places]:
    """For each parameter, by id, where it is registered."""
    found: dict[int, Places] = {}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append((name, module, key))
    return found


def join(module_name: str, key: str) -> str:
    """The name of a parameter."""
    return f"{module_name}.{key}" if module_name else key


def is_linear_weight(module: nn.Module, key: str) -> bool:
    """Whether this is the weight of an nn.Linear."""
    return isinstance(module, nn.Linear) and key == "weight"


def nothing_found(model: nn.Module, filter_fn: FilterFn | None) -> str:
    """The text of the error where `quantize_` finds no weight in a model: what holds the weights instead."""
    groups: dict[str, list[str]] = {}
    for places in owners(model).values():
        found = _reason(places, filter_fn)
        if found is not None:
            groups.setdefault(found[1], []).append(found[0])
    for name, module in model.named_modules():
        reason = _reason_of_module(module)
        if reason is not None:
            groups.setdefault(reason, []).append(name or "the model itself")
    held = "; ".join(f"{_listed(names)} ({reason})" for reason, names in groups.items()) or "no matrix"
    remedy = "a model that has an nn.Linear" + ("" if filter_fn is None else ", or another filter_fn")
    return (
        f"quantize_ takes the weights of nn.Linear and finds none in {type(model).__name__}, which has {held}. "
        f"Pass {remedy}; other weights stay as they are."
    )


def _reason(places: Places, filter_fn: FilterFn | None) -> tuple[str, str] | None:
    """Name of the parameter at these places, and why it isn't taken; None for what is no matrix."""
    for name, module, key in places:
        if is_linear_weight(module, key):
            return join(name, key), _reason_of_linear(places, filter_fn)
    name, module, key = places[0]
    param: Any = module._parameters[key]
    if isinstance(param, nn.UninitializedParameter) or param.dim() < 2 or isinstance(module, ParametrizationList):
        return None
    return join(name, key), _reason_of_matrix(param, module)


def _reason_of_linear(places: Places, filter_fn: FilterFn | None) -> str:
    linear = [(name, module) for name, module, key in places if is_linear_weight(module, key)]
    if filter_fn is not None and not all(filter_fn(*place) for place in linear):
        return "refused by filter_fn" if len(places) == 1 else "shared, and filter_fn refuses one of its layers"
    for name, module, key in places:
        if not is_linear_weight(module, key):
            return f"tied to {join(name, key)} of {type(module).__name__}, and stays float with it"
    module = places[0][1]
    dtype = module.weight.dtype
    return f"{dtype} in {type(module).__name__} of {_package(module)}, quantized in another way"


def _reason_of_matrix(param: Any, module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "table of nn.Embedding"
    if kind == "Conv1D" and _package(module) == "transformers":
        return "Conv1D of transformers, whose weights are (in, out)"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention"
    if isinstance(module, nn.Linear):  # weight_g and weight_v of torch.nn.utils.weight_norm
        return "weight_norm"
    if param.dim() == 3:
        return f"three dimensions, in {kind}"
    return kind


def _reason_of_module(module: nn.Module) -> str | None:
    """Why a layer that has no weight parameter isn't taken; None for other modules."""
    if isinstance(module, nn.Linear):
        if "weight" in module._parameters:
            return None
        return "nn.Linear whose weight is computed by weight_norm or a parametrization: remove that first"
    if "Linear" in type(module).__name__ and not any(param.dim() > 1 for param in module.parameters(recurse=False)):
        return f"{type(module).__name__} of {_package(module)}, no nn.Linear" if _is_leaf(module) else None
    return None


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
