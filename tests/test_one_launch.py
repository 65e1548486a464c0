"""Backend "triton": the step of a whole group in one launch, against the eager definition.

The CPU cases need Triton's interpreter, see test_one_launch_interpreted.py.
"""

import copy
import math

import pytest
import torch

pytest.importorskip("triton")
from one_launch_helpers import align, compare, devices, inner, make_params, run_pair, set_grads, twins

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.optim import Adam8bit, AdamW8bit, adam_kernel, one_launch, plan
from qsub.tensors.blocks import fitting_rows


@devices
@pytest.mark.parametrize(
    ("cls", "dtypes", "options"),
    [
        (AdamW8bit, [torch.float32], {}),
        (Adam8bit, [torch.float32], {"weight_decay": 0.1, "maximize": True}),
        (AdamW8bit, [torch.bfloat16], {"stochastic_round": True}),
        (AdamW8bit, [torch.float16, torch.bfloat16, torch.float32], {"amsgrad": True}),
        (AdamW8bit, [torch.float32, torch.bfloat16], {"state_bits": 32, "stochastic_round": True, "amsgrad": True}),
        (AdamW8bit, [torch.float32], {"block_size": 16}),
        (AdamW8bit, [torch.float32], {"block_size": 1024, "seed": -5, "eps": 1e-3, "betas": (0.0, 0.99)}),
    ],
    ids=["fp32", "adam-maximize", "bf16-stochastic", "mixed-amsgrad", "state32", "block16", "block1024"],
)
def test_equals_the_definition_step_by_step(device, cls, dtypes, options):
    params = make_params(dtypes, device)
    run_pair(cls, params, twins(params), **options)


@devices
def test_another_seed_is_noticed(device):
    """Negative control: the comparison sees codes rounded with other random bits."""
    params = make_params([torch.float32], device, [(16, 64)])
    others = twins(params)
    ours = AdamW8bit(params, min_8bit_size=64, backend="triton")
    reference = AdamW8bit(others, min_8bit_size=64, backend="eager", seed=1)
    set_grads(params, others, torch.Generator().manual_seed(1))
    ours.step()
    reference.step()
    with pytest.raises(AssertionError):
        compare(ours, reference, params, others, 1e-3)


@devices
def test_aligned_fp32_state(device):
    """fp32 state of 2**16 elements and more takes 16-byte accesses."""
    params = make_params([torch.float32], device, [(256, 256)])
    ours, _ = run_pair(AdamW8bit, params, twins(params), steps=1, state_bits=32)
    (only,) = ours._launches._plans[0].values()
    assert only.aligned == [True]


@devices
def test_gradients_that_come_and_go(device):
    params = make_params([torch.float32], device, [(8, 64), (8, 64), (33,)])
    others = twins(params)
    ours = AdamW8bit(params, min_8bit_size=64, backend="triton")
    reference = AdamW8bit(others, min_8bit_size=64, backend="eager")
    generator = torch.Generator().manual_seed(1)
    plans = set()
    for present in ([0, 1], [0, 1, 2], [1], [0, 2], [2], [0, 1, 2]):
        set_grads(params, others, generator)
        for index in range(3):
            if index not in present:
                params[index].grad = others[index].grad = None
        ours.step()
        reference.step()
        live = [i for i in range(3) if ours.state.get(params[i])]
        compare(ours, reference, [params[i] for i in live], [others[i] for i in live], 1e-3)
        align(ours, reference, [params[i] for i in live], [others[i] for i in live])
        plans.update(ours._launches._plans[0].values())
    assert [float(ours.state[p]["step"]) for p in params] == [4, 4, 4]
    assert len(plans) == 2  # one for the first two parameters, then one for all


