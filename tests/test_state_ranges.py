"""Both moments of a block together: the ranges of their codes, derived anew from the values alone (reference.py)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import DECODE_ERROR, first_moment_step, second_moment_step

from qsub import Blockwise8bitTensor
from qsub.tensors import state_codes

CHECK = settings(deadline=None, derandomize=True, max_examples=150)
FP32_EPS = 2.0**-23
BLOCK = 64
SPREADS = [0.0, 1.0, 4.0, 10.0]  # log-normal sigma within a block: 10 is far wider than any code's range


@st.composite
def moments(draw, low=-60, high=60):
    """exp_avg and exp_avg_sq of a block (1, 64) in fp32: sizes from 2**low to 2**high, v of any ratio to m**2."""
    size = 2.0 ** draw(st.floats(low / 2, high / 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = torch.exp(draw(st.sampled_from(SPREADS)) * torch.randn(1, BLOCK, generator=generator))
    first = (size * spread * torch.randn(1, BLOCK, generator=generator)).clamp(-1e15, 1e15)
    second = (size * spread).square() * torch.rand(1, BLOCK, generator=generator)
    zeros = draw(st.integers(0, BLOCK - 1))
    first[0, :zeros] = second[0, :zeros] = 0.0
    return first, torch.where(second > 2.0**-120, second, 0.0).clamp(max=1e37)


def ends(second):
    return state_codes.exponent_range(second)


def second_excess(second, decoded):
    """By how much elements break the bound of exp_avg_sq's code, at most 0 for a right one: half a step.

    What lies under the range of its block, 40 octaves, is the smallest code: a non-zero v is never coded 0.
    """
    step, smallest = second_moment_step(second.double())
    bound = torch.where(second < smallest, smallest, step / 2) + DECODE_ERROR * second
    return (second.double() - decoded.double()).abs() - torch.where(second > 0, bound, 0.0)


def first_excess(first, second, decoded):
    step = first_moment_step(first.double(), second.double())
    # |m| + c is formed in fp32: one rounding of something that is under 255 steps
    return (first.double() - decoded.double()).abs() - step * (0.5 + 255 * FP32_EPS) - DECODE_ERROR * first.abs()


def nearest(first, second):
    """Both moments after a round trip, rounded to nearest."""
    v = Blockwise8bitTensor.from_float(second, BLOCK, "float8_unsigned")
    m = Blockwise8bitTensor.from_float(first, BLOCK, "float8_signed", second)
    return m, v


@CHECK
@given(moments())
def test_codes_err_by_half_a_step(pair):
    first, second = pair
    m, v = nearest(first, second)
    if second.any():
        assert second_excess(second, v.dequantize()).max() <= 0
    if first.any() and second.any():
        assert first_excess(first, second, m.dequantize()).max() <= 0
    assert torch.equal(v.codes == 0, second == 0)  # a non-zero v is never coded 0, and 0 always is
    assert bool((m.dequantize() * first >= 0).all()) and not m.dequantize()[first == 0].any()


@CHECK
@given(moments(-40, 40), st.integers(-20, 20))
def test_codes_are_odd_and_free_of_powers_of_two(pair, shift):
    """Gradients times 2**s make m times 2**s and v times 2**2s: the same codes, so that no scale is special."""
    first, second = pair
    m, v = nearest(first, second)
    m_scaled, v_scaled = nearest(first * 2.0**shift, second * 4.0**shift)
    assert torch.equal(v_scaled.codes, v.codes) and torch.equal(m_scaled.codes, m.codes)
    assert torch.equal(v_scaled.dequantize(), v.dequantize() * 4.0**shift)
    assert torch.equal(m_scaled.dequantize(), m.dequantize() * 2.0**shift)
    assert torch.equal(nearest(-first, second)[0].dequantize(), -m.dequantize())


@CHECK
@given(moments())
def test_decoding_and_encoding_again_changes_little(pair):
    """A value rounded up may widen its block's range, so each comes back within half a step, mostly as it was."""
    first, second = pair
    m, v = nearest(first, second)
    m_again, v_again = nearest(m.dequantize(), v.dequantize())
    if second.any():
        assert second_excess(v.dequantize(), v_again.dequantize()).max() <= 0
        if torch.equal(v_again.scale, v.scale):
            assert torch.equal(v_again.codes, v.codes)
    if first.any() and second.any():
        assert first_excess(m.dequantize(), v.dequantize(), m_again.dequantize()).max() <= 0
        if torch.equal(m_again.scale, m.scale):
            assert torch.equal(m_again.dequantize(), m.dequantize())


