"""The optimizers with state_code="dynamic": rounding, groups, loading between the codes, what is refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
from adam_runs import assert_same, new_optimizer, new_params, round_trip, train
from torch import nn
from torch._dynamo.utils import counters

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.optim import Adam8bit, AdamW8bit

BACKENDS = ["eager", pytest.param("compile", marks=pytest.mark.slow)]
DYNAMIC = {"state_code": "dynamic", "block_size": 256}
CODES = {
    "block_float8": {"exp_avg": "float8_signed", "exp_avg_sq": "float8_unsigned", "max_exp_avg_sq": "float8_unsigned"},
    "dynamic": {"exp_avg": "dynamic_signed", "exp_avg_sq": "dynamic_unsigned", "max_exp_avg_sq": "dynamic_unsigned"},
}


def codes_of(opt, param):
    return {key: x.code for key, x in opt.state[param].items() if isinstance(x, Blockwise8bitTensor)}


def plain(moment):
    return moment.dequantize() if isinstance(moment, Blockwise8bitTensor) else moment


def expected_codes(code, amsgrad=False):
    """With amsgrad exp_avg_sq is fp32 in the code that is rounded stochastically."""
    left_out = "max_exp_avg_sq" if not amsgrad else "exp_avg_sq" if code == "block_float8" else None
    return {key: name for key, name in CODES[code].items() if key != left_out}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_moments_are_the_nearest_codes_of_the_exact_ones(amsgrad, backend):
    """One step from nothing: m and v are known, and so are their codes. fp32 rounds them once more at a tie."""
    param = nn.Parameter(torch.randn(70, 65))
    opt = AdamW8bit([param], backend=backend, amsgrad=amsgrad, **DYNAMIC)
    train(opt, [param], 0, 1)
    assert codes_of(opt, param) == expected_codes("dynamic", amsgrad)
    grad = param.grad
    moments = {"exp_avg": 0.1 * grad, "exp_avg_sq": 0.001 * grad * grad, "max_exp_avg_sq": 0.001 * grad * grad}
    for key, code in codes_of(opt, param).items():
        moment = opt.state[param][key]
        wanted = Blockwise8bitTensor.from_float(moments[key], 256, code, rows_per_block=3)
        assert (moment.codes != wanted.codes).double().mean() < 1e-3
        torch.testing.assert_close(moment.scale, wanted.scale, rtol=2**-20, atol=0)
        assert (moment.dequantize()[grad != 0] != 0).all() or key == "exp_avg"


def test_nothing_is_random_but_the_rounding_of_bf16():
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        for seed in (0, 1):
            params = new_params(dtype)
            opt = new_optimizer(params, backend="eager", seed=seed, stochastic_round=True, **DYNAMIC)
            train(opt, params, 0, 3)
            runs[dtype, seed] = params[0].detach()
    assert torch.equal(runs[torch.float32, 0], runs[torch.float32, 1])
    assert not torch.equal(runs[torch.bfloat16, 0], runs[torch.bfloat16, 1])


@pytest.mark.slow
def test_shapes_and_hyper_parameters_cost_one_graph():
    shapes = [(64, 64 + 16 * i) for i in range(8)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    opt = AdamW8bit(params, backend="compile", betas=(0.91, 0.98), maximize=True, **DYNAMIC)
    before = counters["stats"]["unique_graphs"]
    for step in range(4):
        opt.param_groups[0]["lr"] = 1e-3 / (1 + step)
        opt.param_groups[0]["betas"] = (0.9 + 0.01 * step, 0.99)
        train(opt, params, step, step + 1)
    assert counters["stats"]["unique_graphs"] - before <= 2


def test_each_group_has_its_own_code():
    params = [nn.Parameter(torch.randn(64, 80)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:2], **DYNAMIC}, {"params": params[2:], "state_bits": 32}]
    opt = AdamW8bit(groups, backend="eager")
    train(opt, params, 0, 2)
    assert [codes_of(opt, p) for p in params] == [expected_codes("block_float8"), expected_codes("dynamic"), {}]
    alone = nn.Parameter(params[1].detach().clone())
    saved = round_trip(opt.state_dict())
    other = AdamW8bit([alone], backend="eager")
    other.load_state_dict(
        {"state": {0: saved["state"][1]}, "param_groups": [{**saved["param_groups"][1], "params": [0]}]}
    )
    assert_same(other.state[alone], opt.state[params[1]])


def test_a_skipped_step_changes_nothing():
    param = nn.Parameter(torch.randn(64, 80))
    opt = AdamW8bit([param], backend="eager", amsgrad=True, **DYNAMIC)
    train(opt, [param], 0, 2)
    before, value = copy.deepcopy(opt.state_dict()), param.detach().clone()
    opt.found_inf = torch.ones(())
    train(opt, [param], 2, 3)
    assert_same(opt.state_dict()["state"], before["state"])
    assert torch.equal(param, value)
    opt.found_inf = torch.zeros(())
    train(opt, [param], 2, 3)
    assert not torch.equal(param, value)


@pytest.mark.parametrize("source, target", [("block_float8", "dynamic"), ("dynamic", "block_float8")])
def test_state_loads_into_the_other_code(source, target):
    """The options of a state dict hold; with another code written to its groups the moments are encoded anew."""
    params = new_params()
    opt = new_optimizer(params, backend="eager", amsgrad=True, state_code=source)
    train(opt, params, 0, 4)
    saved = round_trip(opt.state_dict())
    other = [nn.Parameter(p.detach().clone()) for p in params]
    opt_other = new_optimizer(other, backend="eager", state_code=target)
    asked = pytest.warns(UserWarning, match="asks for state_code='dynamic'") if target == "dynamic" else nullcontext()
    with asked:
        opt_other.load_state_dict(saved)
    assert opt_other.param_groups[0]["state_code"] == source
    assert_same(opt_other.state_dict()["state"], saved["state"])
    for group in saved["param_groups"]:
        group["state_code"] = target
    opt_other.load_state_dict(saved)
    for a, b in zip(params[:2], other[:2], strict=True):
        assert codes_of(opt_other, b) == expected_codes(target, amsgrad=True)
        for key in CODES[target]:
            exact, value = (plain(o.state[p][key]) for o, p in ((opt, a), (opt_other, b)))
            # Half of the widest cell of either: .9 / 128 of the block's largest magnitude, or a 30th of the element.
            bound = torch.maximum(0.0071 * exact.abs().max(), exact.abs() / 30)
            assert ((value - exact).abs() <= bound).all()
            assert torch.equal(value, exact) == (key not in expected_codes(target, amsgrad=True))
    assert_same(opt_other.state[other[2]], opt.state[params[2]])
    train(opt_other, other, 4, 6)


@pytest.mark.parametrize("cls, theirs", [(AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)])
def test_torch_state_loads_and_goes_back(cls, theirs):
    params = new_params()
    ref = new_optimizer(params, theirs)
    train(ref, params, 0, 5)
    mine = [nn.Parameter(p.detach().clone()) for p in params]
    opt = new_optimizer(mine, cls, backend="eager", **DYNAMIC)
    opt.load_state_dict(round_trip(ref.state_dict()))
    exported = opt.to_torch_state_dict()
    assert "state_code" not in exported["param_groups"][0]
    for index, (param, p) in enumerate(zip(mine[:2], params[:2], strict=True)):
        for key, code in expected_codes("dynamic").items():
            rows = opt.state[param][key].rows_per_block
            wanted = Blockwise8bitTensor.from_float(ref.state[p][key], 256, code, rows_per_block=rows)
            assert torch.equal(opt.state[param][key].codes, wanted.codes)
            assert torch.equal(exported["state"][index][key], wanted.dequantize())


def test_a_trainable_int8_weight_takes_the_code():
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(64, 64)), requires_grad=True)
    before = weight.dequantize().clone()
    opt = AdamW8bit([weight], backend="eager", lr=0.1, **DYNAMIC)
    train(opt, [weight], 0, 2)
    assert codes_of(opt, weight) == expected_codes("dynamic")
    assert (weight.dequantize() - before).abs().mean() > 0.05


def test_a_code_changed_under_way_is_refused():
    param = nn.Parameter(torch.randn(64, 80))
    opt = AdamW8bit([param], backend="eager")
    train(opt, [param], 0, 1)
    opt.param_groups[0]["state_code"] = "dynamic"
    with pytest.raises(ValueError, match="is coded as 'float8_signed', its group asks for state_code='dynamic'"):
        opt.step()
    with pytest.raises(ValueError, match=r"state_code must be one of \('block_float8', 'dynamic'\), got 'linear'"):
        AdamW8bit([param], state_code="linear")
