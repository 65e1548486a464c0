"""What the tests of exchange of 8-bit Adam's state share: both libraries' optimizers, and the parts of their state."""

import warnings

import pytest
import torch
from torch import nn

from qsub import Blockwise8bitTensor
from qsub.interop.bitsandbytes import optimizer_from_bitsandbytes, optimizer_to_bitsandbytes
from qsub.interop.torchao import optimizer_from_torchao, optimizer_to_torchao
from qsub.optim import AdamW8bit

with warnings.catch_warnings():  # of their imports
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")
    ao = pytest.importorskip("torchao.optim")

READ = {"bitsandbytes": optimizer_from_bitsandbytes, "torchao": optimizer_from_torchao}
WRITE = {"bitsandbytes": optimizer_to_bitsandbytes, "torchao": optimizer_to_torchao}
libraries = pytest.mark.parametrize("library", READ)
# Rows of whole blocks, one row (with a short block for bitsandbytes; plain there, in torchao), blocks of four rows,
# blocks that cut rows in two, fp32 state.
SHAPES = [(64, 256), (4, 8, 128), (5120,), (5000,), (80, 64), (70, 65), (9,)]
EXACT = {0, 1, 2, 3, 4}
LR = 1e-2


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def twins(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def their_optimizer(library, params, **options):
    cls = bnb.optim.AdamW8bit if library == "bitsandbytes" else ao.AdamW8bit
    return cls([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}], lr=LR, **options)


def our_optimizer(params, cls=AdamW8bit, **options):
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    return cls(groups, **{"lr": LR, "backend": "eager", **options})


def parts(library, opt, param):
    """Codes and flat scales of both moments in an optimizer of theirs, or the two plain moments."""
    state = opt.state[param]
    if library == "bitsandbytes":
        if state["state1"].dtype == torch.float32:
            return [(state["state1"],), (state["state2"],)]
        return [(state["state1"], state["absmax1"]), (state["state2"], state["absmax2"])]
    pair = state["exp_avg"], state["exp_avg_sq"]
    return [(x.codes, x.scale) if hasattr(x, "codes") else (x,) for x in pair]


def our_parts(opt, param):
    pair = opt.state[param]["exp_avg"], opt.state[param]["exp_avg_sq"]
    return [(x.codes, x.scale.flatten()) if isinstance(x, Blockwise8bitTensor) else (x,) for x in pair]


def inner(entry):
    """The plain tensors of a state of torchao."""
    return [[x.codes, x.scale, x.qmap] if hasattr(x, "codes") else x for x in entry.values()]


def their_values(library, opt, param):
    """Decoded by their own code."""
    state = opt.state[param]
    if library == "torchao":
        pair = state["exp_avg"], state["exp_avg_sq"]
        return [x.dequantize() if hasattr(x, "codes") else x.float() for x in pair]
    if state["state1"].dtype == torch.float32:
        return [state["state1"], state["state2"]]
    blockwise = bnb.functional.dequantize_blockwise
    return [
        blockwise(state[f"state{n}"], absmax=state[f"absmax{n}"], code=state[f"qmap{n}"], blocksize=256) for n in (1, 2)
    ]


def within_half_a_cell(value, exact):
    """The widest cell of the dynamic tree is .9 / 64 of a block's largest magnitude."""
    return ((value - exact).abs() <= 0.9 / 64 / 2 * 1.01 * exact.abs().max()).all()
