"""The dynamic tree code: its table, rounding to nearest, its bounds, and tensors and files that hold it."""

import json

import pytest
import torch
from hypothesis import given, settings
from reference import dynamic_map, linear_map, rows

import qsub
from qsub import Blockwise8bitTensor
from qsub.tensors.dynamic_codes import (
    decode_signed,
    decode_unsigned,
    dynamic_tables,
    encode_signed,
    encode_unsigned,
)

CHECK = settings(deadline=None, derandomize=True, max_examples=100)
BLOCK = 64
CODES = ["dynamic_signed", "dynamic_unsigned"]
TINY = torch.finfo(torch.float32).tiny


def table(code):
    return dynamic_tables()[CODES.index(code)]


def of_code(code, value):
    return value.abs() if code == "dynamic_unsigned" else value


# ---- The table ----


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_that_of_the_paper_and_of_the_peers(signed):
    """bitsandbytes#121, #152: 256 ascending values, 0 and 1 among them."""
    values = dynamic_tables()[0 if signed else 1]
    assert values.shape == (256,) and (values.diff() > 0).all()
    assert values[127 if signed else 0] == 0 and values[255] == 1
    assert values.min() > -1 and (signed or values.min() == 0)
    assert torch.equal(values, torch.tensor(dynamic_map(signed)))
    if signed:  # every negative value has its positive one; only 1 has no counterpart
        assert torch.equal(-values[:127].flip(0), values[128:255])
    bnb = pytest.importorskip("bitsandbytes.functional")
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    assert torch.equal(values, bnb.create_dynamic_map(signed))
    assert torch.equal(values, torch.tensor(torchao.create_dynamic_map(signed)))


# ---- Rounding ----


def excess(value, decoded, values):
    """By how much fp64 blocks are further from their codes than from the nearest of `values`, in units of the scale."""
    scale = value.abs().amax(1, keepdim=True)
    quotient = torch.where(scale > 0, value / scale, 0.0)
    nearest = (quotient.unsqueeze(-1) - values.double()).abs().amin(-1)
    error = (quotient - torch.where(scale > 0, decoded / scale, 0.0)).abs()
    return error - nearest


@pytest.mark.parametrize("code", CODES)
@CHECK
@given(value=rows(low=-60, high=60, size=BLOCK))
def test_every_element_takes_the_nearest_value(code, value):
    """Up to the roundings of the quotient, of the line through its cell and of the product: 2**-22 of the scale."""
    value = of_code(code, value)
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert torch.equal(x.scale, value.abs().amax(1, keepdim=True))
    error = excess(value.double(), x.dequantize(torch.float64), table(code))
    zeroed = (value > 0) & (code == "dynamic_unsigned") & (value < table(code)[1] * x.scale / 2)
    assert (error <= 2.0**-22)[~zeroed].all() and (error <= table("dynamic_unsigned")[1]).all()


def test_the_bound_rejects_another_code():
    value = torch.randn(4, BLOCK)
    scale = value.abs().amax(1, keepdim=True)
    linear = torch.tensor(linear_map())
    decoded = linear[((value / scale).unsqueeze(-1) - linear).abs().argmin(-1)] * scale
    assert excess(value.double(), decoded.double(), table("dynamic_signed")).max() > 1e-3


@pytest.mark.parametrize("code", CODES)
def test_codes_are_those_of_a_search_in_the_table(code):
    """Also right beside the middle between each two values, where the closed form must not be off by a code."""
    values = table(code).double()
    middle = (values[1:] + values[:-1]) / 2
    width = values.diff()
    quotients = torch.cat([values, middle - 1e-4 * width, middle + 1e-4 * width, torch.ones(1)]).float().unsqueeze(0)
    expected = torch.bucketize(quotients.double(), middle)
    if code == "dynamic_unsigned":
        expected = torch.where(quotients > 0, expected.clamp(min=1), 0)
    encode = encode_signed if code == "dynamic_signed" else encode_unsigned
    codes, scale = encode(quotients)
    assert scale == 1
    # The line through a cell ends at places up to 255, rounded to 2**-16 or less of a cell: 1e-4 of one is decided.
    assert torch.equal(codes.long(), expected)


@pytest.mark.parametrize("code", CODES)
def test_codes_are_those_of_torchao(code):
    """But for the guard of second moments, and for a rounding error at a tie: measured 6e-6."""
    quantize = pytest.importorskip("torchao.optim.quant_utils").quantize_8bit_with_qmap
    value = of_code(code, torch.randn(1024, 256) ** 3)
    x = Blockwise8bitTensor.from_float(value, 256, code)
    theirs = quantize(value / x.scale, table(code))
    guarded = (theirs == 0) & (x.codes == 1) & (code == "dynamic_unsigned")
    assert ((theirs != x.codes) & ~guarded).double().mean() < 1e-4
    assert guarded.any() == (code == "dynamic_unsigned")


