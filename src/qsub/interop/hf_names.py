"""Names of a transformers model's parameters and of the tensors in its files: the one place that maps them.

transformers 5 renames, splits, joins and stacks tensors while it loads a float checkpoint, and does the opposite when
it saves one. Codes and row scales can't go through that: a join of columns, a permutation or a stack of floats has no
counterpart on them, and most patterns don't know their names. So the rule is

    a file with int8 weights has the names and the layout of the model,

which `load_file(folder)` needs anyway to fit `model.load_state_dict`. A float checkpoint is converted by the rules of
transformers before it is quantized (`moves`); a file with int8 weights is read under the names that it has
(`names_in_model`), whatever rules the model comes with. `MARK` in the header of a file says that it follows the rule:
files of earlier versions have the names of the original checkpoint.

Used by QsubConfig's quantizer, by save_pretrained and by the command line. The functions of transformers that are
called here are not public: they were seen in 5.6, 5.12, 5.18 and 5.24, with the same arguments.
"""

import copy
import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MARK = ("names", "model")  # entry of qsub's header


def on_meta(folder: Path, architecture: str) -> Any:
    """The model of a folder's config.json, without memory for its weights.

    Raises:
        Exception: whatever the import of transformers, or the model's own code raises.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what transformers and the packages that it imports have to say is not asked for
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return getattr(transformers, architecture)(config)
    finally:
        logging.disable(level)


# ---- Which parameters ----


def ties(model: Any) -> dict[str, str]:
    """Names of the parameters that config.json ties, to the names that they are tied to."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def layer_weights(
    model: nn.Module,
    embeddings: bool = False,
    skips: Callable[[str], bool] = lambda name: False,
    untied: Iterable[str] = (),
) -> set[str]:
    """Names of the weights that become int8: those that `quantize_` takes once the model is loaded, and tied.

    Args:
        model: of transformers, on the meta device or not.
        embeddings: take the tables of nn.Embedding, too.
        skips: called with the name of a module; True leaves it in float.
        untied: names that config.json ties, but not the checkpoint.
    """
    kinds = (nn.Linear, nn.Embedding) if embeddings else nn.Linear
    modules = list(model.named_modules(remove_duplicate=False))
    taken = {
        f"{name}.weight" if name else "weight"
        for name, module in modules
        if isinstance(module, kinds) and module._parameters.get("weight") is not None and not skips(name)
    }
    for group in _shared(model, set(untied)):  # a tie to a weight that stays float is worth more
        if not group <= taken:
            taken -= group
    return taken


def _shared(model: Any, untied: set[str]) -> list[set[str]]:
    """Sets of names that are one parameter, or will be."""
    by_id: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in untied:
            by_id.setdefault(id(param), set()).add(name)
    group_of = {name: group for group in by_id.values() for name in group}
    for name, source in ties(model).items():
        if name in group_of and source in group_of and name not in untied:
            joined = group_of[name] | group_of[source]
            group_of.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in group_of.values() if len(group) > 1}.values())


# ---- From a float checkpoint to the model ----


@dataclass
class Move:
    """How one or more parameters of the model come from tensors of a float checkpoint.

    Attributes:
        target: name of the parameter, or of the first of several.
        sources: stored tensors, each with the pattern of the rule that it fits.
        rule: WeightConverter of transformers; None where a name is all that changes.
    """

    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    rule: Any = None

    def apply(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parameters by their names.

        Args:
            model: that they belong to.
            read: called with the name of a stored tensor.
        """
        if self.rule is None:
            return {self.target: read(self.sources[0][1])}
        rule = copy.deepcopy(self.rule)
        for pattern, key in self.sources:
            rule.add_tensor(self.target, key, pattern, read(key))
        result = rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


def moves(model: Any, keys: Iterable[str]) -> list[Move]:
    """What from_pretrained does to the tensors of a float checkpoint; those that the model has no use for are left out.

    Args:
        model: of transformers, on the meta device or not.
        keys: names of the stored tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known: dict[str, Any] = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, Move] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            continue
        if pattern is None:
            found.setdefault(name, Move(name, [(key, key)]))
        else:
            found.setdefault(name, Move(name, rule=by_pattern[pattern])).sources.append((pattern, key))
    return list(found.values())


def first_of_its_rule(model: Any, names: set[str]) -> set[str]:
    """`names`, and the first parameter of each rule that makes one of them out of a tensor.

    transformers asks a quantizer about the first one only.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    result = set(names)
    for rule in get_model_conversion_mapping(model):
        first, *others = rule.target_patterns
        for other in others:
            result |= {name.replace(other, first) for name in names if other in name}
    return result


# ---- From a file with int8 weights to the model ----


def names_in_model(model: Any, keys: Iterable[str], original: bool = False) -> dict[str, str]:
    """The model's names of the tensors of a file with int8 weights; those that it has no use for are left out.

    A name that fits as it is, or but for the prefix of the base model, is kept. Others are renamed by the rules of
    transformers, for a file of another class (a language model from one that sees, for example).

    Args:
        model: that is to be loaded.
        keys: names of the file's tensors; those of an int8 weight without their last part.
        original: the names are those of the original checkpoint, as earlier versions wrote them: rename first.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    known: dict[str, Any] = model.state_dict()
    result = {}
    for key in keys:
        for rules in (renamings, []) if original else ([], renamings):
            name = rename_source_key(key, rules, [], model.base_model_prefix, known)[0]
            if name in known:
                result[key] = name
                break
    return result


def converted(model: Any, names: Iterable[str]) -> list[str]:
    """Those weights of a file that transformers would split, join or permute, if they were float."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [name for name in names if rename_source_key(name, renamings, converters)[1] is not None]


def renamed(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """What transformers make of the names in a file by the rules of the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known: dict[str, Any] = model.state_dict()
    prefix = model.base_model_prefix
    return {key: rename_source_key(key, renamings, converters, prefix, known)[0] for key in keys}


# ---- Ties ----


def untied(model: Any, found: list[Move], equal: Callable[[str, str], bool]) -> set[str]:
    """Names that config.json ties, but that a float checkpoint has with values of their own: they are not tied.

    Args:
        model: of the checkpoint.
        found: what `moves` says of it.
        equal: called with the names of two stored tensors.
    """
    stored = {move.target: move.sources[0][1] for move in found if move.rule is None}
    return {
        name
        for name, source in ties(model).items()
        if name in stored and source in stored and not equal(stored[name], stored[source])
    }


def stored_ties(model: Any, stored: Container[str]) -> dict[str, str]:
    """Names that a file leaves out, to those that they are tied to, which it has; either may be an embedding's."""
    result = {}
    for group in _shared(model, set()):
        there = sorted(name for name in group if name in stored)
        if there:
            result.update({name: there[0] for name in sorted(group) if name not in stored})
    return result
