"""Products of Int8RowwiseTensor with operands of unusual shapes, dtypes and devices, against the float weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsub
from qsub import Int8RowwiseTensor
from qsub.linear import int8_linear, int8_mm, int8_mm_transposed

X = torch.linspace(-1, 1, 30).view(3, 10)


def pair(**options):
    weight = Int8RowwiseTensor.from_float(torch.randn(6, 10), **options)
    return weight, weight.dequantize().detach().requires_grad_(weight.requires_grad)


@pytest.mark.parametrize(
    "product",
    [
        lambda w: X @ w[2],
        lambda w: X.expand(2, 3, 10) @ w[2],
        lambda w: w[2] @ X.t(),
        lambda w: w[2] @ X.t().expand(4, 10, 3),
        lambda w: w[2] @ X[0],
        lambda w: X[0] @ w[2],
        lambda w: X[:, :6] @ w[:, 3],
        lambda w: F.linear(X, w[2]),
        lambda w: F.linear(X, w, X[:, :6]),
        lambda w: F.linear(X, w, X[0, :1]),
        lambda w: F.linear(X, w, X[0, 0]),
        lambda w: torch.addmm(torch.full((6,), torch.nan), X, w.t(), beta=0),
        lambda w: torch.addmm(X[:, :6], X, w.t(), beta=2, alpha=0.5),
    ],
)
@pytest.mark.parametrize("trainable", [False, True])
def test_vectors_rows_and_biases(product, trainable):
    weight, plain = pair(requires_grad=trainable)
    result, expected = product(weight), product(plain)
    torch.testing.assert_close(result, expected)
    if trainable:
        result.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(weight.grad, plain.grad)


def test_gradient_of_a_bias_for_each_row():
    weight, plain = pair()
    biases = [X[:, :6].clone().requires_grad_() for _ in range(2)]
    F.linear(X, weight, biases[0]).square().sum().backward()
    F.linear(X, plain, biases[1]).square().sum().backward()
    torch.testing.assert_close(biases[0].grad, biases[1].grad)


@pytest.mark.parametrize("trainable", [False, True])
def test_einsum_with_one_row_and_views_of_it(trainable):
    """A layer with one output: its scale is that of all elements, whatever their shape."""
    weight = Int8RowwiseTensor.from_float(torch.randn(1, 10), requires_grad=trainable)
    plain = weight.dequantize().detach().requires_grad_(trainable)
    x = X.expand(2, 3, 10)
    for product in (
        lambda w: torch.einsum("...k,nk->...n", x, w),
        lambda w: torch.einsum("...k,nk->n...", x[0], w),
        lambda w: x[..., :5] @ w.view(2, 5).t(),
        lambda w: x[..., :2] @ w.view(2, 5),
    ):
        result, expected = product(weight), product(plain)
        torch.testing.assert_close(result, expected)
        if trainable:
            grads = [torch.autograd.grad(y.square().sum(), w)[0] for y, w in ((result, weight), (expected, plain))]
            torch.testing.assert_close(*grads)
    with torch.no_grad():
        weight.view(10, 1).fill_(2.0)
    assert torch.equal(weight.dequantize(), torch.full((1, 10), 2.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: x @ w.t(),
        lambda x, w: w @ x.t(),
        lambda x, w: torch.mm(x, w.t()),
        lambda x, w: x[:, :6] @ w,
        lambda x, w: int8_linear(x, w.int_data, w.scale, activations="int8"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_inputs_that_are_not_float_are_refused(dtype, product, autocast):
    """torch multiplies no integers with a float weight; converting the weight to theirs would lose it."""
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(RuntimeError, match=f"takes a float input, got {dtype}"),
    ):
        product(torch.ones(3, 10, dtype=dtype), pair()[0])


def test_operands_on_two_devices_are_refused():
    """A model that is still on the meta device has no numbers to give."""
    weight = pair()[0]
    away = weight.to("meta")
    cases = [
        lambda: F.linear(X, away),
        lambda: X @ away.t(),
        lambda: F.linear(X.to("meta"), weight),
        lambda: F.linear(X, weight, torch.ones(6, device="meta")),
        lambda: int8_mm(X, away.int_data, away.scale),
        lambda: int8_mm_transposed(X[:, :6], away.int_data, away.scale),
    ]
    for case in cases:
        with pytest.raises(RuntimeError, match="to be on the same device"):
            case()
    assert F.linear(X.to("meta"), away).device.type == "meta"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_shapes_that_do_not_fit():
    weight = pair()[0]
    with pytest.raises(RuntimeError, match=r"expected a bias of shape \(6,\), got \(5,\)"):
        F.linear(X, weight, torch.ones(5))
    with pytest.raises(RuntimeError, match=r"expected a bias of shape \(1,\), got \(5,\)"):
        F.linear(X.double(), weight[:1], torch.ones(5))
    with pytest.raises(RuntimeError, match=r"expected a bias of shape \(6,\), got \(3, 6\)"):
        F.linear(X.unsqueeze(1), weight, torch.ones(3, 6))
    with pytest.raises(NotImplementedError, match=r"torch\.bmm"):
        X[:, :6].expand(2, 3, 6) @ weight.expand(2, 6, 10)
    with pytest.raises(NotImplementedError, match=r"layout=torch\.jagged"):
        F.linear(torch.nested.nested_tensor([X, X[:2]]), weight)


def test_jagged_inputs():
    m = qsub.quantize_(nn.Linear(10, 6))
    ragged = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    torch.testing.assert_close(m(ragged).values(), m(torch.cat([X, X[:2]])))


def test_batched_product_under_autocast():
    """Autocast's copy of an expanded weight is still one matrix, and no larger."""
    weight, plain = pair()
    batch = weight.t().expand(5, 10, 6)
    assert batch.bfloat16().int_data.untyped_storage().nbytes() == 60
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = torch.bmm(X.expand(5, 3, 10), batch)
        expected = torch.bmm(X.expand(5, 3, 10), plain.t().expand(5, 10, 6))
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("bad", [torch.tensor([-1]), torch.tensor([6]), torch.tensor([True])])
def test_embedding_refuses_what_torch_refuses(bad):
    weight, plain = pair()
    with pytest.raises((IndexError, RuntimeError)):
        F.embedding(bad, plain)
    with pytest.raises((IndexError, RuntimeError)):
        F.embedding(bad, weight)


def test_numbers_are_formatted():
    weight = pair()[0]
    assert f"{weight[0, 0]:.3f}" == f"{weight[0, 0].item():.3f}"
    assert f"{weight}" == repr(weight)
