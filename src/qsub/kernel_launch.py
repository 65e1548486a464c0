"""Launches of Triton kernels without its specialization of the arguments at each call, which is slow.

Also the integer functions that choose a grid: those of the module `triton` take some 6 us a call.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int = 3,
    **options: Any,
) -> None:
    """Run `kernel[grid](*arguments, *constants)` on the current device and stream.

    The compiled kernel is kept under what Triton specializes on: dtypes, alignment of pointers, and whether integers
    are 1 or multiples of 16. A kernel's run-time integers are below 2**31. A kept kernel gets addresses in place of
    tensors, which it would ask each tensor and the driver for.

    Args:
        kernel: a `triton.jit` function of a module, whose `tl.constexpr` parameters come last.
        grid: number of programs along three axes.
        arguments: tensors, numbers, tensor descriptors or None, for the run-time parameters.
        constants: values of the `tl.constexpr` parameters.
        warps: warps of a program.
        stages: pipeline stages of its loops.
        options: of the compiler, the same at each launch of a kernel. Products are fused with sums (FMA) throughout.
    """
    key: list[Any] = [id(kernel), constants, warps, stages]  # its hash is that of its source, found anew each time
    values: list[Any] = []
    device = -1
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            key.append(argument if argument == 1 else argument % 16 == 0 and 16)
        elif argument is None or kind is float:
            key.append(kind)
        elif isinstance(argument, Tensor):
            key.append(argument.dtype)
            argument, device = argument.data_ptr(), argument.get_device()
            key.append(argument % 16 == 0)
        else:
            key.append(argument.base.dtype)  # a tensor descriptor; its block shape is among the constants
        values.append(argument)
    key.append(device)
    identity = tuple(key)
    compiled = _compiled.get(identity)
    if compiled is None:
        options |= {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}  # Triton's default until 3.9
        compiled = kernel[grid](*arguments, *constants, **options)
        if compiled is not None:  # None under Triton's interpreter
            _compiled[identity] = compiled
        return
    if _is_watched():
        compiled[grid](*arguments, *constants)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    run(*grid, stream, function, packed, None, None, None, *values, *constants)


def _is_watched() -> bool:
    """Whether a profiler of Triton's is to be told of launches and their arguments."""
    settings = _settings()
    for hook in (settings.launch_enter_hook, settings.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of functions, none of them at first
            return True
    return False


@functools.cache
def _settings() -> Any:
    from triton import knobs

    return knobs.runtime


@functools.cache
def has_triton() -> bool:
    """Whether the kernels can run on CUDA tensors: Triton is installed, and the devices are NVIDIA's.

    On AMD's, which PyTorch calls "cuda" too, the plain torch paths run: some kernels hold instructions of NVIDIA's.
    """
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


def cdiv(a: int, b: int) -> int:
    """Smallest integer that is not below a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of 2 that is not below n, which is positive."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 4 for a CPU tensor under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_tensor_copies(device: torch.device) -> bool:
    """Whether tiles can be loaded by Hopper's bulk tensor copies, which tensor descriptors compile to."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
