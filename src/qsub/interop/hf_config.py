"""QsubConfig, the options that transformers keeps in config.json: see `qsub.interop.transformers`."""

import functools
import inspect
from typing import Any

from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from qsub.tensors import Int8RowwiseTensor
from qsub.tensors.rowwise import check_modes

_CHOOSING = ("skip", "embeddings")  # which layers are int8; the other options say how they multiply and train


class QsubConfig(QuantizationConfigMixin):
    """Options of `qsub.quantize_` for transformers' from_pretrained; a config.json keeps them.

    Every nn.Linear is quantized, but for those in `skip`, those tied to an embedding (unless `embeddings`), and those
    that the checkpoint has no weight for (a new classification head), which stay float and trainable.

    Args:
        activations: None to multiply in the dtype of the input, "int8" to quantize its rows on the fly.
        outlier_threshold: with activations="int8", columns over it are multiplied in float; 6.0 is usual.
        skip: names of modules to leave in float with all that they hold: whole ("model.layers.0"), or a part of
            successive names ("lm_head", "mlp.down_proj"). Default: none.
        backward: None for the exact gradient of the input; "int8" to quantize the rows of the gradient too.
        embeddings: quantize the tables of nn.Embedding too, and heads tied to them.
        trainable: keep requires_grad of the int8 weights. Needed by transformers' Trainer, unless PEFT adapters are
            trained.

    Raises:
        ValueError: the options don't fit together.
        TypeError: `skip` is not a list of names.
    """

    # Not in __dict__, which transformers write into config.json: the options that a caller named, and those of them
    # that choose layers, once merged with the config of a folder.
    __slots__ = ("asked", "given")
    given: frozenset[str]
    asked: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "QsubConfig":
        """Notes which options are named."""
        self = super().__new__(cls)
        named = inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs).arguments
        self.given = frozenset(named) - {"self"}
        self.asked = {}
        return self

    def __init__(
        self,
        activations: str | None = None,
        outlier_threshold: float | None = None,
        skip: list[str] | None = None,
        *,
        backward: str | None = None,
        embeddings: bool = False,
        trainable: bool = False,
    ) -> None:
        check_modes(activations, outlier_threshold, backward)
        if isinstance(skip, str) or not all(isinstance(name, str) and name for name in skip or ()):
            raise TypeError(f'skip must be a list of names of modules such as ["lm_head"], got {skip!r}')
        self.quant_method = "qsub"  # type: ignore[assignment]
        self.activations = activations
        self.outlier_threshold = outlier_threshold
        self.skip = list(skip or ())
        self.backward = backward
        self.embeddings = embeddings
        self.trainable = trainable

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From the `quantization_config` of a config.json.

        Raises:
            ValueError: it has options that this version doesn't know.
        """
        options = {key: value for key, value in config_dict.items() if key != "quant_method"}
        unknown = sorted(set(options) - set(cls().to_dict()))
        if unknown:
            raise ValueError(
                f"quantization_config has options {unknown} that this qsub doesn't know: install a newer one"
            )
        return super().from_dict(options, return_unused_kwargs, **kwargs)

    def with_options_of(self, passed: "QsubConfig") -> "QsubConfig":
        """The config of a folder with the options that are named in one that was passed to from_pretrained.

        Those that choose layers are noted in `asked`: they must agree with the files.
        """
        options = {key: value for key, value in self.to_dict().items() if key != "quant_method"}
        changes = {key: getattr(passed, key) for key in passed.given}
        result = QsubConfig(**{**options, **{k: v for k, v in changes.items() if k not in _CHOOSING}})
        result.asked = {key: changes[key] for key in _CHOOSING if key in changes}
        return result

    def modes(self) -> dict[str, Any]:
        """How the weights multiply, as keywords of Int8RowwiseTensor."""
        return {
            "activations": self.activations,
            "outlier_threshold": self.outlier_threshold,
            "backward_mode": self.backward,
        }

    def take_modes(self, model: nn.Module) -> None:
        """Set the options to those of the int8 weights in a model.

        Raises:
            ValueError: they differ among the weights, and config.json holds one set.
        """
        weights = int8_weights(model)
        found = {(w.activations, w.outlier_threshold, w.backward_mode) for w in weights}
        if len(found) > 1:
            raise ValueError(
                f"the int8 weights have different modes {sorted(map(str, found))}, but save_pretrained can keep one "
                "set: quantize all layers with the same options, or use qsub.save_file"
            )
        if found:
            self.activations, self.outlier_threshold, self.backward = found.pop()
            self.trainable = any(weight.requires_grad for weight in weights)

    def skips(self, name: str) -> bool:
        """Whether the module of this name, or one that holds it, is in `skip`."""
        return any(f".{entry}." in f".{name}." for entry in self.skip)


def int8_weights(model: nn.Module) -> list[Int8RowwiseTensor]:
    """The int8 parameters of a model, each once."""
    return [param for param in model.parameters() if isinstance(param, Int8RowwiseTensor)]


def merge_passed_options() -> None:
    """Have from_pretrained apply a QsubConfig that is passed with a folder of int8 weights.

    transformers have a list of the configs that they merge with that of a folder (seen in 5.6 to 5.24), and ignore
    others with a warning.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    original: Any = AutoHfQuantizer.merge_quantization_configs
    if getattr(original, "knows_qsub", False):
        return

    @functools.wraps(original)
    def merge(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        of_folder, passed = quantization_config, quantization_config_from_args
        if isinstance(of_folder, dict) and of_folder.get("quant_method") == "qsub" and isinstance(passed, QsubConfig):
            of_folder = QsubConfig.from_dict(of_folder)
        if isinstance(of_folder, QsubConfig) and isinstance(passed, QsubConfig):
            return of_folder.with_options_of(passed)
        return original(quantization_config, quantization_config_from_args)

    merge.knows_qsub = True  # type: ignore[attr-defined]
    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge)  # type: ignore[method-assign, assignment]
