"""What transformers calls to load, save and dequantize a model with int8 weights: see `qsub.interop.transformers`."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from qsub import loading
from qsub.interop import hf_names
from qsub.interop.bitsandbytes import weights_from_bitsandbytes
from qsub.interop.hf_config import QsubConfig, int8_weights, merge_passed_options
from qsub.interop.hf_files import BITSANDBYTES, OURS, FileNames, Int8File, untied
from qsub.quantize import dequantize_
from qsub.tensors import Int8RowwiseTensor


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

    def __deepcopy__(self, memo: Any) -> "_Read":
        """Itself: transformers copy the operation for each weight, and the quantizer refers to the model."""
        return self

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """`input_dict` has the stored tensors by the ends of their names, see `stored`."""
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        dtype = self.hf_quantizer.shown_dtype(full_layer_name)
        if list(parts) == ["weight"] and parts["weight"].is_floating_point():  # a float one beside bitsandbytes' layers
            return {"weight": parts["weight"].to(dtype)}
        if "SCB" in parts or "weight" in parts:
            weight = weights_from_bitsandbytes(parts, dtype)["weight"]
            if not isinstance(weight, Int8RowwiseTensor):
                raise ValueError(f"{full_layer_name} is {weight.dtype} but has no SCB beside it")
        else:
            missing = [key for key in OURS if key not in parts]
            if missing:
                raise ValueError(f"{full_layer_name.removesuffix('weight')}{missing[0]} is missing in the checkpoint")
            weight = Int8RowwiseTensor(*(parts[key] for key in OURS), dtype)  # type: ignore[call-overload]
        return {"weight": self.hf_quantizer.parameter(weight)}


class QsubHfQuantizer(HfQuantizer):
    """What transformers calls while it loads, saves and dequantizes a model with a `QsubConfig`."""

    requires_calibration = False

    def __init__(self, quantization_config: QsubConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.targets: set[str] = set()  # names of the weights that are int8, or become so
        self.asked_about: set[str] = set()  # those, and the first of each rule that makes one of them
        self.shapes: dict[str, torch.Size] = {}  # of the parameters before loading
        self.model: Any = None  # while it loads
        self.kept_in: dict[str, torch.dtype] = {}  # patterns of names, of parameters that keep a dtype of their own
        self.file: Int8File | None = None  # a checkpoint with int8 weights
        self.given: dict[str, Any] | None = None  # state_dict of the save_pretrained that runs

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
        self.model = model
        plan = getattr(model, "_get_dtype_plan", None)  # transformers 5.6 to 5.24 have it
        self.kept_in = plan(kwargs.get("dtype") or model.dtype) if plan is not None else {}
        self.shapes = {name: param.shape for name, param in model.named_parameters()}
        files = [Path(file) for file in checkpoint_files or ()]
        if self.pre_quantized:
            self.targets = hf_names.layer_weights(model, config.embeddings, config.skips)
            if files:
                self.file = Int8File(files, model)
                self.file.check_asked(config, model)
            return
        kinds = (nn.Linear, nn.Embedding) if config.embeddings else nn.Linear
        found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        unmatched = [entry for entry in config.skip if not any(f".{entry}." in f".{name}." for name in found)]
        if unmatched:
            raise ValueError(f"skip names {unmatched}, but no layer of {type(model).__name__} has that in its name")
        self.targets = hf_names.layer_weights(model, config.embeddings, config.skips, untied(model, files))
        if not self.targets:
            raise ValueError(
                f"{type(model).__name__} has no weight to quantize: no nn.Linear, or all are tied to an embedding or "
                "in skip. Load it without quantization_config."
            )
        self.asked_about = hf_names.first_of_its_rule(model, self.targets)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a float tensor becomes int8 when it is read, or another that is made with it."""
        return not self.pre_quantized and param_name in self.asked_about

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes an element, for device_map="auto"."""
        return 1 if param_name in self.targets else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """The operation on a float checkpoint."""
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The operation on a checkpoint with int8 weights."""
        if not self.pre_quantized:
            return []
        stored = BITSANDBYTES if self.file is not None and self.file.of_bitsandbytes else OURS
        return [WeightConverter(stored, "weight", operations=[_Read(self)])]

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The rules that names are changed by while a checkpoint is read; transformers 5.6 doesn't ask."""
        if self.file is None or not self.file.by_model_names:
            return [*weight_conversions, *self.get_weight_conversions()]
        own = len(get_model_conversion_mapping(self.model))  # those before them are the user's, key_mapping
        return [
            *weight_conversions[: len(weight_conversions) - own],
            *([FileNames(self.file.names)] if self.file.names else []),
            *self.get_weight_conversions(),
        ]

    def accept(self, model: Any, name: str, value: Tensor) -> Tensor:
        """The int8 weight of a float tensor; one that doesn't fit the model is left for transformers to report."""
        if name in self.targets and value.shape != model.get_parameter(name).shape:
            self.targets.discard(name)
            self.asked_about.discard(name)
        if name not in self.targets:
            return value.to(model.get_parameter_or_buffer(name).dtype)
        return self.parameter(Int8RowwiseTensor.from_float(value))

    def shown_dtype(self, name: str) -> torch.dtype:
        """The dtype that a weight is to show: of the parameter, or what the model keeps it in all the same (fp32)."""
        for pattern, dtype in self.kept_in.items():
            if re.search(pattern.replace("*", ".*"), name):
                return dtype
        return self.model.get_parameter_or_buffer(name).dtype

    def parameter(self, weight: Int8RowwiseTensor) -> nn.Parameter:
        """The parameter of an int8 weight, with the modes of the config."""
        weight = weight.like(weight.int_data, weight.scale, **self.options.modes())
        weight.keeps_requires_grad = self.options.trainable  # a later choice is the user's
        return nn.Parameter(weight, requires_grad=self.options.trainable)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._check_shapes(model)
        if self.pre_quantized and hasattr(model, "_weight_conversions"):
            del model._weight_conversions  # a model that is saved in float again goes by the rules of its class
        self.model = self.file = None
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

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """What save_pretrained writes: plain tensors, and the header of `qsub.save_file`."""
        if getattr(model, "_hf_peft_config_loaded", False):  # transformers goes on to save the adapter alone
            return (model.state_dict() if self.given is None else self.given), {}
        from qsub.interop.hf_saving import tensors_to_save

        self.options.take_modes(model)
        model.config.quantization_config = self.options
        return tensors_to_save(model, self.given)

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dequantize_(model)
        dtype = (
            getattr(torch, dtype) if isinstance(dtype, str) else dtype
        )  # save_pretrained leaves a name in the config
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
merge_passed_options()


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
            conversions = getattr(module, "_weight_conversions", None)
            module.hf_quantizer.remove_quantization_config(module)
            if conversions is not None:  # what the float checkpoint was read with, it is saved with
                module._weight_conversions = conversions
