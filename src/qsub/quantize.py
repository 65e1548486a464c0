"""quantize_ and dequantize_: convert the Linear weights of a model, in place."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from qsub import loading
from qsub.interop import hook
from qsub.tensors import codes
from qsub.tensors.rowwise import Int8RowwiseTensor, check_modes

FilterFn = Callable[[str, nn.Module], bool]


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """For each parameter, by id, where it is registered: (module name, module, parameter name)."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((name, module, key))
    return owners


def _join(module_name: str, key: str) -> str:
    return f"{module_name}.{key}" if module_name else key


def _selected(
    model: nn.Module, filter_fn: FilterFn | None
) -> Iterator[tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]]:
    """Weights to quantize, each once, with all the places that share it."""
    for places in _owners(model).values():
        linear = [
            isinstance(module, nn.Linear) and key == "weight" and (filter_fn is None or filter_fn(name, module))
            for name, module, key in places
        ]
        if not all(linear):  # also a weight shared with a module that is not selected: the tie is worth more
            continue
        name, module, key = places[0]
        param = module.get_parameter(key)
        if isinstance(param, nn.UninitializedParameter):
            raise ValueError(f"{_join(name, key)} is not initialized yet: run a forward pass before quantize_")
        if isinstance(param, Int8RowwiseTensor) or not param.dtype.is_floating_point:
            continue
        yield param, places


def linear_weights(model: nn.Module) -> list[str]:
    """Names of the parameters that `quantize_` takes, a shared one by each of its names."""
    return [_join(name, key) for _, places in _selected(model, None) for name, _, key in places]


def _check(params: list[tuple[nn.Parameter, str]]) -> None:
    """ValueError that names the first bad weight; one synchronization for all weights of a device."""
    absmax: dict[torch.device, list[tuple[torch.Tensor, nn.Parameter, str]]] = {}
    for param, name in params:
        if param.numel() and param.device.type != "meta":
            low, high = torch.aminmax(param.detach())
            absmax.setdefault(param.device, []).append((torch.maximum(-low, high).double(), param, name))
    for entries in absmax.values():
        good = (torch.stack([entry[0] for entry in entries]) <= codes.FP16_MAX).tolist()
        for ok, (_, param, name) in zip(good, entries, strict=True):
            if not ok:
                codes.check_rows(param.detach(), name)


def _bar(items: Iterable[Any], progress: bool, text: str) -> Iterable[Any]:
    if not progress:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm (or qsub[progress])") from error
    return tqdm(items, desc=text, unit="weight")


def quantize_(
    model: nn.Module,
    *,
    filter_fn: FilterFn | None = None,
    trainable: bool = False,
    activations: str | None = None,
    outlier_threshold: float | None = None,
    backward: str | None = None,
    progress: bool = False,
) -> nn.Module:
    """Replace the weight of each nn.Linear by an Int8RowwiseTensor, in place.

    The weights are frozen (requires_grad=False) unless `trainable`; biases and all other parameters stay as they are.
    A weight that is shared with a module that is not selected, such as an embedding, is skipped and stays tied.
    Linears that share a weight go on sharing it. Quantizing twice changes nothing. Memory: at most the float model
    and one layer at a time. A load_state_dict that fails later leaves the model as it was (see `qsub.loading`).

    Args:
        model: any module; also a single nn.Linear.
        filter_fn: called with the name of a Linear in the model and the module; False leaves it in float.
        trainable: keep requires_grad of each weight; its gradient is a plain float tensor.
        activations: None to multiply in the dtype of the input; "int8" to quantize the rows of the input on the fly and
            multiply int8 x int8 (SQNR near 40 dB). Gradients pass the quantization straight through.
        outlier_threshold: with activations="int8", input columns with a magnitude over it are multiplied in float
            (LLM.int8(), arXiv 2208.07339): the 64 of largest magnitude at most, the others stay in int8. 6.0 is usual.
        backward: None for the exact gradient of the input; "int8" to quantize the rows of the gradient too
            (SwitchBack, arXiv 2304.13013).
        progress: show a bar (needs tqdm).

    Returns:
        The model.

    Raises:
        ValueError: the options don't fit together; or a weight has NaN, Inf or a magnitude over 65504: it is named, and
            the model is left as it was.
    """
    modes = {"activations": activations, "outlier_threshold": outlier_threshold, "backward_mode": backward}
    check_modes(*modes.values())
    selected = list(_selected(model, filter_fn))
    _check([(param, _join(places[0][0], places[0][2])) for param, places in selected])
    selected.reverse()
    for _ in _bar(range(len(selected)), progress, "quantize"):
        param, places = selected.pop()  # so that nothing here holds on to a float weight that has been replaced
        weight = Int8RowwiseTensor.from_float(param, **modes)
        _replace(places, nn.Parameter(weight, requires_grad=trainable and param.requires_grad))
        del param
    loading.register(model)
    hook.after_quantize(model)
    return model


def _replace(places: list[tuple[str, nn.Module, str]], new: nn.Parameter) -> None:
    for _, module, key in places:
        module._parameters[key] = new


def dequantize_(model: nn.Module, *, progress: bool = False) -> nn.Module:
    """Replace each Int8RowwiseTensor by a plain float parameter of the dtype that it shows, in place.

    Shared weights stay shared and requires_grad stays what it is (False for a weight that quantize_ froze).

    Args:
        model: any module.
        progress: show a bar (needs tqdm).

    Returns:
        The model.
    """
    places = [p for p in _owners(model).values() if isinstance(p[0][1]._parameters[p[0][2]], Int8RowwiseTensor)]
    for shared in _bar(places, progress, "dequantize"):
        weight = shared[0][1]._parameters[shared[0][2]]
        _replace(shared, nn.Parameter(weight.decode(), requires_grad=weight.requires_grad))
    for module in model.modules():
        loading.unregister(module)
    hook.after_dequantize(model)
    return model
