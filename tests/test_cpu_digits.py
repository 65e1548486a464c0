"""Digits of many rows on a CPU: pieces of any size, rows left to the float product, rows apart from each other."""

import pytest
import torch
from linear_reference import LEAST_SQNR, float_weight, make_weight, sqnr

from qsub.linear import cpu, cpu_digits, int8_mm, int8_mm_transposed

pytestmark = pytest.mark.skipif(not cpu.has_int8_product(), reason="no int8 product on this CPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def in_float(monkeypatch):
    """How many rows other than 0 each call multiplied in float."""
    rows = []
    for name in ("_piecewise_mm", "_piecewise_mm_transposed"):
        original = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda x, *args, f=original: (rows.append(int(x.bool().any(1).sum())), f(x, *args))[1]
        )
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block, sums, cached", [(512, 1 << 25, 1 << 16), (64, 1, 1), (512, 3 * 70 * 520, 3000)])
def test_pieces_of_any_size(monkeypatch, in_float, dtype, block, sums, cached):
    for name, value in {"_BLOCK": block, "_SUMS": sums, "_CACHED": cached}.items():
        monkeypatch.setattr(cpu_digits, name, value)
    monkeypatch.setattr(cpu, "_has_bf16_product", lambda: False)  # digits for any number of bf16 rows
    codes, scale = make_weight(520, 1040)
    weight, bias = float_weight(codes, scale), torch.randn(520)
    x, grad = torch.randn(150, 1040).to(dtype), torch.randn(150, 520).to(dtype)
    assert sqnr(int8_mm(x, codes, scale, bias), x.double() @ weight.t() + bias.double()) > LEAST_SQNR[dtype]
    assert sqnr(int8_mm_transposed(grad, codes, scale), grad.double() @ weight) > LEAST_SQNR[dtype]
    assert not in_float


def test_fp32_products_are_nearer_than_those_of_floats():
    codes, scale = make_weight(1024, 1040)
    weight = float_weight(codes, scale)
    x, grad = torch.randn(64, 1040), torch.randn(64, 1024)
    for result, plain, exact in (
        (int8_mm(x, codes, scale), x @ weight.float().t(), x.double() @ weight.t()),
        (int8_mm_transposed(grad, codes, scale), grad @ weight.float(), grad.double() @ weight),
    ):
        assert sqnr(result, exact) > max(130, sqnr(plain, exact) - 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_digits_do_not_hold_are_multiplied_in_float(in_float, dtype):
    codes, scale = make_weight(520, 1040)
    x = torch.randn(20, 1040)
    x[1, 5], x[2, 5], x[3, 5] = 5e3, torch.inf, torch.nan
    x[4], x[5, 10:], x[6, 600:] = 0.0, 0.0, 0.0
    tiny = x[7] * 1e-33
    x[7] = 0 if dtype == torch.float16 else tiny
    x = x.to(dtype)
    result, expected = int8_mm(x, codes, scale), x.double() @ float_weight(codes, scale).t()
    assert in_float == [3 if dtype == torch.float16 else 4]  # none of those with many zeros
    torch.testing.assert_close(result[2].double(), expected[2], rtol=0, atol=0, equal_nan=True)
    assert result[3].isnan().all() and not result[4].any()
    for row in (0, 1, 5, 6, 8) if dtype == torch.float16 else (0, 1, 5, 6, 7, 8):
        assert sqnr(result[row], expected[row]) > LEAST_SQNR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    codes, scale = make_weight(520, 1040)
    x, grad = torch.randn(30, 1040), torch.randn(30, 520)
    x[[4, 17, 20], 3] = grad[[4, 17, 20], 3] = 1e4  # multiplied in float
    x, grad = x.to(dtype), grad.to(dtype)
    result, grad_result = int8_mm(x, codes, scale), int8_mm_transposed(grad, codes, scale)
    x[0], grad[0] = torch.nan, torch.inf  # so is this row now
    for rows in (slice(1, 30), slice(4, 9), torch.tensor([3, 0, 17, 29])):
        kept = torch.arange(30)[rows] > 0
        torch.testing.assert_close(int8_mm(x[rows], codes, scale)[kept], result[rows][kept], rtol=0, atol=0)
        again = int8_mm_transposed(grad[rows], codes, scale)
        torch.testing.assert_close(again[kept], grad_result[rows][kept], rtol=0, atol=0)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 20])
def test_the_default_dtype_is_not_that_of_the_digits(default, dtype, m):
    codes, scale = make_weight(520, 1040)
    x, grad = torch.randn(m, 1040).to(dtype), torch.randn(m, 520).to(dtype)
    torch.set_default_dtype(default)
    try:
        result, grad_result = int8_mm(x, codes, scale), int8_mm_transposed(grad, codes, scale)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(result, int8_mm(x, codes, scale), rtol=0, atol=0)
    torch.testing.assert_close(grad_result, int8_mm_transposed(grad, codes, scale), rtol=0, atol=0)


def test_strided_operands():
    wide, scale = make_weight(520, 1100)
    codes = wide[:, 30:1070]
    weight = float_weight(codes, scale)
    x, grad = torch.randn(1040, 40).t(), torch.randn(40, 600)[:, 50:570]
    assert sqnr(int8_mm(x, codes, scale), x.double() @ weight.t()) > LEAST_SQNR[torch.float32]
    assert sqnr(int8_mm_transposed(grad, codes, scale), grad.double() @ weight) > LEAST_SQNR[torch.float32]
    single, scale = make_weight(65, 131072)  # a last piece of one row
    x = torch.randn(1, 131072)
    assert sqnr(int8_mm(x, single, scale), x.double() @ float_weight(single, scale).t()) > LEAST_SQNR[torch.float32]
