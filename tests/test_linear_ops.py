"""The int8 linear as an operator: gradients, autocast, compile, opcheck, errors and saved memory."""

import pytest
import torch
import torch._dynamo as dynamo
from linear_reference import LEAST_SQNR, float_weight, make_weight, sqnr
from torch._dynamo.testing import CompileCounter

from qsub.linear import dequantize, int8_linear, int8_mm, int8_mm_transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [
    pytest.param({}, id="weight-only"),
    pytest.param({"activations": "int8"}, id="int8"),
    pytest.param({"activations": "int8", "outlier_threshold": 2.0}, id="outliers"),
    pytest.param({"activations": "int8", "backward": "int8"}, id="int8-backward"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 3, 48), (1, 1, 48)])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
def test_gradients(device, mode, shape, bias_dtype):
    """The gradient of x is straight through, in x's dtype; that of the bias is a sum in the bias's dtype."""
    codes, scale = make_weight(64, 48, device)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = None if bias_dtype is None else torch.randn(64, device=device, dtype=bias_dtype, requires_grad=True)
    y = int8_linear(x, codes, scale, bias, **mode)
    assert y.shape == (*shape[:-1], 64) and y.dtype == torch.bfloat16
    grad = torch.randn_like(y)
    y.backward(grad)
    least = 33 if "backward" in mode else LEAST_SQNR[torch.bfloat16]
    assert x.grad.dtype == torch.bfloat16
    assert sqnr(x.grad, grad.double() @ float_weight(codes, scale)) > least
    if bias is not None:
        assert bias.grad.dtype == bias_dtype
        torch.testing.assert_close(
            bias.grad.double(), grad.double().reshape(-1, 64).sum(0), rtol=torch.finfo(bias_dtype).eps * 4, atol=1e-5
        )
    with torch.no_grad():
        assert torch.equal(y, int8_linear(x, codes, scale, bias, **mode))


@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences(device):
    codes, scale = make_weight(6, 5, device)
    x = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, device=device, dtype=torch.float64, requires_grad=True)

    def run(x, bias):
        return int8_linear(x, codes, scale, bias)

    assert torch.autograd.gradcheck(run, (x, bias))
    assert torch.autograd.gradgradcheck(run, (x, bias))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 3, 48), (2, 0, 48)])
def test_results_can_be_changed_in_place(mode, shape):
    """`h = layer(x); h += residual`, nn.ReLU(inplace=True): autograd must not take a result for a view."""
    codes, scale = make_weight(64, 48)
    grads = []

    def in_place(y):
        y[..., 3:] *= 2
        return y.add_(1).relu_()

    for change in (in_place, lambda y: (y * torch.tensor([1.0] * 3 + [2.0] * 61) + 1).relu()):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
        change(int8_linear(x, codes, scale, **mode)).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        y = int8_linear(x, codes, scale, **mode)
    factor = torch.ones(64, requires_grad=True)
    y.mul_(factor).sum().backward()  # refused on a view that no_grad has made
    assert factor.grad.shape == (64,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 3, 48)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients(mode, shape, create_graph):
    """is_grads_batched, and torch.autograd.functional with vectorize=True, equal one gradient at a time."""
    codes, scale = make_weight(64, 48)
    x, bias = torch.randn(shape, requires_grad=True), torch.randn(64, requires_grad=True)
    y = int8_linear(x, codes, scale, bias, **mode)
    grads = torch.randn(3, *y.shape)
    options = {"retain_graph": True, "create_graph": create_graph}
    batched = torch.autograd.grad(y, (x, bias), grads, is_grads_batched=True, **options)
    single = [torch.autograd.grad(y, (x, bias), grad, **options) for grad in grads]
    for result, expected in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(expected))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [False, True])
