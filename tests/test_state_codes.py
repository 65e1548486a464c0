"""The block code of optimizer state: bounds, invariances, stochastic rounding, random bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import rows

from qsub import Blockwise8bitTensor
from qsub.tensors import state_codes as codes

CHECK = settings(deadline=None, derandomize=True, max_examples=100)
BLOCK = 64
SIGNED, UNSIGNED = "float8_signed", "float8_unsigned"
# Bit patterns that the whole number of patterns per code is off by, at most 1/2, at the 255th code: of 2**23 an octave.
STEP_ROUNDING = 255 / 2 / 2**23


def blocks(low=-60, high=60):
    """(1, 64) fp32 blocks with heavy tails, ties and zeros."""
    return rows(low=low, high=high, size=BLOCK)


def of_code(code, value):
    return value.abs() if code == UNSIGNED else value


def octave(value):
    """The largest power of two up to each positive fp64 value."""
    return torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - 1)


def step(value, tensor):
    """Distance between the codes next to each fp64 value: on the scale of bit patterns, 1/k of the octave it is in."""
    exponent, per_octave = tensor.scale.double().reshape(-1, 2, 1).unbind(1)
    start = torch.ldexp(torch.ones_like(exponent), exponent - 127)
    place = value.abs() + start if tensor.code == SIGNED else torch.maximum(value, start)
    return octave(place) / per_octave, octave(place)


def excess(value, tensor):
    """By how much each element breaks the bound of half a step: at most 0 for a right code."""
    size, top = step(value.double(), tensor)
    start = torch.ldexp(torch.ones(1).double(), tensor.scale[..., 0].double().reshape(-1, 1) - 127)
    error = (value.double() - tensor.dequantize(torch.float64)).abs()
    if tensor.code == UNSIGNED:  # what is under the start of the range has its code: never 0
        error = torch.where((value > 0) & (value < start), (tensor.dequantize(torch.float64) - start).abs(), error)
    return error - size * (0.5 + 1e-6) - top * (STEP_ROUNDING + 2**-22)


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
@CHECK
@given(value=blocks())
def test_half_a_step_of_the_blocks_own_range(code, value):
    value = of_code(code, value)
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert excess(value, x).max() <= 0


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
def test_the_bound_rejects_a_coarser_code_and_a_wrong_scale(code):
    value = of_code(code, torch.randn(16, BLOCK))
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert excess(value, x).max() <= 0
    for codes_, scale in (
        (x.codes & 0xFC, x.scale),  # two bits less
        (x.codes, x.scale - torch.tensor([0, 1], dtype=torch.uint8)),  # one code per octave less
        (x.codes, x.scale + torch.tensor([1, 0], dtype=torch.uint8)),  # an octave up
        (x.codes.roll(1, 0), x.scale),
    ):
        bad = Blockwise8bitTensor(codes_, scale, BLOCK, code)
        assert (value.double() - bad.dequantize(torch.float64)).abs().sub(step(value.double(), x)[0]).max() > 0


def test_precision_follows_the_range_of_the_block():
    """Relative error of v: under 1/500 in a block within an octave, under 1/12 + over 40 octaves."""
    narrow = 1 + torch.rand(8, BLOCK)
    error = (Blockwise8bitTensor.from_float(narrow, BLOCK, UNSIGNED).dequantize() / narrow - 1).abs().max()
    assert error <= 1 / (2 * 254) + STEP_ROUNDING
    wide = 2.0 ** (torch.rand(8, BLOCK) * 40 - 40)
    x = Blockwise8bitTensor.from_float(wide, BLOCK, UNSIGNED)
    assert x.scale[..., 1].min() == 6  # 254 codes in 41 octaves
    assert 1 / 50 < (x.dequantize() / wide - 1).abs().max() <= 1 / 12 + STEP_ROUNDING


def test_elements_far_below_the_maximum_keep_the_lowest_code():
    value = torch.ones(1, BLOCK)
    value[0, 0], value[0, 1], value[0, 2] = 2.0**-39.5, 2.0**-60, 0.0
    x = Blockwise8bitTensor.from_float(value, BLOCK, UNSIGNED)
    assert x.codes[0, 1] == 1 and x.codes[0, 2] == 0
    assert x.dequantize()[0, 1] == 2.0**-40 and abs(x.dequantize()[0, 0] / 2.0**-39.5 - 1) < 1 / 12


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
@CHECK
@given(value=blocks(-30, 30), shift=st.integers(-20, 20))
def test_odd_and_free_of_powers_of_two(code, value, shift):
    value = of_code(code, value)
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    scaled = Blockwise8bitTensor.from_float(value * 2.0**shift, BLOCK, code)
    assert torch.equal(scaled.codes, x.codes)
    assert torch.equal(scaled.dequantize().double(), x.dequantize().double() * 2.0**shift)
    if code == SIGNED:
        assert torch.equal(Blockwise8bitTensor.from_float(-value, BLOCK, code).dequantize(), -x.dequantize())
        assert bool((x.dequantize() * value >= 0).all())


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
@pytest.mark.parametrize("exponent, per_octave", [(127, 254), (110, 63), (90, 12), (60, 6)])
def test_codes_are_monotonic_and_exact_on_the_grid(code, exponent, per_octave):
    count = 128 if code == SIGNED else 256
    every = torch.arange(count, dtype=torch.uint8).reshape(-1, BLOCK)
    scale = torch.tensor([exponent, per_octave], dtype=torch.uint8).expand(len(every), 1, 2)
    value = Blockwise8bitTensor(every, scale, BLOCK, code).dequantize().flatten()
    assert value[0] == 0 and value.diff().min() > 0 and value.isfinite().all()


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
def test_zero_blocks(code):
    x = Blockwise8bitTensor.from_float(torch.zeros(2, 100), BLOCK, code)
    assert not x.codes.any() and torch.equal(x.dequantize(), torch.zeros(2, 100))
    assert torch.equal(Blockwise8bitTensor.zeros((2, 100), BLOCK, code).dequantize(), torch.zeros(2, 100))


@CHECK
@given(value=blocks(-100, 100), seed=st.integers(0, 2**31))
def test_a_second_moment_is_never_coded_zero_and_zero_always_is(value, seed):
    value = value.abs()
    value[0, ::7] = 0
    noise = torch.randint(0, 1 << 23, value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    for draw in (codes.HALF, noise, (1 << 23) - 1, 0):
        encoded, _ = codes.encode_exp_avg_sq(value, *codes.exponent_range(value), draw)
        assert torch.equal(encoded == 0, value == 0)


def draws(code, value, n=2048):
    """Decoded codes (n, 64) over evenly spaced noise, and the scale."""
    noise = (torch.arange(n, dtype=torch.int32) * ((1 << 23) // n)).reshape(-1, 1)
    many = value.expand(n, -1).contiguous()
    if code == UNSIGNED:
        encoded, scale = codes.encode_exp_avg_sq(many, *codes.exponent_range(many), noise)
        return codes.decode_exp_avg_sq(encoded, scale).double(), scale[:1]
    encoded, scale = codes.encode_exp_avg(many, codes.exponent_range(many.square())[0], noise)
    return codes.decode_exp_avg(encoded, scale).double(), scale[:1]


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
@CHECK
@given(value=blocks(-20, 20))
def test_rounding_is_unbiased_and_draws_the_two_neighbours(code, value):
    value = of_code(code, value)
    drawn, scale = draws(code, value)
    size, top = step(value.double(), Blockwise8bitTensor(torch.zeros(1, 64).byte(), scale[None], BLOCK, code))
    start = torch.ldexp(torch.ones(1).double(), scale[:, :1].double() - 127)
    kept = (value >= start) | (value == 0) if code == UNSIGNED else torch.ones_like(value, dtype=torch.bool)
    slack = size / 2048 + top * (STEP_ROUNDING + 2**-22)  # a spacing of the noise, and fp32 roundings
    assert ((drawn.mean(0, keepdim=True) - value.double()).abs() - slack)[kept].max() <= 0
    assert ((drawn.amax(0) - drawn.amin(0)) - 2 * size - slack).max() <= 0  # a neighbour may be in the next octave
    nearest = Blockwise8bitTensor.from_float(value, BLOCK, code).dequantize(torch.float64)
    halfway = ((nearest - value.double()).abs() / size > 0.25) & kept
    assert not halfway.any() or ((nearest - value.double()).abs() - slack)[halfway].min() > 0  # the control


@pytest.mark.parametrize("peak", [1e-30, 1e-20, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
def test_flush_to_zero_changes_no_code(code, peak):
    """fp32 is normal from 1.2e-38: gradients of 1e-15 (v = 1e-30) survive a mode that a library turned on."""
    value = of_code(code, torch.randn(32, BLOCK) * torch.exp(2 * torch.randn(32, BLOCK)))
    value = value / value.abs().max() * peak
    value = torch.where(value.abs() < 2.0**-126, 0.0, value)  # denormal inputs are zero in that mode, by its nature
    second = value.abs().clamp(2.0**-63, 2.0**63).square()  # 1e-37 at least: not denormal either
    plain = Blockwise8bitTensor.from_float(value, BLOCK, code, second)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        flushed = Blockwise8bitTensor.from_float(value, BLOCK, code, second)
        decoded = plain.dequantize()
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.codes, plain.codes) and torch.equal(flushed.scale, plain.scale)
    normal = plain.dequantize().abs() >= 2.0**-126
    assert torch.equal(decoded[normal], plain.dequantize()[normal])


def test_size():
    """Two moments in blocks of 64: 2.0625 bytes a parameter."""
    moments = [Blockwise8bitTensor.zeros((128, 512), BLOCK, code) for code in (SIGNED, UNSIGNED)]
    assert sum(t.nbytes for m in moments for t in (m.codes, m.scale)) == 2.0625 * 128 * 512


# ---- Random bits ----


def bits_of(seed, step, first_block, count, block_size=BLOCK):
    numbers = (torch.tensor(seed, dtype=torch.int32), torch.tensor(step, dtype=torch.int32))
    return codes.random_bits(*numbers, torch.tensor(first_block), count, block_size)


@CHECK
@given(
    st.integers(-(2**31), 2**31 - 1),
    st.integers(1, 10**6),
    st.integers(0, 2**40),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_random_bits_of_a_shard_are_those_of_the_whole(seed, step, start, cut, rest):
    whole = bits_of(seed, step, start, cut + rest)
    assert torch.equal(bits_of(seed, step, start, cut), whole[:cut])
    assert torch.equal(bits_of(seed, step, start + cut, rest), whole[cut:])
    assert torch.equal(bits_of(seed, step, start, cut + rest), whole)  # no generator state


@pytest.mark.parametrize("first_block", [0, (1 << 25) - 100, 1 << 26])  # around 2**31 and at 2**32 elements
def test_random_bits_are_uniform_and_independent_between_places_seeds_and_windows(first_block):
    """The upper 25 bits, of neighbours, of seeds, of windows of 32 steps and of places 2**32 elements apart.

    The 7 bits below, worth 2**-16 of a code at most, are not quite independent between neighbours.

    A share of n fair bits is within 5 standard deviations, 5 / (2 sqrt(n)), of a half.
    """
    count, n = 1024, 1024 * BLOCK
    limit = 5 / (2 * math.sqrt(n))
    drawn = bits_of(7, 3, first_block, count)
    others = [
        bits_of(7, 35, first_block, count),
        bits_of(8, 3, first_block, count),
        bits_of(7, 3, first_block + count, count),
        bits_of(7, 3, first_block + (1 << 26), count),
        drawn.flatten().roll(1).reshape(drawn.shape),
        drawn.roll(1, 0),
    ]
    for place in range(7, 32):
        bit = (drawn >> place) & 1
        assert abs(bit.double().mean().item() - 0.5) < limit, place
        for other in others:
            agree = bit == ((other >> place) & 1)
            assert abs(agree.double().mean().item() - 0.5) < limit, place
    counts = torch.bincount((drawn.flatten() >> 24) & 0xFF, minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    assert torch.unique(drawn).numel() > n - 5 * n * n / 2**33 - 5  # collisions as of a random function


@pytest.mark.parametrize("moment, bound", [(0, 4 / 32), (1, 2.618 / 32)])
def test_the_thresholds_of_an_element_fill_a_window_of_steps_evenly(moment, bound):
    """The largest gap between 32 thresholds. A golden rotation leaves at most 2.618 / 32 (three-distance theorem); the
    low bits, for exp_avg, rotate by .4334. Independent draws, the control, leave 4.06 / 32 in the mean."""

    def largest_gap(steps):
        noise = torch.stack([codes.noise_of(bits_of(5, s, 0, 4), moment) for s in steps]).double() / 2**23
        ordered = noise.flatten(1).sort(0).values
        return torch.cat([ordered.diff(dim=0), ordered[:1] + 1 - ordered[-1:]]).amax(0)

    assert largest_gap(range(64, 96)).max() <= bound
    assert largest_gap(range(64, 64 + 32 * 32, 32)).mean() > 3.5 / 32
