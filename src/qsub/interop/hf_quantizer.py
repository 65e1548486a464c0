"""What transformers calls to load, save and dequantize a model with int8 weights: see `qsub.interop.transformers`."""

import json
import os
import sys
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from qsub import loading
from qsub.interop.bitsandbytes import weights_from_bitsandbytes
from qsub.interop.hf_config import QsubConfig, int8_weights
from qsub.quantize import dequantize_
from qsub.serialization import HEADER, flatten_state_dict
from qsub.tensors import Int8RowwiseTensor

_OURS = ["weight.int_data", "weight.scale"]
_BITSANDBYTES = ["weight", "SCB", "weight_format"]


class _Quantize(ConversionOps):
    """From a float tensor of a checkpoint to an int8 weight."""

    def __init__(self, hf_quantizer: "QsubHfQuantizer") -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """All that transformers collected for one or more parameters, by their names."""
        result = {}
        for name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            result[name] = self.hf_quantizer.accept(model, name, value)
        return result


class _Read(ConversionOps):
    """From the stored tensors of one int8 weight to that weight."""

    def __init__(self, hf_quantizer: "QsubHfQuantizer") -> None:
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """`input_dict` has the stored tensors by the ends of their names, see `stored`."""
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        if list(parts) == ["weight"] and parts["weight"].is_floating_point():  # a float one beside bitsandbytes' layers
            return {"weight": parts["weight"].to(dtype)}
        if "SCB" in parts or "weight" in parts:
            weight = weights_from_bitsandbytes(parts, dtype)["weight"]
            if not isinstance(weight, Int8RowwiseTensor):
                raise ValueError(f"{full_layer_name} is {weight.dtype} but has no SCB beside it")
        else:
            missing = [key for key in _OURS if key not in parts]
            if missing:
                raise ValueError(f"{full_layer_name.removesuffix('weight')}{missing[0]} is missing in the checkpoint")
            weight = Int8RowwiseTensor(*(parts[key] for key in _OURS), dtype)  # type: ignore[call-overload]
        return {"weight": self.hf_quantizer.parameter(weight)}


