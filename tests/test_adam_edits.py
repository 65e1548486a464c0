"""State that users edit as they do that of torch.optim: assigned floats, rows cut, appended and reset, moved state.

Backend "triton" on the CPU runs in the interpreter, see `one_launch_helpers`.
"""

import copy

import pytest
import torch
from one_launch_helpers import INTERPRETED
from torch import nn

from qsub import Blockwise8bitTensor
from qsub.optim import AdamW8bit

BACKENDS = [
    ("eager", "cpu"),
    pytest.param("compile", "cpu", marks=pytest.mark.slow),
    pytest.param("triton", "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]
backends = pytest.mark.parametrize("backend, device", BACKENDS)
MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = [(80, 64), (33,), (70, 65)]  # 8-bit state, fp32 state, 8-bit state with short blocks


def new_params(device, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def train(opt, params, first, last):
    for step in range(first, last):
        for place, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + place)
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        opt.step()


def decoded(moment):
    return moment.dequantize() if isinstance(moment, Blockwise8bitTensor) else moment.clone()


# ---- Assigned floats ----

FLOATS = {
    "zeros": lambda p, old: torch.zeros_like(p),
    "its own": lambda p, old: decoded(old),
    "bf16": lambda p, old: decoded(old).bfloat16(),
    "fp64": lambda p, old: decoded(old).double(),
    "transposed": lambda p, old: decoded(old).t().contiguous().t() if old.dim() == 2 else decoded(old),
    "halved": lambda p, old: old * 0.5,
    "a parameter": lambda p, old: nn.Parameter(decoded(old)),
    "every second row": lambda p, old: torch.cat([old, old])[::2],
}


@backends
@pytest.mark.parametrize("kind", FLOATS)
def test_assigned_floats_are_the_state_of_the_next_step(kind, backend, device):
    """The step equals that of an optimizer that loaded the same floats; a plan notices."""
    params = new_params(device)
    opt = AdamW8bit(params, backend=backend)
    train(opt, params, 0, 3)
    values = {p: {key: FLOATS[kind](p, opt.state[p][key]) for key in MOMENTS} for p in params}
    for param in params:
        opt.state[param].update(values[param])
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ref = AdamW8bit(twins, backend=backend)
    floats = {
        place: {"step": torch.tensor(3.0), **{key: decoded(value).float() for key, value in values[p].items()}}
        for place, p in enumerate(params)
    }
    exact = kind == "every second row"  # coded rows, which are taken as they are
    if exact:
        floats = copy.deepcopy({place: {"step": torch.tensor(3.0), **values[p]} for place, p in enumerate(params)})
    groups = torch.optim.AdamW(twins).state_dict()["param_groups"]
    ref.load_state_dict({"state": floats, "param_groups": groups})
    train(opt, params, 3, 5), train(ref, twins, 3, 5)
    assert all(map(torch.equal, params, twins))
    for param in params:
        for key in MOMENTS:
            moment = opt.state[param][key]
            assert isinstance(moment, Blockwise8bitTensor) == (param.numel() >= 4096)
            assert moment.dtype == torch.float32 and moment.device == param.device
        assert float(opt.state[param]["step"]) == 5


@backends
def test_an_assigned_step_is_a_number(backend, device):
    params, twins = new_params(device), new_params(device)
    opt, ref = AdamW8bit(params, backend=backend), AdamW8bit(twins, backend=backend)
    train(opt, params, 0, 2), train(ref, twins, 0, 2)
    for param, twin, count in zip(params, twins, (7, 7.0, torch.tensor([7])), strict=True):
        opt.state[param]["step"] = count
        ref.state[twin]["step"].fill_(7.0)
    train(opt, params, 2, 4), train(ref, twins, 2, 4)
    assert all(map(torch.equal, params, twins))
    assert [float(opt.state[param]["step"]) for param in params] == [9.0] * 3


BAD = {
    "shape": (
        "exp_avg",
        lambda p: torch.zeros(3, 3, device=p.device),
        r"has shape \(3, 3\): the parameter was changed",
    ),
    "integers": (
        "exp_avg_sq",
        lambda p: torch.zeros_like(p, dtype=torch.int64),
        "must be a float tensor .* torch.int64",
    ),
    "None": ("exp_avg", lambda p: None, "exp_avg must be a float tensor or a Blockwise8bitTensor, got NoneType"),
    "number": ("exp_avg", lambda p: 0.0, "got float. Assign one of that shape"),
    "NaN": ("exp_avg", lambda p: torch.full_like(p, float("nan")), "exp_avg: cannot encode NaN"),
    "negative": ("exp_avg_sq", lambda p: -torch.ones_like(p), "exp_avg_sq: a second moment must not be negative"),
    "step": ("step", lambda p: "3", "step must be a number or a tensor of one, got '3'"),
    "steps": ("step", lambda p: torch.zeros(2), "step must be a number or a tensor of one"),
}


@backends
@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_a_state_is_refused_before_anything_is_changed(kind, backend, device):
    """In the last parameter of the last group, with edits elsewhere that could be taken."""
    params = new_params(device)
    opt = AdamW8bit([{"params": params[:2]}, {"params": params[2:]}], backend=backend)
    train(opt, params, 0, 2)
    before = [param.detach().clone() for param in params]
    key, make, text = BAD[kind]
    kept = opt.state[params[2]][key]
    opt.state[params[2]][key] = make(params[2])
    opt.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])
    with pytest.raises(ValueError, match=text):
        opt.step()
    assert all(map(torch.equal, params, before))
    assert all(float(opt.state[param]["step"]) == 2 for param in params[:2])
    opt.state[params[2]][key] = kept
    opt.step()
    assert [float(opt.state[param]["step"]) for param in params] == [3.0] * 3


