"""quantize_ and dequantize_: convert the Linear weights of a model, in place."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from qsub import loading
from qsub.float_weights import FilterFn, Places, is_linear_weight, join, nothing_found, owners
from qsub.interop import hook
from qsub.tensors import codes
from qsub.tensors.dispatch import is_dtensor
from qsub.tensors.rowwise import Int8RowwiseTensor, check_modes
from qsub.tensors.rowwise_parallel import (
    bad_ranks,
    check_not_gathered,
    check_placements,
    decode,
    encode,
    forget_shards,
    held_tensor,
    local_part,
)


def _is_int8(param: Any) -> bool:
    return isinstance(local_part(param), Int8RowwiseTensor)


def _selected(model: nn.Module, filter_fn: FilterFn | None) -> Iterator[tuple[nn.Parameter, Places]]:
    """Weights that `quantize_` takes, float and int8 ones, each once, with all the places that share it."""
    for places in owners(model).values():
        name, module, key = places[0]
        param: Any = module._parameters[key]
        linear = [(name, module) for name, module, key in places if is_linear_weight(module, key)]
        accepted = [filter_fn is None or filter_fn(*place) for place in linear]
        if not all(accepted) or (filter_fn is not None and not linear):
            continue
        if _is_int8(param):  # also in another module: to change its options tears no tie
            yield param, places
            continue
        if len(linear) < len(places):  # a weight shared with a module that is no Linear: the tie is worth more
            continue
        if isinstance(param, nn.UninitializedParameter):
            raise ValueError(f"{join(name, key)} is not initialized yet: run a forward pass before quantize_")
        if param.dtype.is_floating_point and not has_own_class(param):
            yield param, places


def has_own_class(param: Any) -> bool:
    """Whether a parameter is of a subclass of nn.Parameter, which the forward of its module relies on.

    So are those of bitsandbytes (Int8Params, Params4bit), which are floats until they are moved to a GPU.
    """
    return nn.Parameter in type(param).__mro__[1:]


def linear_weights(model: nn.Module) -> list[str]:
    """Names of the float parameters that `quantize_` takes, a shared one by each of its names."""
    selected = [places for param, places in _selected(model, None) if not _is_int8(param)]
    return [join(name, key) for places in selected for name, _, key in places]


def _check(params: list[tuple[nn.Parameter, str]]) -> None:
    """ValueError that names the first bad weight, on all ranks that share one; one synchronization for each device."""
    for param, name in params:
        check_placements(param, name)
        if not is_dtensor(param):
            codes.check_matrix(param, name)
    absmax: dict[torch.device, list[tuple[torch.Tensor, int]]] = {}
    for index, (param, _) in enumerate(params):
        part = local_part(param).detach()
        if part.numel() and part.device.type != "meta":
            low, high = torch.aminmax(part)
            absmax.setdefault(part.device, []).append((torch.maximum(-low, high).double(), index))
    bad = [False] * len(params)
    for entries in absmax.values():
        good = (torch.stack([entry[0] for entry in entries]) <= codes.FP16_MAX).tolist()
        for ok, (_, index) in zip(good, entries, strict=True):
            bad[index] = not ok
    for rank, (param, name) in zip(bad_ranks([param for param, _ in params], bad), params, strict=True):
        if rank >= 0 and any(is_dtensor(other) for other, _ in params):
            raise ValueError(
                f"{name}: the part on rank {rank} has NaN, Inf or a magnitude over {codes.FP16_MAX:.0f}, which an fp16 "
                "row scale can't hold. Repair the weight, or leave it in float (quantize_: filter_fn)."
            )
        if rank >= 0:
            codes.check_rows(param.detach(), name)


def _bar(items: Iterable[Any], progress: bool, text: str) -> Iterable[Any]:
    if not progress:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install 'qsub[progress]'") from error
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
    A weight that is shared with a module that is not selected, such as an embedding, is skipped and stays tied. So is
    one of a subclass of nn.Parameter, as in the modules of bitsandbytes, whose forward needs it. Linears that share a
    weight go on sharing it. Memory: at most the float model and one layer at a time. A load_state_dict that fails later
    leaves the model as it was (see `qsub.loading`).

    Weights that are int8 already, by an earlier call, from_pretrained or a file, take the options of this call: the
    parameters stay the same objects, so that optimizers and ties go on, and codes and scales stay as they are. A call
    with the same options changes nothing. `trainable=True` undoes what an earlier call or a loaded file froze, and
    leaves alone what the user froze. int8 weights of other modules (embeddings of from_pretrained) take the options,
    too, unless there is a `filter_fn`.

    Weights that are distributed already (parallelize_module, or fully_shard before the first forward) are quantized
    where they are, to what they would be if they had been quantized first, bit for bit: the ranks exchange the largest
    magnitude of each row where columns are cut. All ranks must call it, and all raise if one has a bad weight.

    Args:
        model: any module; also a single nn.Linear.
        filter_fn: called with the name of a Linear in the model and the module; False leaves it as it is.
        trainable: keep requires_grad of each weight, as its user set it; its gradient is a plain float tensor.
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
        ValueError: nothing is found to quantize, which the text gives the reasons of; weights that are int8 already
            count as found. Or the options don't fit together; or a weight has NaN, Inf or a magnitude over 65504, or
            isn't a dense matrix (float8, sparse): it is named, and the model is left as it was. Or fully_shard has run
            a forward; or a weight is placed as Partial.
    """
    modes = {"activations": activations, "outlier_threshold": outlier_threshold, "backward_mode": backward}
    check_modes(*modes.values())
    found = list(_selected(model, filter_fn))
    if not found:
        raise ValueError(nothing_found(model, filter_fn))
    present = [param for param, _ in found if _is_int8(param)]
    selected = [(param, places) for param, places in found if not _is_int8(param)]
    del found
    if selected or any(_has_other_options(param, trainable, modes) for param in present):
        check_not_gathered(model, "quantize_")
    _check([(param, join(places[0][0], places[0][2])) for param, places in selected])
    selected.reverse()
    for _ in _bar(range(len(selected)), progress, "quantize"):
        param, places = selected.pop()  # so that nothing here holds on to a float weight that has been replaced
        weight = encode(param, **modes)
        tensor = held_tensor(weight)
        tensor.keeps_requires_grad = trainable or not param.requires_grad
        tensor.trainable = trainable and param.requires_grad
        _replace(places, nn.Parameter(weight, requires_grad=trainable and param.requires_grad))
        del param
    for param in present:
        _set_options(param, trainable, modes)
    forget_shards(model)
    loading.register(model)
    hook.after_quantize(model)
    return model


