"""Launches of Triton kernels without its specialization of the arguments at each call, which is slow."""

import functools
from typing import Any

import torch

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
    are 1 or multiples of 16. A kernel's run-time integers are below 2**31.

    Args:
        kernel: a `triton.jit` function whose `tl.constexpr` parameters come last.
        grid: number of programs along three axes.
        arguments: tensors, numbers, tensor descriptors or None, for the run-time parameters.
        constants: values of the `tl.constexpr` parameters.
        warps: warps of a program.
        stages: pipeline stages of its loops.
        options: of the compiler, the same at each launch of a kernel.
    """
    key: list[Any] = [kernel, constants, warps, stages]
    device = None
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            key.append(argument.dtype)
            key.append(argument.data_ptr() % 16 == 0)
            if device is None:
                device = argument.device
        elif type(argument) is int:
            key.append(argument if argument == 1 else argument % 16 == 0 and 16)
        elif argument is None or type(argument) is float:
            key.append(type(argument))
        else:
            key.append(argument.base.dtype)  # a tensor descriptor; its block shape is among the constants
    key.append(device)
    compiled = _compiled.get(tuple(key))
    if compiled is not None:
        compiled[grid](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages, **options)
    if compiled is not None:  # None under Triton's interpreter
        _compiled[tuple(key)] = compiled


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 4 for a CPU tensor under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_tensor_copies(device: torch.device) -> bool:
    """Whether tiles can be loaded by Hopper's bulk tensor copies, which tensor descriptors compile to."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
