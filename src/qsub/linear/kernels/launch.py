"""Kernel launches without Triton's per-call specialization of the arguments, which costs more than a small product."""

import functools

import torch
import triton

_compiled: dict[tuple, "triton.compiler.CompiledKernel"] = {}


def launch(kernel, grid: tuple[int, int, int], arguments: tuple, constants: tuple, warps: int, stages: int = 3) -> None:
    """Run `kernel[grid](*arguments, *constants)` on the current device and stream.

    The compiled kernel is kept under what Triton specializes on: dtypes, alignment of pointers, and whether integers
    are 1 or multiples of 16. A kernel's run-time integers are below 2**31.

    Args:
        kernel: a `triton.jit` function whose `tl.constexpr` parameters come last.
        grid: number of programs along three axes.
        arguments: tensors, integers, tensor descriptors or None, for the run-time parameters.
        constants: values of the `tl.constexpr` parameters.
        warps: warps of a program.
        stages: pipeline stages of its loops.
    """
    key = [kernel, constants, warps, stages]
    device = None
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            key.append(argument.dtype)
            key.append(argument.data_ptr() % 16 == 0)
            if device is None:
                device = argument.device
        elif type(argument) is int:
            key.append(argument if argument == 1 else argument % 16 == 0 and 16)
        elif argument is None:
            key.append(None)
        else:
            key.append(argument.base.dtype)  # a tensor descriptor; its block shape is among the constants
    key.append(device)
    key = tuple(key)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages)
    if compiled is not None:  # None under Triton's interpreter
        _compiled[key] = compiled


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 4 for a CPU tensor under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_tensor_copies(device: torch.device) -> bool:
    """Whether tiles can be loaded by Hopper's bulk tensor copies, which tensor descriptors compile to."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
