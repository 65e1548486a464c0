"""FlopCounterMode counts the products with int8 weights as those with floats, forward and backward."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qsub
from qsub import Int8RowwiseTensor

MODES = {
    "float": {},
    "int8": {"activations": "int8"},
    "threshold": {"activations": "int8", "outlier_threshold": 6.0},
    "backward": {"activations": "int8", "backward": "int8"},
}
PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w),
    "linear 3-D": lambda x, w: F.linear(x.view(2, -1, x.shape[-1]), w),
    "mm": lambda x, w: x.mm(w.t()),
    "matmul": lambda x, w: x.view(2, -1, x.shape[-1]) @ w.t(),
    "matmul left": lambda x, w: w @ x.t(),
    "addmm": lambda x, w: torch.addmm(torch.zeros(w.shape[0]), x, w.t()),
    "bmm": lambda x, w: torch.bmm(x.view(2, -1, x.shape[-1]), w.t().expand(2, -1, -1)),
    "einsum": lambda x, w: torch.einsum("bk,nk->bn", x, w),
}


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("trainable", [False, True])
def test_forward_and_backward(product, mode, trainable):
    m = qsub.quantize_(nn.Linear(64, 32, bias=False), trainable=trainable, **MODES[mode])
    x = torch.randn(16, 64, requires_grad=True)
    run = PRODUCTS[product]
    one = 2 * 16 * 64 * 32
    assert flops(lambda: run(x, m.weight)) == one
    assert flops(lambda: run(x, m.weight).sum().backward()) == one * (3 if trainable else 2)
    with torch.no_grad():
        assert flops(lambda: run(x, m.weight)) == one
    plain = m.weight.detach().dequantize().requires_grad_(trainable)
    assert flops(lambda: run(x, plain).sum().backward()) == one * (3 if trainable else 2)  # as torch counts


@pytest.mark.parametrize("first", ["import qsub", "import torch.utils.flop_counter"])
def test_either_order_of_imports(first):
    code = f"""{first}
import qsub, sys, torch
assert {first == "import torch.utils.flop_counter"} == ("torch.utils.flop_counter" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
w = qsub.Int8RowwiseTensor.from_float(torch.ones(3, 5))
with FlopCounterMode(display=False) as counter:
    torch.nn.functional.linear(torch.ones(2, 5), w)
assert counter.get_total_flops() == 60
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_vector():
    w = Int8RowwiseTensor.from_float(torch.randn(32, 64))
    assert flops(lambda: F.linear(torch.randn(64), w)) == 2 * 64 * 32
