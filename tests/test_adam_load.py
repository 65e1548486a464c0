"""Loading state: exchange with torch.optim, the API of torch.distributed, hooks, and loads that fail."""

import copy

import pytest
import torch
from adam_runs import assert_same, new_optimizer, new_params, round_trip, storages, train
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from qsub import Blockwise8bitTensor
from qsub.optim import Adam8bit, AdamW8bit

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

# ---- torch.optim ----


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("cls, theirs", [(AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)])
def test_torch_state_loads_and_goes_back(cls, theirs, amsgrad):
    params = new_params()
    ref = new_optimizer(params, theirs, amsgrad=amsgrad)
    train(ref, params, 0, 5)
    mine = [nn.Parameter(p.detach().clone()) for p in params]
    opt = new_optimizer(mine, cls, backend="eager", block_size=32, seed=3)
    opt.load_state_dict(round_trip(ref.state_dict()))
    groups = opt.param_groups
    assert [g["lr"] for g in groups] == [1e-2, 1e-3] and all(g["amsgrad"] == amsgrad for g in groups)
    assert all(g["block_size"] == 32 and g["seed"] == 3 and g["state_bits"] == 8 for g in groups)
    for param, p in zip(mine, params, strict=True):
        assert opt.state[param]["step"] == 5
        for key in MOMENTS[: 2 + amsgrad]:
            moment, wanted = opt.state[param][key], ref.state[p][key]
            coded = param.numel() >= 4096 and not (amsgrad and key == "exp_avg_sq")
            assert isinstance(moment, Blockwise8bitTensor) == coded
            if not coded:
                assert torch.equal(moment, wanted)
            else:  # within half a step of the code, 1/32, of each element, or of the block's smallest step
                floor = wanted.abs().max() * (2.0**-11 if key == "exp_avg" else 2.0**-18)
                assert ((moment.dequantize() - wanted).abs() <= wanted.abs() / 30 + floor).all()

    exported = opt.to_torch_state_dict()
    back = [nn.Parameter(p.detach().clone()) for p in mine]
    ref_back = new_optimizer(back, theirs)
    ref_back.load_state_dict(round_trip(exported))
    assert not storages(exported["state"]) & storages(opt.state_dict()["state"])
    assert set(ref_back.param_groups[0]) - {"decoupled_weight_decay"} <= set(ref.param_groups[0])
    for param, b in zip(mine, back, strict=True):
        for key in MOMENTS[: 2 + amsgrad]:
            moment = opt.state[param][key]
            value = moment.dequantize() if isinstance(moment, Blockwise8bitTensor) else moment
            assert torch.equal(ref_back.state[b][key], value)
    train(ref_back, back, 5, 6), train(opt, mine, 5, 6)
    # From the same moments the next step is the same, up to fp32 rounding.
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(mine, back, strict=True))


def test_export_with_fp32_state_is_exact_both_ways():
    params = new_params()
    opt = new_optimizer(params, state_bits=32, backend="eager")
    train(opt, params, 0, 3)
    ref = new_optimizer([nn.Parameter(p.detach().clone()) for p in params], torch.optim.AdamW)
    ref.load_state_dict(opt.to_torch_state_dict())
    again = new_optimizer(new_params(), state_bits=32, backend="eager")
    again.load_state_dict(ref.state_dict())
    assert_same(again.state_dict()["state"], opt.state_dict()["state"])


def test_steps_of_old_checkpoints_are_plain_numbers():
    params = new_params()
    ref = new_optimizer(params, torch.optim.AdamW)
    train(ref, params, 0, 2)
    saved = ref.state_dict()
    saved["state"] = {k: {**v, "step": 2} for k, v in saved["state"].items()}
    opt = new_optimizer(new_params(), backend="eager")
    opt.load_state_dict(saved)
    assert all(entry["step"] == 2 and entry["step"].dtype == torch.float32 for entry in opt.state.values())


def test_distributed_checkpoint_api_before_and_after_the_first_step():
    """get_optimizer_state_dict takes a step with zero gradients and lr 0 first: nothing may move."""
    model = nn.Sequential(nn.Linear(80, 64), nn.Linear(64, 3))
    before = copy.deepcopy(model.state_dict())
    opt = AdamW8bit(model.parameters(), backend="eager")
    saved = get_optimizer_state_dict(model, opt)
    assert_same(model.state_dict(), before)
    assert isinstance(saved["state"]["0.weight"]["exp_avg"], Blockwise8bitTensor)
    assert opt.param_groups[0]["lr"] == 1e-3
    train(opt, list(model.parameters()), 0, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt))
    other = AdamW8bit(model.parameters(), backend="eager")
    set_optimizer_state_dict(model, other, saved)
    assert_same(other.state_dict()["state"], opt.state_dict()["state"])


