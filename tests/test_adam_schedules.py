"""Hyper-parameters that change from step to step: the values of torch.optim's schedules, and no recompiling."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import lr_scheduler

from qsub.optim import Adam8bit, AdamW8bit

BACKENDS = ["eager", pytest.param("compile", marks=pytest.mark.slow)]
STEPS = 20


def graphs():
    """Graphs that torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-5).step


def one_cycle(optimizer):
    """Cycles beta1 against the learning rate."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-2, 1e-2], total_steps=STEPS + 1).step


def lambda_lr(optimizer):
    return lr_scheduler.LambdaLR(optimizer, [lambda i: 0.9**i, lambda i: 1 / (1 + i)]).step


def plateau(optimizer):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    return lambda: scheduler.step(1.0)


def warm_up_then_step(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.StepLR(optimizer, 4)], [5]).step


def plain_float(optimizer):
    """timm, transformers and users write floats."""
    count = iter(range(1, STEPS + 1))

    def write():
        i = next(count)
        optimizer.param_groups[0]["lr"] = 1e-2 / i
        optimizer.param_groups[1]["lr"] = 1e-3 * i

    return write


def everything_else(optimizer):
    """Weight decay, betas and eps changed each step."""
    count = iter(range(1, STEPS + 1))

    def write():
        i = next(count)
        for group in optimizer.param_groups:
            group.update(weight_decay=0.02 * i, betas=(0.9 - 0.01 * i, 0.99 + 0.0004 * i), eps=1e-8 * i)

    return write


def warm_restarts(optimizer):
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7).step


SCHEDULES = [
    cosine,
    one_cycle,
    lambda_lr,
    plateau,
    warm_up_then_step,
    plain_float,
    everything_else,
    warm_restarts,
]


def two_groups():
    """In each group a parameter with 8-bit state and a small one, whose fp32 state follows torch exactly."""
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(80, 64), (33,), (70, 65), (40,)]]


def build(cls, params, **options):
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 2e-3, "weight_decay": 0.1}]
    return cls(groups, betas=(0.9, 0.99), **options)


def readings(optimizer):
    groups = optimizer.param_groups
    return [float(x) for g in groups for x in (g["lr"], *g["betas"], g["weight_decay"], g["eps"])]


def run_side_by_side(schedule, backend, cls=AdamW8bit, theirs=torch.optim.AdamW, tensor_lr=False, frozen=False):
    """Both optimizers under the schedule on the same gradients; (largest difference of small parameters, graphs).

    The graphs are those made after the second step. With `frozen` ours misses the schedule: the negative control.
    """
    params, expected = two_groups(), two_groups()
    opt, ref = build(cls, params, backend=backend), build(theirs, expected)
    if tensor_lr:
        for group in opt.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    advance, advance_ref = schedule(opt), schedule(ref)
    generator = torch.Generator().manual_seed(6)
    after_two = 0
    for i in range(STEPS):
        for p, q in zip(params, expected, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        opt.step(), ref.step()
        advance_ref()
        if not frozen:
            advance()
            assert readings(opt) == pytest.approx(readings(ref), rel=1e-6 if tensor_lr else 0, abs=0)
        if i == 1:
            after_two = graphs()
    small = max((p - q).abs().max().item() for p, q in zip(params[1::2], expected[1::2], strict=True))
    # 8-bit state errs by a few percent of lr a step (gpu-findings.md); a schedule that is missed by far more.
    large = max((p - q).abs().mean().item() for p, q in zip(params[::2], expected[::2], strict=True))
    assert frozen or large < 0.05 * STEPS * 1e-2
    return small, graphs() - after_two


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_reach_the_step_and_never_recompile(schedule, backend):
    """fp32 state follows torch.optim.AdamW to 1e-6, which it could not with a stale value (the control)."""
    difference, new_graphs = run_side_by_side(schedule, backend)
    assert difference < 1e-6
    assert new_graphs == 0
    if backend == "eager":
        assert run_side_by_side(schedule, backend, frozen=True)[0] > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", [cosine, one_cycle, plain_float])
def test_schedules_of_a_learning_rate_in_a_tensor(schedule, backend):
    """torch's schedulers fill such a tensor in place; its identity must not be what is looked at."""
    difference, new_graphs = run_side_by_side(schedule, backend, tensor_lr=True)
    assert difference < 1e-6 and new_graphs == 0


def test_adam_without_decoupling_follows_a_changing_weight_decay():
    difference, _ = run_side_by_side(everything_else, "eager", Adam8bit, torch.optim.Adam)
    assert difference < 1e-6


def test_group_values_stay_as_the_user_put_them():
    param = nn.Parameter(torch.ones(3))
    rate = torch.tensor(1e-2)
    opt = AdamW8bit([{"params": [param], "lr": rate}], backend="eager")
    param.grad = torch.ones(3)
    opt.step()
    assert opt.param_groups[0]["lr"] is rate
    opt.param_groups[0]["lr"] = 5e-3
    opt.step()
    assert opt.param_groups[0]["lr"] == 5e-3 and type(opt.param_groups[0]["lr"]) is float
    assert torch.allclose(param, torch.tensor(1 - 1.5e-2), atol=2e-4)


def test_two_optimizers_do_not_share_hyper_parameters():
    results = []
    for rate in (1e-2, 1e-3):
        param = nn.Parameter(torch.zeros(80, 64))
        results.append((param, AdamW8bit([param], lr=rate, backend="eager")))
    for param, opt in results:
        param.grad = torch.ones_like(param)
        opt.step()
    assert torch.allclose(results[0][0], torch.tensor(-1e-2)) and torch.allclose(results[1][0], torch.tensor(-1e-3))


@pytest.mark.slow
def test_twenty_shapes_cost_at_most_six_graphs():
    """2-D, 4-D, odd sizes, 1-D, one block and many; then nothing more, whatever comes later."""
    torch._dynamo.reset()
    counters.clear()
    shapes = [(64 * i, 64) for i in range(1, 6)] + [(61 + i, 97 + i) for i in range(4)]
    shapes += [(16, 32, 3, 3), (33, 17, 3, 3), (64, 64, 1, 1), (7, 5, 31, 9)]
    shapes += [(4096,), (5001,), (70000,), (10,), (63,), (1,), ()]
    assert len(set(shapes)) == 20
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    opt = AdamW8bit(params, backend="compile")
    for i in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        opt.step()
        if i == 0:
            first = graphs()
    assert 1 <= first <= 6 and graphs() == first
    late = [nn.Parameter(torch.randn(shape)) for shape in [(90, 111), (12345,), (3, 5, 7)]]
    opt.add_param_group({"params": late, "lr": 1e-4})
    for param in late:
        param.grad = torch.randn_like(param)
    opt.step()
    assert graphs() == first


@pytest.mark.slow
def test_later_optimizers_use_the_graphs_of_the_first():
    """Compiled once at module level, not once per optimizer (pytorch/ao#2500)."""
    torch._dynamo.reset()
    counters.clear()
    made = []
    for _ in range(3):
        params = two_groups()
        opt = build(AdamW8bit, params, backend="compile")
        for param in params:
            param.grad = torch.randn_like(param)
        opt.step()
        made.append(graphs())
    assert 0 < made[0] == made[1] == made[2]
    opt = build(AdamW8bit, params, backend="compile", amsgrad=True)
    opt.step()
    assert graphs() > made[0]  # the control: another step does cost a graph, and is counted
