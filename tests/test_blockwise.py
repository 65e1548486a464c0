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
    before, expected = x.dequantize(), edit(x.dequantize())
    assert edit(x) is x
    torch.testing.assert_close(x.dequantize(), expected, rtol=0.1, atol=0.02)
    assert not torch.allclose(before, expected, rtol=0.1, atol=0.02)  # which would be no edit


ROWS, MASK = torch.tensor([3, 5, 3]), torch.arange(12) % 3 == 0
VALUE = torch.linspace(0.1, 2.0, 130)


def set_item(index, value):
    return lambda x: x.__setitem__(index, value)


EDITS = {  # and the rows that they touch
    "rows": (set_item(ROWS, 0), [3, 5]),
    "rows, values": (set_item([3, 5], torch.stack([VALUE, VALUE / 3])), [3, 5]),
    "mask": (set_item(MASK, VALUE), [0, 3, 6, 9]),
    "number": (set_item(-2, VALUE), [10]),
    "number in a tensor": (set_item(torch.tensor(4), VALUE), [4]),
    "range": (set_item(slice(2, 5), 0.5), [2, 3, 4]),
    "steps": (set_item(slice(1, None, 4), VALUE), [1, 5, 9]),
    "element": (set_item((7, 129), 1.5), [7]),
    "part of rows": (set_item((slice(0, 2), slice(3, 9)), 0.0), [0, 1]),
    "rows and columns": (set_item((torch.tensor([2, 8]), slice(1, 5)), 0.25), [2, 8]),
    "elements": (set_item((torch.tensor([2, 8]), torch.tensor([0, 64])), 0.25), [2, 8]),
    "columns": (set_item((slice(None), [5, 70]), 0.0), range(12)),
    "last column": (set_item((..., -1), 0.0), range(12)),
    "mask of elements": (lambda x: x.__setitem__(x.dequantize() > 0.5, 0.5), range(12)),
    "index_fill_": (lambda x: x.index_fill_(0, ROWS, 0.5), [3, 5]),
    "index_copy_": (lambda x: x.index_copy_(0, torch.tensor([6, 1]), torch.stack([VALUE, VALUE * 2])), [1, 6]),
    "index_add_": (lambda x: x.index_add_(0, torch.tensor([6, 1]), torch.stack([VALUE, VALUE * 2])), [1, 6]),
    "index_put_, accumulate": (lambda x: x.index_put_((ROWS,), VALUE, accumulate=True), [3, 5]),
    "scatter_": (lambda x: x.scatter_(1, torch.zeros(2, 1, dtype=torch.int64), 0.75), [0, 1]),
    "masked_fill_": (lambda x: x.masked_fill_(MASK.unsqueeze(1), 0.5), [0, 3, 6, 9]),
    "masked_fill_ with a tensor": (lambda x: x.masked_fill_(MASK.unsqueeze(1), torch.tensor(0.5)), [0, 3, 6, 9]),
    "mul_ with a mask": (lambda x: x.mul_(MASK.unsqueeze(1)), [1, 2, 4, 5, 7, 8, 10, 11]),
    "a row": (lambda x: x[4].zero_(), [4]),
    "rows of another": (lambda x: x.__setitem__(slice(0, 2), x[4:6].clone()), [0, 1]),
    "narrow": (lambda x: x.narrow(0, 3, 2).fill_(0.5), [3, 4]),
    "data": (lambda x: x.data.mul_(0.5), range(12)),
    "foreach": (lambda x: torch._foreach_mul_([x], [MASK.unsqueeze(1)]), [1, 2, 4, 5, 7, 8, 10, 11]),
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_that_of_a_float_and_leaves_other_rows_as_they_are(name, code):
    """Other rows bit for bit, and other blocks of the same rows; what is written is right to half a step of the code.

    A step of the unsigned codes is 2**-k of the value, with 254 codes over up to 40 octaves (k >= 6: 12%); that of the
    signed ones, over 20 octaves, the same. The dynamic tree has steps of up to 10% of a value near the block's largest,
    and larger ones below.
    """
    edit, rows = EDITS[name]
    x = make(code)
    before, expected = x.clone(), x.dequantize()
    edit(x), edit(expected)
    others = [row for row in range(12) if row not in rows]
    assert torch.equal(x.codes[others], before.codes[others]) and torch.equal(x.scale[others], before.scale[others])
    same = torch.stack([part.all(1) for part in (expected == before.dequantize()).split(64, 1)], 1)  # (rows, blocks)
    assert torch.equal(x.scale[same], before.scale[same])
    torch.testing.assert_close(x.dequantize(), expected, rtol=0.13, atol=0.02)
    assert not torch.allclose(before.dequantize(), expected, rtol=0.13, atol=0.02)  # which would be no edit


def test_elements_that_are_cleared_cost_the_others_of_a_block_nothing():
    """While the largest of the block stays, the range does: knee and density are those of the block as it was."""
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(64, 64, generator=generator).exp() * 1e-2
    first = torch.randn(64, 64, generator=generator)
    x = Blockwise8bitTensor.from_float(first, 64, "float8_signed", second)
    before = x.dequantize()
    mask = (torch.rand(64, 64, generator=generator) > 0.2) | (before.abs() == before.abs().amax(1, keepdim=True))
    x.mul_(mask)
    after = x.dequantize()
    assert not after[~mask].any()
    # A decoded largest may lie a quarter of an octave lower than the one that was encoded: few blocks, by one code.
    assert (after[mask] == before[mask]).float().mean() > 0.95
    anew = Blockwise8bitTensor.from_float(before * mask, 64, "float8_signed").dequantize()  # the knee of other floats
    assert (anew[mask] == before[mask]).float().mean() < 0.5


@pytest.mark.parametrize("code", CODES)
def test_rows_are_read_and_joined_as_they_are_stored(code):
    x = make(code)
    whole = x.dequantize()
    for index in (ROWS, MASK, [3, 5], slice(1, None, 4)):
        part = x[index]
        assert isinstance(part, Blockwise8bitTensor) and torch.equal(part.dequantize(), whole[index])
    assert torch.equal(x[4].dequantize(), whole[4])
    new = torch.rand(3, 130)
    for tensors in ([x, new], [new, x], [torch.zeros(0), x, new, x[:2]], [x, x.new_zeros(3, 130)]):
        joined = torch.cat(tensors)
        assert isinstance(joined, Blockwise8bitTensor) and joined.same_layout(x)
        start = 0
        for part in tensors:
            rows = joined[start : start + len(part)]
            if isinstance(part, Blockwise8bitTensor):
                assert torch.equal(rows.codes, part.codes) and torch.equal(rows.scale, part.scale)
            elif part.dim() == 2:
                torch.testing.assert_close(rows.dequantize(), part, rtol=0.13, atol=0.02)
            start += len(part) if part.dim() == 2 else 0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[x > 0.5],
        lambda x: x[:, [3, 5]],
        lambda x: x[ROWS, ROWS],
        lambda x: x[ROWS.view(1, 3)],
        lambda x: x.index_select(1, ROWS),
        lambda x: x.masked_select(x > 0.5),
        lambda x: x.gather(1, torch.zeros(12, 1, dtype=torch.int64)),
        lambda x: x.flatten(1).topk(3).values,
        lambda x: torch.cat([x, x.new_zeros(12, 3).dequantize()], 1),
    ],
)
def test_what_else_is_read_is_a_copy_in_plain_floats(read):
    """Of one dimension, too. They can be assigned to the state."""
    x = make()
    result = read(x)
    assert type(result) is torch.Tensor and torch.equal(result, read(x.dequantize()))
    flat = make(shape=(130,))
    assert torch.equal(
        torch.cat([flat[MASK.repeat(11)[:130]], torch.zeros(3)])[:-3], flat.dequantize()[MASK.repeat(11)[:130]]
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e38])
def test_an_edit_that_cannot_be_encoded_changes_nothing(value):
    x = make()
    before = x.clone()
    for edit in (set_item(ROWS, value), set_item((slice(None), 3), value), set_item(3, value)):
        with pytest.raises(ValueError, match="cannot encode"):
            edit(x)
    unsigned = make("float8_unsigned")
    with pytest.raises(ValueError, match="must not be negative"):
        unsigned[3] = -1.0
    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        x[12] = 0.0
    assert torch.equal(x.codes, before.codes) and torch.equal(x.scale, before.scale)


def test_doors_that_do_not_lead_to_the_values():
    x = make()
    x.data = torch.full_like(x, 0.5)  # torch would ignore it
    torch.testing.assert_close(x.dequantize(), torch.full((12, 130), 0.5), rtol=0.01, atol=0)
    with pytest.raises(ValueError, match=r"keep its shape \(12, 130\), got shape \(3,\): assign to the state"):
        x.data = torch.zeros(3)
    for door in (lambda: x.numpy(), lambda: torch.from_dlpack(x), lambda: x.__array__()):
        with pytest.raises(NotImplementedError, match="no memory of its own"):
            door()
    with pytest.raises(NotImplementedError, match=r"x\[:, 3\] = 0.*dequantize\(\)"):
        x[:, 3]
    assert x.tolist() == x.dequantize().tolist()


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
