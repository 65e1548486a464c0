"""Which tensors of a checkpoint are weights of Linear layers, and which of them to take.

A Hugging Face folder is asked what `quantize_` would take: the model is built on the meta device from config.json, so
that embeddings, tied heads, and matrices of other modules are known for what they are. Without a config.json, or
without transformers, names and shapes decide: a float matrix called `*.weight` whose layer is not called an embedding.
"""

import logging
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qsub.quantize import linear_weights
from qsub.streaming.source import FLOATS, Entry, Source

_EMBEDDING = re.compile(
    r"(^|_)(emb|embd|embed|embeds|embedding|embeddings)(_|$)|^(wte|wpe|shared|relative_attention_bias)$"
)


class PatternError(ValueError):
    """A pattern of names that fits none."""


@dataclass
class Selection:
    """What was decided.

    Attributes:
        rule: in words, where it comes from.
        reasons: for each tensor that stays as it is, why; the others are quantized.
        floats: layers that the model has as nn.Linear and that stay float all the same.
    """

    rule: str
    reasons: dict[str, str] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)


def select(source: Source, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> Selection:
    """Decide for each plain tensor of a checkpoint.

    Args:
        source: the checkpoint.
        only: patterns of shell style (`*`, `?`, `[...]`) for names of layers or tensors: all others stay float. Where
            names decide, these replace the guess.
        skip: patterns of layers that stay float.

    Raises:
        PatternError: a pattern fits no tensor.
    """
    plain = source.plain()
    for pattern in (*only, *skip):
        if not any(_fits(name, (pattern,)) for name in (*plain, *source.quantized)):
            raise PatternError(f"the pattern {pattern!r} fits no tensor of {source.path}; --dry-run lists the names")
    linear, rule = _linear_names(source)
    result = Selection(rule)
    for name, entry in plain.items():
        if linear is None:
            reason = _unlike_linear(name, entry, bool(only)) or _tied(name, plain)
        else:
            reason = "" if name in linear else "no weight of nn.Linear, or shared with another module"
            reason = reason or ("" if entry.dtype in FLOATS else f"{entry.dtype} is no float dtype")
        if not reason and only and not _fits(name, only):
            reason = "not in --only"
        if not reason and _fits(name, skip):
            reason = "in --skip"
        if reason:
            result.reasons[name] = reason
            if linear is not None and name in linear:
                result.floats.append(linear[name].removesuffix(".weight"))
    return result


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for key in (name, name.removesuffix(".weight")) for pattern in patterns)


# ---- By names ----


def _unlike_linear(name: str, entry: Entry, chosen: bool) -> str:
    if not (name == "weight" or name.endswith(".weight")):
        return "not called weight"
    if len(entry.shape) != 2:
        return f"{len(entry.shape)} dimensions"
    if entry.dtype not in FLOATS:
        return f"{entry.dtype} is no float dtype"
    if not chosen and _is_embedding(name):
        return "an embedding, by its name"
    return ""


def _is_embedding(name: str) -> bool:
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return bool(_EMBEDDING.search(layer))


def _tied(name: str, plain: dict[str, Entry]) -> str:
    """Why a head stays float whose bytes are those of an embedding: they are one parameter of the model."""
    entry = plain[name]
    for other in plain.values():
        alike = (other.dtype, other.shape) == (entry.dtype, entry.shape) and other.name != name
        if alike and _is_embedding(other.name) and all(a == b for a, b in zip(entry.raw(), other.raw(), strict=True)):
            return f"tied to {other.name}"
    return ""


# ---- By the model ----


def _linear_names(source: Source) -> tuple[dict[str, str] | None, str]:
    """Stored names of the weights that quantize_ would take, to their names in the model; None where names decide."""
    model, rule = _model(source)
    if model is None:
        return None, rule
    stored: dict[str, str] = {}
    for name in linear_weights(model):
        for key in _stored_names(model, name):
            if key in source.entries:
                stored[key] = name
                break
    return stored, rule


def float_linears(source: Source) -> list[str] | None:
    """The nn.Linear modules of the model that its checkpoint has in float, tied heads too; None without a model."""
    model, _ = _model(source)
    if model is None:
        return None
    int8 = {*source.quantized, *(name for name, other in source.shared.items() if other in source.quantized)}
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted(name for name in linears if int8.isdisjoint(_stored_names(model, f"{name}.weight")))


def names_of_modules(source: Source, names: list[str]) -> list[str]:
    """Those of the names that a module of config.json's model has, whole or as a part; all without a model."""
    model, _ = _model(source)
    if model is None:
        return names
    return [name for name in names if any(f".{name}." in f".{module}." for module, _ in model.named_modules())]


def _stored_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """A checkpoint of the base model has names without its prefix, and one of a model with a head has them with it."""
    prefix = getattr(model, "base_model_prefix", "")
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


def _model(source: Source) -> tuple[nn.Module | None, str]:
    """The model of config.json, and the rule that tensors are chosen by, in words."""
    config = source.config()
    if not config or not config.get("architectures"):
        return None, "names and shapes"
    architecture = str(config["architectures"][0])
    try:
        return _on_meta(source.path, architecture), f"the nn.Linear modules of {architecture}"
    except Exception as error:  # whatever a model's own code raises; the reason is shown
        return None, f"names and shapes, as {architecture} can't be built ({_first_line(error)})"


def _on_meta(folder: Path, architecture: str) -> Any:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what transformers and the packages that it imports have to say is not asked for
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = getattr(transformers, architecture)(config)
            model.tie_weights()
        return model
    finally:
        logging.disable(level)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
