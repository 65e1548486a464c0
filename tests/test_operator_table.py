"""Each row of the table of operators, for several dtypes and layouts, against the dequantized twin."""

import copy
import pathlib

import pytest
import torch
import torch.nn.functional as F
from operator_table import TABLE, markdown

from qsub import Int8RowwiseTensor

# Both sides compute in the same dtype from the same values: they differ by the order of sums and by one rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8, torch.float64: 1e-12}


def operands(dtype, contiguous, device="cpu"):
    torch.manual_seed(1)
    w = Int8RowwiseTensor.from_float(torch.randn(6, 10, dtype=dtype))
    if not contiguous:  # a matrix whose int8 data has the strides of a transpose
        w = Int8RowwiseTensor(w.int_data.t().contiguous().t(), w.scale, dtype=dtype)
    tensors = {
        "w": w,
        "x": torch.randn(3, 10, dtype=dtype),
        "y": torch.randn(3, 6, dtype=dtype),
        "v": torch.randn(10, dtype=dtype),
        "f": torch.randn(6, 10, dtype=dtype),
        "i": torch.tensor([4, 0, 4]),
        "mask": torch.tensor([True, False, True, True, False, False]),
    }
    return {**{name: tensor.to(device) for name, tensor in tensors.items()}, "F": F, "copy": copy, "torch": torch}


def evaluate(expression, names):
    if "addmm" in expression:
        expression = expression.replace("torch.ones(6)", "torch.ones(6, dtype=x.dtype, device=x.device)")
    return eval(expression, names)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.expression)
def test_row(row, dtype, contiguous, device):
    if device == "cuda" and "'cpu'" in row.expression:
        pytest.skip("the expression moves a tensor to the CPU or compares with one: nothing to see on a GPU")
    names = operands(dtype, contiguous or ".contiguous()" in row.expression, device)
    w = names["w"]
    before = w.dequantize()
    if row.kind == "refused":
        with pytest.raises(NotImplementedError, match=r"dequantize|int_data"):
            evaluate(row.expression, names)
        assert torch.equal(w.dequantize(), before)
        return
    if row.expression == "w.dequantize()":  # which a plain tensor has too, for other types
        assert torch.equal(evaluate(row.expression, names), before) and before.dtype == dtype
        return
    twin = {**names, "w": before.clone()}
    result, expected = evaluate(row.expression, names), evaluate(row.expression, twin)
    if row.kind == "value":
        assert type(result) is type(expected) and result == expected
        return
    assert result.shape == expected.shape and result.dtype == expected.dtype
    assert (type(result) is Int8RowwiseTensor) == (row.kind != "plain")
    if row.kind == "in place":
        assert result is w
        wanted = Int8RowwiseTensor.from_float(expected.to(dtype)).dequantize()
        # The update is done in fp32, the twin's in its dtype: up to one code apart where they round differently.
        step = w.scale.to(torch.float64).unsqueeze(1) / 127
        apart = (w.dequantize(torch.float64) - wanted.double()).abs()
        assert (apart <= step * 1.01 + TOLERANCE[dtype] * wanted.double().abs()).all()
        assert dtype != torch.float32 or torch.equal(w.dequantize(), wanted)
        return
    assert torch.equal(w.dequantize(), before)
    if row.kind in ("view", "copy"):
        # A cast decodes to its own dtype, rather than rounding what was decoded to another.
        value = expected if result.dtype == dtype else w.dequantize(result.dtype)
        assert torch.equal(result.dequantize(), value)
        if result is w:  # a cast to the dtype that it shows, as in torch
            return
        shares = result.int_data.untyped_storage().data_ptr() == w.int_data.untyped_storage().data_ptr()
        assert shares == (row.kind == "view")
    elif result.dtype == torch.bool:
        assert torch.equal(result, expected)
    else:
        atol = TOLERANCE[dtype] * max(1.0, float(expected.double().abs().max()))
        torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=atol)


@pytest.mark.parametrize("row", [row for row in TABLE if row.kind != "in place"], ids=lambda row: row.expression)
def test_under_inference_mode_the_outcome_is_the_same(row):
    """Composite operators arrive whole there, and a view of a normal tensor must be a normal tensor."""
    names = operands(torch.float32, True)
    outside, inside = [], []
    for found, mode in ((outside, torch.no_grad()), (inside, torch.inference_mode())):
        with mode:
            try:
                value = evaluate(row.expression, names)
                found.append(value.dequantize() if isinstance(value, Int8RowwiseTensor) else value)
                found.append(type(value))
            except NotImplementedError:
                found.append(NotImplementedError)
    assert outside[1:] == inside[1:]
    same = torch.equal if isinstance(outside[0], torch.Tensor) else lambda a, b: a == b
    assert same(outside[0], inside[0])


@pytest.mark.parametrize("row", [row for row in TABLE if row.kind == "view"], ids=lambda row: row.expression)
def test_a_change_of_a_view_shows_in_the_weight_or_is_refused(row):
    names = operands(torch.float32, True)
    w = names["w"]
    view, before = evaluate(row.expression, names), w.dequantize()
    touched = evaluate(row.expression, {**names, "w": torch.arange(60.0).view(6, 10)}).long().flatten()
    try:
        view.mul_(0.5)
    except NotImplementedError as error:
        assert "whole rows" in str(error) and torch.equal(w.dequantize(), before)
        return
    expected = before.flatten()
    expected[touched] = expected[touched] * 0.5
    torch.testing.assert_close(w.dequantize().flatten(), expected, rtol=1e-3, atol=0)


def test_the_docs_show_this_table():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "tensors.md").read_text(encoding="utf-8")
    assert markdown() in page, "docs/tensors.md is out of date: paste the output of python tests/operator_table.py"