class QsubHfQuantizer(HfQuantizer):
    """What transformers calls while it loads, saves and dequantizes a model with a `QsubConfig`."""

    requires_calibration = False

    def __init__(self, quantization_config: QsubConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.targets: set[str] = set()  # names of the weights that are int8, or become so
        self.shapes: dict[str, torch.Size] = {}  # of the parameters before loading
        self.stored = _OURS  # what stands for a weight in a checkpoint with int8 weights

    @property
    def options(self) -> QsubConfig:
        """The config."""
        return self.quantization_config  # type: ignore[return-value]

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """ValueError for what from_pretrained can't do with int8 weights."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                'device_map has "disk": int8 weights are not offloaded to disk. Offload to "cpu", which holds them in '
                "a quarter of their fp32 size."
            )

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config = self.options
        kinds = (nn.Linear, nn.Embedding) if config.embeddings else nn.Linear
        found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        unmatched = [entry for entry in config.skip if not any(f".{entry}." in f".{name}." for name in found)]
        if unmatched and not self.pre_quantized:
            raise ValueError(f"skip names {unmatched}, but no layer of {type(model).__name__} has that in its name")
        names = {f"{name}.weight" for name in found if not config.skips(name)}
        for name, source in model.all_tied_weights_keys.items():  # a tie to a module that stays float is kept
            if not {name, source} <= names:
                names -= {name, source}
        if not names and not self.pre_quantized:
            raise ValueError(
                f"{type(model).__name__} has no weight to quantize: no nn.Linear, or all are tied to an embedding or "
                "in skip. Load it without quantization_config."
            )
        self.targets = names
        self.shapes = {name: param.shape for name, param in model.named_parameters()}
        if self.pre_quantized and checkpoint_files:
            self._check_files(checkpoint_files)

    def _check_files(self, files: list[str]) -> None:
        if not files[0].endswith(".safetensors"):
            raise ValueError(f"{files[0]}: int8 weights are read from safetensors files only")
        keys = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                keys.update(opened.keys())
        if any(key.endswith(".SCB") for key in keys):
            self.stored = _BITSANDBYTES
        elif not any(key.endswith(".weight.int_data") for key in keys):
            raise ValueError(
                f"{os.path.dirname(files[0])}: config.json says that weights are int8, but no file holds any. Remove "
                "its quantization_config, and pass quantization_config=qsub.QsubConfig() to quantize them."
            )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a float tensor becomes int8 when it is read."""
        return not self.pre_quantized and param_name in self.targets

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes an element, for device_map="auto"."""
        return 1 if param_name in self.targets else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """The operation on a float checkpoint."""
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The operation on a checkpoint with int8 weights."""
        return [WeightConverter(self.stored, "weight", operations=[_Read(self)])] if self.pre_quantized else []

    def accept(self, model: Any, name: str, value: Tensor) -> Tensor:
        """The int8 weight of a float tensor; one that doesn't fit the model is left for transformers to report."""
        if value.shape != model.get_parameter(name).shape:
            self.targets.discard(name)
        if name not in self.targets:
            return value
        return self.parameter(Int8RowwiseTensor.from_float(value))

    def parameter(self, weight: Int8RowwiseTensor) -> nn.Parameter:
        """The parameter of an int8 weight, with the modes of the config."""
        weight = weight.like(weight.int_data, weight.scale, **self.options.modes())
        return nn.Parameter(weight, requires_grad=self.options.trainable)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._check_shapes(model)
        # Reading is no transform of names that saving would have to undo.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [c for c in conversions if not any(isinstance(o, _Read) for o in _operations(c))]
        loading.register(model)
        attach(model)
        return model

    def _check_shapes(self, model: Any) -> None:
        """Releases of transformers before 5.23 put tensors of any shape into a model that has a quantizer."""
        for name, param in model.named_parameters():
            if param.shape != self.shapes.get(name, param.shape):
                raise RuntimeError(
                    f"{name} is {tuple(param.shape)} in the checkpoint, but {tuple(self.shapes[name])} in the model: "
                    "load it with the config it was saved with. To leave out what doesn't fit with "
                    "ignore_mismatched_sizes=True, install transformers 5.23 or newer."
                )

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What save_pretrained writes: plain tensors, and the header of `qsub.save_file`."""
        state_dict = model.state_dict()
        if getattr(model, "_hf_peft_config_loaded", False):  # transformers goes on to save the adapter alone
            return state_dict, {}
        self.options.take_modes(model)
        model.config.quantization_config = self.options
        if any(value.device.type == "meta" for value in state_dict.values()):
            from accelerate.utils import modeling

            state_dict = modeling.get_state_dict_offloaded_model(model)
        tied = model.all_tied_weights_keys
        state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        plain, header = flatten_state_dict(state_dict, share=False)  # from_pretrained knows no other ties
        return plain, {HEADER: json.dumps(header)}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        dequantize_(model)
        return model if dtype in (None, model.dtype) else nn.Module.to(model, dtype)

    def is_serializable(self) -> bool:
        """save_pretrained works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """The int8 weights themselves can be trained."""
        return self.options.trainable

    @property
    def is_compileable(self) -> bool:
        """torch.compile works."""
        return True


register_quantization_config("qsub")(QsubConfig)
register_quantizer("qsub")(QsubHfQuantizer)


def _pretrained(model: nn.Module) -> list[Any]:
    """The models of transformers among the modules of a model (itself, the base of one with a head, PEFT's base)."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return [m for m in model.modules() if isinstance(m, modeling.PreTrainedModel)] if modeling is not None else []


def attach(model: nn.Module) -> None:
    """Have save_pretrained and dequantize() work, for the models of transformers in one that has int8 weights."""
    for module in _pretrained(model):
        if getattr(module, "hf_quantizer", None) is None and int8_weights(module):
            module.hf_quantizer = QsubHfQuantizer(QsubConfig(), pre_quantized=True)


def detach(model: nn.Module) -> None:
    """Undo `attach`, and the marks of from_pretrained."""
    for module in _pretrained(model):
        if isinstance(getattr(module, "hf_quantizer", None), QsubHfQuantizer):
            module.hf_quantizer.remove_quantization_config(module)


def _operations(conversion: Any) -> list[Any]:
    return getattr(conversion, "operations", [])
