"""Pairs of optimizers with equal parameters and gradients, and their comparison up to last-bit differences."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # must be set before Triton is imported
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="test_one_launch_interpreted.py runs it"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [CPU, CUDA])

# Blocks of 64: full (16, 64), rows of 16 that end in a short block (48 and 80), rows of any length, one row, fp32
# state (33 and a scalar, with min_8bit_size=64). Narrow rows share blocks: whole ones (5 of 13), the last of fewer rows
# (30 of 3 and 75 of 1), an odd number of elements (18 of 25).
SHAPES = [(16, 64), (7, 48), (9, 80), (5, 13), (130,), (2, 3, 5, 7), (1, 640), (33,), ()]
SHAPES += [(30, 3), (75, 1), (18, 25)]

# Of one step, in units of lr: the quotient m / sqrt(v), at most 10 in a first few steps, is off by a few roundings
# (the GPU's division and square root are good to 2 ulp). The parameter adds its own last rounding.
UPDATE_ERROR = 10 * 2.0**-20
# Share of codes that such an error may turn: those within a few ulp of a rounding boundary, of which there is one in
# 2**19 ulp; measured 0 to 3e-5.
CODE_FLIPS = 1e-3


def make_params(dtypes, device, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtypes[i % len(dtypes)]))
        for i, shape in enumerate(shapes)
    ]


def twins(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def set_grads(params, others, generator, scale=1e-2):
    """The same heavy-tailed gradients for both."""
    for p, q in zip(params, others, strict=True):
        spread = torch.randn(p.shape, generator=generator).exp()
        grad = torch.randn(p.shape, generator=generator) * spread * scale
        p.grad = grad.to(p.device, p.dtype)
        q.grad = p.grad.clone()


def inner(moment):
    return [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]


def compare(ours, reference, params, others, lr):
    """Assert that states and parameters are equal up to last-bit differences; returns how many codes differ."""
    flips = total = 0
    for p, q in zip(params, others, strict=True):
        a, b = ours.state[p], reference.state[q]
        assert a.keys() == b.keys()
        assert float(a["step"]) == float(b["step"])
        for key in set(a) - {"step"}:
            for x, y in zip(inner(a[key]), inner(b[key]), strict=True):
                if x.dtype == torch.uint8:
                    flips += int((x != y).sum())
                    total += x.numel()
                else:
                    # a few roundings, of terms as large as the largest where they cancel
                    torch.testing.assert_close(x, y, rtol=2.0**-21, atol=2.0**-22 * float(y.abs().max()))
        ulp = torch.finfo(p.dtype).eps * q.detach().float().abs()
        difference = (p.detach().float() - q.detach().float()).abs()
        assert bool((difference <= UPDATE_ERROR * lr + ulp).all()), (tuple(p.shape), float(difference.max()))
    assert flips <= max(2, CODE_FLIPS * total)
    return flips


def align(ours, reference, params, others):
    """Give `reference` the values of `ours`, so that each step is compared by itself."""
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
            for key in set(ours.state[p]) - {"step"}:
                reference.state[q][key].copy_(ours.state[p][key])


def run_pair(cls, params, others, steps=3, **options):
    """Both backends side by side, compared after each step."""
    options = {"lr": 1e-2, "min_8bit_size": 64, **options}
    ours, reference = cls(params, backend="triton", **options), cls(others, backend="eager", **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        set_grads(params, others, generator)
        ours.step()
        reference.step()
        compare(ours, reference, params, others, options["lr"])
        align(ours, reference, params, others)
    return ours, reference