@devices
def test_unaligned_and_strided(device):
    """Views at odd addresses, transposed parameters, expanded and transposed gradients."""
    base = torch.randn(16 * 64 + 1, device=device)
    params = [
        torch.nn.Parameter(base[1:].view(16, 64)),
        torch.nn.Parameter(torch.randn(64, 16, device=device).t()),
        torch.nn.Parameter(torch.randn(16, 64, device=device)),
        torch.nn.Parameter(torch.randn(16, 64, device=device)),
    ]
    others = [torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    ours = AdamW8bit(params, min_8bit_size=64, backend="triton")
    reference = AdamW8bit(others, min_8bit_size=64, backend="eager")
    flat = torch.randn(16 * 64 + 1, device=device)
    grads = [
        [torch.randn(16, 64, device=device), torch.randn(64, 16, device=device).t()],
        [torch.randn(16, 64, device=device), torch.randn(64, 16, device=device).t()],
        [torch.randn(16, 64, device=device), flat[1:].view(16, 64)],
        [torch.ones((), device=device).expand(16, 64), torch.randn(16, 64, device=device)],
    ]
    for turn in range(2):
        for p, q, grad in zip(params, others, grads, strict=True):
            p.grad, q.grad = grad[turn], grad[turn].clone()
        ours.step()
        reference.step()
        compare(ours, reference, params, others, 1e-3)
        align(ours, reference, params, others)
    assert not params[1].is_contiguous()


@devices
def test_first_step_moves_by_lr(device):
    """Without weight decay and eps the first step is lr * sign(gradient), whatever the size of the gradient."""
    param = torch.nn.Parameter(torch.zeros(64, 64, device=device))
    optimizer = Adam8bit([param], lr=0.5, eps=0, backend="triton", min_8bit_size=0)
    grad = torch.logspace(-15, 15, 64 * 64, device=device).view(64, 64)
    grad[1::2] *= -1
    param.grad = grad
    optimizer.step()
    torch.testing.assert_close(param.detach(), -0.5 * grad.sign(), rtol=2.0**-19, atol=0)


@devices
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy, in the interpreter
def test_non_finite_gradients_stay_in_their_element(device):
    params = make_params([torch.float32], device, [(4, 64), (33,)])
    others = twins(params)
    ours = AdamW8bit(params, min_8bit_size=64, backend="triton")
    reference = AdamW8bit(others, min_8bit_size=64, backend="eager")
    set_grads(params, others, torch.Generator().manual_seed(1))
    for p in (*params, *others):
        p.grad.view(-1)[3], p.grad.view(-1)[5] = math.nan, math.inf
    ours.step()
    reference.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.isnan(), q.isnan())
        assert int(p.isnan().sum()) == 2
    first = ours.state[params[0]]
    assert torch.equal(first["exp_avg_sq"].scale, reference.state[others[0]]["exp_avg_sq"].scale)
    assert first["exp_avg"].codes.view(-1)[[3, 5]].tolist() == [0, 0]


@devices
def test_hyper_parameters_follow_the_group(device):
    """Float and tensor lr, betas, weight decay and seed may change at each step."""
    params = make_params([torch.float32], device, [(16, 64)])
    others = twins(params)
    lr = torch.tensor(1e-3, device=device)
    ours = AdamW8bit(params, lr=lr, min_8bit_size=64, backend="triton")
    reference = AdamW8bit(others, lr=1e-3, min_8bit_size=64, backend="eager")
    generator = torch.Generator().manual_seed(1)
    for turn in range(4):
        set_grads(params, others, generator)
        values = {"betas": (0.8 + 0.01 * turn, 0.99), "weight_decay": 0.1 * turn, "eps": 1e-6, "seed": turn}
        for group in (ours.param_groups[0], reference.param_groups[0]):
            group.update(values)
        lr.fill_(1e-3 * (turn + 1))
        reference.param_groups[0]["lr"] = 1e-3 * (turn + 1)
        ours.step()
        reference.step()
        compare(ours, reference, params, others, 4e-3)
        align(ours, reference, params, others)


@devices
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_grad_scaler_protocol(device, backend):
    """`found_inf` leaves everything as it was, the step count too; `grad_scale` divides the gradients."""
    params = make_params([torch.float32, torch.bfloat16], device, [(16, 64), (33,)])
    others = twins(params)
    ours = AdamW8bit(params, min_8bit_size=64, backend=backend)
    plain = AdamW8bit(others, min_8bit_size=64, backend=backend)
    generator = torch.Generator().manual_seed(1)
    set_grads(params, others, generator)
    ours.step()
    plain.step()
    before = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(ours.state_dict())
    set_grads(params, others, generator)
    for p in params:
        p.grad *= 1024.0
    ours.grad_scale = torch.tensor(1024.0, device=device)
    ours.found_inf = torch.ones((), device=device)
    ours.step()
    for p, old in zip(params, before[0], strict=True):
        assert torch.equal(p, old)
    for index, old in before[1]["state"].items():
        for key, value in ours.state_dict()["state"][index].items():
            assert all(torch.equal(x, y) for x, y in zip(inner(value), inner(old[key]), strict=True)), key
    ours.found_inf.zero_()
    ours.step()
    plain.step()
    for p, q in zip(params, others, strict=True):  # 1024 is a power of two: nothing is rounded
        assert torch.equal(p, q)
        assert float(ours.state[p]["step"]) == 2


