"""What users of torch.optim do with an optimizer and its groups, on each backend.

Backend "triton" on the CPU runs in the interpreter, see `one_launch_helpers`.
"""

import contextlib
import warnings

import pytest
import torch
from one_launch_helpers import INTERPRETED
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from qsub import Blockwise8bitTensor
from qsub.optim import AdamW8bit, compiled

NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="test_one_launch_interpreted.py runs it")
BACKENDS = [
    ("eager", "cpu"),
    pytest.param("compile", "cpu", marks=pytest.mark.slow),
    pytest.param("triton", "cpu", marks=NEEDS_INTERPRETER),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]
backends = pytest.mark.parametrize("backend, device", BACKENDS)
SHAPES = [(80, 64), (33,), (70, 65)]


def new_params(device):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


# ---- Groups changed by hand ----

CHANGES = {
    "block_size": (32, "has blocks of 64, its group asks for block_size=32"),
    "amsgrad": (True, "lacks .'max_exp_avg_sq'., its group asks for amsgrad=True"),
    "state_code": ("nf4", "state_code must be one of"),
    "betas": ((1.0, 0.999), r"betas\[0\] must be in \[0, 1\), got 1.0"),
}


@backends
@pytest.mark.parametrize("option", CHANGES)
def test_an_option_that_the_state_does_not_suit_is_refused(option, backend, device):
    """Taken up by the step or refused before it changes anything: never ignored."""
    params = new_params(device)
    opt = AdamW8bit(params, backend=backend)
    for step in range(2):  # the second one goes by the plan of the first
        set_grads(params, step)
        opt.step()
    before = [param.detach().clone() for param in params]
    value, text = CHANGES[option]
    kept, opt.param_groups[0][option] = opt.param_groups[0][option], value
    with pytest.raises(ValueError, match=text):
        opt.step()
    assert all(map(torch.equal, params, before))
    if option == "block_size":
        opt.load_state_dict(opt.state_dict())  # the remedy that the error names
        assert opt.state[params[0]]["exp_avg"].block_size == 32
    else:
        opt.param_groups[0][option] = kept
    opt.step()
    assert [float(opt.state[param]["step"]) for param in params] == [3, 3, 3]


@backends
@pytest.mark.parametrize(("option", "value"), [("state_bits", 32), ("min_8bit_size", 10**6)])
def test_the_bits_of_a_state_follow_the_options(option, value, backend, device):
    """8 bits decoded, which is exact, and encoded again."""
    params = new_params(device)
    opt = AdamW8bit(params, backend=backend)
    for step in range(2):
        set_grads(params, step)
        opt.step()
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    ref = AdamW8bit(twins, backend=backend, **{option: value})
    floats = opt.to_torch_state_dict()
    floats["param_groups"][0]["fused"] = None
    ref.load_state_dict(floats)
    opt.param_groups[0][option], kept = value, opt.param_groups[0][option]
    set_grads(params, 2), set_grads(twins, 2)
    opt.step(), ref.step()
    assert all(map(torch.equal, params, twins))
    assert type(opt.state[params[0]]["exp_avg"]) is torch.Tensor
    opt.param_groups[0][option] = kept
    set_grads(params, 3)
    opt.step()
    assert isinstance(opt.state[params[0]]["exp_avg"], Blockwise8bitTensor)


# ---- Parameters and gradients ----


@backends
def test_a_parameter_that_is_listed_twice_steps_twice(backend, device):
    """As in torch.optim, which warns of it. With fp32 state as torch's steps, one parameter after the other."""
    params, expected = new_params(device)[::2], new_params(device)[::2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "duplicate parameters"
        opt = AdamW8bit([params[0], params[1], params[0]], backend=backend, state_bits=32)
        fused = backend == "compile"  # torch's fused kernel counts both steps first
        ref = torch.optim.AdamW(
            [expected[0], expected[1], expected[0]], foreach=False if not fused else None, fused=fused
        )
    for step in range(3):
        set_grads(params, step), set_grads(expected, step)
        opt.step(), ref.step()
    assert [float(opt.state[param]["step"]) for param in params] == [6, 3]
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-6)  # six roundings to fp32; an update is 1e-3