def test_what_is_missing_is_named():
    (param,) = params = new_params("cpu")[:1]
    opt = AdamW8bit(params, backend="eager")
    train(opt, params, 0, 1)
    del opt.state[param]["step"], opt.state[param]["exp_avg_sq"]
    with pytest.raises(
        ValueError, match=r"lacks \['step', 'exp_avg_sq'\]. Assign what is missing, or remove the state"
    ):
        opt.step()
    opt.state.pop(param)
    opt.step()
    assert opt.state[param]["step"] == 1


@backends
def test_notes_of_a_wrapper_may_come_before_the_state(backend, device):
    """SAM keeps the old value there, Lookahead the slow one, before the first step."""
    params, twins = new_params(device), new_params(device)
    opt, ref = AdamW8bit(params, backend=backend), AdamW8bit(twins, backend=backend)
    for param in params:
        opt.state[param]["old_p"] = param.detach().clone()
    train(opt, params, 0, 2), train(ref, twins, 0, 2)
    assert all(map(torch.equal, params, twins))
    assert all(set(opt.state[param]) == {"old_p", "step", *MOMENTS} for param in params)


@backends
def test_the_state_of_a_parameter_without_a_gradient_may_be_edited(backend, device):
    """It waits in the plan of the others, which must not step by its old state, nor fail."""
    params, twins = new_params(device), new_params(device)
    opt, ref = AdamW8bit(params, backend=backend), AdamW8bit(twins, backend=backend)
    train(opt, params, 0, 2), train(ref, twins, 0, 2)
    opt.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])
    ref.state[twins[0]]["exp_avg"].zero_()
    params[0].grad = twins[0].grad = None
    opt.step(), ref.step()
    train(opt, params, 2, 4), train(ref, twins, 2, 4)
    assert all(map(torch.equal, params, twins))


# ---- Splats: rows are cut, appended and reset, and the state moves to a new parameter ----


def replace(opt, group, new, change):
    """As the densification of splats: another parameter in the group, with the state of the old one, changed."""
    (old,) = group["params"]
    state = opt.state.pop(old)
    for key in MOMENTS:
        state[key] = change(state[key])
    group["params"][0] = new
    opt.state[new] = state


