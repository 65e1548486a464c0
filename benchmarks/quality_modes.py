"""The ways to quantize a model that benchmarks/quality.py compares; all take the layers that qsub.quantize_ takes."""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

import qsub
from qsub.quantize import linear_weights


def _linears(model: nn.Module) -> list[str]:
    """The layers whose weights qsub.quantize_ takes; every mode takes the same."""
    return [name.removesuffix(".weight") for name in linear_weights(model)]


def _qsub(**options: Any) -> Callable[[nn.Module, str], None]:
    return lambda model, device: (qsub.quantize_(model, **options), None)[1]


def _bitsandbytes(threshold: float) -> Callable[[nn.Module, str], None]:
    def quantize(model: nn.Module, device: str) -> None:
        import bitsandbytes as bnb

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of its cast to fp16 at each call
        for name in _linears(model):
            old = model.get_submodule(name)
            new = bnb.nn.Linear8bitLt(
                old.in_features, old.out_features, old.bias is not None, has_fp16_weights=False, threshold=threshold
            )
            new.load_state_dict({key: value.cpu() for key, value in old.state_dict().items()})
            model.set_submodule(name, new.to(device).requires_grad_(False))  # `to` quantizes
        model.is_loaded_in_8bit = True  # which tells peft what the layers are

    return quantize


def _torchao(config: str) -> Callable[[nn.Module, str], None]:
    def quantize(model: nn.Module, device: str) -> None:
        import torchao.quantization as ao

        names = set(_linears(model))
        ao.quantize_(model, getattr(ao, config)(), lambda module, name: name in names)

    return quantize


def _int4(model: nn.Module, device: str) -> None:
    for name in _linears(model):
        weight = model.get_submodule(name).weight.data
        step = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
        weight.copy_((weight / step).round() * step)


MODES: dict[str, Callable[[nn.Module, str], Any]] = {
    "bf16, not quantized": lambda model, device: model.bfloat16(),
    "qsub weight only": _qsub(),
    "qsub int8": _qsub(activations="int8"),
    "qsub int8, threshold 6": _qsub(activations="int8", outlier_threshold=6.0),
    "bitsandbytes, threshold 0": _bitsandbytes(0.0),
    "bitsandbytes, threshold 6": _bitsandbytes(6.0),
    "torchao weight only": _torchao("Int8WeightOnlyConfig"),
    "torchao int8": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "int4": _int4,
}


def quantize_as(mode: str, model: nn.Module, device: str) -> nn.Module:
    """Quantize a model in place in one of `MODES`."""
    MODES[mode](model, device)
    return model
