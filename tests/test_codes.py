"""The row code of weights: bounds, invariances, stochastic rounding."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import rows

from qsub import Int8RowwiseTensor
from qsub.tensors import codes

CHECK = settings(deadline=None, derandomize=True, max_examples=150)
LOG2_LOW, LOG2_HIGH = math.log2(3e-6), math.log2(65504)  # magnitudes of rows that the row code takes
FP32_EPS = 2.0**-23  # the codes are formed in fp32: a tie may fall on either side by one fp32 rounding or two


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
@given(rows(LOG2_LOW, LOG2_HIGH))
@example(torch.tensor([[3e-6, 1e-6, -1.5e-6]]))
@example(torch.tensor([[65504.0, -65504.0, 257.0]]))
@example(torch.tensor([[6.1e-5, 0.0, 2.4e-7]]))  # where fp16 becomes subnormal
def test_row_code_errs_by_half_a_step_at_any_magnitude(weight):
    w = Int8RowwiseTensor.from_float(weight)
    assert row_excess(weight, w.int_data, w.scale).max() <= 0
    assert w.scale.item() == weight.abs().max().half().item()
    assert w.int_data.abs().max() == 127  # the whole range is used, also where a row is subnormal


@CHECK
@given(rows(LOG2_LOW, LOG2_HIGH))
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
@given(rows(LOG2_LOW, 10.0), st.integers(0, 2**31))
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


def test_a_value_that_a_code_stands_for_is_coded_as_that_whatever_the_noise():
    """All codes and all fp16 scales. A step that changes nothing, with lr=0 or a zero gradient, moves nothing."""
    scale = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)  # 0 to 65504, every one
    int_data = torch.arange(-127, 128, dtype=torch.int8).expand(len(scale), -1)
    value = codes.dequantize_rows(int_data, scale, torch.float32)
    expected = torch.where(scale.unsqueeze(1) > 0, int_data, 0)
    for noise in (0.0, 0.5, 1 - 2.0**-24):
        again, same_scale = codes.quantize_rows(value, torch.full_like(value, noise))
        assert torch.equal(again, expected) and torch.equal(same_scale, scale)
    # The rule that floors `value * 127 / scale + noise` alone moves some.
    floored = (value * 127 / scale.float().unsqueeze(1).clamp(min=2.0**-24)).floor()
    assert (floored != expected).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [None, 0.0, 1 - 2.0**-24])
def test_rows_that_have_their_value_already_keep_codes_and_scale(noise, dtype):
    """Also a row whose largest code is under 127, as stochastic rounding leaves some; coded anew it would move."""
    int_data = torch.randint(-90, 91, (64, 40), dtype=torch.int8)
    scale = torch.rand(64).half()
    weight = Int8RowwiseTensor(int_data.clone(), scale.clone(), dtype=dtype)
    value = weight.dequantize()
    value[7] *= 1.5
    weight.requantize_(value, noise=None if noise is None else torch.full(value.shape, noise))
    kept = torch.arange(64) != 7
    assert torch.equal(weight.int_data[kept], int_data[kept]) and torch.equal(weight.scale[kept], scale[kept])
    assert not torch.equal(weight.int_data[7], int_data[7])
