"""State of the 8-bit optimizers: saving, copying and resuming."""

import copy
import io
import pickle

import pytest
import torch
from adam_runs import assert_same, new_optimizer, new_params, round_trip, storages, train
from expecttest import assert_expected_inline
from torch import nn

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.optim import AdamW8bit

# ---- Saving and resuming ----

OPTIONS = {
    "default": {},
    "amsgrad": {"amsgrad": True},
    "capturable": {"capturable": True},
    "fp32 state": {"state_bits": 32},
    "small blocks, other seed": {"block_size": 32, "seed": 11, "maximize": True},
    "dynamic code": {"state_code": "dynamic", "block_size": 256, "amsgrad": True},
    "tensor lr": {"lr": torch.tensor(1e-2)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_from_a_file_is_bit_exact(dtype, options):
    """Also where the new optimizer was made with other options: those of the file hold."""
    options = {**OPTIONS[options], "backend": "eager", "stochastic_round": True}
    through, params = new_params(dtype), new_params(dtype)
    opt_through, opt = new_optimizer(through, **options), new_optimizer(params, **options)
    train(opt_through, through, 0, 8)
    train(opt, params, 0, 4)
    saved = round_trip({"params": [p.detach() for p in params], "opt": opt.state_dict()})
    resumed = [nn.Parameter(p) for p in saved["params"]]
    opt_resumed = new_optimizer(resumed, lr=0.5, seed=99, backend="eager")
    opt_resumed.load_state_dict(saved["opt"])
    assert_same(opt_resumed.state_dict(), opt.state_dict())
    train(opt_resumed, resumed, 4, 8)
    assert_same([p.data for p in resumed], [p.data for p in through])
    assert_same(opt_resumed.state_dict()["state"], opt_through.state_dict()["state"])
    # Negative control: without the state the run goes elsewhere.
    fresh = [nn.Parameter(p.detach().clone()) for p in params]
    train(new_optimizer(fresh, **options), fresh, 4, 8)
    assert not torch.equal(fresh[0], resumed[0])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_the_whole_optimizer_goes_on_alike_and_apart(how):
    params = new_params()
    opt = new_optimizer(params, amsgrad=True, backend="eager", seed=4)
    train(opt, params, 0, 3)
    both = {"opt": opt, "params": params}  # as one object, so that parameters stay the optimizer's
    twin = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "torch.save": lambda x: round_trip(x, weights_only=False),
    }[how](both)
    assert twin["opt"].backend == "eager"
    assert_same(twin["opt"].state_dict(), opt.state_dict())
    assert not storages(twin["opt"].state_dict()) & storages(opt.state_dict())
    before = copy.deepcopy(opt.state_dict())
    train(twin["opt"], twin["params"], 3, 6)
    assert_same(opt.state_dict(), before)
    train(opt, params, 3, 6)
    assert_same(twin["opt"].state_dict(), opt.state_dict())
    assert_same([p.data for p in twin["params"]], [p.data for p in params])


def test_an_optimizer_that_never_stepped_can_be_saved_copied_and_loaded():
    params = new_params()
    opt = new_optimizer(params, backend="eager")
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert_same(other.state_dict(), opt.state_dict())
    opt.load_state_dict(round_trip(opt.state_dict()))
    train(opt, params, 0, 1)
    opt.load_state_dict(new_optimizer(new_params()).state_dict())
    assert opt.state_dict()["state"] == {}  # as torch.optim: what was there is gone


def test_map_location_moves_codes_and_scales():
    params = new_params()
    opt = new_optimizer(params, backend="eager")
    train(opt, params, 0, 1)
    moment = round_trip(opt.state_dict(), map_location="meta")["state"][0]["exp_avg"]
    assert isinstance(moment, Blockwise8bitTensor)
    assert moment.device.type == moment.codes.device.type == moment.scale.device.type == "meta"
    assert_same(round_trip(opt.state_dict(), map_location="cpu"), opt.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_state_loads_into_parameters_of_another_dtype_unchanged(dtype):
    """torch.optim would cast the codes to the parameter's dtype."""
    params = new_params()
    opt = new_optimizer(params, backend="eager")
    train(opt, params, 0, 3)
    others = new_params(dtype)
    opt_other = new_optimizer(others, backend="eager")
    opt_other.load_state_dict(opt.state_dict())
    assert_same(opt_other.state_dict()["state"], opt.state_dict()["state"])
    train(opt_other, others, 3, 4)
    assert all(p.isfinite().all() and p.dtype == dtype for p in others)


def test_the_file_is_far_smaller_than_fp32_state():
    param = nn.Parameter(torch.randn(256, 256))
    sizes = []
    for opt in (AdamW8bit([param], backend="eager"), torch.optim.AdamW([param])):
        train(opt, [param], 0, 1)
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        sizes.append(buffer.tell())
    assert sizes[0] < 0.28 * sizes[1]  # (1 + 2/64) / 4 = .258, and the file's frame


def test_loaded_state_shares_no_memory_with_the_dict():
    params = new_params()
    opt = new_optimizer(params, backend="eager", lr=torch.tensor(1e-2))
    train(opt, params, 0, 2)
    opt.state[params[0]]["note"] = torch.ones(3)  # what a user keeps there travels along
    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(saved)
    other = new_params()
    opt_other = new_optimizer(other, backend="eager")
    opt_other.load_state_dict(saved)
    assert torch.equal(opt_other.state[other[0]]["note"], torch.ones(3))
    assert not storages(opt_other.state_dict()) & storages(saved)
    train(opt_other, other, 2, 4)
    assert_same(saved, kept)


def test_state_of_a_trainable_int8_weight_is_saved_and_resumed():
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(64, 64)), requires_grad=True)
    opt = AdamW8bit([weight], backend="eager")
    train(opt, [weight], 0, 2)
    twin = nn.Parameter(weight.detach().clone(), requires_grad=True)
    opt_twin = AdamW8bit([twin], backend="eager")
    opt_twin.load_state_dict(round_trip(opt.state_dict()))
    train(opt, [weight], 2, 4), train(opt_twin, [twin], 2, 4)
    assert torch.equal(weight.int_data, twin.int_data) and torch.equal(weight.scale, twin.scale)


