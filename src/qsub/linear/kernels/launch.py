"""Kernel launches without Triton's per-call specialization of the arguments, which costs more than a small product."""

import torch
import triton
from torch import Tensor

_compiled: dict[tuple, "triton.compiler.CompiledKernel"] = {}


def _argument_class(argument):
    """What Triton specializes a kernel on: alignment of pointers and integers, values of 1, and constants."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return 1 if argument == 1 else (argument % 16 == 0, argument >= 2**31)
    return type(argument)


def launch(kernel, grid: tuple[int, int, int], arguments: tuple, constants: tuple, **options: int) -> None:
    """Run `kernel[grid](*arguments, *constants, **options)`.

    Args:
        kernel: a `triton.jit` function whose `tl.constexpr` parameters come last.
        grid: number of programs along three axes.
        arguments: tensors, numbers or None, for the run-time parameters.
        constants: values of the `tl.constexpr` parameters.
        options: num_warps, num_stages.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (kernel, device, constants, tuple(options.items()), *map(_argument_class, arguments))
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, **options)
    if compiled is not None:  # None under Triton's interpreter
        _compiled[key] = compiled