class Traced(torch.Tensor):
    """A class as users write them: every function of torch goes through it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@backends
def test_parameters_of_a_users_class_step_as_plain_ones(backend, device):
    params, plain = new_params(device), new_params(device)
    params = [nn.Parameter(param.detach().as_subclass(Traced)) for param in params]
    opt, ref = AdamW8bit(params, backend=backend), AdamW8bit(plain, backend=backend)
    set_grads(plain, 0)
    for param, other in zip(params, plain, strict=True):
        param.grad = other.grad.clone().as_subclass(Traced)
    opt.step(), ref.step()
    for param, other in zip(params, plain, strict=True):
        # a small one goes through torch's fused kernel if its class is plain: the last bits of an update may differ
        torch.testing.assert_close(param.detach().as_subclass(torch.Tensor), other.detach(), rtol=2**-23, atol=1e-9)
        assert all(not isinstance(value, Traced) for value in opt.state[param].values())


@backends
def test_gradients_that_are_not_of_the_parameter_are_refused(backend, device):
    """torch.optim's operators refuse them, too; a complex one would lose its imaginary part."""
    params = new_params(device)
    before = params[0].detach().clone()
    opt = AdamW8bit(params[:1], backend=backend)
    params[0].grad_dtype = None  # any
    params[0].grad = torch.ones(80, 64, dtype=torch.complex64, device=device)
    with pytest.raises(TypeError, match="must be real, got torch.complex64"):
        opt.step()
    params[0].grad = torch.ones(80, 64, device=device)
    params[0].data = before.view(64, 80)
    with pytest.raises(ValueError, match=r"a gradient has shape \(80, 64\), not \(64, 80\)"):
        opt.step()
    assert torch.equal(params[0].view(80, 64), before)


@backends
@pytest.mark.parametrize("steps", [1, 2])
def test_a_cleared_state_starts_anew(steps, backend, device):
    params = new_params(device)
    opt = AdamW8bit(params, backend=backend)
    for step in range(steps):
        set_grads(params, step)
        opt.step()
    opt.state.clear()
    fresh = [nn.Parameter(param.detach().clone()) for param in params]
    other = AdamW8bit(fresh, backend=backend)
    set_grads(params, 9), set_grads(fresh, 9)
    opt.step(), other.step()
    assert all(map(torch.equal, params, fresh))
    assert [float(opt.state[param]["step"]) for param in params] == [1, 1, 1]


@backends
def test_gradients_stay_as_they_are_under_a_scaler(backend, device):
    """With fused=True on all paths alike, whatever the size and bits of the state: the step divides what it reads."""
    params = [*new_params(device), nn.Parameter(torch.ones(32, device=device))]
    opt = AdamW8bit(params, backend=backend if backend != "eager" else None, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale(sum(param.sum() for param in params)).backward()
    scaler.step(opt)
    assert all(bool((param.grad == 1024).all()) for param in params)


@backends
def test_gradients_without_memory_of_their_own_values(backend, device):
    """Zeros that forward-mode AD doesn't allocate, and views that negate when they are read."""
    params, plain = new_params(device), new_params(device)
    opt, ref = AdamW8bit(params, backend=backend), AdamW8bit(plain, backend=backend)
    for step in range(6):  # some of them go by the plan of the one before
        set_grads(params, step), set_grads(plain, step)
        for param, other in zip(params, plain, strict=True):
            if step in (0, 2):
                param.grad = torch._neg_view(-other.grad)
            elif step in (1, 4):
                param.grad = torch._efficientzerotensor(param.shape, device=device)
                other.grad.zero_()
        opt.step(), ref.step()
        assert all(map(torch.equal, params, plain))
    assert [float(opt.state[param]["step"]) for param in params] == [6, 6, 6]


@backends
def test_another_view_of_the_data_is_noticed(backend, device):
    """At the same address, as pruning or transposing in place leaves it."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(device)
    param, copied = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    opt, ref = AdamW8bit([param], backend=backend), AdamW8bit([copied], backend=backend)
    for step in range(3):
        set_grads([param], step), set_grads([copied], step)
        opt.step(), ref.step()
        if step == 1:
            param.data, copied.data = param.data.t(), copied.data.t().contiguous()
    assert torch.equal(param, copied)
    param.data = param.data[:, :40]
    set_grads([param], 3)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"shape \(64, 40\).* has shape \(64, 64\): the parameter was changed"):
        opt.step()
    assert torch.equal(param, before)


@backends
def test_a_gradient_whose_square_overflows(backend, device):
    """1e20 squared is no fp32, a thousandth of it is. The reference is fp64: torch's foreach squares first on a GPU."""
    params = new_params(device)
    expected = [nn.Parameter(param.detach().double()) for param in params]
    opt, ref = AdamW8bit(params, backend=backend), torch.optim.AdamW(expected)
    set_grads(params, 0)
    for param, other in zip(params, expected, strict=True):
        param.grad[0] = 1e20
        other.grad = param.grad.double()
    opt.step(), ref.step()
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other.float(), rtol=1e-6, atol=1e-8)  # an update is 1e-3


@backends
@pytest.mark.parametrize("state_bits", [8, 32])
def test_a_tiny_eps_is_raised_to_the_documented_least_divisor(state_bits, backend, device):
    """The root of v is 0 for gradients of 1e-25: the update is m / 2**-63 then; m / 2**-126 would be 1e13 lr."""
    params = [nn.Parameter(torch.zeros_like(param)) for param in new_params(device)]
    opt = AdamW8bit(params, lr=1.0, weight_decay=0, eps=0, backend=backend, state_bits=state_bits)
    for param in params:
        param.grad = torch.full_like(param, 1e-25)
    opt.step()
    for param in params:
        torch.testing.assert_close(param.detach(), torch.full_like(param, -1e-25 * 2.0**63), rtol=1e-5, atol=0)


