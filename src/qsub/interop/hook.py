"""Registers `qsub.interop.hf_quantizer` as soon as both qsub and transformers are imported, in either order.

transformers looks quantization methods up in a registry and has no entry points for others. Its registry takes two
seconds to import, so `import qsub` doesn't: where transformers comes later, a finder waits for that one module, has it
loaded as usual, registers, and is gone. Another waits for the module of PreTrainedModel, whose save_pretrained is
wrapped, see `qsub.interop.hf_saving`.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_OURS = "qsub.interop.hf_quantizer"
_SAVING = "qsub.interop.hf_saving"


class _WhenImported(MetaPathFinder):
    """Finder that only adds a step after one module has been executed."""

    def __init__(self, name: str, step: Callable[[], Any]) -> None:
        self.name, self.step = name, step

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Called for every import; the module's own finders find it."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.step()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _is_transformers_5() -> bool:
    return find_spec("transformers.core_model_loading") is not None


def _register() -> None:
    if _is_transformers_5():
        import_module(_OURS)


def _wrap() -> None:
    if _is_transformers_5():
        import_module(_SAVING).wrap_save_pretrained()


_STEPS = {"transformers.quantizers.auto": _register, "transformers.modeling_utils": _wrap}


def register_with_transformers() -> None:
    """Make quant_method "qsub" known to transformers, now or when it is imported."""
    for name, step in _STEPS.items():
        when_imported(name, step)


def when_imported(name: str, step: Callable[[], Any]) -> None:
    """Call `step` once the module `name` is imported: now, or when it is."""
    if name in sys.modules:
        step()
    elif not any(isinstance(finder, _WhenImported) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported(name, step))


def after_quantize(model: Any) -> None:
    """Tell a model of transformers that it is quantized, so that its save_pretrained works."""
    if _OURS in sys.modules:  # else no such model exists
        sys.modules[_OURS].attach(model)


def after_dequantize(model: Any) -> None:
    """Undo `after_quantize`."""
    if _OURS in sys.modules:
        sys.modules[_OURS].detach(model)
