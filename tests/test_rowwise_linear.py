"""Linear and matmul with an int8 weight: values, gradients, dtypes, layouts and what backward keeps alive."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import qsub
from qsub import Int8RowwiseTensor

# Unit roundoff of each dtype. An output element is a sum of K products of rounded operands, accumulated in fp32 and
# rounded once: |error| <= (3 u + K 2**-24) * sum |x| |w|, where 3 u covers the rounding of w, a product and the sum.
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def bound(x, weight, bias=None):
    """Elementwise error bound of x @ weight.t() + bias in the dtype of x."""
    magnitude = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
    unit = ROUNDOFF[x.dtype]
    return (3 * unit + x.shape[-1] * min(unit, 2.0**-24)) * magnitude + 1e-30


def make(out_features=48, in_features=96, dtype=torch.float32, trainable=False):
    return nn.Parameter(
        Int8RowwiseTensor.from_float(torch.randn(out_features, in_features, dtype=dtype)), requires_grad=trainable
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 96), (17, 96), (2, 3, 96), (2, 0, 96), (2, 3, 4, 96)])
@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_linear_equals_the_float_product(dtype, shape, with_bias):
    weight = make()
    bias = torch.randn(48) if with_bias else None
    x = torch.randn(shape, dtype=dtype)
    y = F.linear(x, weight, bias)
    exact = x.double() @ weight.dequantize(torch.float64).t() + (0 if bias is None else bias.double())
    assert y.dtype == dtype and y.shape == (*shape[:-1], 48) and type(y) is torch.Tensor
    assert ((y.double() - exact).abs() <= bound(x, weight.dequantize(torch.float64), bias)).all()


def test_the_bound_rejects_int4_and_a_wrong_scale():
    weight, x = make(), torch.randn(17, 96)
    limit = bound(x, weight.dequantize(torch.float64))
    exact = x.double() @ weight.dequantize(torch.float64).t()
    int4 = Int8RowwiseTensor((weight.int_data.float() / 16).round().mul(16).to(torch.int8), weight.scale)
    wrong = Int8RowwiseTensor(weight.int_data, weight.scale * 1.01)
    for bad in (int4, wrong):
        assert not ((F.linear(x, bad).double() - exact).abs() <= limit).all()


@pytest.mark.parametrize(
    "product",
    [
        lambda w, x: x @ w.t(),
        lambda w, x: torch.matmul(x, w.t()),
        lambda w, x: x.mm(w.t()),
        lambda w, x: torch.addmm(torch.ones(48), x, w.t()),
        lambda w, x: torch.addmm(torch.ones(7, 48), x, w.t(), beta=0.5, alpha=2.0),
        lambda w, x: (w @ x.t()).t(),
        lambda w, x: w @ x[0],
        lambda w, x: x[0] @ w.t(),
        lambda w, x: x[:, :48] @ w,
        lambda w, x: (w.t() @ x[:, :48].t()).t(),
        lambda w, x: w @ x.t().expand(3, 96, 7),
        lambda w, x: x.expand(3, 7, 96) @ w.t(),
    ],
)
def test_matmul_family(product):
    weight, x = make(), torch.randn(7, 96)
    y, exact = product(weight, x), product(weight.dequantize(), x)
    assert type(y) is torch.Tensor and y.shape == exact.shape
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=96 * 2**-23 * 10)  # K u max|x||w|, both sides fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded"])
def test_gradient_of_the_input(dtype, layout):
    weight = make()
    x = torch.randn(5, 7, 96, dtype=dtype)
    if layout == "transposed":
        x = x.transpose(0, 1)
    elif layout == "strided":
        x = torch.randn(5, 7, 192, dtype=dtype)[..., ::2]
    elif layout == "expanded":
        x = x[:1].expand(5, 7, 96)
    x = x.detach().requires_grad_()
    y = F.linear(x, weight)
    grad = torch.randn(y.shape, dtype=dtype)
    if layout == "expanded":
        grad = grad[:1].expand_as(y)
    y.backward(grad)
    exact = grad.double() @ weight.dequantize(torch.float64)
    assert x.grad.dtype == dtype
    limit = bound(grad.reshape(-1, 48), weight.dequantize(torch.float64).t()).view_as(exact)
    assert ((x.grad.double() - exact).abs() <= limit).all()


def test_weight_and_bias_gradients_of_a_trainable_layer():
    layer = qsub.quantize_(nn.Linear(96, 48), trainable=True)
    layer.bias.data = layer.bias.data.double()
    twin = nn.Linear(96, 48)
    twin.weight.data, twin.bias.data = layer.weight.dequantize(), layer.bias.data.float()
    x = torch.randn(5, 7, 96)
    for module in (layer, twin):
        module(x).square().sum().backward()
    assert type(layer.weight.grad) is torch.Tensor and layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-5, atol=1e-4)
    assert layer.bias.grad.dtype == torch.float64
    torch.testing.assert_close(layer.bias.grad.float(), twin.bias.grad, rtol=1e-5, atol=1e-4)


def test_finite_wherever_the_float_result_is():
    weight = Int8RowwiseTensor(torch.full((2, 4096), 127, dtype=torch.int8), torch.tensor([0.01, 1.0]).half())
    y = F.linear(torch.full((1, 4096), 6.0).half(), weight)  # codes * x would sum to 3e6, over fp16's 65504
    assert y.isfinite().all() and abs(y[0, 1].item() / (6 * 4096) - 1) < 2**-10
    large = F.linear(torch.full((1, 4096), 1e5).bfloat16(), weight)
    assert large.isfinite().all() and abs(large[0, 1].item() / 4.096e8 - 1) < 2**-7


def test_autocast_casts_the_input_and_nothing_else():
    layer = qsub.quantize_(nn.Linear(96, 48))
    x = torch.randn(3, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and layer.bias.grad.dtype == torch.float32
    assert layer.weight.dtype == layer.bias.dtype == torch.float32


def test_input_dtype_decides_and_nothing_warns():
    layer = qsub.quantize_(nn.Linear(96, 48))
    for dtype in ROUNDOFF:
        assert layer(torch.randn(2, 96, dtype=dtype)).dtype == dtype
    assert layer.bias.dtype == torch.float32


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("shape", [(96,), (3, 96), (2, 3, 96)])
def test_a_result_may_be_changed_in_place(shape, trainable, grad):
    """As that of a float layer: `y += adapter(x)` and nn.ReLU(inplace=True), also on what no_grad has computed."""
    layer = qsub.quantize_(nn.Linear(96, 48), trainable=trainable)
    x, added = torch.randn(shape, requires_grad=True), torch.randn(48, requires_grad=True)
    with torch.set_grad_enabled(grad):
        y, z = layer(x), layer(x)
    y += added
    z = z + added
    assert torch.equal(y.mul_(2).relu_(), (z * 2).relu())
    leaves = [x, added, *(p for p in layer.parameters() if p.requires_grad)] if grad else [added]
    for a, b in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad((z * 2).relu().sum(), leaves), strict=True
    ):
        assert torch.equal(a, b) and a.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_give_the_same_numbers(mode):
    layer = qsub.quantize_(nn.Linear(96, 48))
    x = torch.randn(2, 3, 96)
    expected = layer(x)
    with mode():
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected) and torch.equal(layer.train()(x), expected)


def stack(quantize, trainable=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return qsub.quantize_(model, trainable=trainable) if quantize else model.requires_grad_(False)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_lets_go_of_the_input(frozen):
    layer = qsub.quantize_(nn.Linear(32, 64), trainable=not frozen)
    source = torch.randn(4, 32, requires_grad=True)
    hidden = source * 2
    alive = weakref.ref(hidden)
    y = layer(hidden)
    del hidden
    gc.collect()
    assert (alive() is None) == frozen  # the trainable weight is the control: its gradient needs the input
    y.sum().backward()
    assert source.grad is not None


def saved_tensors(model, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    return saved


def test_saved_tensors_are_int8_and_scales():
    x = torch.randn(4, 32, requires_grad=True)

    def float_sizes(model):
        plain = []
        for t in saved_tensors(model, x):
            plain += [t.int_data, t.scale] if isinstance(t, Int8RowwiseTensor) else [t]
        return [t.numel() for t in plain if t.dtype == torch.float32]

    sizes = {p.numel() for p in stack(False).parameters() if p.dim() == 2}
    assert not sizes & set(float_sizes(stack(True)))
    assert sizes & set(float_sizes(stack(False)))  # the control: a float weight is saved


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_gradient_checkpointing_equals_the_plain_run(reentrant, trainable):
    model = stack(True, trainable)
    results = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        model.zero_grad()
        x = torch.linspace(-1, 1, 4 * 32).view(4, 32).requires_grad_()
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == (8 if trainable else 5)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Trace(TorchDispatchMode):
    """Names of the operators that reach the dispatcher, with the shapes of their tensors."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tree_leaves(args) if type(t) is torch.Tensor]
        if not any(isinstance(t, Int8RowwiseTensor) for t in tree_leaves(args)):
            self.lines.append(f"{func} {' '.join(shapes)}")
        return func(*args, **(kwargs or {}))