def test_the_bounds_reject_coarser_codes_and_wrong_scales():
    first = torch.randn(16, BLOCK)
    second = torch.rand(16, BLOCK)
    m, v = nearest(first, second)
    assert second_excess(second, v.dequantize()).max() <= 0 >= first_excess(first, second, m.dequantize()).max()
    for name, codes, scale in (("7 bits", 0xFE, 0), ("6 bits", 0xFC, 0), ("scale", 0xFF, 1)):
        wrong = [Blockwise8bitTensor(x.codes & codes, x.scale + scale, BLOCK, x.code).dequantize() for x in (m, v)]
        assert first_excess(first, second, wrong[0]).max() > 0, name
        assert second_excess(second, wrong[1]).max() > 0, name


def test_codes_are_fine_where_a_block_is_uniform():
    """Two octaves of v get 127 codes each: 1/254 at most. m up to 3 sqrt(v) has 3.6 octaves over c, and so about 35
    codes to each: its step is at most 4/35 where |m| + c is in [4, 8), for a root of v of at least 1.1."""
    second = 1.0 + 2 * torch.rand(50, BLOCK)
    first = second.sqrt() * torch.randn(50, BLOCK).clamp(-3, 3)
    m, v = nearest(first, second)
    assert ((v.dequantize() - second).abs() / second).max() < 1 / 254 + DECODE_ERROR
    assert ((m.dequantize() - first).abs() / second.sqrt()).max() < 4 / 35 / 2 / 1.1


@pytest.mark.parametrize("code", ["float8_signed", "float8_unsigned"])
def test_zero_blocks_and_padding_decode_to_zero(code):
    value = torch.zeros(3, 70)
    value[1] = 2.0
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert torch.equal(x.dequantize()[[0, 2]], torch.zeros(2, 70)) and torch.allclose(x.dequantize()[1], value[1])
    assert not Blockwise8bitTensor.zeros((3, 70), BLOCK, code).dequantize().any()


# ---- Stochastic rounding ----


def stochastic(first, second, n=2048):
    """All decoded values of a block over n evenly spaced noises, each (n, 64)."""
    noise = (torch.arange(n, dtype=torch.int32) * ((1 << 23) // n)).reshape(-1, 1)
    low, high = (x.expand(n) for x in ends(second))
    v = state_codes.decode_exp_avg_sq(*state_codes.encode_exp_avg_sq(second.expand(n, -1), low, high, noise))
    m = state_codes.decode_exp_avg(*state_codes.encode_exp_avg(first.expand(n, -1), low, noise))
    return m.double(), v.double()


@CHECK
@given(moments())
def test_both_moments_are_rounded_without_bias(pair):
    """Within one spacing of the noise, and nothing but the two neighbours of a value is drawn.

    Rounding to nearest, the control, breaks the bound wherever a value is not close to a code.
    """
    first, second = pair
    if not (first.any() and second.any()):
        return
    m, v = stochastic(first, second)
    step, smallest = second_moment_step(second.double())
    kept = second >= smallest  # under the range of the block, "never 0" comes before unbiased
    slack = step / 1024 + DECODE_ERROR * second
    assert ((v.mean(0, keepdim=True) - second).abs() - slack)[kept].max() <= 0
    # The upper neighbour may lie in the next octave, at twice the step, when rounded there
    assert (v.amax(0) - v.amin(0) - step * (1 + 2 * DECODE_ERROR) - DECODE_ERROR * second)[kept].max() <= 0
    step_m = first_moment_step(first.double(), second.double())
    slack_m = step_m / 1024 + DECODE_ERROR * first.abs() + 255 * FP32_EPS * step_m
    top = first.abs() == first.abs().amax(1, keepdim=True)  # its upper neighbour may be past the last code
    assert ((m.mean(0, keepdim=True) - first).abs() - slack_m)[~top].max() <= 0
    nearest_v = Blockwise8bitTensor.from_float(second, BLOCK, "float8_unsigned").dequantize().double()
    far = kept & ((nearest_v - second).abs() > step / 4)
    assert ((nearest_v - second).abs() > slack)[far].all()
