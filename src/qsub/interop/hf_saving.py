"""What save_pretrained writes of a model with int8 weights.

transformers ask the quantizer of a model for the tensors to save, and drop the `state_dict` that the caller passed. A
model whose layers were quantized one by one, or got int8 weights by load_state_dict(assign=True), has no quantizer at
that time. So `PreTrainedModel.save_pretrained` is wrapped, once: a model without int8 weights goes to the original as
it came, at the cost of a look at its parameters.
"""

import functools
import inspect
import json
from typing import Any

import torch
from torch import Tensor, nn

from qsub.interop import hf_names
from qsub.interop.hf_quantizer import QsubHfQuantizer, attach, detach
from qsub.serialization import HEADER, flatten_state_dict, same_tensor
from qsub.tensors import Int8RowwiseTensor
from qsub.tensors.rowwise_parallel import local_part


def wrap_save_pretrained() -> None:
    """Have `PreTrainedModel.save_pretrained` know int8 weights; once, however often this is called."""
    from transformers.modeling_utils import PreTrainedModel

    original: Any = PreTrainedModel.save_pretrained
    if getattr(original, "knows_int8", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(local_part(param), Int8RowwiseTensor) for param in self.parameters()):
            attach(self)
        else:
            detach(self)  # the last of its layers was dequantized on its own
        quantizer = getattr(self, "hf_quantizer", None)
        if not isinstance(quantizer, QsubHfQuantizer):
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        if call.arguments.get("save_original_format"):
            raise ValueError(
                "save_original_format=True: a folder with int8 weights has the names of the model, as codes can't be "
                "split, joined or permuted into those of the original checkpoint. Leave it out, or save "
                "model.dequantize(), which is float."
            )
        call.arguments["save_original_format"] = False
        quantizer.given = call.arguments.get("state_dict")
        try:
            return original(*call.args, **call.kwargs)
        finally:
            quantizer.given = None

    save_pretrained.knows_int8 = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained


def tensors_to_save(model: Any, given: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors, and the strings of the header.

    Args:
        model: of transformers, with int8 weights.
        given: the state dict to save in place of the model's own, an average of weights for example. Floats that come
            in the place of int8 weights are quantized, as by load_state_dict.

    Raises:
        ValueError: a float among them doesn't fit the int8 weight.
    """
    state_dict = dict(model.state_dict() if given is None else given)
    if any(isinstance(value, Tensor) and value.device.type == "meta" for value in state_dict.values()):
        from accelerate.utils import modeling

        state_dict = modeling.get_state_dict_offloaded_model(model)
    if given is not None:
        state_dict = {name: _encoded(model, name, value) for name, value in state_dict.items()}
    shared = {name: source for name, source in hf_names.ties(model).items() if _tied(model, state_dict, name, source)}
    for name in shared:
        del state_dict[name]
    plain, header = flatten_state_dict(state_dict, share=False)  # from_pretrained knows no other ties
    header["shared"] = shared
    header.update([hf_names.MARK])
    return plain, {HEADER: json.dumps(header)}


def _encoded(model: Any, name: str, value: Any) -> Any:
    """The float that stands for an int8 weight, as one; anything else as it is."""
    param = dict(model.named_parameters(remove_duplicate=False)).get(name)
    weight = local_part(param) if param is not None else None
    if not isinstance(weight, Int8RowwiseTensor) or not isinstance(value, Tensor):
        return value
    if isinstance(local_part(value), Int8RowwiseTensor):
        return value
    if value.shape != param.shape or not value.dtype.is_floating_point:  # type: ignore[union-attr]
        raise ValueError(
            f"state_dict: {name} must be a float tensor or an int8 weight of shape {tuple(param.shape)}, "  # type: ignore[union-attr]
            f"got {value.dtype} {tuple(value.shape)}"
        )
    encoded = Int8RowwiseTensor.from_float(value.detach())
    return weight.like(encoded.int_data, encoded.scale)


def _tied(model: Any, state_dict: dict[str, Any], name: str, source: str) -> bool:
    """Whether a tie of config.json is one at this moment: the name is stored with the one that it is tied to."""
    if name not in state_dict or source not in state_dict:
        return False
    first, second = state_dict[name], state_dict[source]
    return first is second or same_tensor(first, second) or _is_one_parameter(model, name, source)


def _is_one_parameter(model: nn.Module, name: str, source: str) -> bool:
    """For those that accelerate has offloaded, of which a state dict holds copies."""
    params = dict(model.named_parameters(remove_duplicate=False))
    pair = params.get(name), params.get(source)
    return pair[0] is not None and pair[0] is pair[1] and pair[0].device == torch.device("meta")
