"""Which tensors of a checkpoint are weights of Linear layers, and which of them to take.

A Hugging Face folder is asked what `quantize_` would take: the model is built on the meta device from config.json, so
that embeddings, tied heads, and matrices of other modules are known for what they are, and the tensors are taken by
the model's names (`qsub.interop.hf_names`). Without a config.json, or without transformers, names and shapes decide: a
float matrix called `*.weight` whose layer is not called an embedding.
"""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from qsub.interop import hf_names
from qsub.streaming.converted import Tensors, by_model_names
from qsub.streaming.source import FLOATS, Source

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
        guess: why names decide, though there is a config.json; empty where they don't.
        tensors: the plain tensors to write, by the names that they are to have.
        reasons: for each of them that stays as it is, why; the others are quantized.
        floats: layers that the model has as nn.Linear and that stay float all the same.
        shared: names that the model ties, to those that they are tied to, which the checkpoint stores.
        by_model_names: whether the names are those of the model.
    """

    rule: str
    guess: str = ""
    tensors: Tensors = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    by_model_names: bool = False


def select(source: Source, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> Selection:
    """Decide for each plain tensor of a checkpoint.

    Args:
        source: the checkpoint.
        only: patterns of shell style (`*`, `?`, `[...]`) for names of layers or tensors, in the model or in the
            checkpoint: all others stay float. Where names decide, these replace the guess.
        skip: patterns of layers that stay float.

    Raises:
        PatternError: a pattern fits no tensor.
        ValueError: the rules of transformers can't be applied to the tensors.
    """
    result, linear = _by_model(source)
    keys = {name: (name, *_stored_keys(entry)) for name, entry in result.tensors.items()}
    for pattern in (*only, *skip):
        if not any(_fits(key, (pattern,)) for key in (*source.quantized, *(k for all_ in keys.values() for k in all_))):
            raise PatternError(f"the pattern {pattern!r} fits no tensor of {source.path}; --dry-run lists the names")
    for name, entry in result.tensors.items():
        if linear is None:
            reason = _unlike_linear(name, entry, bool(only)) or _tied(name, result.tensors)
        else:
            reason = "" if name in linear else "no weight of nn.Linear, or shared with another module"
            reason = reason or ("" if entry.dtype in FLOATS else f"{entry.dtype} is no float dtype")
        if not reason and only and not any(_fits(key, only) for key in keys[name]):
            reason = "not in --only"
        if not reason and any(_fits(key, skip) for key in keys[name]):
            reason = "in --skip"
        if reason:
            result.reasons[name] = reason
            if linear is not None and name in linear:
                result.floats.append(name.removesuffix(".weight"))
    return result


def _stored_keys(entry: Any) -> list[str]:
    """Names in the checkpoint of a tensor that the model knows by another; of one that is made of several, none."""
    return [entry.key] if getattr(entry, "key", "") else []


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for key in (name, name.removesuffix(".weight")) for pattern in patterns)


# ---- By names ----


def _unlike_linear(name: str, entry: Any, chosen: bool) -> str:
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


def _tied(name: str, plain: Tensors) -> str:
    """Why a head stays float whose bytes are those of an embedding: they are one parameter of the model."""
    entry = plain[name]
    for other in plain.values():
        alike = (other.dtype, other.shape) == (entry.dtype, entry.shape) and other.name != name
        if alike and _is_embedding(other.name) and all(a == b for a, b in zip(entry.raw(), other.raw(), strict=True)):
            return f"tied to {other.name}"
    return ""


# ---- By the model ----


def _by_model(source: Source) -> tuple[Selection, set[str] | None]:
    """The tensors to choose from, and those that are weights of nn.Linear; None where names decide."""
    model, rule, guess = _model(source)
    plain = source.plain()
    if model is None:
        return Selection(rule, guess, dict(plain)), None
    if source.quantized:  # its names are fixed already
        by_name = {key: name for name in hf_names.layer_weights(model) for key in _stored_names(model, name)}
        tensors: Tensors = dict(plain)
        linear = {key for key in plain if key in by_name}
        return Selection(rule, guess, tensors, by_model_names=source.by_model_names), linear
    tensors, found = by_model_names(plain, model)
    untied = hf_names.untied(model, found, lambda a, b: plain[a].equals(plain[b]))
    linear = hf_names.layer_weights(model, untied=untied)
    return Selection(rule, guess, tensors, shared=hf_names.stored_ties(model, tensors), by_model_names=True), linear


def model_tensors(source: Source) -> Tensors:
    """The plain tensors of a checkpoint, by the names of config.json's model where they are not those already."""
    model = None if source.by_model_names else _model(source)[0]
    return dict(source.plain()) if model is None else by_model_names(source.plain(), model)[0]


def names_by_model(source: Source, weights: list[str]) -> dict[str, str] | None:
    """The model's names for the tensors of a checkpoint, some of which are quantized; None without a model.

    Args:
        source: the checkpoint.
        weights: names of those that are quantized.

    Raises:
        ValueError: one of them can't go where transformers would have it.
    """
    model = _model(source)[0]
    if model is None:
        return None
    for name in hf_names.converted(model, weights):
        raise ValueError(
            f"{source.path}: {name} is a tensor that transformers splits, joins or permutes, which int8 codes can't "
            "follow. Quantize the float checkpoint: qsub quantize."
        )
    return hf_names.names_in_model(model, source.plain(), original=True)


def float_linears(source: Source) -> list[str] | None:
    """The nn.Linear modules of the model that its checkpoint has in float, tied heads too; None without a model."""
    model = _model(source)[0]
    if model is None:
        return None
    int8 = {*source.quantized, *(name for name, other in source.shared.items() if other in source.quantized)}
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted(name for name in linears if int8.isdisjoint(_stored_names(model, f"{name}.weight")))


def names_of_modules(source: Source, names: list[str]) -> list[str]:
    """Those of the names that a module of config.json's model has, whole or as a part; all without a model."""
    model = _model(source)[0]
    if model is None:
        return names
    return [name for name in names if any(f".{name}." in f".{module}." for module, _ in model.named_modules())]


def _stored_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """A checkpoint of the base model has names without its prefix, and one of a model with a head has them with it."""
    prefix = getattr(model, "base_model_prefix", "")
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


def _model(source: Source) -> tuple[Any, str, str]:
    """The model of config.json, the rule that tensors are chosen by, and why names decide although there is one."""
    config = source.config()
    if not config or not config.get("architectures"):
        return None, "names and shapes", ""
    architecture = str(config["architectures"][0])
    try:
        return hf_names.on_meta(source.path, architecture), f"the nn.Linear modules of {architecture}", ""
    except Exception as error:  # whatever a model's own code raises; the reason is shown
        guess = f"{architecture} can't be built ({_first_line(error)})"
        return None, f"names and shapes, as {guess}", guess


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
