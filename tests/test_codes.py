"""The row code of weights and the block codes of optimizer state: bounds, invariances, random bits."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import LAYOUT, SCALE_STEP, SIGNED, UNSIGNED

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.tensors import codes

CHECK = settings(deadline=None, derandomize=True, max_examples=150)
LOG2_LOW, LOG2_HIGH = math.log2(3e-6), math.log2(65504)  # magnitudes of rows that the row code takes
FP32_EPS = 2.0**-23  # the codes are formed in fp32: a tie may fall on either side by one fp32 rounding or two
BLOCK = 64
LARGEST_SCALE = 2.0**126  # the reciprocal of a scale stays a normal fp32 number: values over it saturate


@st.composite
def rows(draw, low=LOG2_LOW, high=LOG2_HIGH, size=33):
    """(1, size) fp32 whose largest magnitude is between 2**low and 2**high: heavy tails, ties and zeros too."""
    peak = 2.0 ** draw(st.floats(low, high))
    seed = draw(st.integers(0, 2**31))
    sigma = draw(st.sampled_from([0.0, 1.0, 4.0]))
    picked = draw(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=size - 1))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, generator=generator) * torch.exp(sigma * torch.randn(size, generator=generator))
    row = noise / noise.abs().max()
    row[: len(picked)] = torch.tensor(picked)
    row[row.abs() < 2.0**-60] = 0
    row[-1] = draw(st.sampled_from([-1.0, 1.0]))
    return (row.double() * peak).float().clamp(-(2.0**high), 2.0**high).unsqueeze(0)


def blocks(low=-80, high=80):
    """(1, 64) fp32 blocks of a far wider range: of v, say."""
    return rows(low=low, high=high, size=BLOCK)


# ---- Row code ----


def row_excess(weight, int_data, scale):
    """By how much each element breaks the bound of the row code: at most 0 for a right one.

    Half a step of the maximum in fp16; and where fp16 rounds the maximum down, what it cuts off the top (under half
    a step for rows over 7.7e-6, up to 1.3 steps at 3e-6).
    """
    peak = weight.abs().amax(1, keepdim=True).half().double()
    cut = (weight.double().abs() - peak).clamp_min(0)
    bound = torch.maximum(peak / 254, cut) + 2 * FP32_EPS * peak
    return (weight.double() - int_data.double() * scale.double().unsqueeze(1) / 127).abs() - bound


@CHECK
@given(rows())
@example(torch.tensor([[3e-6, 1e-6, -1.5e-6]]))
@example(torch.tensor([[65504.0, -65504.0, 257.0]]))
@example(torch.tensor([[6.1e-5, 0.0, 2.4e-7]]))  # where fp16 becomes subnormal
def test_row_code_errs_by_half_a_step_at_any_magnitude(weight):
    w = Int8RowwiseTensor.from_float(weight)
    assert row_excess(weight, w.int_data, w.scale).max() <= 0
    assert w.scale.item() == weight.abs().max().half().item()
    assert w.int_data.abs().max() == 127  # the whole range is used, also where a row is subnormal


@CHECK
@given(rows())
def test_row_code_is_idempotent_odd_and_free_of_powers_of_two(weight):
    w = Int8RowwiseTensor.from_float(weight)
    again = Int8RowwiseTensor.from_float(w.dequantize())
    assert torch.equal(again.int_data, w.int_data) and torch.equal(again.scale, w.scale)
    assert torch.equal(Int8RowwiseTensor.from_float(-weight).int_data, -w.int_data)
    if 2.0**-12 < w.scale.item() < 2.0**14:  # where fp16 is normal before and after
        scaled = Int8RowwiseTensor.from_float(weight * 0.25)
        assert torch.equal(scaled.int_data, w.int_data) and torch.equal(scaled.scale * 4, w.scale)


def test_zero_rows_have_scale_zero_and_leave_their_neighbours_alone():
    weight = torch.randn(3, 20)
    weight[1] = 0
    w = Int8RowwiseTensor.from_float(weight)
    assert w.scale[1] == 0 and not w.int_data[1].any()
    assert torch.equal(w.dequantize()[1], torch.zeros(20))
    assert torch.equal(w.int_data[[0, 2]], Int8RowwiseTensor.from_float(weight[[0, 2]]).int_data)


@pytest.mark.parametrize("magnitude", [3e-6, 1e-4, 7e-3, 1.0, 6e4])
def test_row_bound_rejects_int4_and_a_wrong_scale(magnitude):
    weight = torch.randn(8, 256)
    weight *= magnitude / weight.abs().amax(1, keepdim=True)
    int_data, scale = codes.quantize_rows(weight)
    int4 = (int_data.float() / 16).round().clamp(-7, 7) * 16
    assert row_excess(weight, int4, scale).max() > 0
    assert row_excess(weight, int_data, scale.float() * 1.01).max() > 0
    max_over_127 = (scale.float() / 127).half().double() * 127  # the scale that other libraries keep
    if magnitude < 1e-3:
        assert row_excess(weight, int_data, max_over_127).max() > 0


@CHECK
@given(rows(high=10.0), st.integers(0, 2**31))
def test_row_code_rounds_stochastically_without_bias(weight, seed):
    """Evenly spaced noise stands for the uniform one, so the mean is exact to one spacing."""
    n = 512
    offset = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) / n
    noise = (torch.arange(n).unsqueeze(1) / n + offset).clamp_max(1 - 2.0**-24)
    int_data, scale = codes.quantize_rows(weight.expand(n, -1), noise)
    value = codes.dequantize_rows(int_data, scale, torch.float64)
    step = scale[0].double() / 127
    # 127 * x / scale is formed in fp32, which moves it by up to 127 * 2**-23 codes before it meets the noise
    assert (value.mean(0) - weight[0].double()).abs().max() <= step * (1 / n + 2 * 127 * FP32_EPS)
    assert (value.amax(0) - value.amin(0)).max() <= step * 1.001  # only the two neighbours are drawn


# ---- Block codes ----


def block_excess(value, tensor):
    """By how much each element breaks the bound of its block code: at most 0 for a right one."""
    scale = tensor.scale.double().reshape(-1, 1)
    half = LAYOUT[tensor.code].step(value.double(), scale) / 2
    if tensor.code == "float8_unsigned":  # never 0: a value under the smallest code may be that code
        half = torch.maximum(half, LAYOUT[tensor.code].step(torch.zeros_like(scale), scale))
    return (value.double() - tensor.dequantize(torch.float64)).abs() - half * (1 + 1e-5)


def of_code(code, value):
    return value.abs() if code == "float8_unsigned" else value


@pytest.mark.parametrize("code", sorted(LAYOUT))
@CHECK
@given(value=blocks())
def test_block_code_errs_by_half_a_step(code, value):
    value = of_code(code, value)
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert block_excess(value, x).max() <= 0
    peak = value.abs().max().item()
    assert peak <= x.scale.item() <= peak * (1 + SCALE_STEP)  # rounded up: no element is over the top code


@pytest.mark.parametrize("code", sorted(LAYOUT))
@CHECK
@given(value=blocks(-40, 40), shift=st.integers(-20, 20))
def test_block_code_is_idempotent_odd_and_free_of_powers_of_two(code, value, shift):
    value = of_code(code, value)
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    decoded = x.dequantize()
    # By value: a tiny negative element may be the negative zero, which comes back as zero.
    again = Blockwise8bitTensor.from_float(decoded, BLOCK, code)
    assert torch.allclose(again.dequantize(), decoded, rtol=2 * FP32_EPS, atol=0)
    scaled = Blockwise8bitTensor.from_float(value * 2.0**shift, BLOCK, code)
    assert torch.equal(scaled.codes, x.codes)
    assert torch.equal(scaled.scale.double(), x.scale.double() * 2.0**shift)
    if code == "float8_signed":
        assert torch.equal(Blockwise8bitTensor.from_float(-value, BLOCK, code).dequantize(), -decoded)
        assert bool((decoded * value >= 0).all())


@pytest.mark.parametrize("code", sorted(LAYOUT))
def test_block_bound_rejects_a_coarser_code_and_a_wrong_scale(code):
    value = of_code(code, torch.randn(16, BLOCK))
    x = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert block_excess(value, x).max() <= 0
    coarse = Blockwise8bitTensor(x.codes & 0xFE, x.scale, BLOCK, code)  # one mantissa bit less
    assert block_excess(value, coarse).max() > 0
    wrong = Blockwise8bitTensor(x.codes, x.scale * 1.05, BLOCK, code)
    assert block_excess(value, wrong).max() > 0
    other = Blockwise8bitTensor(x.codes.roll(1, 0), x.scale, BLOCK, code)
    assert block_excess(value, other).max() > 0


@pytest.mark.parametrize("code", sorted(LAYOUT))
def test_every_code_decodes_to_a_value_that_encodes_to_it(code):
    every = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    every = every[:2] if code == "float8_signed" else every  # the sign bit: 128 is a negative zero
    x = Blockwise8bitTensor(every, torch.ones(len(every), 1, dtype=torch.bfloat16), BLOCK, code)
    value = x.dequantize()
    assert torch.equal(value.flatten(), value.flatten().sort().values) and len(value.unique()) == value.numel()
    assert value[0, 0] == 0 and abs(value[-1, -1] - 1) <= FP32_EPS  # the top code is worth the scale
    encode = {"float8_signed": codes.encode_signed, "float8_unsigned": codes.encode_unsigned}[code]
    assert torch.equal(encode(value, torch.ones(len(every))), every)
    gaps = value.flatten().diff().double()
    assert torch.allclose(gaps, LAYOUT[code].step(value.flatten()[:-1].double() * (1 + 1e-6), torch.ones(1)), rtol=1e-5)


@CHECK
@given(value=blocks(-100, 100), seed=st.integers(0, 2**31))
def test_a_second_moment_is_never_coded_zero_and_zero_always_is(value, seed):
    value = value.abs()
    value[0, ::7] = 0
    scale = codes.block_scale(value.amax(1))
    noise = torch.randint(0, 1 << 19, value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    for encoded in (codes.encode_unsigned(value, scale), codes.encode_unsigned(value, scale, noise)):
        assert torch.equal(encoded == 0, value == 0)


def stochastic_mean(value, scale, n=2048):
    """Mean of the decoded codes over evenly spaced noise, and the largest difference between two draws."""
    noise = (torch.arange(n, dtype=torch.int32) * ((1 << 19) // n)).reshape(-1, 1)
    encoded = codes.encode_unsigned(value.expand(n, -1), scale.expand(n), noise)
    decoded = codes.decode_unsigned(encoded, scale.expand(n)).double()
    return decoded.mean(0, keepdim=True), decoded.amax(0, keepdim=True) - decoded.amin(0, keepdim=True)


@CHECK
@given(blocks())
def test_second_moment_is_rounded_without_bias(value):
    value = value.abs()
    scale = codes.block_scale(value.amax(1))
    mean, spread = stochastic_mean(value, scale)
    step = UNSIGNED.step(value.double(), scale.double())
    smallest = UNSIGNED.step(torch.zeros(1).double(), scale.double())
    kept = (value > smallest) | (value == 0)  # below the smallest code, "never 0" comes before unbiased
    bias = (mean - value.double()).abs()
    # One spacing of the noise, and the fp32 roundings of normalizing and decoding.
    assert (bias - step / 2048 - 4 * FP32_EPS * value.double())[kept].max() <= 0
    assert (spread / step).max() <= 1 + 1e-5  # nothing but the two neighbours is drawn
    nearest = Blockwise8bitTensor.from_float(value, BLOCK, "float8_unsigned").dequantize(torch.float64)
    halfway = ((nearest - value.double()).abs() / step > 0.25) & kept
    if halfway.any():  # negative control: rounding to nearest fails this bound
        assert ((nearest - value.double()).abs() - step / 2048 - 4 * FP32_EPS * value.double())[halfway].min() > 0


@pytest.mark.parametrize("peak", [1e-36, 1e-20, 1.0, 1e20, 3e38])
@pytest.mark.parametrize("code", sorted(LAYOUT))
def test_flush_to_zero_changes_no_code(code, peak):
    """fp32 is normal from 1.2e-38; gradients of 1e-17 (v = 1e-37) must survive a mode that a library turned on."""
    value = of_code(code, torch.randn(32, BLOCK) * torch.exp(2 * torch.randn(32, BLOCK)))
    value = value / value.abs().max() * peak
    value = torch.where(value.abs() < 2.0**-126, 0.0, value)  # denormal inputs are zero in that mode, by its nature
    plain = Blockwise8bitTensor.from_float(value, BLOCK, code)
    assert block_excess(value, plain)[value.abs() <= LARGEST_SCALE].max() <= 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        flushed = Blockwise8bitTensor.from_float(value, BLOCK, code)
        decoded = plain.dequantize()
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.codes, plain.codes) and torch.equal(flushed.scale, plain.scale)
    normal = plain.dequantize().abs() >= 2.0**-126
    assert torch.equal(decoded[normal], plain.dequantize()[normal])


@pytest.mark.parametrize("absmax", [0.0, 1e-45, 2.0**-126, 1.0, 1.0 + 2.0**-8, 1e38, 3.0e38, 3.4028234e38])
def test_scale_is_the_maximum_rounded_up_to_bf16(absmax):
    scale = codes.block_scale(torch.tensor([absmax]))
    assert torch.equal(scale.to(torch.bfloat16).float(), scale) and scale.isfinite().all()
    assert scale.item() >= min(torch.tensor(absmax).item(), LARGEST_SCALE)
    if absmax >= 2.0**-126:
        assert scale.item() <= absmax * (1 + SCALE_STEP)
    assert (scale.item() == 0) == (absmax == 0)


# ---- Random bits ----


def bits_of(seed, step, first_block, blocks, block_size=BLOCK):
    salt = codes.mix(torch.tensor(seed, dtype=torch.int32) ^ codes.mix(torch.tensor(step, dtype=torch.int32)))
    return codes.random_bits(salt, torch.tensor(first_block), blocks, block_size)


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
def test_random_bits_are_uniform_and_independent(first_block):
    """Each of the 32 bits, pairs of neighbours, and pairs of steps, seeds and places 2**32 elements apart.

    A share of n fair bits is within 5 standard deviations, 5 / (2 sqrt(n)), of a half.
    """
    blocks, n = 1024, 1024 * BLOCK
    limit = 5 / (2 * math.sqrt(n))
    draws = bits_of(7, 3, first_block, blocks)
    others = [
        bits_of(7, 4, first_block, blocks),
        bits_of(8, 3, first_block, blocks),
        bits_of(7, 3, first_block + blocks, blocks),
        bits_of(7, 3, first_block + (1 << 26), blocks),
        draws.flatten().roll(1).reshape(draws.shape),
        draws.roll(1, 0),
    ]
    for place in range(32):
        bit = (draws >> place) & 1
        assert abs(bit.double().mean().item() - 0.5) < limit, place
        for other in others:
            agree = bit == ((other >> place) & 1)
            assert abs(agree.double().mean().item() - 0.5) < limit, place
    counts = torch.bincount((draws.flatten() >> 24) & 0xFF, minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    assert torch.unique(draws).numel() > n - 5 * n * n / 2**33 - 5  # collisions as of a random function


def test_layouts_spend_eight_bits():
    assert 1 + SIGNED.exponent_bits + SIGNED.mantissa_bits == 8 == UNSIGNED.exponent_bits + UNSIGNED.mantissa_bits
