"""Int8RowwiseTensor: construction, copies, moves, views, in-place updates and error texts."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import qsub
from qsub import Int8RowwiseTensor
from qsub.tensors.codes import row_noise

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def make(rows=6, columns=10, dtype=torch.float32, **options):
    return Int8RowwiseTensor.from_float(torch.randn(rows, columns, dtype=dtype), **options)


def half_step(weight):
    """Half a code step of each row, (rows, 1): the bound on the error of rounding to nearest."""
    return weight.scale.float().unsqueeze(1) / 254


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_from_float_is_the_row_code_of_the_design(dtype):
    weight = torch.randn(7, 33, dtype=dtype) * torch.logspace(-5, 4, 7).to(dtype).unsqueeze(1)
    quantized = Int8RowwiseTensor.from_float(weight)
    scale = weight.float().abs().amax(1).half()
    codes = (weight.float() * 127 / scale.float().unsqueeze(1)).round().clamp(-127, 127)
    assert torch.equal(quantized.scale, scale)
    assert torch.equal(quantized.int_data, codes.to(torch.int8))
    assert torch.equal(quantized.dequantize(torch.float32), codes * (scale.float() * (1 / 127)).unsqueeze(1))
    assert quantized.dtype == dtype and quantized.shape == weight.shape and quantized.device == weight.device
    assert quantized.dequantize().dtype == dtype


def test_error_is_within_half_a_step_and_int4_is_not():
    weight = torch.randn(64, 512)
    quantized = Int8RowwiseTensor.from_float(weight)
    # Half a step, and what the fp16 rounding of the scale can clamp off the largest element: 2**-11 of it.
    bound = half_step(quantized) + quantized.scale.float().unsqueeze(1) * 2**-11
    assert ((quantized.dequantize() - weight).abs() <= bound).all()
    int4 = (weight * 7 / weight.abs().amax(1, keepdim=True)).round() * weight.abs().amax(1, keepdim=True) / 7
    assert not ((int4 - weight).abs() <= bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 65520.0, -1e30])
def test_from_float_names_the_bad_row(value):
    weight = torch.randn(5, 4)
    weight[3, 1] = value
    with pytest.raises(ValueError, match=r"row 3 has NaN, Inf or a magnitude over 65504"):
        Int8RowwiseTensor.from_float(weight)


def test_largest_magnitude_is_accepted():
    weight = torch.tensor([[65504.0, -1.0], [3e-6, 1e-6]])
    quantized = Int8RowwiseTensor.from_float(weight)
    assert quantized.dequantize()[0, 0] == 65504.0
    assert (quantized.dequantize()[1, 0] / 3e-6 - 1).abs() < 0.02  # fp16 is subnormal there: 2**-24 steps


def test_zero_and_empty_matrices():
    zero = Int8RowwiseTensor.from_float(torch.zeros(3, 4))
    assert torch.equal(zero.dequantize(), torch.zeros(3, 4)) and torch.equal(zero.scale, torch.zeros(3).half())
    for shape in ((0, 4), (4, 0), (0, 0)):
        assert Int8RowwiseTensor.from_float(torch.randn(shape)).dequantize().shape == shape


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Int8RowwiseTensor.from_float(torch.zeros(4)), ValueError, "must be (out_features, in_features)"),
        (lambda: Int8RowwiseTensor.from_float(torch.zeros(4, 4, dtype=torch.int32)), TypeError, "float dtype"),
        (lambda: Int8RowwiseTensor.from_float(make()), TypeError, "already"),
        (lambda: Int8RowwiseTensor(torch.zeros(4, 4), torch.zeros(4).half()), TypeError, "from_float"),
        (lambda: Int8RowwiseTensor(torch.zeros(4, 4).char(), torch.zeros(4)), TypeError, "fp16 scale"),
        (lambda: Int8RowwiseTensor(torch.zeros(4, 4).char(), torch.zeros(3).half()), ValueError, "(out_features,)"),
        (lambda: make().to(torch.int32), TypeError, "can only take a float dtype"),
        (lambda: make().sort(), NotImplementedError, "Call .dequantize() first"),
        (lambda: make().copy_(torch.zeros(10)), ValueError, "broadcasting"),
        (lambda: make().copy_(torch.full((6, 10), torch.nan)), ValueError, "source of copy_: row 0"),
        (lambda: torch.mm(make(), make().t()), NotImplementedError, "product of two"),
        (lambda: torch.zeros(3, 4) @ make().t(), RuntimeError, "takes 10 features"),
    ],
)
def test_errors_state_the_rule(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_unknown_operator_names_operator_and_class():
    with pytest.raises(NotImplementedError, match=r"aten\.cumsum\.default is not implemented for Int8RowwiseTensor"):
        make().cumsum(0)


def test_repr():
    weight = make(4, 8, torch.bfloat16)
    text = "Int8RowwiseTensor(shape=(4, 8), dtype=torch.bfloat16, device=cpu)"
    assert repr(weight) == text
    assert repr(weight.t()) == "Int8RowwiseTensor(shape=(8, 4), dtype=torch.bfloat16, device=cpu, scale_dim=-1)"
    assert text[:-1] + ", requires_grad=True)" in repr(nn.Parameter(weight))


@pytest.mark.parametrize("copier", [copy.deepcopy, torch.clone, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_equal_and_independent(copier):
    weight = make()
    before = weight.dequantize()
    twin = copier(weight)
    assert type(twin) is Int8RowwiseTensor and torch.equal(twin.dequantize(), before)
    twin.mul_(2.0)
    assert torch.equal(weight.dequantize(), before)
    assert not torch.equal(twin.dequantize(), before)


def test_detach_and_data_are_aliases():
    weight = make(requires_grad=True)
    for alias in (weight.detach(), weight.data):
        assert type(alias) is Int8RowwiseTensor and not alias.requires_grad
        assert alias.int_data.data_ptr() == weight.int_data.data_ptr()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_to_dtype_changes_the_appearance_only(dtype):
    weight = make()
    other = weight.to(dtype)
    assert other.dtype == dtype and other.dequantize().dtype == dtype
    assert torch.equal(other.int_data, weight.int_data) and torch.equal(other.scale, weight.scale)
    assert weight.dtype == torch.float32
    assert (other is weight) == (dtype == torch.float32)  # as torch: no copy where nothing changes
    assert weight.to(dtype, copy=True) is not weight


def test_module_to_keeps_codes_and_scales():
    module = qsub.quantize_(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)))
    codes = [layer.weight.int_data.clone() for layer in module]
    scales = [layer.weight.scale.clone() for layer in module]
    for move in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float, nn.Module.cpu):
        move(module)
        for layer, code, scale in zip(module, codes, scales, strict=True):
            assert type(layer.weight) is Int8RowwiseTensor and isinstance(layer.weight, nn.Parameter)
            assert torch.equal(layer.weight.int_data, code) and torch.equal(layer.weight.scale, scale)
            assert layer.weight.dtype == layer.bias.dtype


def test_meta_and_to_empty():
    module = qsub.quantize_(nn.Linear(8, 4)).to("meta")
    assert module.weight.device.type == module.weight.int_data.device.type == "meta"
    module.to_empty(device="cpu")
    assert type(module.weight) is Int8RowwiseTensor and module.weight.scale.shape == (4,)
    with torch.device("meta"):
        module = qsub.quantize_(nn.Linear(8, 4))
    assert module(torch.empty(3, 8, device="meta")).shape == (3, 4)


def test_transpose_is_a_view_with_the_scale_on_the_other_dimension():
    weight = make()
    for turned in (weight.t(), weight.T, weight.mT, weight.transpose(0, 1), weight.transpose(-1, -2)):
        assert turned.shape == (10, 6) and torch.equal(turned.dequantize(), weight.dequantize().t())
        assert turned.int_data.data_ptr() == weight.int_data.data_ptr()
        assert torch.equal(turned.t().dequantize(), weight.dequantize())
    assert torch.equal(weight.transpose(1, 1).dequantize(), weight.dequantize())


def test_copy_in_three_directions():
    source, target = make(), make()
    target.copy_(source)
    assert torch.equal(target.int_data, source.int_data) and torch.equal(target.scale, source.scale)
    value = torch.randn(6, 10)
    target.copy_(value)
    assert torch.equal(target.dequantize(), Int8RowwiseTensor.from_float(value).dequantize())
    plain = torch.zeros(6, 10, dtype=torch.float64)
    plain.copy_(source)
    assert type(plain) is torch.Tensor and torch.equal(plain, source.dequantize(torch.float64))
    target.t().copy_(value.t())  # into a view: the rows of the weight are still its rows
    assert torch.equal(target.dequantize(), Int8RowwiseTensor.from_float(value).dequantize())
    target.t().copy_(source.t())
    assert torch.equal(target.int_data, source.int_data)


def test_failed_copy_leaves_the_weight_as_it_was():
    weight = make()
    before = weight.dequantize()
    for bad in (torch.full((6, 10), torch.inf), torch.zeros(10, 6)):
        with pytest.raises(ValueError, match=r"copy_"):
            weight.copy_(bad)
        assert torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize(
    "update",
    [
        lambda w, x: w.add_(x),
        lambda w, x: w.add_(x, alpha=-0.5),
        lambda w, x: w.sub_(x),
        lambda w, x: w.mul_(0.75),
        lambda w, x: w.mul_(x),
        lambda w, x: w.div_(3.0),
        lambda w, x: w.lerp_(x, 0.25),
        lambda w, x: w.addcdiv_(x, x.abs() + 1, value=-0.1),
        lambda w, x: w.addcmul_(x, x, value=0.1),
        lambda w, x: torch._foreach_add_([w], [x]),
        lambda w, x: torch._foreach_mul_([w], 0.5),
        lambda w, x: torch._foreach_addcdiv_([w], [x], [x.abs() + 1], -0.1),
    ],
)
def test_in_place_arithmetic_goes_through_the_row_code(update):
    weight, operand = make(), torch.randn(6, 10)
    expected = weight.dequantize()
    update(expected, operand)
    result = update(weight, operand)
    assert (result[0] if isinstance(result, (list, tuple)) else result) is weight
    assert torch.equal(weight.dequantize(), Int8RowwiseTensor.from_float(expected).dequantize())


def test_updates_of_a_trainable_weight_are_unbiased_and_of_a_frozen_one_to_nearest():
    weight = torch.randn(16, 64).clamp(-2, 2)
    weight[:, 0] = 2.0  # pins the scale of each row
    delta = torch.zeros(16, 64)
    delta[:, 1:] = 2e-4  # an eightieth of a code step, which rounding to nearest loses
    frozen = Int8RowwiseTensor.from_float(weight)
    trained = nn.Parameter(Int8RowwiseTensor.from_float(weight))
    start = frozen.dequantize()
    draws = 400
    with torch.no_grad():
        for _ in range(draws):
            with pytest.warns(UserWarning, match="kept less than 1% of itself"):
                frozen.add_(delta)
            trained.add_(delta)
    assert torch.equal(frozen.dequantize(), start)
    moved = (trained.dequantize() - start)[:, 1:] / (draws * 2e-4)
    # Bernoulli steps: sd of an element's move is sqrt(n p (1-p)) steps, p = 1/80, so of the mean of 1,008 elements
    # sqrt(400 / 80) / (400 / 80) / sqrt(1008) = .014.
    assert abs(moved.mean().item() - 1) < 5 * 0.014


def _updated(seed, rows=slice(None), updates=1, transposed=False):
    torch.manual_seed(seed)
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.linspace(-1, 1, 600).view(6, 100)[rows]))
    weight = nn.Parameter(weight.detach().t()) if transposed else weight
    with torch.no_grad():
        for _ in range(updates):
            weight.add_(0.0011)
    return weight.detach().t().int_data if transposed else weight.int_data


@pytest.mark.filterwarnings("ignore:an update in place:UserWarning")  # of the one to nearest
def test_stochastic_updates_follow_from_the_values_of_the_row():
    """Not from the generator, which differs between the ranks of a replicated weight, nor from the other rows."""
    whole = _updated(3)
    assert torch.equal(_updated(4), whole)
    assert torch.equal(_updated(3, slice(2, 5)), whole[2:5])
    assert torch.equal(_updated(3, transposed=True), whole)
    nearest = Int8RowwiseTensor.from_float(torch.linspace(-1, 1, 600).view(6, 100)).add_(0.0011).int_data
    assert not torch.equal(whole, nearest)  # negative control


def test_the_same_update_of_the_same_values_is_not_rounded_alike_for_ever():
    """A row that no element of left its code is drawn anew."""
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.tensor([[1.0, 0.5], [1.0, -0.5]])))
    start = weight.int_data.clone()
    delta = torch.tensor([[0.0, 1e-4]])  # an eightieth of a step: after 800 updates both have moved but for e**-10
    with torch.no_grad():
        for _ in range(800):
            weight.add_(delta)
    assert (weight.int_data[:, 1] > start[:, 1]).all() and torch.equal(weight.int_data[:, 0], start[:, 0])


def test_noise_is_uniform():
    noise = row_noise(torch.randn(300, 301), 5)
    assert noise.min() >= 0 and noise.max() < 1
    counts = torch.histc(noise, 64, 0, 1)
    expected = noise.numel() / 64
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - 63) < 5 * (2 * 63) ** 0.5  # chi square of 63 degrees of freedom: mean 63, variance 126
    for other in (row_noise(torch.randn(300, 301), 5), noise.roll(1, 0), noise.roll(1, 1)):
        correlation = ((noise - 0.5) * (other - 0.5)).mean() * 12
        assert abs(correlation) < 5 / noise.numel() ** 0.5


def test_a_diverged_update_shows_as_nan():
    weight = make()
    weight.add_(torch.tensor(torch.inf))
    assert weight.dequantize().isnan().all()


def test_new_tensors_from_a_weight():
    weight = make(dtype=torch.bfloat16)
    zeros = torch.zeros_like(weight)  # what optimizers keep their state in
    assert type(zeros) is torch.Tensor and zeros.dtype == torch.bfloat16 and not zeros.any()
    assert torch.zeros_like(weight, dtype=torch.float32).dtype == torch.float32
    assert type(torch.empty_like(weight)) is Int8RowwiseTensor


def test_parameter_accepts_the_class_as_accelerate_builds_it():
    weight = make(requires_grad=True)
    again = Int8RowwiseTensor(weight, requires_grad=False)
    assert again.int_data is weight.int_data and not again.requires_grad
    param = nn.Parameter(make(), requires_grad=False)
    assert isinstance(param, nn.Parameter) and isinstance(param, Int8RowwiseTensor)


def test_the_class_makes_a_parameter_of_a_weight_as_accelerate_asks_it_to():
    weight = Int8RowwiseTensor.from_float(torch.randn(4, 8))
    made = Int8RowwiseTensor(weight, requires_grad=True)
    assert isinstance(made, torch.nn.Parameter) and made.requires_grad and not isinstance(weight, torch.nn.Parameter)


def test_the_pointer_tells_weights_apart():
    weight = Int8RowwiseTensor.from_float(torch.randn(4, 8))
    assert weight.data_ptr() == weight.detach().data_ptr() == weight.int_data.data_ptr() != weight.clone().data_ptr()


def test_a_threshold_of_numpy_is_a_number_in_files(tmp_path):
    """torch.load takes no NumPy scalars from metadata."""
    model = qsub.quantize_(nn.Linear(8, 4), activations="int8", outlier_threshold=np.float32(6.0))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt")["weight"].outlier_threshold == 6.0
