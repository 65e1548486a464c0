"""QsubConfig, the options that transformers keeps in config.json: see `qsub.interop.transformers`."""

from typing import Any

from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from qsub.tensors import Int8RowwiseTensor
from qsub.tensors.rowwise import check_modes


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
