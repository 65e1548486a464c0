"""Write-back of int8 weights by a kernel: the definition in torch, bit for bit; many weights in several launches."""

import types

import pytest
import torch
from one_launch_helpers import devices, set_grads

from qsub import Int8RowwiseTensor
from qsub.optim import AdamW8bit
from qsub.optim.per_parameter import write_back
from qsub.optim.step import N_HYPER, SKIP

pytest.importorskip("triton")


def hyper_of(device, seed=-123456, skip=0.0):
    tensor = torch.zeros(N_HYPER, device=device)
    tensor[SKIP] = skip
    return types.SimpleNamespace(tensor=tensor, seed=torch.tensor(seed, dtype=torch.int32, device=device))


def twins(columns, device):
    """Two equal weights of 7 rows, one of zeros and one that is NaN already, and a new value for them."""
    generator = torch.Generator().manual_seed(columns)
    value = torch.randn(7, columns, generator=generator) * torch.tensor([1e-8, 1e-3, 1, 0, 30, 6e4, 1]).view(-1, 1)
    weights = [Int8RowwiseTensor.from_float(value.clamp(-6e4, 6e4)).to(device) for _ in range(2)]
    for weight in weights:
        weight.scale[6] = float("nan")
    value = value * (1 + 0.1 * torch.randn(7, columns, generator=generator))
    for row, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        value[row, row % columns] = bad
    return weights, value.to(device)


@devices
@pytest.mark.parametrize("columns", [1, 64, 100, 5000])
@pytest.mark.parametrize("first_row", [0, 1, 3_000_000])  # 1.5e10 elements before those of 5000 columns
def test_equals_the_definition(device, columns, first_row):
    from qsub.optim.requantize_kernel import requantize

    (ours, reference), value = twins(columns, device)
    before = ours.int_data.clone()
    step = torch.tensor(37.0, device=device)
    requantize(ours, value, step, hyper_of(device), first_row)
    write_back(reference, value, step, hyper_of(device), first_row)
    assert torch.equal(ours.int_data, reference.int_data)
    assert torch.equal(ours.scale.isnan(), reference.scale.isnan())
    assert torch.equal(ours.scale.nan_to_num(), reference.scale.nan_to_num())
    if columns > 1:
        assert not torch.equal(ours.int_data, before)
        again, _ = twins(columns, device)
        requantize(again[0], value, step + 1, hyper_of(device), first_row)
        assert not torch.equal(again[0].int_data, ours.int_data)  # rounded by other bits


@devices
def test_a_skipped_step_changes_nothing(device):
    from qsub.optim.requantize_kernel import requantize

    (weight, before), value = twins(64, device)
    requantize(weight, value, torch.tensor(3.0, device=device), hyper_of(device, skip=1.0), 0)
    assert torch.equal(weight.int_data, before.int_data)
    assert torch.equal(weight.scale.nan_to_num(), before.scale.nan_to_num())


@devices
def test_rows_that_have_their_value_already_stay(device):
    """Also where the largest code is under 127; one row of these moves."""
    from qsub.optim.requantize_kernel import requantize

    int_data = torch.randint(-90, 91, (7, 100), dtype=torch.int8, generator=torch.Generator().manual_seed(3)).to(device)
    scale = torch.linspace(0.1, 3, 7).half().to(device)
    ours, reference = (Int8RowwiseTensor(int_data.clone(), scale.clone()) for _ in range(2))
    value = ours.dequantize()
    value[2, 5] += 1.0
    step = torch.tensor(3.0, device=device)
    requantize(ours, value, step, hyper_of(device), 0)
    write_back(reference, value, step, hyper_of(device), 0)
    assert torch.equal(ours.int_data, reference.int_data) and torch.equal(ours.scale, reference.scale)
    kept = torch.arange(7, device=device) != 2
    assert torch.equal(ours.int_data[kept], int_data[kept]) and torch.equal(ours.scale[kept], scale[kept])
    assert not torch.equal(ours.int_data[2], int_data[2])


@devices
def test_strided_codes(device):
    """Rows of a wider matrix."""
    from qsub.optim.requantize_kernel import requantize

    (weight, reference), value = twins(64, device)
    wide = torch.zeros(7, 80, dtype=torch.int8, device=device)
    wide[:, :64] = weight.int_data
    strided = Int8RowwiseTensor(wide[:, :64], weight.scale.clone())
    step = torch.tensor(3.0, device=device)
    requantize(strided, value, step, hyper_of(device), 0)
    write_back(reference, value, step, hyper_of(device), 0)
    assert torch.equal(wide[:, :64], reference.int_data)
    assert not wide[:, 64:].any()


def _trained(device, steps=3):
    generator = torch.Generator().manual_seed(5)
    shapes = [(16, 64), (33,), (8, 64), (24, 64), (16, 64)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = [Int8RowwiseTensor.from_float(v).to(device) if v.dim() == 2 else v.to(device) for v in values]
    params = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = AdamW8bit(params, lr=0.1, min_8bit_size=64, backend="triton")
    for _ in range(steps):
        set_grads(params, params, generator)
        params[2].grad = None
        optimizer.step()
    states = [part for p in params for m in list(optimizer.state[p].values())[1:] for part in _parts(m)]
    steps_taken = [float(optimizer.state[p].get("step", 0)) for p in params]
    return [part.clone() for p in params for part in _parts(p.detach())] + states, steps_taken


def _parts(value):
    names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
    return [getattr(value, name) for name in names] or [value]


@devices
def test_several_launches_equal_one(device, monkeypatch):
    """Copies of the int8 weights take bounded memory: no more of them are float at a time."""
    from qsub.optim import one_launch

    launches = []
    launch = one_launch._launch
    monkeypatch.setattr(one_launch, "_launch", lambda *args: (launches.append(1), launch(*args)))
    whole = _trained(device)
    assert len(launches) == 3
    monkeypatch.setattr(one_launch, "_STAGED", 24 * 64)
    parts = _trained(device)
    assert len(launches) == 3 + 3 * 3  # 16 rows; 24 rows; 16 rows
    assert parts[1] == whole[1] == [3, 3, 0, 3, 3]
    for left, right in zip(parts[0], whole[0], strict=True):
        assert torch.equal(left, right)