def test_trace_of_a_frozen_layer():
    """Forward and backward are one operator each; no float tensor of the weight's size (48, 96) appears."""
    layer = qsub.quantize_(nn.Linear(96, 48, bias=False))
    x = torch.randn(5, 96, requires_grad=True)
    grad = torch.ones(5, 48)
    with Trace() as forward:
        y = layer(x)
    with Trace() as backward:
        y.backward(grad)
    assert_expected_inline(
        "\n".join([*forward.lines, "---", *backward.lines]),
        """\
qsub.int8_mm.default float32[5, 96] int8[48, 96] float16[48]
---
qsub.int8_mm_transposed.default float32[5, 48] int8[48, 96] float16[48]
aten.detach.default float32[5, 96]""",
    )


def test_peers_tolerance_of_the_input_gradient():
    """bitsandbytes' test of its memory-efficient backward (PR #33), sizes and bounds, on ten draws."""
    outside = []
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        quantized = qsub.quantize_(copy.deepcopy(model))
        x = torch.randn(16, 8, 32, requires_grad=True)
        grad = torch.randn(16, 8, 32)
        (quantized(x) * grad).sum().backward()
        exact = grad @ model[1].weight @ model[0].weight
        scale = exact.abs().mean().item()
        torch.testing.assert_close(x.grad, exact, rtol=0, atol=0.05 * scale)
        outside.append((~torch.isclose(x.grad, exact, atol=0.01 * scale, rtol=0.1)).float().mean().item())
    assert sum(outside) / len(outside) <= 0.005, outside


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("shape", [(0,), (5, 0), (2, 3, 0)])
def test_zero_features(shape, trainable):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's init warns of zero elements
        layer = qsub.quantize_(nn.Linear(0, 4), trainable=trainable)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, layer.bias.expand(*shape[:-1], 4)) and x.grad.shape == shape