def test_saves_codes_and_scales_only(mode, compiled):
    codes, scale = make_weight(64, 48)
    x = torch.randn(32, 48, requires_grad=True)
    saved = []
    run = torch.compile(int8_linear, fullgraph=True, backend="aot_eager") if compiled else int8_linear
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, codes, scale, **mode)
    assert sorted(t.data_ptr() for t in saved) == sorted([codes.data_ptr(), scale.data_ptr()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_autocast(device, mode):
    codes, scale = make_weight(64, 48, device)
    x = torch.randn(5, 48, device=device, requires_grad=True)
    expected = int8_linear(x.detach().bfloat16(), codes, scale, **mode)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = int8_linear(x, codes, scale, **mode)
        assert torch.equal(y, expected)
        assert int8_linear(x.double(), codes, scale, **mode).dtype == torch.float64
        # Called below autocast, an operator keeps the dtype it was given, also inside.
        assert torch.equal(int8_mm(x, codes, scale), int8_mm(x.detach(), codes, scale))
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_products_inside_ignore_autocast():
    codes, scale = make_weight(64, 48)
    x = torch.randn(100, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = int8_mm(x, codes, scale)
    assert torch.equal(inside, int8_mm(x, codes, scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_equals_eager(device, mode):
    codes, scale = make_weight(64, 48, device)
    bias = torch.randn(64, device=device, requires_grad=True)

    def run(x):
        return int8_linear(x, codes, scale, bias, **mode).relu()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (2, 17, 100):
        x = torch.randn(m, 48, device=device, requires_grad=True)
        y, z = run(x), compiled(x)
        assert torch.equal(y, z)
        grad = torch.randn_like(y)
        for result, other in zip(
            torch.autograd.grad(y, (x, bias), grad), torch.autograd.grad(z, (x, bias), grad), strict=True
        ):
            torch.testing.assert_close(result, other)


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_for_all_batch_sizes(mode):
    codes, scale = make_weight(64, 48)
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: int8_linear(x, codes, scale, **mode), fullgraph=True, backend=counter, dynamic=True
    )
    for m in (2, 3, 16, 17, 1000):
        compiled(torch.randn(m, 48, requires_grad=True))
    assert counter.frame_count == 1
    for m in (1, 0):  # torch specializes on sizes of 0 and 1
        compiled(torch.randn(m, 48, requires_grad=True))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [1, 5, 20])
def test_opcheck(device, m):
    codes, scale = make_weight(64, 48, device)
    bias = torch.randn(64, device=device, requires_grad=True)
    for options in (
        {},
        {"int8_activations": True},
        {"int8_activations": True, "outlier_threshold": 2.0},
        {"int8_backward": True},
    ):
        x = torch.randn(m, 48, device=device, requires_grad=True)
        torch.library.opcheck(torch.ops.qsub.int8_mm.default, (x, codes, scale, bias), options)
    for int8_grad in (False, True):
        grad = torch.randn(m, 64, device=device, requires_grad=True)
        torch.library.opcheck(torch.ops.qsub.int8_mm_transposed.default, (grad, codes, scale), {"int8_grad": int8_grad})
    for weight in (codes, codes.t().contiguous().t(), codes[:, ::2], codes[:1].expand(64, 48), codes[:, :0]):
        for dtype in (torch.bfloat16, torch.float64):
            torch.library.opcheck(torch.ops.qsub.dequantize_rowwise.default, (weight, scale, dtype))


def test_operators_are_differentiable_themselves():
    codes, scale = make_weight(64, 48)
    x = torch.randn(5, 48, requires_grad=True)
    int8_mm(x, codes, scale, activations="int8").sum().backward()
    torch.testing.assert_close(
        x.grad, dequantize(codes, scale, torch.float32).sum(0).expand(5, 48), rtol=1e-4, atol=1e-4
    )
    grad = torch.randn(5, 64, requires_grad=True)
    int8_mm_transposed(grad, codes, scale).sum().backward()
    torch.testing.assert_close(
        grad.grad, dequantize(codes, scale, torch.float32).sum(1).expand(5, 64), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activations": "int4"}, "activations must be None or"),
        ({"backward": "fp8"}, "backward must be None or"),
        ({"outlier_threshold": 6.0}, 'needs activations="int8"'),
        ({"activations": "int8", "outlier_threshold": 0.0}, "outlier_threshold must be positive, got 0.0"),
        ({"activations": "int8", "outlier_threshold": -6.0}, "must be positive"),
        ({"activations": "int8", "outlier_threshold": float("nan")}, "must be positive"),
    ],
)
def test_errors(arguments, message):
    codes, scale = make_weight(64, 48)
    with pytest.raises(ValueError, match=message):
        int8_linear(torch.randn(2, 48), codes, scale, **arguments)
    with pytest.raises(ValueError, match=message):
        int8_mm(torch.randn(2, 48), codes, scale, **arguments)
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 48\)"):
        int8_linear(torch.randn(2, 47), codes, scale)


def test_operands_that_do_not_fit():
    """A kernel would read past them, or take the codes of one row for those of two."""
    codes, scale = make_weight(520, 1040)
    x, grad = torch.randn(2, 1040), torch.randn(2, 520)
    for bad in (torch.randn(2, 2080), torch.randn(1, 520), x[0], x.unsqueeze(0)):
        with pytest.raises(RuntimeError, match="expected a matrix with 1040 columns for an int8 weight"):
            int8_mm(bad, codes, scale)
    for bad in (torch.randn(2, 1040), grad[0], grad.unsqueeze(0)):
        with pytest.raises(RuntimeError, match="expected a matrix with 520 columns for an int8 weight"):
            int8_mm_transposed(bad, codes, scale)
    for weight in ((codes, scale[:1]), (codes, scale.unsqueeze(1)), (codes, scale.to("meta")), (codes.float(), scale)):
        for product in (int8_linear, int8_mm, lambda x, *weight: int8_mm_transposed(grad, *weight)):
            with pytest.raises(RuntimeError, match=r"expected an int8 weight of codes \(N, K\) and scales \(N,\)"):
                product(x, *weight)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(RuntimeError, match=f"takes a float bias, got {dtype}"):
            int8_linear(x, codes, scale, torch.ones(520, dtype=dtype))


def test_forward_mode_is_not_lost():
    codes, scale = make_weight(6, 5)
    x, bias = torch.ones(3, 5), torch.ones(6)
    for inputs in ((x,), (x, bias)):
        with pytest.raises(NotImplementedError, match="with an Int8RowwiseTensor"):
            torch.func.jvp(lambda first, *rest: int8_linear(first, codes, scale, *rest), inputs, inputs)


def test_generic_fallback_is_the_definition(monkeypatch):
    """A CPU without an int8 product gets the same values from the plain torch path."""
    from qsub.linear import cpu

    codes, scale = make_weight(520, 1040)
    for m in (1, 5, 40):
        x = torch.randn(m, 1040)
        fast = int8_mm(x, codes, scale, activations="int8"), int8_mm(x, codes, scale)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "has_int8_product", lambda: False)
            plain = int8_mm(x, codes, scale, activations="int8"), int8_mm(x, codes, scale)
        assert sqnr(fast[0], plain[0]) > 110 and sqnr(fast[1], plain[1]) > 110
