"""Run the step eagerly or compiled, on plain (blocks, block_size) tensors of one parameter.

The compiled step is compiled once at module level for each variant (8-bit or fp32 state, its code, Adam or AdamW,
amsgrad, dtype), with the number of blocks dynamic: any number of shapes costs one graph a variant. Values that change
from step to step come in tensors, so none of them recompiles.
"""

import functools
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _get_current_dispatch_mode

from qsub.kernel_launch import has_triton
from qsub.optim import step as definition
from qsub.tensors.dynamic_codes import dynamic_tables

# Elements per call on the CPU: the fp32 intermediates of a chunk stay in the cache (and malloc reuses them).
_CHUNK = 1 << 19


@functools.cache
def cpp_compiler_error() -> str | None:
    """Why torch.compile can't build for the CPU here, or None if it can."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # torch raises its own class, and OSError where the command can't start
        return f"{type(error).__name__}: {error}"
    if sys.platform == "linux":  # where distributions package the headers apart from Python
        folders = [sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")]
        if not any(os.path.isfile(os.path.join(folder, "Python.h")) for folder in folders):
            return f"Python.h is missing from {folders[0]}"
    return None


@functools.cache
def _warn_eager(reason: str) -> None:
    warnings.warn(
        "qsub.optim: torch.compile can't build the step, which runs in eager mode, much slower. Install a C++ compiler "
        "(g++, or set CXX) and Python's headers (python3-dev), or pass backend='eager' to silence this. "
        + reason.splitlines()[0],
        stacklevel=4,
    )


def resolve_backend(backend: str | None, device: torch.device) -> str:
    """The backend that a parameter on `device` uses: `backend` itself, or the fastest one that works there."""
    if backend is not None:
        return backend
    if device.type == "cuda":
        return "triton" if has_triton() else "eager"
    if device.type == "cpu":
        reason = cpp_compiler_error()
        if reason is not None:
            _warn_eager(reason)
            return "eager"
        return "compile"
    return "eager"


@_disable_dynamo  # which imports torch._dynamo at the first call only
def untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` from code that torch.compile traces, without tracing it."""
    return function(*args)


@functools.cache
def _variant(kind: str, variant: tuple[Any, ...]) -> Callable[..., None]:
    """A compiled copy of the step. Each variant has a code object of its own, and so its own recompile limit."""
    function = {"8bit": definition.step_8bit, "float32": definition.step_float32}[kind]
    code = function.__code__.replace(co_name=f"{function.__name__}_{hash(variant) & 0xFFFFFFFF:x}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(copy, fullgraph=True)


@functools.cache
@torch.inference_mode(False)  # what is kept serves later steps, too
def _tables(device: torch.device) -> Tensor:
    """The tables of the dynamic code on `device`: uploading them each step would wait for it."""
    return dynamic_tables(device)


_marked: set[Callable[..., None]] = set()


@functools.lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _cpu_offset(blocks: int) -> Tensor:
    return torch.tensor(blocks, device="cpu")


def _offset(blocks: int, device: torch.device, watched: bool) -> Tensor:
    if device.type == "cpu" and not watched:
        return _cpu_offset(blocks)
    # Not kept: it may belong to a CUDA graph, or be a FakeTensor.
    return torch.full((), blocks, dtype=torch.int64, device=device)


def _leaves(tensors: Any) -> list[Tensor]:
    return [leaf for x in tensors for leaf in (x if isinstance(x, tuple) else (x,)) if leaf is not None]


def _slice(x: Any, part: slice) -> Any:
    if x is None:
        return None
    return tuple(leaf[part] for leaf in x) if isinstance(x, tuple) else x[part]


def run_step(
    backend: str,
    tensors: tuple[Any, ...],
    scalars: tuple[Tensor, Tensor, Tensor],
    first_block: int,
    decoupled: bool,
    stochastic_round: bool,
    state_code: str = "block_float8",
) -> None:
    """One step in place.

    Args:
        backend: "eager" or "compile".
        tensors: param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq as `definition.step_8bit` takes them, where a
            state is a pair of codes and scale, or as `definition.step_float32` does, where it is one tensor.
        scalars: step, hyper and seed, on the device of the parameter.
        first_block: blocks of the whole parameter before the first one here.
        decoupled: AdamW rather than Adam.
        stochastic_round: round a bf16 parameter stochastically.
        state_code: of 8-bit state.
    """
    param = tensors[0]
    kind = "8bit" if isinstance(tensors[2], tuple) else "float32"
    function: Callable[..., None] = definition.step_8bit if kind == "8bit" else definition.step_float32
    options: tuple[Any, ...] = (decoupled, stochastic_round)
    watched = _get_current_dispatch_mode() is not None  # by a FlopCounterMode, say
    if kind == "8bit" and state_code == "dynamic":
        options += (dynamic_tables(param.device) if watched else _tables(param.device),)
    compiled = False
    if backend == "compile" and not watched:
        dtypes = (param.dtype, tensors[1].dtype, tensors[4] is None, param.device)
        variant = _variant(kind, (decoupled, stochastic_round, len(options), *dtypes))
        # What torch.compile refuses once (under a mode, or TORCH_COMPILE_DISABLE=1) it does not compile later either.
        compiled = variant in _marked or not torch._dynamo.config.disable
        function = variant if compiled else function
    blocks, block_size = param.shape
    size = max(1, _CHUNK // block_size) if param.device.type == "cpu" else max(1, blocks)
    for start in range(0, blocks, size):
        chunk = tensors if size >= blocks else tuple(_slice(x, slice(start, start + size)) for x in tensors)
        if compiled and function not in _marked and chunk[0].shape[0] > 1:
            _marked.add(function)  # one marked call makes the graph dynamic; marks cost a tenth of a small step
            for leaf in _leaves(chunk):
                torch._dynamo.mark_dynamic(leaf, 0)
        arguments = (*chunk, *scalars, _offset(first_block + start, param.device, watched), *options)
        try:
            function(*arguments)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # type: ignore[attr-defined]
            # Settings of torch, such as autocast and the default dtype, compile anew, but shapes do not.
            with torch._dynamo.config.patch(recompile_limit=1 << 10, accumulated_recompile_limit=1 << 12):
                function(*arguments)
