"""Parameters that hold less than the step computes: bf16 with stochastic rounding, and trainable int8 weights."""

import pytest
import torch
from adam_runs import train
from torch import nn

from qsub import Int8RowwiseTensor
from qsub.optim import AdamW8bit

BACKENDS = ["eager", pytest.param("compile", marks=pytest.mark.slow)]

# ---- bf16 and stochastic rounding ----


@pytest.mark.parametrize("state_bits", [8, 32])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_round_moves_bf16_on_updates_far_under_one_ulp(sign, state_bits):
    """1,000 updates of 1/256 ulp: to nearest nothing moves; stochastically the mean does, by the sum, unbiased.

    A parameter moves k ulps with k about Poisson(3.9), so the mean of n = 4096 is within 5 * sqrt(3.9 / n) ulps.
    """
    ulp, steps_, n = 2.0**-7, 1000, 4096
    lr = ulp / 256
    moved = {}
    for stochastic in (False, True):
        param = nn.Parameter(torch.full((64, n // 64), sign * 1.5, dtype=torch.bfloat16))
        opt = AdamW8bit(
            [param], lr=lr, weight_decay=0, stochastic_round=stochastic, backend="eager", state_bits=state_bits
        )
        param.grad = torch.full_like(param, -1.0)
        for _ in range(steps_):
            opt.step()
        moved[stochastic] = (param.double() - sign * 1.5).mean().item() / ulp
    total = steps_ / 256  # constant gradients: each update is lr
    assert moved[False] == 0
    assert abs(moved[True] - total) < 5 * (total / n) ** 0.5 + 0.01 * total  # 1%: the code's error of a constant


@pytest.mark.parametrize("numel", [100, 4096])
def test_stochastic_round_keeps_what_bf16_holds_and_what_is_not_finite(numel):
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-38, 3.3e38, float("inf"), float("-inf"), float("nan")])
    param = nn.Parameter(values.repeat(numel // 9 + 1)[:numel].to(torch.bfloat16))
    before = param.detach().clone()
    opt = AdamW8bit([param], lr=0.0, weight_decay=0, stochastic_round=True, backend="eager")
    train(opt, [param], 0, 3)
    assert torch.equal(param.nan_to_num(7.0), before.nan_to_num(7.0))


# ---- Trainable int8 weights ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trainable_int8_weight_is_trained(backend):
    torch.manual_seed(1)
    x, target = torch.randn(256, 64), torch.randn(64, 64) / 8
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(64, 64) / 8), requires_grad=True)
    floating = nn.Parameter(weight.dequantize().detach())
    opt = AdamW8bit([weight], lr=1e-2, weight_decay=0, backend=backend)
    ref = torch.optim.AdamW([floating], lr=1e-2, weight_decay=0)
    losses = []
    for _ in range(100):
        row = []
        for w, o in ((weight, opt), (floating, ref)):
            loss = (torch.nn.functional.linear(x, w) - x @ target.t()).square().mean()
            o.zero_grad()
            loss.backward()
            o.step()
            row.append(loss.item())
        losses.append(row)
    assert isinstance(weight, Int8RowwiseTensor) and weight.grad is not None
    assert losses[-1][0] < 0.1 * losses[0][0] and losses[-1][0] < losses[-1][1] + 0.02 * losses[0][1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_spoils_no_row_of_an_int8_weight(bad):
    """The row code can't hold NaN, which is what torch would make of the element: it stays, the others are updated."""
    value = torch.rand(64, 65) + 0.5
    value[:, 0] = 2.0  # keeps the row's scale
    runs = []
    for element in (0.0, bad):
        weight = nn.Parameter(Int8RowwiseTensor.from_float(value), requires_grad=True)
        opt = AdamW8bit([weight], lr=1e-2, weight_decay=0, backend="eager")
        for _ in range(3):
            weight.grad = torch.ones(64, 65)
            weight.grad[:, 0], weight.grad[3, 5] = 0.0, element
            opt.step()
        runs.append(weight.dequantize().detach())
    assert runs[1].isfinite().all() and torch.equal(runs[0], runs[1])
    assert (runs[0] != Int8RowwiseTensor.from_float(value).dequantize())[:, 1:].float().mean() > 0.8


def test_an_int8_weight_saturates_where_its_scale_does():
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.full((64, 64), 6e4)), requires_grad=True)
    opt = AdamW8bit([weight], lr=1e4, weight_decay=0, backend="eager")
    weight.grad = -torch.ones(64, 64)
    opt.step()
    assert torch.allclose(weight.dequantize(), torch.tensor(65504.0))


def test_int8_weights_are_written_back_without_bias_and_reproducibly():
    """Updates of 1/50 of a code: to nearest none would move; the mean moves by their sum."""
    runs = []
    for seed in (0, 0, 1):
        value = torch.full((64, 65), 0.25)
        value[:, 0] = 1.0  # keeps the row's scale at 1: a code is 1/127
        weight = nn.Parameter(Int8RowwiseTensor.from_float(value), requires_grad=True)
        start = weight.dequantize().double()
        opt = AdamW8bit([weight], lr=1 / 127 / 50, weight_decay=0, backend="eager", seed=seed)
        weight.grad = torch.ones(64, 65)
        weight.grad[:, 0] = 0.0
        for _ in range(100):
            opt.step()
        runs.append((weight.int_data.clone(), (start - weight.dequantize())[:, 1:].mean().item() * 127))
    assert torch.equal(runs[0][0], runs[1][0]) and not torch.equal(runs[0][0], runs[2][0])
    # Each element moves by 2 codes on average with a variance under 2: 4096 of them, 5 standard deviations, and
    # the code's error of a constant gradient
    assert all(abs(mean - 2) < 5 * (2 / 4096) ** 0.5 + 0.02 for _, mean in runs)


# ---- amsgrad ----


@pytest.mark.slow
def test_the_maximum_of_amsgrad_keeps_no_rounding_errors():
    """After 1,000 and after 6,000 steps it is torch's within a step of the code, and within 1% in the mean.

    A step is 9% in a block of 30 octaves, which has 254 // 30 = 8 codes to the octave; the blocks here have fewer.

    The control is the maximum of an exp_avg_sq that is rounded stochastically: it keeps each upward draw.
    """
    shape, options = (4, 64), {"weight_decay": 0.0, "min_8bit_size": 64}
    theirs, mine, other = (nn.Parameter(torch.zeros(shape)) for _ in range(3))
    ref = torch.optim.AdamW([theirs], weight_decay=0.0, amsgrad=True, fused=True)
    opt, control = AdamW8bit([mine], amsgrad=True, **options), AdamW8bit([other], **options)
    kept = torch.zeros(shape)
    scale = torch.exp(1.5 * torch.randn(shape))
    for step in range(1, 6001):
        theirs.grad = mine.grad = other.grad = scale * (0.2 + torch.randn(shape))
        ref.step(), opt.step(), control.step()
        kept = torch.maximum(kept, control.state[other]["exp_avg_sq"].dequantize())
        if step in (1000, 6000):
            largest = ref.state[theirs]["max_exp_avg_sq"]
            ratio = opt.state[mine]["max_exp_avg_sq"].dequantize() / largest
            assert abs(ratio.mean() - 1) < 0.01 and (ratio - 1).abs().max() < 0.09
    assert (kept / largest).mean() > 1.1
    torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.01)