def test_layers_of_any_size_backward():
    """bitsandbytes#804: dimensions that are no multiple of 16 or 32."""
    model = qsub.quantize_(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(8, 3)))
    x = torch.randn(10, 16, requires_grad=True)
    model(x).softmax(-1).sum().backward()
    assert x.grad.isfinite().all()


def test_rows_of_a_batch_do_not_depend_on_each_other():
    """bitsandbytes#28: what else is in the batch changes a row by no more than the order of its sum."""
    weight, x = make(), torch.randn(16, 96)
    y = F.linear(x, weight)
    other = torch.cat([x[:1], torch.randn(15, 96) * 1e4])
    assert ((F.linear(other, weight)[0] - y[0]).abs() <= bound(x, weight.dequantize())[0]).all()


def test_transformer_layer_in_train_and_eval():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    twin = qsub.dequantize_(qsub.quantize_(copy.deepcopy(layer)))
    layer = qsub.quantize_(layer)
    x = torch.randn(2, 5, 64)
    for train in (True, False):
        with torch.no_grad():
            torch.testing.assert_close(layer.train(train)(x), twin.train(train)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        lambda p: qsub.optim.AdamW8bit(p, lr=1e-2, backend="eager"),
    ],
)
def test_trainable_int8_weights_learn(make_optimizer):
    torch.manual_seed(0)
    teacher = nn.Linear(32, 8)
    model = qsub.quantize_(nn.Linear(32, 8), trainable=True)
    optimizer = make_optimizer(model.parameters())
    first = loss = None
    for _ in range(150):
        x = torch.randn(64, 32)
        loss = F.mse_loss(model(x), teacher(x).detach())
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert isinstance(model.weight, Int8RowwiseTensor)
    assert loss.item() < 0.05 * first


def test_fused_optimizers_of_torch_refuse():
    model = qsub.quantize_(nn.Linear(32, 8), trainable=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 32)).sum().backward()
    before = model.weight.dequantize()
    with pytest.raises(NotImplementedError, match="AdamW8bit"):
        optimizer.step()
    assert torch.equal(model.weight.dequantize(), before)
