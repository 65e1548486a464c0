"""A check before load_state_dict touches a quantized model, so that a bad entry leaves all of it as it was.

torch.nn.Module.load_state_dict copies entry by entry and raises at the end. quantize_ registers this check on the model
it was given; dequantize_ removes it. A model that holds such a model, or one whose layers were quantized one by one,
gets it when it is about to load: the hooks of its parts are called too late, when entries of the modules before have
been copied, and nothing of a part leads to the model. So `Module.load_state_dict` is wrapped, once quantize_ has been
called. It also joins the two parts of an int8 weight, which a plain reader of safetensors
takes from a file of `qsub.save_file` or save_pretrained (transformers' Trainer does, when it resumes). Keys that are
missing or not expected are torch's to report, after the others are loaded: a hook is not told whether strict=True was
asked for.
"""

import functools
from typing import Any

from torch import Tensor, nn

from qsub.tensors import Int8RowwiseTensor
from qsub.tensors.codes import check_rows
from qsub.tensors.dispatch import jit_refusal


def _problem(key: str, target: Tensor, value: Any, assign: bool) -> str | None:
    if not isinstance(value, Tensor):
        return f"{key}: expected a tensor, got {type(value).__name__}"
    if value.shape != target.shape and not (target.dim() == 0 and value.shape == (1,)):  # which torch loads
        return f"size mismatch for {key}: shape {tuple(value.shape)} doesn't fit the model's {tuple(target.shape)}"
    if isinstance(target, Int8RowwiseTensor) and not assign and not isinstance(value, Int8RowwiseTensor):
        if not value.dtype.is_floating_point:
            return f"{key}: an int8 weight takes a float tensor or an Int8RowwiseTensor, got {value.dtype}"
        try:
            check_rows(value.detach(), key)
        except ValueError as error:
            return str(error)
    return None


def _join(key: str, target: Int8RowwiseTensor, state_dict: dict[str, Any]) -> str | None:
    """Put an Int8RowwiseTensor in the place of `key.int_data` and `key.scale`; returns what is wrong with them."""
    parts = [part for part in (f"{key}.int_data", f"{key}.scale") if part in state_dict]
    if not parts:
        return None
    if len(parts) == 1:
        return f"{parts[0]} comes without the other part of the int8 weight {key}"
    try:
        state_dict[key] = target.like(*(state_dict.pop(part) for part in parts))
    except (TypeError, ValueError) as error:
        return f"{key}: {error}"
    return None


def check_before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """load_state_dict pre-hook: RuntimeError, as torch's, with one line for each entry that can't be loaded."""
    assign = local_metadata.get("assign_to_params_buffers", False)
    problems = []
    for path, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        if any(_hook(hook) is not check_before_load for hook in owner._load_state_dict_pre_hooks.values()):
            continue  # it may bring the entries of its module into form first
        for name, target in [*owner._parameters.items(), *owner._buffers.items()]:
            key = f"{path}.{name}" if path else name
            if isinstance(target, Int8RowwiseTensor) and key not in state_dict:
                problems.append(_join(key, target, state_dict))
            if target is None or key not in state_dict:
                continue
            if isinstance(target, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                continue
            problems.append(_problem(key, target, state_dict[key], assign))
    problems = [problem for problem in problems if problem is not None]
    if problems:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}, which is left as it was:\n\t"
            + "\n\t".join(problems)
        )


def _wrap_load_state_dict() -> None:
    """Have any module registered that is about to load, and has a part that is."""
    original = nn.Module.load_state_dict
    if getattr(original, "checks_parts", False):
        return

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _handles(self) and any(_handles(module) for module in self.modules()):
            register(self)
        return original(self, *args, **kwargs)

    load_state_dict.checks_parts = True  # type: ignore[attr-defined]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def register(module: nn.Module) -> None:
    """Have `module`, and all that hold it, checked before they load; once, however often this is called.

    torch.jit.script is refused, too.
    """
    _wrap_load_state_dict()
    if not _handles(module):
        module.register_load_state_dict_pre_hook(check_before_load)
    for owner in module.modules():
        if any(isinstance(param, Int8RowwiseTensor) for param in owner._parameters.values()):
            owner.__dict__["__prepare_scriptable__"] = refuse_script


def unregister(module: nn.Module) -> None:
    """Undo `register`, but for what is inside."""
    for key in _handles(module):
        del module._load_state_dict_pre_hooks[key]
    if module.__dict__.get("__prepare_scriptable__") is refuse_script:
        del module.__dict__["__prepare_scriptable__"]


def refuse_script() -> None:
    """torch.jit.script calls this attribute of each module; it has no other way to ask (torch 2.11 to 2.13)."""
    raise jit_refusal("Int8RowwiseTensor")


def _handles(module: nn.Module) -> list[int]:
    hooks = module._load_state_dict_pre_hooks
    return [key for key, hook in hooks.items() if _hook(hook) is check_before_load]


def _hook(registered: Any) -> Any:
    """The function that was registered: torch wraps it."""
    return getattr(registered, "hook", registered)