def _requires_grad(param: nn.Parameter, trainable: bool) -> bool:
    """What `trainable` makes of requires_grad of an int8 weight: see `quantize_`."""
    return trainable and (param.requires_grad or not held_tensor(param).keeps_requires_grad)


def _has_other_options(param: nn.Parameter, trainable: bool, modes: dict[str, Any]) -> bool:
    fields = held_tensor(param).fields()
    return param.requires_grad != _requires_grad(param, trainable) or any(fields[key] != modes[key] for key in modes)


def _set_options(param: nn.Parameter, trainable: bool, modes: dict[str, Any]) -> None:
    """Change an int8 weight in place. Modes are metadata of the tensor, which torch.compile's guards look at."""
    weight = held_tensor(param)
    requires_grad = _requires_grad(param, trainable)
    weight.keeps_requires_grad = trainable or (weight.keeps_requires_grad and not param.requires_grad)
    if not requires_grad:
        param.grad = None  # else an optimizer would go on with it
    param.requires_grad_(requires_grad)
    weight.trainable = requires_grad
    weight.set_modes(**modes)


def _replace(places: Places, new: nn.Parameter) -> None:
    for _, module, key in places:
        module._parameters[key] = new


def dequantize_(model: nn.Module, *, progress: bool = False) -> nn.Module:
    """Replace each Int8RowwiseTensor by a plain float parameter of the dtype that it shows, in place.

    Shared weights stay shared and requires_grad stays what it is (False for a weight that quantize_ froze). Weights
    that are distributed stay where they are.

    Args:
        model: any module.
        progress: show a bar (needs tqdm).

    Returns:
        The model.

    Raises:
        ValueError: fully_shard has run a forward.
    """
    places = [p for p in owners(model).values() if _is_int8(p[0][1]._parameters[p[0][2]])]
    if places:
        check_not_gathered(model, "dequantize_")
    for shared in _bar(places, progress, "dequantize"):
        weight = shared[0][1]._parameters[shared[0][2]]
        _replace(shared, nn.Parameter(decode(weight), requires_grad=weight.requires_grad))
    forget_shards(model)
    for module in model.modules():
        loading.unregister(module)
    hook.after_dequantize(model)
    return model