@devices
def test_loaded_and_replaced_state_is_noticed(device):
    params = make_params([torch.float32], device, [(16, 64), (33,)])
    others = twins(params)
    ours, reference = run_pair(AdamW8bit, params, others, steps=2)
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.state[params[1]]["step"] = torch.tensor(7.0)
    reference.state[others[1]]["step"].fill_(7.0)
    set_grads(params, others, torch.Generator().manual_seed(2))
    ours.step()
    reference.step()
    compare(ours, reference, params, others, 1e-2)
    assert [float(ours.state[p]["step"]) for p in params] == [3, 8]
    align(ours, reference, params, others)
    del ours.state[params[0]], reference.state[others[0]]
    ours.step()
    reference.step()
    compare(ours, reference, params, others, 1e-2)
    assert copy.deepcopy(ours)._launches is None


@devices
def test_parameter_that_changes_its_dtype(device):
    """model.to(bf16) after a step swaps the data of the parameters under the optimizer."""
    params = make_params([torch.float32], device, [(16, 64)])
    others = twins(params)
    ours, reference = run_pair(AdamW8bit, params, others, steps=1)
    for p in (*params, *others):
        p.grad = None
        p.data = p.data.to(torch.bfloat16)
    set_grads(params, others, torch.Generator().manual_seed(2))
    ours.step()
    reference.step()
    compare(ours, reference, params, others, 1e-2)


@devices
def test_trainable_int8_weight(device):
    """An int8 weight goes through the launch as a float copy, which is then written back."""
    weight = Int8RowwiseTensor.from_float(torch.randn(16, 64, device=device))
    params = [torch.nn.Parameter(weight.clone()), torch.nn.Parameter(torch.randn(4, device=device))]
    others = [torch.nn.Parameter(weight.clone()), torch.nn.Parameter(params[1].detach().clone())]
    ours = AdamW8bit(params, lr=0.1, min_8bit_size=64, backend="triton")
    reference = AdamW8bit(others, lr=0.1, min_8bit_size=64, backend="eager")
    set_grads(params, others, torch.Generator().manual_seed(1))
    ours.step()
    reference.step()
    assert not torch.equal(params[0].int_data, weight.int_data)
    assert float((params[0].int_data != others[0].int_data).float().mean()) <= 1e-2
    assert float(ours.state[params[0]]["step"]) == 1


@devices
def test_fp64_steps_by_itself(device, monkeypatch):
    params = [
        torch.nn.Parameter(torch.randn(4, device=device, dtype=dtype)) for dtype in (torch.float64, torch.float32)
    ]
    optimizer = AdamW8bit(params, backend="triton")
    alone = []
    monkeypatch.setattr(optimizer, "_step_param", lambda index, group, param, grad: alone.append(param))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(alone) == 1
    assert alone[0] is params[0]
    assert float(optimizer.state[params[1]]["step"]) == 1


@devices
def test_8_bit_state_in_the_dynamic_code_steps_by_itself(device, monkeypatch):
    """Its fp32 state goes through the launch."""
    params = [torch.nn.Parameter(torch.randn(64, 64, device=device)), torch.nn.Parameter(torch.ones(4, device=device))]
    optimizer = AdamW8bit(params, backend="triton", state_code="dynamic")
    alone = []
    monkeypatch.setattr(optimizer, "_step_param", lambda index, group, param, grad: alone.append(param))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(alone) == 1
    assert alone[0] is params[0]
    assert float(optimizer.state[params[1]]["step"]) == 1


@devices
def test_stochastic_rounding_is_unbiased(device):
    """bf16, updates of 1/16 ulp: the draws move on average by what fp32 moves, within 5 standard errors."""
    shape = (100_000,) if device == "cuda" else (4096,)
    param = torch.nn.Parameter(torch.ones(shape, device=device, dtype=torch.bfloat16))
    ulp = 2.0**-7
    options = {"lr": ulp / 16, "weight_decay": 0, "eps": 0, "backend": "triton"}
    optimizer = AdamW8bit([param], stochastic_round=True, **options)
    param.grad = -torch.ones_like(param)  # the parameter goes up, where its ulp is 2**-7
    optimizer.step()
    moved = (param.detach().float() - 1) / ulp
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    assert abs(float(moved.mean()) - 1 / 16) <= 5 * math.sqrt(1 / 16 * 15 / 16 / param.numel())
    still = torch.nn.Parameter(torch.ones(shape, device=device, dtype=torch.bfloat16))
    still.grad = -torch.ones_like(still)
    AdamW8bit([still], **options).step()
    assert bool((still == 1).all())


