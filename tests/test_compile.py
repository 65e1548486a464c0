"""torch.compile and torch.export of quantized models."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import qsub

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _cold_start():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model(trainable=False):
    layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 40, bias=False), nn.GELU(), nn.Linear(40, 8))
    return qsub.quantize_(layers, trainable=trainable)


@pytest.mark.parametrize("trainable", [False, True])
def test_any_batch_size_in_two_graphs(trainable):
    eager = model(trainable)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(eager, fullgraph=True, backend=counter)
    for batch in (1, 2, 17, 1000):
        grads = []
        for run in (compiled, eager):
            x = torch.linspace(-1, 1, batch * 24).view(batch, 24).requires_grad_()
            eager.zero_grad()
            run(x).square().mean().backward()
            grads.append([x.grad, *(p.grad for p in eager.parameters() if p.grad is not None)])
        assert len(grads[0]) == len(grads[1]) == (6 if trainable else 3)
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert counter.frame_count <= 2


def test_three_dimensions_autocast_and_no_grad():
    eager = model()
    compiled = torch.compile(eager, fullgraph=True)
    x = torch.randn(3, 5, 24).transpose(0, 1)
    torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-6)


def test_backward_keeps_no_float_weight():
    """The compiled forward may save the int8 data and the scales of a frozen weight, but nothing float of its size."""
    sizes = []

    def keep(graph, inputs):
        sizes.extend(t.numel() for t in inputs if isinstance(t, torch.Tensor) and t.dtype == torch.float32)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def backward(graph, inputs):
        keep(graph, inputs)
        return make_boxed_func(graph.forward)

    frozen, plain = model(), model()
    plain = qsub.dequantize_(plain)
    for module in (frozen, plain):
        torch._dynamo.reset()
        sizes.clear()
        backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=backward)
        torch.compile(module, backend=backend)(torch.randn(3, 24, requires_grad=True)).sum().backward()
        weights = {48 * 24, 40 * 48, 8 * 40}
        assert bool(weights & set(sizes)) == (module is plain)  # the float model is the control


def test_compile_after_a_move_and_a_copy():
    eager = model().bfloat16()
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True)
    x = torch.randn(4, 24, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(x), eager(x), rtol=2**-6, atol=2**-8)


def test_export_with_a_dynamic_batch():
    eager = model()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(eager, (torch.randn(4, 24),), dynamic_shapes=({0: batch},))
    for size in (2, 9):
        x = torch.randn(size, 24)
        torch.testing.assert_close(program.module()(x), eager(x), rtol=1e-5, atol=1e-6)