def splat_run(cls, device, shapes, **options):
    """Parameters of one group each, pruned, extended, reset and pruned again; returns parameters and states."""
    params = new_params(device, shapes)
    opt = cls([{"params": [p], "name": str(place)} for place, p in enumerate(params)], lr=1e-3, **options)
    generator = torch.Generator().manual_seed(5)
    keep = torch.rand(shapes[0][0], generator=generator).to(device) > 0.3

    def current():
        return [group["params"][0] for group in opt.param_groups]

    train(opt, current(), 0, 3)
    for group in opt.param_groups:  # prune
        (old,) = group["params"]
        replace(opt, group, nn.Parameter(old.detach()[keep]), lambda m: m[keep])
    train(opt, current(), 3, 5)
    for group in opt.param_groups:  # clone
        (old,) = group["params"]
        new = nn.Parameter(torch.cat([old.detach(), old.detach()[:60]]))
        replace(opt, group, new, lambda m: torch.cat([m, torch.zeros(60, *m.shape[1:], device=device)]))
    train(opt, current(), 5, 7)
    for group in opt.param_groups:  # relocate
        for key in MOMENTS:
            opt.state[group["params"][0]][key][torch.tensor([1, 4], device=device)] = 0
    train(opt, current(), 7, 8)
    for group in opt.param_groups:  # prune to a few
        (old,) = group["params"]
        replace(opt, group, nn.Parameter(old.detach()[:5]), lambda m: m[:5])
    train(opt, current(), 8, 10)
    return current(), [opt.state[param] for param in current()]


# Of at least 300 elements 8 bits: (200, 2) has them, loses them when it is pruned, and has them again.
SPLATS = [(200, 48), (200, 3), (200, 2), (200,), (200, 15, 3)]


@backends
def test_splats_train_as_with_torch(backend, device):
    """With fp32 state bit for bit or nearly, with 8 bits as far as its code goes, whatever the number of elements."""
    theirs, their_states = splat_run(torch.optim.AdamW, device, SPLATS)
    exact, states = splat_run(AdamW8bit, device, SPLATS, backend=backend, state_bits=32)
    for param, other, state, their in zip(exact, theirs, states, their_states, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-7)
        assert float(state["step"]) == float(their["step"]) == 10
    ours, states = splat_run(AdamW8bit, device, SPLATS, backend=backend, min_8bit_size=300)
    for param, other, state in zip(ours, theirs, states, strict=True):
        # ten updates of about 1e-3 each: a quarter of one is far above the error of the code
        assert (param - other).abs().max() < 2.5e-3 and (param - other).abs().mean() < 2e-4
        assert state["exp_avg"].shape == param.shape and type(state["exp_avg"]) is torch.Tensor  # few are left


@backends
def test_rows_that_are_kept_step_as_if_nothing_happened(backend, device):
    """Random bits go by place, so the state is compared before the step: rows of it, bit for bit."""
    (param,) = new_params(device, [(120, 100)])
    opt = AdamW8bit([param], backend=backend)
    train(opt, [param], 0, 3)
    before = copy.deepcopy(opt.state[param])
    keep = torch.arange(120, device=device) % 3 != 0
    new = nn.Parameter(param.detach()[keep])
    replace(opt, opt.param_groups[0], new, lambda m: m[keep])
    for key in MOMENTS:
        assert torch.equal(opt.state[new][key].codes, before[key].codes[keep])
        assert torch.equal(opt.state[new][key].scale, before[key].scale[keep])
    train(opt, [new], 3, 5)
    assert opt.state[new]["step"] == 5 and list(opt.state) == [new]


@backends
def test_masks_of_a_pruning_and_resets_of_neurons(backend, device):
    """ReLoRA prunes moments by random masks and by size; a sparse autoencoder resets rows and columns of them."""
    params = new_params(device)[:1]
    opt = AdamW8bit(params, backend=backend)
    train(opt, params, 0, 3)
    state = opt.state[params[0]]
    state["exp_avg"].mul_(torch.rand_like(state["exp_avg"]) > 0.9)
    threshold = torch.quantile(state["exp_avg_sq"].abs().flatten(), 0.5)
    state["exp_avg_sq"].mul_(state["exp_avg_sq"] > threshold)
    dead = torch.tensor([3, 17], device=device)
    for key in MOMENTS:
        state[key][dead] = 0.0
        state[key][:, dead] = 0.0
        value = state[key].dequantize()
        assert not value[dead].any() and not value[:, dead].any()
    assert (state["exp_avg"].dequantize() == 0).float().mean() > 0.8
    assert 0.4 < (state["exp_avg_sq"].dequantize() == 0).float().mean() < 0.6
    twin = nn.Parameter(params[0].detach().clone())
    ref = AdamW8bit([twin], backend=backend)
    ref.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(opt, params, 3, 5), train(ref, [twin], 3, 5)
    assert torch.equal(params[0], twin)
    assert torch.isfinite(twin).all()