@pytest.mark.parametrize("code", CODES)
def test_what_was_decoded_is_coded_the_same_again(code):
    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(0)
    for scale in (1e-30, 1e-3, 0.7, 1.0, 3e20):
        x = Blockwise8bitTensor(codes, torch.tensor([[scale]]), 256, code)
        again = Blockwise8bitTensor.from_float(x.dequantize(), 256, code)
        assert torch.equal(again.codes, codes) and torch.equal(again.scale, x.scale)


def test_a_second_moment_that_is_not_zero_is_never_decoded_to_zero():
    tiny = torch.tensor([[1.0, 1e-9, 1e-20, 1e-38, 0.0]])
    for factor in (1.0, 1e-30, 1e-37, 1e30):
        second = tiny * factor
        decoded = decode_unsigned(*encode_unsigned(second))
        assert torch.equal(decoded > 0, second > 0)
        assert (decoded[second > 0] >= TINY).all()
    first = torch.tensor([[1.0, 1e-9]])  # the control: a first moment may vanish
    assert decode_signed(*encode_signed(first))[0, 1] == 0


@pytest.mark.parametrize("code", CODES)
def test_blocks_of_zeros_and_the_initial_state_are_zero(code):
    x = Blockwise8bitTensor.from_float(torch.zeros(3, 70), BLOCK, code)
    start = Blockwise8bitTensor.zeros((3, 70), BLOCK, code)
    assert not x.scale.any() and not x.dequantize().any() and not start.dequantize().any()


# ---- Tensors and files ----


def test_scales_are_fp32_of_rows_and_blocks():
    value = torch.randn(10, 7, 11)
    x = Blockwise8bitTensor.from_float(value, 32, "dynamic_signed")
    assert x.scale.shape == (10, 3) and x.scale.dtype == torch.float32
    part = Blockwise8bitTensor.from_float(value[3:8], 32, "dynamic_signed")
    assert torch.equal(part.codes, x.codes[3:8]) and torch.equal(part.scale, x.scale[3:8])
    for scale, text in ((x.scale[:, :1], r"shape \(10, 3\), got \(10, 1\)"), (x.scale.half(), "torch.float16")):
        with pytest.raises(ValueError, match=text):
            Blockwise8bitTensor(x.codes, scale, 32, "dynamic_signed")
    with pytest.raises(ValueError, match="must not be negative"):
        Blockwise8bitTensor.from_float(-torch.ones(2), 16, "dynamic_unsigned")


def test_copies_between_the_codes_go_through_floats():
    value = torch.rand(4, 100)
    for source, target in (("dynamic_unsigned", "float8_unsigned"), ("float8_unsigned", "dynamic_unsigned")):
        x = Blockwise8bitTensor.from_float(value, BLOCK, source)
        y = Blockwise8bitTensor.zeros(value.shape, BLOCK, target)
        y.copy_(x)
        assert torch.equal(y.dequantize(), Blockwise8bitTensor.from_float(x.dequantize(), BLOCK, target).dequantize())


@pytest.mark.parametrize("shape", [(5, 100), (0, 3), (70,)])
@pytest.mark.parametrize("code", CODES)
def test_files_hold_codes_and_scales(tmp_path, code, shape):
    x = Blockwise8bitTensor.from_float(torch.rand(shape), BLOCK, code)
    qsub.save_file({"m": x}, tmp_path / "x.safetensors")
    y = qsub.load_file(tmp_path / "x.safetensors")["m"]
    assert (y.code, y.block_size, y.dtype) == (code, BLOCK, torch.float32)
    assert torch.equal(y.codes, x.codes) and torch.equal(y.scale, x.scale) and y.scale.dtype == torch.float32


def test_a_file_with_scales_of_the_other_code_is_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    x = Blockwise8bitTensor.from_float(torch.rand(5, 100), BLOCK, "float8_unsigned")
    fields = {"class": "Blockwise8bitTensor", "dtype": "float32", "block_size": BLOCK, "code": "dynamic_unsigned"}
    header = {"version": 1, "tensors": {"m": fields}, "shared": {}}
    path = tmp_path / "x.safetensors"
    safetensors.save_file({"m.codes": x.codes, "m.scale": x.scale}, path, {"qsub": json.dumps(header)})
    with pytest.raises(ValueError, match="'m.scale' has dtype U8, expected F32"):
        qsub.load_file(path)