# ---- Blockwise8bitTensor by itself ----


def test_blockwise_tensor_repr_and_refusals():
    x = Blockwise8bitTensor.from_float(torch.randn(3, 70), 64, "float8_signed")
    assert_expected_inline(
        repr(x),
        """Blockwise8bitTensor(shape=(3, 70), dtype=torch.float32, device=cpu, block_size=64, code='float8_signed')""",
    )
    with pytest.raises(NotImplementedError) as caught:
        x.cumsum(0)
    rule, remedy = str(caught.value).split(". ")
    assert rule == "aten.cumsum.default is not implemented for Blockwise8bitTensor"
    assert remedy == "Call .dequantize() to get a plain float tensor."
    with pytest.raises(ValueError) as bad:
        Blockwise8bitTensor(x.codes, x.scale[:, :1], 64, "float8_signed")
    assert_expected_inline(
        str(bad.value), """scale of codes (3, 70) in blocks of 64 must have shape (3, 2, 2), got (3, 1, 2)"""
    )
    for value, code in ((torch.tensor([1.0, float("nan")]), "float8_signed"), (-torch.ones(2), "float8_unsigned")):
        with pytest.raises(ValueError):
            Blockwise8bitTensor.from_float(value, 16, code)


def test_rows_of_the_state_are_rows_of_codes_and_scales():
    """What re-sharding relies on: encoding a slice of rows gives that slice."""
    value = torch.randn(10, 7, 11)
    whole = Blockwise8bitTensor.from_float(value, 32, "float8_signed")
    part = Blockwise8bitTensor.from_float(value[3:8], 32, "float8_signed")
    assert torch.equal(part.codes, whole.codes[3:8]) and torch.equal(part.scale, whole.scale[3:8])