# ---- Settings of torch ----


@backends
def test_the_default_device_is_not_that_of_the_step(backend, device):
    """torch.set_default_device("cuda") with parameters on the CPU, say, or "meta" to make models."""
    results = []
    for default in ("meta", None):
        params = new_params(device)
        opt = AdamW8bit(params, backend=backend, amsgrad=True)
        for step in range(3):
            set_grads(params, step)
            opt.param_groups[0]["lr"] = 1e-3 * (step + 1)
            torch.set_default_device(default)
            try:
                opt.step()
            finally:
                torch.set_default_device(None)
        results.append(params)
        assert {value.device.type for state in opt.state.values() for value in state.values()} <= {device, "cpu"}
    assert all(map(torch.equal, *results))


UNCOMPILED = {
    "mode": lambda: FlopCounterMode(display=False),
    "disabled": lambda: torch._dynamo.config.patch(disable=True),  # TORCH_COMPILE_DISABLE=1
}


@backends
@pytest.mark.parametrize("setting", UNCOMPILED)
def test_settings_that_torch_compile_refuses(setting, backend, device):
    """The step is eager there, which may differ in last bits, and compiled again afterwards."""
    params, plain = new_params(device), new_params(device)
    opt, ref = AdamW8bit(params, backend=backend), AdamW8bit(plain, backend=backend)
    for step in range(3):
        set_grads(params, step), set_grads(plain, step)
        with UNCOMPILED[setting]() if step == 1 else contextlib.nullcontext():
            opt.step()
        ref.step()
    for param, other in zip(params, plain, strict=True):
        # where last bits turned a code, the next update is off by a step of it: some percent of 1e-3
        difference = (param - other).detach().abs()
        assert difference.max() < 2e-4 and (difference > 1e-6).double().mean() < 0.01


@pytest.mark.parametrize("backend", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", ["block_float8", "dynamic"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_nothing_fake_is_kept(code, backend):
    """A step on FakeTensors, to estimate memory, ahead of real ones."""
    results = []
    for fake in (True, False):
        if fake:
            compiled._cpu_offset.cache_clear(), compiled._tables.cache_clear()
            with FakeTensorMode():
                param = nn.Parameter(torch.ones(80, 64))
                param.grad = torch.ones(80, 64)
                AdamW8bit([param], state_code=code, backend=backend).step()
        params = new_params("cpu")[:1]
        opt = AdamW8bit(params, state_code=code, backend=backend)
        set_grads(params, 0)
        opt.step()
        results.append(params[0])
    assert torch.equal(*results)


@backends
def test_a_step_in_inference_mode_leaves_nothing_of_it(backend, device):
    """Where the state was there before: as in torch.optim the optimizer goes on outside, with other options too."""
    results = []
    for context in (torch.inference_mode, torch.no_grad):
        params = new_params(device)
        opt = AdamW8bit(params, backend=backend)
        for step in range(4):
            set_grads(params, step)
            opt.param_groups[0]["lr"] = 1e-3 * (step + 1)
            if step == 2:
                opt.load_state_dict(opt.state_dict())
            with context() if step == 2 else contextlib.nullcontext():
                opt.step()
        opt.load_state_dict(opt.state_dict())
        results.append(params)
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_settings_that_compile_anew_have_no_limit():
    """Autocast, the default dtype and the like are guards of a graph: torch.compile allows eight of them by default."""
    value, grad = torch.randn(2, 80, 64, generator=torch.Generator().manual_seed(1))
    param, plain = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    param.grad, plain.grad = grad, grad
    opt, ref = AdamW8bit([param], backend="compile"), AdamW8bit([plain], backend="compile")
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with torch._dynamo.config.patch(recompile_limit=1), context:
            opt.step()
        ref.step()
    assert torch.equal(param, plain)


@pytest.mark.slow
@backends
def test_a_compiled_step_is_the_step(backend, device):
    """torch.compile(optimizer.step), or of a function that calls it: no graph for the step, no recompiling."""
    torch._dynamo.reset()
    results, calls = [], []
    for traced in (False, True):
        params = new_params(device)
        opt = AdamW8bit(params, backend=backend)
        opt.register_step_post_hook(lambda *_: calls.append(1))
        step = torch.compile(opt.step, backend="eager") if traced else opt.step
        graphs = []
        for number in range(10):
            set_grads(params, number)
            opt.param_groups[0]["lr"] = 1e-3 / (number + 1)
            step()
            graphs.append(counters["stats"]["unique_graphs"])
        results.append(params)
    assert all(map(torch.equal, *results))
    assert len(calls) == 20
    assert len(set(graphs)) == 1
