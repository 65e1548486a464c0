"""Inputs and gradients with elements that are huge beside the others, or not finite: what digits could not hold."""

import pytest
import torch
from linear_reference import LEAST_SQNR, float_weight, make_weight, sqnr

from qsub.linear import int8_mm, int8_mm_transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGE = [(dtype, 10.0**power) for dtype in (torch.float32, torch.bfloat16) for power in (2, 4, 6, 9, 14, 30)]
LARGE += [(torch.float16, 1e2), (torch.float16, 1e4)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, magnitude", LARGE)
@pytest.mark.parametrize("outliers", [1, 400])
@pytest.mark.parametrize("m", [2, 4, 20, 150])
def test_few_rows_with_large_inputs_that_the_weight_ignores(device, dtype, outliers, magnitude, m):
    """Digits of a whole row must leave enough of its small elements: they may be all that the result consists of."""
    codes, scale = make_weight(600, 1040, device)
    codes[:, :outliers] = 0
    x = torch.randn(m, 1040, device=device)
    x[0, :outliers] = magnitude
    if m > 2:
        x[2, outliers:] = 0  # a sparse one
    x = x.to(dtype)
    result, expected = int8_mm(x, codes, scale), x.double() @ float_weight(codes, scale).t()
    for row in {0, 1, m - 1}:
        # Three digits hold elements down to 1/256 of the largest to 2**-24 * 256 / sqrt(12), 107 dB.
        assert sqnr(result[row], expected[row]) > min(LEAST_SQNR[dtype], 105)
    if m == 2 and device == "cpu":
        for row in (0, 1):
            torch.testing.assert_close(int8_mm(x[row : row + 1], codes, scale)[0], result[row], rtol=0, atol=0)
    if m > 2:
        assert not result[2].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, magnitude", LARGE)
@pytest.mark.parametrize("m", [1, 20, 150])
def test_large_gradients_that_the_weight_ignores(device, dtype, magnitude, m):
    codes, scale = make_weight(600, 1040, device)
    codes[:7] = 0
    grad = torch.randn(m, 600, device=device)
    grad[0, :7] = magnitude
    grad = grad.to(dtype)
    result, expected = int8_mm_transposed(grad, codes, scale), grad.double() @ float_weight(codes, scale)
    for row in {0, m - 1}:
        assert sqnr(result[row], expected[row]) > min(LEAST_SQNR[dtype], 105)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 20, 150])
def test_infinity_and_nan_go_where_a_float_product_takes_them(device, dtype, m):
    codes, scale = make_weight(600, 1040, device)
    x = torch.randn(m, 1040, device=device).to(dtype)
    x[1, 3], x[2, 5], x[3, 7] = torch.inf, -torch.inf, torch.nan
    result, expected = int8_mm(x, codes, scale), x.double() @ float_weight(codes, scale).t()
    for row in (1, 2):
        torch.testing.assert_close(result[row].double(), expected[row], rtol=0, atol=0, equal_nan=True)
    assert result[3].isnan().all()
    finite = [row for row in range(m) if row not in (1, 2, 3)]
    assert sqnr(result[finite], expected[finite]) > LEAST_SQNR[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 33, 260])
def test_backward_of_a_large_weight(device, dtype, m):
    """Digits of rows of the gradient on CPU. A gradient that isn't finite is none of the other rows' business."""
    codes, scale = make_weight(520, 1040, device)
    grad = torch.randn(m, 520, device=device).to(dtype)
    expected = grad.double() @ float_weight(codes, scale)
    assert sqnr(int8_mm_transposed(grad, codes, scale), expected) > LEAST_SQNR[dtype]
    grad[m // 2, 3] = torch.inf
    result, expected = int8_mm_transposed(grad, codes, scale), grad.double() @ float_weight(codes, scale)
    torch.testing.assert_close(result[m // 2].double(), expected[m // 2], rtol=0, atol=0, equal_nan=True)
    others = [row for row in range(m) if row != m // 2]
    assert not others or sqnr(result[others], expected[others]) > LEAST_SQNR[dtype]