# ---- Hooks and failures ----


def test_state_dict_and_step_hooks_run_as_in_torch():
    params = new_params()
    opt = new_optimizer(params, backend="eager")
    train(opt, params, 0, 1)
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("save"))
    opt.register_state_dict_post_hook(lambda o, d: seen.append("saved") or {**d, "note": 1})
    opt.register_load_state_dict_pre_hook(lambda o, d: seen.append("load") or {k: d[k] for k in d if k != "note"})
    # The state must be in place when the hooks after loading run.
    opt.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("step"))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append("stepped"))
    saved = opt.state_dict()
    assert saved["note"] == 1
    opt.load_state_dict(saved)
    opt.step()
    assert seen == ["save", "saved", "load", 3, "step", "stepped"]
    hooks = len(opt._optimizer_load_state_dict_pre_hooks), len(opt._optimizer_load_state_dict_post_hooks)
    assert hooks == (1, 1)  # none of ours is left behind


def test_a_hook_may_return_a_state_dict_of_any_form():
    opt = new_optimizer(new_params(), backend="eager")
    opt.register_state_dict_post_hook(lambda o, saved: {"wrapped": saved})
    opt.register_load_state_dict_pre_hook(lambda o, saved: saved["wrapped"])
    assert list(opt.state_dict()) == ["wrapped"]
    opt.load_state_dict(opt.state_dict())


def damage(saved, what):
    """A copy of a state dict with one thing wrong."""
    saved = copy.deepcopy(saved)
    state, groups = saved["state"], saved["param_groups"]
    if what == "shape":
        state[1]["exp_avg"] = torch.zeros(3, 3)
    elif what == "moment missing":
        del state[1]["exp_avg_sq"]
    elif what == "step missing":
        del state[1]["step"]
    elif what == "integer moment":
        state[1]["exp_avg"] = torch.zeros(70, 65, dtype=torch.uint8)
    elif what == "not a tensor":
        state[1]["exp_avg"] = None
    elif what == "NaN":
        state[1]["exp_avg"] = torch.full((70, 65), float("nan"))
    elif what == "negative second moment":
        state[1]["exp_avg_sq"] = -torch.ones(70, 65)
    elif what == "another number of groups":
        saved["param_groups"] = groups[:1]
    elif what == "another number of parameters":
        groups[0]["params"] = groups[0]["params"][:1]
    elif what == "bad option":
        groups[0]["block_size"] = 48
    elif what == "bad state_bits":
        groups[1]["state_bits"] = 4
    elif what == "no groups":
        del saved["param_groups"]
    return saved


DAMAGES = [
    "shape",
    "moment missing",
    "step missing",
    "integer moment",
    "not a tensor",
    "NaN",
    "negative second moment",
    "another number of groups",
    "another number of parameters",
    "bad option",
    "bad state_bits",
    "no groups",
]


@pytest.mark.parametrize("what", DAMAGES)
def test_a_failed_load_leaves_everything_as_it_was(what):
    params = new_params()
    opt = new_optimizer(params, backend="eager")
    train(opt, params, 0, 2)
    saved = copy.deepcopy(opt.state_dict())
    train(opt, params, 2, 3)
    before, hyper = copy.deepcopy(opt.state_dict()), opt.param_groups
    with pytest.raises((ValueError, KeyError, TypeError)):
        opt.load_state_dict(damage(saved, what))
    assert_same(opt.state_dict(), before)
    assert opt.param_groups is hyper
    assert not opt._optimizer_load_state_dict_pre_hooks and not opt._optimizer_load_state_dict_post_hooks
    twin = new_params()
    opt_twin = new_optimizer(twin, backend="eager")
    train(opt_twin, twin, 0, 4), train(opt, params, 3, 4)
    assert_same([p.data for p in params], [p.data for p in twin])


