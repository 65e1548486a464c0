"""What only a GPU can show of the int8 linear: no synchronization, CUDA graphs, memory, kernels by shape class."""

import pytest
import torch
import torch.nn.functional as F
from linear_reference import LEAST_SQNR, LEAST_SQNR_CODES, fake_quantize_rows, float_weight, make_weight, sqnr

from qsub.linear import int8_linear, int8_mm_transposed

pytestmark = pytest.mark.gpu

MODES = [
    pytest.param({}, id="weight-only"),
    pytest.param({"activations": "int8"}, id="int8"),
    pytest.param({"activations": "int8", "outlier_threshold": 2.0}, id="outliers"),
    pytest.param({"activations": "int8", "backward": "int8"}, id="int8-backward"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [1, 8, 64, 500])
def test_no_synchronization(mode, m):
    codes, scale = make_weight(256, 512, "cuda")
    x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    int8_linear(x, codes, scale, **mode).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        int8_linear(x, codes, scale, **mode).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [1, 8, 64, 500])
def test_cuda_graph(mode, m):
    codes, scale = make_weight(256, 512, "cuda")
    x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    int8_linear(x, codes, scale, **mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = int8_linear(x, codes, scale, **mode)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(y, int8_linear(x, codes, scale, **mode))


@pytest.mark.parametrize("m", [1, 2, 16, 17, 33, 64, 128, 256, 300, 1024, 4096])
@pytest.mark.parametrize(("n", "k"), [(512, 2048), (4096, 4096), (14336, 1024)])
def test_shape_classes_in_bf16(m, n, k):
    """Every tile of the tables, on sizes of real layers."""
    codes, scale = make_weight(n, k, "cuda")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = float_weight(codes, scale)
    assert sqnr(int8_linear(x, codes, scale), x.double() @ weight.t()) > LEAST_SQNR[torch.bfloat16]
    quantized = fake_quantize_rows(x) @ weight.t()
    least = LEAST_SQNR_CODES[torch.bfloat16]
    assert sqnr(int8_linear(x, codes, scale, activations="int8"), quantized) > least
    result = int8_linear(x, codes, scale, activations="int8", outlier_threshold=100.0)
    assert sqnr(result, quantized) > least
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    assert sqnr(int8_mm_transposed(grad, codes, scale), grad.double() @ weight) > LEAST_SQNR[torch.bfloat16]
    folded = fake_quantize_rows(grad.double() * scale.double() / 127) @ codes.double()
    assert sqnr(int8_mm_transposed(grad, codes, scale, backward="int8"), folded) > least


@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64, 100, 128, 129])
def test_backward_of_a_few_rows(m):
    """Large weights are read as int8; more rows than the kernel takes go through a dequantized weight."""
    from qsub.linear.kernels import few_rows_backward

    codes, scale = make_weight(8192, 4096, "cuda")
    grad = torch.randn(m, 8200, device="cuda", dtype=torch.bfloat16)[:, :8192]
    assert few_rows_backward.takes(grad, codes) == (m <= 128)
    result = int8_mm_transposed(grad, codes, scale)
    assert sqnr(result, grad.double() @ float_weight(codes, scale)) > LEAST_SQNR[torch.bfloat16]
    assert torch.equal(result, int8_mm_transposed(grad, codes, scale))


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_saved_by_frozen_layers(compiled):
    """As much as frozen bf16 layers save: the inputs of the GELUs, and no input of a linear."""
    depth, width, rows = 4, 512, 1024
    weights = [make_weight(width, width, "cuda") for _ in range(depth)]
    floats = [float_weight(*weight).bfloat16() for weight in weights]

    def int8(x):
        for codes, scale in weights:
            x = F.gelu(int8_linear(x, codes, scale))
        return x

    def bf16(x):
        for weight in floats:
            x = F.gelu(F.linear(x, weight))
        return x

    def saved(run):
        run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        run(x).sum().backward()
        before = torch.cuda.memory_allocated()
        y = run(x)
        return torch.cuda.memory_allocated() - before, y

    assert saved(int8)[0] <= saved(bf16)[0]


def test_no_float_weight_outlives_the_call():
    codes, scale = make_weight(4096, 4096, "cuda")
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = int8_linear(x, codes, scale)
    y.backward(y.detach())
    y = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = int8_linear(x, codes, scale)
    assert torch.cuda.memory_allocated() - before <= y.nbytes + 2**21
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + 2 * codes.numel() + 2**22
