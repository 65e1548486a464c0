"""Cases of test_linear_kernels.py, run with TRITON_INTERPRET=1: the Triton kernels' source on CPU tensors.

The interpreter multiplies bf16 operands of tl.dot as integers (a known limit), so products of bf16 are left to the GPU
tests; bf16 inputs of kernels that multiply codes or use fp32 are covered.
"""

import itertools

import pytest
import torch
from linear_reference import LEAST_SQNR, LEAST_SQNR_CODES, float_weight, llm_int8, make_weight, sqnr

from qsub.linear import cuda, reference
from qsub.linear.kernels import code_gemv, digits, few_rows, few_rows_backward, gemm, quantize, weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 33, 65), (2, 48, 64), (15, 64, 100), (17, 130, 96), (70, 130, 300)]  # (M, N, K)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_modes(dtype, shape):
    m, n, k = shape
    codes, scale = make_weight(n, k)
    x, grad, bias = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype), torch.randn(n)
    if dtype != torch.bfloat16 or m == 1 or m > 16:
        truth = x.double() @ float_weight(codes, scale).t() + bias.double()
        assert sqnr(cuda.int8_mm(x, codes, scale, bias), truth) > LEAST_SQNR[dtype]
    result = cuda.int8_mm(x, codes, scale, bias, int8_activations=True)
    expected = reference.int8_mm(x.double(), codes, scale, bias.double(), int8_activations=True)
    assert sqnr(result, expected) > LEAST_SQNR_CODES[dtype]
    result = cuda.int8_mm_transposed(grad, codes, scale, int8_grad=True)
    assert (
        sqnr(result, reference.int8_mm_transposed(grad.double(), codes, scale, int8_grad=True))
        > (LEAST_SQNR_CODES[dtype])
    )
    if dtype != torch.bfloat16:
        for threshold in (0.5, 2.5, 100.0):
            result = cuda.int8_mm(x, codes, scale, int8_activations=True, outlier_threshold=threshold)
            expected = llm_int8(x, codes, scale, threshold, limit=reference.OUTLIER_COLUMNS)
            assert sqnr(result, expected) > LEAST_SQNR_CODES[dtype] - 5


@pytest.mark.parametrize("mode", [{}, {"int8_activations": True}, {"int8_activations": True, "outlier_threshold": 2.5}])
@pytest.mark.parametrize("bias", [torch.tensor(2.0), torch.tensor([2.0])])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_one_bias_for_all_outputs(m, bias, mode):
    """The kernels read a bias for each output; torch broadcasts one."""
    codes, scale = make_weight(64, 96)
    x = torch.randn(m, 96).half()
    expected = cuda.int8_mm(x, codes, scale, bias.reshape(1).repeat(64), **mode)
    assert torch.equal(cuda.int8_mm(x, codes, scale, bias, **mode), expected)


@pytest.mark.parametrize("outliers", [0, 1, 63, 64, 65, 200])
def test_selected_columns(outliers):
    """The device picks the columns that a sort of the magnitudes picks."""
    k = 300
    x = torch.rand(20, k) - 0.5
    columns = torch.randperm(k)[:outliers]
    x[3, columns] = torch.linspace(10, 90, outliers) * torch.tensor([1.0, -1.0]).repeat(outliers)[:outliers]
    codes, _ = make_weight(16, k)
    found = quantize.Outliers(x, codes, 6.0)
    kept = columns[max(0, outliers - 64) :]  # the largest are last
    assert sorted(found.index[found.index >= 0].tolist()) == sorted(kept.tolist())
    assert found.mask.nonzero().flatten().tolist() == sorted(kept.tolist())
    quantize.quantize_rows(x, outliers=found)
    for slot, column in enumerate(found.index.tolist()):
        expected_x = x[:, column] if column >= 0 else torch.zeros(20)
        expected_w = codes[:, column].float() if column >= 0 else torch.zeros(16)
        assert torch.equal(found.x[:, slot], expected_x)
        assert torch.equal(found.weight[:, slot], expected_w)


def test_a_threshold_below_every_magnitude():
    """All columns are over it, the zeros and those past the end of a block included: only real ones are picked."""
    x = torch.zeros(4, 40)
    x[0, :10] = 1.0
    found = quantize.Outliers(x, make_weight(8, 40)[0], -1.0)
    assert found.index.tolist() == [*range(40), *[-1] * 24]
    assert found.mask.all()


