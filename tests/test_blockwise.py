"""Blockwise8bitTensor in a user's hands: logging, edits, row slices, processes, error texts."""

import copy

import pytest
import torch

from qsub import Blockwise8bitTensor

CODES = ("float8_signed", "float8_unsigned", "dynamic_signed", "dynamic_unsigned")


def make(code="float8_signed", shape=(12, 130)):
    value = torch.randn(shape)
    return Blockwise8bitTensor.from_float(value.abs() if "unsigned" in code else value, 64, code)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "expression",
    [
        lambda x: x.norm(),
        lambda x: x.mean(),
        lambda x: x.abs().max(),
        lambda x: x.sum(1),
        lambda x: x * 2,
        lambda x: x + x,
        lambda x: x.sqrt().nan_to_num(),
        lambda x: x.isfinite(),
        lambda x: x > 0,
        lambda x: torch.ones_like(x),
    ],
)
def test_arithmetic_is_plain(expression, code):
    x = make(code)
    result, expected = expression(x), expression(x.dequantize())
    assert type(result) is torch.Tensor and torch.equal(result, expected)


def test_comparisons():
    x = make()
    assert torch.equal(x, x.clone()) and torch.allclose(x, x.dequantize())
    assert not torch.equal(x, x * 2)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "edit", [lambda x: x.mul_(0.5), lambda x: x.div_(4), lambda x: x.zero_(), lambda x: x.fill_(0.25)]
)
def test_edits_take_effect(edit, code):
    """The edited values, encoded to nearest."""
    x = make(code)
    expected = edit(x.dequantize())
    assert edit(x) is x
    assert torch.equal(x.dequantize(), Blockwise8bitTensor.from_float(expected, 64, code).dequantize())
    torch.testing.assert_close(x.dequantize(), expected, rtol=0.1, atol=0.02)


def test_inference_mode():
    x = make()
    whole = x.dequantize()
    with torch.inference_mode():
        for part, expected in (
            (x[3:7], whole[3:7]),
            (x.split(5)[1], whole[5:10]),
            (x.detach(), whole),
            (x.chunk(3)[0], whole[:4]),
        ):
            assert torch.equal(part.dequantize(), expected)


@pytest.mark.parametrize("code", CODES)
def test_rows_are_slices_of_codes_and_scales(code):
    x = make(code)
    whole = x.dequantize()
    part = x[3:7]
    assert torch.equal(part.dequantize(), whole[3:7]) and part.codes.data_ptr() == x.codes[3:].data_ptr()
    pieces = x.split([5, 7])
    assert [tuple(p.shape) for p in pieces] == [(5, 130), (7, 130)] and pieces[1].scale.shape[:2] == (7, 3)
    assert torch.equal(torch.cat(pieces).codes, x.codes) and torch.equal(torch.cat(pieces).scale, x.scale)
    assert len(x.chunk(5)) == 4 and torch.equal(x.chunk(5)[3].dequantize(), whole[9:])
    part.zero_()
    assert not x.dequantize()[3:7].any() and torch.equal(x.dequantize()[7:], whole[7:])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, 3:9],
        lambda x: x.split(10, dim=1),
        lambda x: make(shape=(100,))[3:9],
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x, x.dequantize()]),
        lambda x: x.t(),
        lambda x: x.cumsum(0),
    ],
)
def test_what_would_tear_blocks_is_refused(call):
    with pytest.raises(NotImplementedError, match=r"dequantize\(\)"):
        call(make())


def test_copies_moves_and_memory():
    x = make()
    for twin in (copy.deepcopy(x), x.clone(), x.cpu().to("cpu", copy=True)):
        twin.zero_()
        assert x.dequantize().any()
    assert x.half().dtype == torch.float16 and torch.equal(x.half().codes, x.codes)
    assert x.to("meta").codes.device.type == "meta"
    empty = torch.empty_like(x)
    assert type(empty) is Blockwise8bitTensor and empty.copy_(x).same_layout(x) and torch.equal(empty, x)
    assert x.nbytes == 12 * 130 + 12 * 3 * 2
    assert not x.is_pinned() and not x.is_shared()
    assert x.share_memory_() is x and x.is_shared()
