"""What from_pretrained needs to know of the files before it reads them."""

from pathlib import Path
from typing import Any

import transformers
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.base import HfQuantizer

from qsub.interop import hf_names
from qsub.interop.hf_config import QsubConfig
from qsub.serialization import HEADER, header_of
from qsub.streaming.source import Entry, read_entries

OURS = ["weight.int_data", "weight.scale"]  # what stands for a weight
BITSANDBYTES = ["weight", "SCB", "weight_format"]
_PARTS = (".int_data", ".scale")


class Int8File:
    """A checkpoint with int8 weights, which may be in several files.

    Args:
        files: of the checkpoint.
        model: that it is read into, before it is.

    Attributes:
        of_bitsandbytes: its layers are theirs.
        by_model_names: it has the names of a model, see `qsub.interop.hf_names`; else those of the original checkpoint.
        names: stored names to those that this model has for them, where they differ.

    Raises:
        ValueError: the files aren't safetensors, hold no int8 weight, or hold them under names that transformers would
            split, join or permute.
    """

    def __init__(self, files: list[Path], model: Any) -> None:
        if files[0].suffix != ".safetensors":
            raise ValueError(f"{files[0]}: int8 weights are read from safetensors files only")
        self.folder = files[0].parent
        self.by_model_names = False
        stored: dict[str, Entry] = {}
        for file in files:
            entries, strings = read_entries(file)
            stored.update(entries)
            key, value = hf_names.MARK
            self.by_model_names |= header_of(strings.get(HEADER), file).get(key) == value
        self.of_bitsandbytes = any(key.endswith(".SCB") for key in stored)
        weights = [key.removesuffix(_PARTS[0]) for key in stored if key.endswith(".weight.int_data")]
        if not weights and not self.of_bitsandbytes:
            raise ValueError(
                f"{self.folder}: config.json says that weights are int8, but no file holds any. Remove its "
                "quantization_config, and pass quantization_config=qsub.QsubConfig() to quantize them."
            )
        parts = {weight + part for weight in weights for part in _PARTS}
        self._floats = [key for key in stored if key not in parts]
        self._weights = weights
        self._in_model = hf_names.names_in_model(model, [*weights, *self._floats], original=not self.by_model_names)
        self.names: dict[str, str] = {}
        if self.by_model_names:
            self.names = {key: name for key, name in self._in_model.items() if key not in weights and key != name}
            changed = {key: name for key, name in self._in_model.items() if key in weights and key != name}
            self.names |= {key + part: name + part for key, name in changed.items() for part in _PARTS}
            self._check_version(model)
        else:
            layers = [f"{key.removesuffix('.SCB')}.weight" for key in stored if key.endswith(".SCB")]
            self._check_original_names(model, [f"{weight}.int_data" for weight in weights] + layers)

    def _check_original_names(self, model: Any, names: list[str]) -> None:
        for name in hf_names.converted(model, names):
            raise ValueError(
                f"{self.folder}: {name} has the name of the original checkpoint, whose tensors transformers splits, "
                "joins or permutes, which int8 codes can't follow. An earlier qsub or another package wrote it: "
                "quantize the float checkpoint."
            )

    def _check_version(self, model: Any) -> None:
        """transformers before `update_weight_conversions` change all names by the model's rules, or this raises."""
        if hasattr(HfQuantizer, "update_weight_conversions"):
            return
        changed = hf_names.renamed(model, self._in_model)
        for key, name in changed.items():
            if name == self._in_model[key]:
                continue
            raise ValueError(
                f"{self.folder}: transformers {transformers.__version__} would read {key} as {name}. Install 5.12 or "
                "newer, which ask qsub for the names."
            )

    def check_asked(self, config: QsubConfig, model: Any) -> None:
        """ValueError if options that were passed choose other layers than those that are int8 in the files."""
        if not config.asked:
            return
        options = {"skip": config.skip, "embeddings": config.embeddings, **config.asked}
        chooser = QsubConfig(skip=options["skip"], embeddings=options["embeddings"])
        chosen = hf_names.layer_weights(model, chooser.embeddings, chooser.skips)
        if self.of_bitsandbytes:
            return
        int8 = {self._in_model[key] for key in self._weights if key in self._in_model}
        floats = {self._in_model[key] for key in self._floats if key in self._in_model}
        shared = set(hf_names.ties(model))
        wrong = [f"{name} is float there" for name in sorted(chosen & floats)]
        wrong += [f"{name} is int8 there" for name in sorted(int8 - chosen - shared)]
        if wrong:
            named = " and ".join(f"{key}={value!r}" for key, value in config.asked.items())
            raise ValueError(
                f"{self.folder} has int8 weights already, and {named} would choose others: {wrong[0]} "
                f"({len(wrong)} such weights). Leave the option out, or quantize the float checkpoint with it."
            )


class FileNames(WeightRenaming):
    """Renames the tensors of one file by a table."""

    __slots__ = ("table",)

    def __init__(self, table: dict[str, str]) -> None:
        super().__init__("names of the file", "names of the model")
        self.table = table

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The new name, and the pattern that it fits: itself."""
        name = self.table.get(source_key)
        return (source_key, None) if name is None else (name, source_key)

    def reverse_transform(self) -> "FileNames":
        """Of saving, which goes by the model's names."""
        return FileNames({name: key for key, name in self.table.items()})


def untied(model: Any, files: list[Path]) -> set[str]:
    """Names that config.json ties, but that the float files have with values of their own, see `hf_names.untied`."""
    if not files or not hf_names.ties(model) or files[0].suffix != ".safetensors":
        return set()
    stored = {key: entry for file in files for key, entry in read_entries(file)[0].items()}
    return hf_names.untied(model, hf_names.moves(model, stored), lambda a, b: stored[a].equals(stored[b]))
