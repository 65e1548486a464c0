"""Overlap of a kernel's start with the end of the one before it, by programmatic dependent launch (Hopper and later).

A kernel launched with `launch_pdl` may start as soon as all programs of the one before have started to finish. It
waits in `wait_for_inputs` until that one is complete and its results are visible; before, it may only touch what no
kernel writes or what doesn't matter. `prefetch` brings a weight into L2, which is where every write ends up too, so it
is safe even if the kernel before writes that weight.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qsub.kernel_launch import has_tensor_copies

LINE = tl.constexpr(128)  # bytes of a cache line


def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched with `launch_pdl`."""
    return device.type == "cuda" and has_tensor_copies(device)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(address):
    """Ask for the cache line of each address (a tensor of pointers) to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
