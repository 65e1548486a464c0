"""Weights from and to bitsandbytes, against the installed package."""

import warnings

import pytest
import torch
from torch import nn

import qsub
from qsub import Int8RowwiseTensor
from qsub.interop.bitsandbytes import weights_from_bitsandbytes, weights_to_bitsandbytes

with warnings.catch_warnings():  # of its imports
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:bitsandbytes")


def float_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)).half()


def their_model(state=None):
    model = nn.Sequential(
        bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False),
        nn.ReLU(),
        bnb.nn.Linear8bitLt(32, 8, bias=False, has_fp16_weights=False),
    )
    model.load_state_dict(float_model().state_dict() if state is None else state)
    return model.to("cpu")  # which quantizes


@pytest.fixture
def theirs():
    return their_model()


def test_codes_and_scales_carry_over(theirs):
    state = weights_from_bitsandbytes(theirs.state_dict())
    assert set(state) == set(float_model().state_dict())
    for name in ("0.weight", "2.weight"):
        layer = theirs[int(name[0])]
        assert isinstance(state[name], Int8RowwiseTensor) and state[name].dtype == torch.float16
        assert torch.equal(state[name].int_data, layer.weight.data)
        assert torch.equal(state[name].scale.float(), layer.weight.SCB)
    ours = float_model()
    ours.load_state_dict(state, assign=True)
    exact = qsub.quantize_(float_model())
    x = torch.randn(3, 64).half()
    assert torch.equal(ours[0].weight.scale, exact[0].weight.scale)
    # They round the quotient in another order: codes differ by one where it lies halfway.
    assert (ours[0].weight.int_data.int() - exact[0].weight.int_data.int()).abs().max() <= 1
    torch.testing.assert_close(ours(x), exact(x), rtol=0.02, atol=0.02)


def test_saved_before_or_after_a_forward(theirs):
    before = {key: value.clone() for key, value in theirs.state_dict().items()}
    theirs(torch.randn(3, 64).half())
    a, b = weights_from_bitsandbytes(before), weights_from_bitsandbytes(theirs.state_dict())
    for key in a:
        x, y = (v.dequantize() if isinstance(v, Int8RowwiseTensor) else v for v in (a[key], b[key]))
        assert torch.equal(x.float(), y.float())


def test_safetensors_files_of_theirs(theirs, tmp_path):
    import safetensors.torch

    plain = {key: value.detach().as_subclass(torch.Tensor).clone() for key, value in theirs.state_dict().items()}
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors")
    state = weights_from_bitsandbytes(qsub.load_file(tmp_path / "model.safetensors"), torch.bfloat16)
    assert state["0.weight"].dtype == torch.bfloat16
    assert torch.equal(state["0.weight"].int_data, plain["0.weight"])


def test_bitsandbytes_loads_what_we_write(theirs):
    ours = qsub.quantize_(float_model())
    with torch.no_grad():
        ours[0].weight.mul_(0.5)
    theirs.load_state_dict(weights_to_bitsandbytes(ours.state_dict()))
    for index in (0, 2):
        assert torch.equal(theirs[index].weight.data, ours[index].weight.int_data)
        assert torch.equal(theirs[index].weight.SCB, ours[index].weight.scale.float())
    again = weights_from_bitsandbytes(theirs.state_dict())
    assert torch.equal(again["0.weight"].dequantize(), ours[0].weight.dequantize())
    x = torch.randn(3, 64).half()
    torch.testing.assert_close(theirs(x), ours(x), rtol=0.03, atol=0.03)  # theirs rounds the input to int8 too


def layer(**changes):
    entries = {
        "a.weight": torch.randint(-127, 128, (4, 6), dtype=torch.int8),
        "a.SCB": torch.rand(4) + 0.5,
        "a.weight_format": torch.tensor(0, dtype=torch.uint8),
        "a.bias": torch.zeros(4),
        "norm.weight": torch.ones(4),
    }
    entries.update({f"a.{key}": value for key, value in changes.items()})
    return {key: value for key, value in entries.items() if value is not None}


def test_a_scale_that_is_no_fp16_number_is_within_its_bound():
    entries = layer()
    weight = weights_from_bitsandbytes(entries, torch.float32)["a.weight"]
    exact = entries["a.weight"].double() * entries["a.SCB"].double().unsqueeze(1) / 127
    error = (weight.dequantize(torch.float64) - exact).abs()
    step = entries["a.SCB"].double().unsqueeze(1) / 127
    assert error.max() > 0 and (error <= step * 127 * 2**-11 * (1 + 1e-6)).all()


def test_other_entries_pass_through():
    entries = layer()
    result = weights_from_bitsandbytes(entries)
    assert list(result) == ["a.weight", "a.bias", "norm.weight"] and result["norm.weight"] is entries["norm.weight"]
    assert list(weights_from_bitsandbytes({"SCB": torch.ones(2), "weight": torch.ones(2, 3).char()})) == ["weight"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight": None}, r"a\.SCB comes with an int8 a\.weight .* got nothing"),
        ({"weight": torch.ones(4, 6)}, r"a\.SCB comes with .* got torch\.float32"),
        ({"weight_format": torch.tensor(2)}, r"a\.weight_format is 2"),
        ({"SCB": torch.ones(3)}, r"a\.weight and a\.SCB must be"),
        ({"SCB": torch.full((4,), torch.nan)}, r"a\.SCB has a value that is negative, not finite"),
        ({"SCB": torch.full((4,), 1e5)}, r"a\.SCB has a value"),
    ],
)
def test_damaged_layers_are_named(changes, text):
    with pytest.raises(ValueError, match=text):
        weights_from_bitsandbytes(layer(**changes))


def test_what_bitsandbytes_has_no_place_for():
    weight = Int8RowwiseTensor.from_float(torch.ones(2, 3))
    for state in ({"table": weight}, {"a.weight": weight.t()}):
        with pytest.raises(ValueError, match="weight of a Linear"):
            weights_to_bitsandbytes(state)