def test_tied_columns_fill_the_limit():
    x = torch.zeros(4, 100)
    x[1, :90] = 7.0
    found = quantize.Outliers(x, make_weight(8, 100)[0], 6.0)
    assert (found.index >= 0).all() and found.mask.sum() == 64


@pytest.mark.parametrize("k", [1, 127, 1000, 20000])
def test_row_codes(k):
    """Codes equal the definition's but for ties, NaN reaches the scale, and tiny rows are zero."""
    x = torch.randn(6, k) * torch.tensor([1.0, 1e-20, 1e20, 0.0, 1e-38, 1.0]).unsqueeze(1)
    x[5, k // 2] = float("nan")
    codes, scale = quantize.quantize_rows(x)
    expected, expected_scale = reference.quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    assert (codes[:5].int() - expected[:5].int()).abs().max() <= 1
    assert (codes[:5] != expected[:5]).float().mean() < 1e-3
    assert not codes[3].any() and not codes[4].any()


@pytest.mark.parametrize(("m", "n", "k"), [(2, 96, 64), (17, 64, 96), (33, 130, 272), (70, 48, 1040)])
@pytest.mark.parametrize("split", [1, 3])
def test_digits(monkeypatch, m, n, k, split):
    monkeypatch.setattr(digits, "_tile", lambda *_: digits._Tile(32, 32, 64, 2, split))
    codes, scale = make_weight(n, k)
    x, bias = torch.randn(m, k).bfloat16(), torch.randn(n)
    truth = x.double() @ float_weight(codes, scale).t() + bias.double()
    assert sqnr(digits.digit_mm(x, codes, scale, bias), truth) > LEAST_SQNR[torch.bfloat16]
    high_only = reference.int8_mm(x.double(), codes, scale, bias.double(), int8_activations=True)
    assert sqnr(digits.digit_mm(x, codes, scale, bias), high_only) < 46
    result = digits.digit_mm(x.float(), codes, scale, bias, int8_activations=True)
    assert sqnr(result, high_only) > LEAST_SQNR_CODES[torch.float32]


@pytest.mark.parametrize("magnitude", [1e2, 6e2, 1e4, 1e9, 1e30])
@pytest.mark.parametrize("split", [1, 2])
def test_digits_of_rows_with_large_inputs_that_the_weight_ignores(monkeypatch, magnitude, split):
    """Some rows of a tile have further digits, next to others and to tiles that have none."""
    monkeypatch.setattr(digits, "_tile", lambda *_: digits._Tile(32, 32, 64, 2, split))
    codes, scale = make_weight(96, 272)
    codes[:, 7:40] = 0
    x, bias = torch.randn(70, 272), torch.randn(96) / 100
    large = [0, 3, 17, 69]
    x[large, 7:40] = magnitude
    x[1], x[2, 40:] = 0.0, 0.0
    x = x.bfloat16()
    result = digits.digit_mm(x, codes, scale, bias)
    expected = x.double() @ float_weight(codes, scale).t() + bias.double()
    for row in (*large, 2, 4, 32):
        assert sqnr(result[row], expected[row]) > LEAST_SQNR[torch.bfloat16]
    torch.testing.assert_close(result[1].float(), bias, rtol=2**-7, atol=0)  # the interpreter cuts to bf16


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of infinity times 0
@pytest.mark.parametrize("share", [1, 300, 528])
def test_digits_of_rows_that_are_not_finite(share):
    """Infinity and NaN go where a float product takes them, and no other row is touched."""
    codes, scale = make_weight(96, 528)
    x = torch.randn(6, 528)
    x[1, :share] = torch.inf
    x[3, 100:102] = torch.tensor([torch.inf, -torch.inf])
    x[4, 7] = torch.nan
    x[5, 9] = -torch.inf
    result = digits.digit_mm(x.bfloat16(), codes, scale, None)
    expected = x @ float_weight(codes, scale).float().t()
    assert sqnr(result[::2][:2], expected[::2][:2]) > LEAST_SQNR[torch.bfloat16]
    assert not result[[1, 3]].isfinite().any() and result[4].isnan().all()
    torch.testing.assert_close(result[5].float(), expected[5], equal_nan=True)
    if share == 1:
        torch.testing.assert_close(result[1].float(), expected[1], equal_nan=True)


@pytest.mark.parametrize(("n", "k"), [(1, 8), (33, 200), (64, 1024), (5, 2048)])
def test_row_of_codes(n, k):
    (wide, scale), bias = make_weight(n, k + 8), torch.randn(n)
    weight = wide[:, :k]
    codes, row_scale = torch.randint(-127, 128, (1, k), dtype=torch.int8), torch.rand(1)
    codes[0, :8] = weight[0, :8] = -127  # eight products as large as they get
    assert code_gemv.takes(weight) and not code_gemv.takes(wide[:, 1 : k + 1])
    expected = (codes.double() @ weight.double().t()) * (scale.double() / 127) * (row_scale.double() / 127)
    for summand in (None, bias):
        result = code_gemv.code_gemv(codes, weight, row_scale, scale, summand, torch.float32)
        assert sqnr(result, expected + (0 if summand is None else bias.double())) > 130


@pytest.mark.parametrize("count", [2, 34, 65, 128, 129, 512])
@pytest.mark.parametrize("n", [1, 512, 2048, 8192, 128256])
def test_tile_of_digits(count, n):
    """A tile holds all digits or 128 of them, and splitting the depth never makes more programs than there is room."""
    tile = digits._tile(count, n, 132)
    assert tile.digits >= min(count, 128) and tile.digits < max(32, 2 * count)
    programs = -(-count // tile.digits) * -(-n // tile.bn) * tile.split
    assert tile.split == 1 or programs <= 132
    assert tile.stages * tile.bk * (tile.digits + tile.bn) <= 227 * 1024


@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 128), (3, 320, 64), (17, 32, 192), (100, 64, 64)])
@pytest.mark.parametrize("programs", [0, 4])
def test_few_rows_backward(monkeypatch, m, n, k, programs):
    tile = few_rows_backward._Tile(max(16, 1 << (m - 1).bit_length()), 32, 64, 2, 4, programs)
    monkeypatch.setattr(few_rows_backward, "_tile", lambda m: tile)
    codes, scale = make_weight(n, k)
    wide = torch.randn(m, n + 3)
    result = few_rows_backward.few_rows_backward(wide[:, :n], codes, scale)
    assert sqnr(result, wide[:, :n].double() @ float_weight(codes, scale)) > LEAST_SQNR[torch.float32]