@devices
@pytest.mark.parametrize("state_bits", [8, 32])
@pytest.mark.parametrize("backend", ["triton", "eager", "compile"])
def test_eps_of_zero_divides_nothing_by_zero(device, backend, state_bits):
    """Gradients of 0, of 1e-21 (whose square is no normal fp32) and of 1: still, at most one step of lr, one step."""
    grad = torch.tensor([0.0, 1e-21, -1.0], device=device).repeat_interleave(64).repeat(64, 1)
    param = torch.nn.Parameter(torch.ones_like(grad))
    param.grad = grad
    optimizer = AdamW8bit([param], lr=1e-3, eps=0, weight_decay=0, state_bits=state_bits, backend=backend)
    optimizer.step()
    zero, tiny, one = ((param.detach() - 1) / 1e-3).tensor_split(3, dim=1)
    assert not zero.any()
    assert bool((tiny.abs() <= 1.001).all())
    torch.testing.assert_close(one, torch.ones_like(one), rtol=1e-3, atol=0)


def test_cpu_parameters_are_refused_without_the_interpreter(monkeypatch):
    class JITFunction:
        pass

    monkeypatch.setattr(one_launch, "adam_kernel", JITFunction())
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="backend='triton' needs CUDA parameters, got one on cpu"):
        AdamW8bit([param], backend="triton").step()


@devices
def test_state_of_another_block_size_is_refused(device):
    param = torch.nn.Parameter(torch.zeros(64, 64, device=device))
    param.grad = torch.ones_like(param)
    optimizer = AdamW8bit([param], backend="triton")
    optimizer.step()
    optimizer.param_groups[0]["block_size"] = 128
    with pytest.raises(ValueError, match="has blocks of 64, its group asks for block_size=128"):
        optimizer.step()


def test_program_map():
    """Entries are of one parameter and one kind, PROGRAMS chunks at most; kinds follow each other, fp32 state first."""
    many = plan.PROGRAMS + 1
    work = [(0, 0, 0, 1), (36, 1, 0, many - 1), (0, 2, 0, many), (36, 3, 0, 2), (27, 2, many, 1)]
    expected = [
        (1, 0, 36, many - 1),
        (3, 0, 36, 2),
        (2, many, 27, 1),
        (0, 0, 0, 1),
        (2, 0, 0, many - 1),
        (2, many - 1, 0, 1),
    ]
    assert plan._program_map(work).tolist() == [
        [slot, first, kind | chunks << 8] for slot, first, kind, chunks in expected
    ]


@pytest.mark.parametrize(
    ("shape", "work"),
    [
        ((64, 64), [("FLAT", 0, 8)]),
        ((1600,), [("FLAT", 0, 4)]),
        ((1601,), [("FLAT", 0, 3), ("RAGGED", 3, 1)]),
        ((1601, 1), [("FLAT", 0, 3), ("RAGGED", 3, 1)]),
        ((400, 4), [("FLAT", 0, 4)]),
        ((320, 3), [("ROWS", 0, 3)]),  # 20 blocks of 16 rows
        ((330, 3), [("ROWS", 0, 2), ("RAGGED", 2, 1)]),  # and one of 10
        ((64, 14), [("QUADS", 0, 2)]),
        ((32, 80), [("ROWS", 0, 8)]),
        ((32, 44), [("QUADS", 0, 4)]),
        ((32, 45), [("RAGGED", 0, 4)]),
        ((0, 45), [("FLAT", 0, 0)]),
    ],
)
def test_layouts(shape, work):
    """Wide accesses wherever addresses and lengths allow them; the last chunk by itself where it doesn't."""
    param = torch.nn.Parameter(torch.zeros(shape))
    moments = [
        Blockwise8bitTensor.zeros(shape, 64, code, rows_per_block=fitting_rows(shape, 64))
        for code in ("float8_signed", "float8_unsigned")
    ]
    row = plan._describe(param, moments, 64, 8, aligned=True)
    assert row.work() == [(getattr(adam_kernel, name).value, first, chunks) for name, first, chunks in work]
    ragged = adam_kernel.RAGGED.value
    assert all(layout == ragged for layout, _, _ in plan._describe(param, moments, 64, 8, aligned=False).work())
