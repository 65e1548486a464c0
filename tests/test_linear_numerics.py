"""Values of the int8 linear: every mode, dtype and class of shapes against float64 definitions."""

import pytest
import torch
from linear_reference import (
    LEAST_SQNR,
    LEAST_SQNR_CODES,
    fake_quantize_rows,
    float_weight,
    llm_int8,
    make_weight,
    sqnr,
)

from qsub.linear import OUTLIER_COLUMNS, dequantize, int8_linear, int8_mm, int8_mm_transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS = [1, 2, 15, 16, 17, 100, 1000]
SHAPES = [(1, 1), (7, 1), (1, 9), (33, 65), (64, 48), (257, 640)]  # (N, K): odd and even, multiples of 16 and not


def least(table, dtype, results):
    """The bound for a number of results: with a few, one of them may be a sum that cancels."""
    return table[dtype] - (25 if results < 16 else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", ROWS)
def test_weight_only(device, dtype, m):
    for n, k in SHAPES:
        codes, scale = make_weight(n, k, device)
        x = torch.randn(m, k, device=device).to(dtype)
        bias = torch.randn(n, device=device)
        result = int8_mm(x, codes, scale, bias)
        assert result.dtype == dtype
        assert sqnr(result, x.double() @ float_weight(codes, scale).t() + bias.double()) > least(
            LEAST_SQNR, dtype, m * n
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 64, 65, 256, 257])
def test_weight_only_of_a_large_weight(device, dtype, m):
    """Sizes past the switches: digits on CPU, digits and wide tiles on CUDA."""
    for n, k in ((520, 1040), (8200, 272)):
        codes, scale = make_weight(n, k, device)
        x = torch.randn(m, k, device=device).to(dtype)
        result = int8_mm(x, codes, scale)
        assert sqnr(result, x.double() @ float_weight(codes, scale).t()) > LEAST_SQNR[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", ROWS)
def test_int8_activations(device, dtype, m):
    for n, k in SHAPES:
        codes, scale = make_weight(n, k, device)
        x = torch.randn(m, k, device=device).to(dtype)
        bias = torch.randn(n, device=device)
        result = int8_mm(x, codes, scale, bias, activations="int8")
        reference = fake_quantize_rows(x) @ float_weight(codes, scale).t() + bias.double()
        assert result.dtype == dtype
        assert sqnr(result, reference) > least(LEAST_SQNR_CODES, dtype, m * n)
        if k > 16:  # a row of one element is its own scale, exact at any number of levels
            assert sqnr(result, fake_quantize_rows(x, 7) @ float_weight(codes, scale).t() + bias.double()) < 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outliers", [0, 1, 7, OUTLIER_COLUMNS])
@pytest.mark.parametrize("m", [1, 17, 100])
def test_llm_int8_is_the_definition_up_to_the_limit(device, dtype, outliers, m):
    n, k = 96, 320
    codes, scale = make_weight(n, k, device)
    x = torch.randn(m, k, device=device).clamp(-5, 5)
    columns = torch.randperm(k)[:outliers]
    x[m // 2, columns.to(device)] = 40 + 20 * torch.rand(outliers, device=device)
    x = x.to(dtype)
    result = int8_mm(x, codes, scale, activations="int8", outlier_threshold=6.0)
    assert sqnr(result, llm_int8(x, codes, scale, 6.0)) > LEAST_SQNR_CODES[dtype]
    if outliers:
        plain = int8_mm(x, codes, scale, activations="int8")
        truth = x.double() @ float_weight(codes, scale).t()
        assert sqnr(result[m // 2], truth[m // 2]) > sqnr(plain[m // 2], truth[m // 2]) + 6


@pytest.mark.parametrize("device", DEVICES)
def test_llm_int8_beyond_the_limit(device):
    """The largest columns are computed in float; the others over the threshold stay in int8."""
    n, k, outliers = 96, 512, OUTLIER_COLUMNS + 40
    codes, scale = make_weight(n, k, device)
    x = torch.randn(33, k, device=device)
    columns = torch.randperm(k)[:outliers].to(device)
    x[5, columns] = torch.linspace(20, 90, outliers, device=device)
    result = int8_mm(x, codes, scale, activations="int8", outlier_threshold=6.0)
    assert sqnr(result, llm_int8(x, codes, scale, 6.0, limit=OUTLIER_COLUMNS)) > 60
    assert sqnr(result, llm_int8(x, codes, scale, 6.0)) < 60
    # Ties at the last place still fill exactly the limit: nothing is lost and nothing counted twice.
    x[5, columns] = 50.0
    result = int8_mm(x, codes, scale, activations="int8", outlier_threshold=6.0)
    assert sqnr(result, x.double() @ float_weight(codes, scale).t()) > 35


@pytest.mark.parametrize("device", DEVICES)
def test_llm_int8_is_stateless(device):
    codes, scale = make_weight(64, 256, device)
    x, loud = torch.randn(20, 256, device=device), 50 * torch.randn(20, 256, device=device)
    first = int8_mm(x, codes, scale, activations="int8", outlier_threshold=6.0)
    int8_mm(loud, codes, scale, activations="int8", outlier_threshold=6.0)
    assert torch.equal(first, int8_mm(x, codes, scale, activations="int8", outlier_threshold=6.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 100])
def test_backward_product(device, dtype, m):
    for n, k in SHAPES:
        codes, scale = make_weight(n, k, device)
        grad = torch.randn(m, n, device=device).to(dtype)
        truth = grad.double() @ float_weight(codes, scale)
        assert sqnr(int8_mm_transposed(grad, codes, scale), truth) > least(LEAST_SQNR, dtype, m * k)
        folded = fake_quantize_rows(grad.double() * scale.double() / 127) @ codes.double()
        quantized = int8_mm_transposed(grad, codes, scale, backward="int8")
        assert sqnr(quantized, folded) > least(LEAST_SQNR_CODES, dtype, m * k)
        if min(n, k) > 16:
            assert sqnr(quantized, truth) > 33  # the documented error, less a margin for short rows
            wrong = fake_quantize_rows(grad.double() * scale.double() / 127, 7) @ codes.double()
            assert sqnr(quantized, wrong) < 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [{}, {"activations": "int8"}, {"activations": "int8", "outlier_threshold": 6.0}])
@pytest.mark.parametrize("m", [1, 4, 20, 300])
def test_finite_wherever_float_is(device, mode, m):
    """An fp16 round trip, or the scale after the cast, would overflow here (bitsandbytes#165)."""
    codes = torch.full((64, 4096), 127, dtype=torch.int8, device=device)
    scale = torch.ones(64, dtype=torch.float16, device=device)
    half = int8_linear(torch.full((m, 4096), 6.0, dtype=torch.float16, device=device), codes, scale, **mode)
    torch.testing.assert_close(half, torch.full_like(half, 6 * 4096), rtol=2**-10, atol=0)
    wide = int8_linear(torch.full((m, 4096), 1e5, dtype=torch.bfloat16, device=device), codes, scale, **mode)
    torch.testing.assert_close(wide, torch.full_like(wide, 1e5 * 4096), rtol=2**-7, atol=0)
    small = int8_linear(torch.full((m, 4096), 1e-20, dtype=torch.bfloat16, device=device), codes, scale, **mode)
    torch.testing.assert_close(small, torch.full_like(small, 1e-20 * 4096), rtol=2**-7, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [{}, {"activations": "int8"}, {"activations": "int8", "outlier_threshold": 6.0}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_apart(device, mode, value):
    codes, scale = make_weight(64, 512, device)
    x = torch.randn(20, 512, device=device)
    x[3, 7] = value
    result = int8_linear(x, codes, scale, **mode)
    assert not result[3].isfinite().any()
    others = torch.arange(20, device=device) != 3
    assert result[others].isfinite().all()


def test_few_rows_of_infinities_alone():
    """They have no small elements to keep them from being multiplied as digits, which know no infinity."""
    codes, scale = make_weight(520, 1040)
    codes[:3], codes[3:6] = 0, codes[3:6].abs().clamp(1)
    x = torch.full((2, 1040), float("inf"))
    x[1] *= -1
    expected = (x.double() @ float_weight(codes, scale).t()).float()
    assert expected[0, 3] == float("inf") and expected[1, 3] == -float("inf") and expected[0, 0].isnan()
    torch.testing.assert_close(int8_mm(x, codes, scale), expected, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_costs_other_rows_no_outlier_column(device):
    """Its column is one of those in float, so that another row's outlier there doesn't fall back to int8."""
    codes, scale = make_weight(64, 512, device)
    x = torch.randn(20, 512, device=device).clamp(-5, 5)
    x[3, 7], x[5, 7] = float("nan"), 1000.0
    result = int8_mm(x, codes, scale, activations="int8", outlier_threshold=6.0)
    expected = x.double() @ float_weight(codes, scale).t()
    assert result[3].isnan().all()
    assert sqnr(result[5], expected[5]) > 60 and sqnr(result[6], expected[6]) > 35


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [{}, {"activations": "int8"}, {"activations": "int8", "outlier_threshold": 6.0}])
def test_empty(device, mode):
    bias = torch.randn(5, device=device)
    for m, n, k in ((0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)):
        codes, scale = make_weight(n, k, device)
        x = torch.randn(2, m, k, device=device, requires_grad=True)
        result = int8_linear(x, codes, scale, bias[:n], **mode)
        assert result.shape == (2, m, n)
        torch.testing.assert_close(result, torch.zeros_like(result) + bias[:n])
        result.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [{}, {"activations": "int8"}, {"activations": "int8", "outlier_threshold": 2.0}])
@pytest.mark.parametrize("m", [1, 12, 40])
def test_any_layout(device, mode, m):
    """Transposed and strided inputs and weights give what their contiguous copies give."""
    codes, scale = make_weight(96, 128, device)
    x = torch.randn(128, m, device=device).t()
    expected = int8_mm(x.contiguous(), codes, scale, **mode)
    torch.testing.assert_close(int8_mm(x, codes, scale, **mode), expected)
    torch.testing.assert_close(int8_mm(x, codes.t().contiguous().t(), scale, **mode), expected)
    wide_x, wide_codes = torch.randn(m, 200, device=device), torch.zeros(96, 200, device=device, dtype=torch.int8)
    wide_x[:, 3:131], wide_codes[:, 5:133] = x, codes
    torch.testing.assert_close(int8_mm(wide_x[:, 3:131], wide_codes[:, 5:133], scale, **mode), expected)
    same_rows = codes[:1].expand(96, 128)
    torch.testing.assert_close(
        int8_mm(x, same_rows, scale, **mode), int8_mm(x.contiguous(), same_rows.contiguous(), scale, **mode)
    )
    one, bias = scale[:1].expand(96), torch.randn(192, device=device)[::2]
    torch.testing.assert_close(
        int8_mm(x, codes, one, bias, **mode), int8_mm(x, codes, one.contiguous(), bias.contiguous(), **mode)
    )
    grad = torch.randn(96, m, device=device).t()
    torch.testing.assert_close(
        int8_mm_transposed(grad, wide_codes[:, 5:133], scale), int8_mm_transposed(grad.contiguous(), codes, scale)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_weight_only_rows_are_independent(device):
    """bitsandbytes#28: what else is in the batch doesn't change a row by more than the order of its sum."""
    codes, scale = make_weight(96, 1024, device)
    x = torch.randn(300, 1024, device=device)
    together = int8_mm(x, codes, scale)
    for row in (0, 17, 299):
        assert sqnr(int8_mm(x[row : row + 1], codes, scale), together[row : row + 1]) > 110


def digitless_row(k):
    """Magnitudes of so many orders that no number of digits holds enough of them."""
    return torch.logspace(0, -30, k)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_few_rows_do_not_depend_on_whether_others_have_digits(m):
    codes, scale = make_weight(520, 1040)
    x = torch.randn(m, 1040)
    x[0] = digitless_row(1040)
    ordinary = int8_mm(x, codes, scale)
    for other in (digitless_row(1040), torch.full((1040,), float("nan")), torch.zeros(1040)):
        x[1] = other
        result = int8_mm(x, codes, scale)
        assert torch.equal(result[0], ordinary[0]) and torch.equal(result[2:], ordinary[2:])


@pytest.mark.parametrize("expanded", ["rows", "columns"])
def test_digits_of_a_weight_whose_rows_or_columns_are_one(expanded):
    codes, scale = make_weight(520, 1040)
    codes = codes[:1].expand(520, 1040) if expanded == "rows" else codes[:, :1].expand(520, 1040)
    x = torch.randn(2, 1040)
    assert sqnr(int8_mm(x, codes, scale), x.double() @ float_weight(codes, scale).t()) > LEAST_SQNR[torch.float32]


def test_fp64_has_its_own_range():
    """The reciprocal of a row's scale is far from fp64's limit where it would be at fp32's."""
    codes, scale = make_weight(64, 48)
    x, grad = 1e-200 * torch.randn(5, 48).double(), 1e-200 * torch.randn(5, 64).double()
    expected = fake_quantize_rows(x * 1e200) @ float_weight(codes, scale).t()
    assert sqnr(int8_mm(x, codes, scale, activations="int8") * 1e200, expected) > LEAST_SQNR_CODES[torch.float64]
    expected = fake_quantize_rows(grad * 1e200 * scale.double() / 127) @ codes.double()
    quantized = int8_mm_transposed(grad, codes, scale, backward="int8") * 1e200
    assert sqnr(quantized, expected) > LEAST_SQNR_CODES[torch.float64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(device, dtype):
    codes, scale = make_weight(70, 130, device)
    scale[0] = 0.0
    expected = float_weight(codes, scale)
    result = dequantize(codes, scale, dtype)
    assert result.dtype == dtype and result.is_contiguous()
    # One rounding of the product and one of scale / 127.
    torch.testing.assert_close(result.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_tolerances_of_bitsandbytes(device):
    """Linear 1024 -> 3072 with threshold 6, and the 64-wide matmul (peers' tests)."""
    weight = torch.randn(3072, 1024, device=device) / 32
    scale = weight.abs().amax(dim=1).half()
    codes = (weight * 127 / scale.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    x = torch.randn(3, 1024, device=device, dtype=torch.float16)
    result = int8_linear(x, codes, scale, activations="int8", outlier_threshold=6.0)
    error = (result.double() - x.double() @ weight.double().t()).abs()
    assert (error > 0.02 + 1e-5).double().mean() <= 0.25  # against the float weight, its own rounding included
    exact = (result.double() - llm_int8(x, codes, scale, 6.0)).abs()
    assert (exact > 0.02).double().mean() <= 2.5e-4 and exact.max() < 0.03