@pytest.mark.parametrize(("n", "k"), [(40, 192), (8200, 48)])
def test_few_rows(n, k):
    codes, scale = make_weight(n, k)
    for m in (2, 16):
        x, bias = torch.randn(m, k).half(), torch.randn(n)
        truth = x.double() @ float_weight(codes, scale).t() + bias.double()
        assert sqnr(few_rows.few_rows(x, codes, scale, bias), truth) > LEAST_SQNR[torch.float16]


@pytest.mark.parametrize(("m", "n", "k"), list(itertools.product([17, 150], [32, 136], [64, 208])))
def test_gemm_through_descriptors_and_pointers(monkeypatch, m, n, k):
    a, (b, scale) = torch.randint(-127, 128, (m, k), dtype=torch.int8), make_weight(n, k)
    row_scale, bias = torch.rand(m), torch.randn(n)
    expected = (a.double() @ b.double().t()) * (row_scale.double() / 127).unsqueeze(1) * (scale.double() / 127)
    for descriptors in (True, False):
        monkeypatch.setattr(gemm, "has_tensor_copies", lambda device, answer=descriptors: answer)
        result = gemm.int8_gemm(a, b, row_scale, scale, bias, torch.float32)
        assert sqnr(result, expected + bias.double()) > 130
        result = gemm.int8_gemm(a, b, row_scale, None, None, torch.float32)
        assert sqnr(result, (a.double() @ b.double().t()) * (row_scale.double() / 127).unsqueeze(1)) > 130


def test_one_pass_over_the_weight():
    codes, scale = make_weight(37, 150)
    assert torch.equal(weight.transpose(codes), codes.t())
    for dtype in DTYPES:
        expected = float_weight(codes, scale)
        eps = torch.finfo(dtype).eps * (2 if dtype != torch.bfloat16 else 4)  # the interpreter truncates to bf16
        torch.testing.assert_close(weight.dequantize(codes, scale, dtype).double(), expected, rtol=eps, atol=0)