def test_texts_of_failed_loads():
    params = new_params()
    opt = new_optimizer(params, backend="eager")
    train(opt, params, 0, 2)
    texts = []
    for what in DAMAGES[:8]:
        with pytest.raises(ValueError) as caught:
            opt.load_state_dict(damage(opt.state_dict(), what))
        texts.append(str(caught.value))
    assert_expected_inline(
        "\n".join(texts),
        """\
state of parameter 1, exp_avg: shape (3, 3) doesn't match its parameter's (70, 65)
state of parameter 1 lacks ['exp_avg_sq']: not a state of Adam or AdamW; it has ['step', 'exp_avg']
state of parameter 1 lacks ['step']: not a state of Adam or AdamW; it has ['exp_avg', 'exp_avg_sq']
state of parameter 1, exp_avg: expected a float tensor or a Blockwise8bitTensor, got torch.uint8
state of parameter 1, exp_avg: expected a float tensor or a Blockwise8bitTensor, got NoneType
state of parameter 1, exp_avg: cannot encode NaN, Inf or magnitudes over 1e38 in 8-bit state: repair the floats (.dequantize()), or load a healthy run
state of parameter 1, exp_avg_sq: a second moment must not be negative
loaded state dict has a different number of parameter groups""",  # noqa: E501
    )
    sgd = torch.optim.SGD(new_params(), momentum=0.9)
    train(sgd, sgd.param_groups[0]["params"], 0, 1)
    one_group = AdamW8bit(new_params())
    with pytest.raises(ValueError) as caught:
        one_group.load_state_dict(sgd.state_dict())
    rule, found = str(caught.value).split("; ")
    assert rule == (
        "a parameter group of the state dict lacks ['betas', 'eps', 'amsgrad']: it is not one of Adam or AdamW"
    )
    assert found.startswith("it has ['dampening', ") and found.endswith("Load it into the optimizer that it is of.")


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adadelta", "Rprop", "NAdam", "RAdam", "Adamax"])
def test_the_state_dict_of_another_optimizer_is_refused(name, trained):
    """Also when it has no state: its learning rate would be taken over, and nothing else."""
    params = new_params()
    other = getattr(torch.optim, name)(params, lr=0.5)
    if trained:
        train(other, params, 0, 1)
    opt = AdamW8bit(new_params(), lr=1e-3, backend="eager")
    with pytest.raises(ValueError, match="not one of Adam or AdamW"):
        opt.load_state_dict(other.state_dict())
    assert opt.param_groups[0]["lr"] == 1e-3 and not opt.state


# ---- Options that were asked for ----

FORMS = {
    "state_bits": 32,
    "block_size": 32,
    "state_code": "dynamic",
    "min_8bit_size": 64,
    "stochastic_round": True,
}


@pytest.mark.parametrize("option", FORMS)
def test_an_option_that_was_asked_for_and_is_not_restored_is_told(option):
    params = new_params()
    saved = AdamW8bit(params).state_dict()
    opt = AdamW8bit(params, **{option: FORMS[option]})
    with pytest.warns(UserWarning, match=rf"group 0 asks for {option}={FORMS[option]!r}; .* has {option}="):
        opt.load_state_dict(saved)
    assert opt.param_groups[0][option] == saved["param_groups"][0][option]  # as torch.optim does
    saved["param_groups"][0][option] = FORMS[option]  # the remedy that the text names
    again = AdamW8bit(params, **{option: FORMS[option]})
    again.load_state_dict(saved)
    assert again.param_groups[0][option] == FORMS[option]


def test_the_options_of_a_state_dict_are_restored_in_silence_where_none_were_asked_for():
    params = new_params()
    saved = AdamW8bit(params, **FORMS).state_dict()
    opt = AdamW8bit(params)
    opt.load_state_dict(saved)
    opt.load_state_dict(saved)
    assert all(opt.param_groups[0][option] == FORMS[option] for option in FORMS)
    opt.load_state_dict(AdamW8bit(params).state_dict())  # what a load restored was not asked for
    assert opt.param_groups[0]["state_bits"] == 8


@pytest.mark.filterwarnings("error")
def test_where_the_warning_is_an_error_nothing_is_loaded():
    params = new_params()
    ref = AdamW8bit(params, backend="eager", lr=0.5)
    train(ref, params, 0, 1)
    opt = AdamW8bit(params, state_bits=32)
    with pytest.raises(UserWarning):
        opt.load_state_dict(ref.state_dict())
    assert not opt.state and opt.param_groups[0]["lr"] == 1e-3 and opt.param_groups[0]["state_bits"] == 32
