"""accelerate: offloading, dispatch and loading of int8 weights; Accelerator with 8-bit Adam."""

import copy

import pytest
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import set_module_tensor_to_device
from hf_models import folder_of, output, tokens
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel

import qsub
from qsub import Int8RowwiseTensor

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


def build(tied=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    if tied:
        model[3].weight = model[0].weight
    return model


def quantized(tied=False, **modes):
    return qsub.quantize_(build(tied), **modes)


# ---- Where weights are ----

PLACES = {
    "cpu_offload": lambda model: cpu_offload(model, execution_device="cpu"),
    "one device": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "layer by layer": lambda model: dispatch_model(
        model, {str(i): "cpu" for i in range(5)}, main_device="cpu", force_hooks=True
    ),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_dispatched_model_answers_as_before(tied, place):
    """The middle layers have one shape: a weight that were taken for another's would not be noticed by it."""
    model = quantized(tied, activations="int8")
    expected = model(X)
    moved = PLACES[place](copy.deepcopy(model))
    assert torch.equal(moved(X), expected) and torch.equal(moved(X), expected)
    wrong = copy.deepcopy(model)
    wrong[2].weight = wrong[0].weight
    assert not torch.equal(wrong(X), expected)


def test_offloaded_weights_are_on_the_meta_device_in_between_and_come_back():
    model = quantized()
    expected = model(X)
    cpu_offload(model, execution_device="cpu")
    assert all(p.device.type == "meta" and p.nbytes for p in model.parameters())
    assert torch.equal(model(X), expected) and isinstance(model[0].weight, Int8RowwiseTensor)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected) and isinstance(model[0].weight, nn.Parameter)


def test_the_gradient_of_the_input_passes_an_offloaded_layer():
    model, x = quantized(), X.clone().requires_grad_()
    model(x).sum().backward()
    offloaded, y = cpu_offload(quantized(), execution_device="cpu"), X.clone().requires_grad_()
    offloaded(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_real_model_offloaded_to_the_cpu():
    folder = folder_of("minilm")
    batch = tokens(folder)
    model = qsub.quantize_(AutoModel.from_pretrained(folder))
    expected = output(model, batch)
    assert torch.equal(output(cpu_offload(model, execution_device="cpu"), batch), expected)


def test_an_offloaded_model_is_saved_whole(tmp_path):
    folder = folder_of("minilm")
    batch = tokens(folder)
    model = qsub.quantize_(AutoModel.from_pretrained(folder))
    expected = output(model, batch)
    cpu_offload(model, execution_device="cpu").save_pretrained(tmp_path)
    assert torch.equal(output(AutoModel.from_pretrained(tmp_path), batch), expected)


def test_offloading_to_disk_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="use .int_data and .scale"):
        disk_offload(quantized(), tmp_path, execution_device="cpu")


# ---- Loading ----


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_load_checkpoint_and_dispatch(tmp_path, tied, meta, int8):
    source = quantized(tied)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights() if meta else torch.device("cpu"):
        model = build(tied)
        if int8:
            qsub.quantize_(model)
    if not meta:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    load_checkpoint_and_dispatch(model, str(tmp_path / "pytorch_model.bin"), device_map={"": "cpu"})
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    if int8 or meta:  # a float parameter on a device takes the values in float
        assert isinstance(model[0].weight, Int8RowwiseTensor) and torch.equal(model(X), source(X))
    assert torch.allclose(model(X), source(X), atol=1e-5)  # fp32 sums in another order


def test_set_module_tensor_to_device():
    model, expected = quantized(), quantized()(X)
    value = model[0].weight
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.device.type == "meta" and isinstance(model[0].weight, Int8RowwiseTensor)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=value)
    assert isinstance(model[0].weight, nn.Parameter) and torch.equal(model(X), expected)
    with pytest.raises(TypeError, match="from_float"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=value.dequantize())
    float_model = build()
    set_module_tensor_to_device(float_model, "0.weight", "cpu", value=value)
    assert isinstance(float_model[0].weight, Int8RowwiseTensor)


# ---- Training ----


@pytest.fixture
def accelerator():
    made = []

    def make(**options):
        AcceleratorState._reset_state(reset_partial_state=True)
        made.append(Accelerator(cpu=True, **options))
        return made[-1]

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def batches(count=12):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(16, 32, generator=generator), torch.randint(8, (16,), generator=generator)) for _ in range(count)
    ]


def train(accelerator, trainable, folder=None, start=0, stop=None, lr=1e-2):
    """Train on the batches from `start` to `stop`, after loading from the folder if there is a start; then save."""
    model = quantized(trainable=True) if trainable else build()
    groups = qsub.optim.param_groups(model)
    optimizer = qsub.optim.AdamW8bit(groups, lr=lr, min_8bit_size=256, backend="eager")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if start:
        accelerator.load_state(folder)
    for number, (x, y) in enumerate(batches()[start:stop], start):
        torch.manual_seed(number)  # int8 weights are rounded stochastically, by torch's generator
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if folder and not start:
        accelerator.save_state(folder, safe_serialization=not trainable)
    return [p.dequantize() if isinstance(p, Int8RowwiseTensor) else p for p in model.parameters()]


@pytest.mark.parametrize("trainable", [False, True])
def test_save_state_and_load_state_resume_exactly(accelerator, tmp_path, trainable):
    whole = train(accelerator(gradient_accumulation_steps=2), trainable)
    train(accelerator(gradient_accumulation_steps=2), trainable, tmp_path, stop=6)
    resumed = train(accelerator(gradient_accumulation_steps=2), trainable, tmp_path, start=6)
    other = train(accelerator(gradient_accumulation_steps=2), trainable, lr=2e-2)
    assert all(map(torch.equal, whole, resumed)) and not all(map(torch.equal, whole, other))


def test_accumulated_steps_are_those_of_larger_batches(accelerator):
    """Two batches of 16, accumulated, against one of 32: gradients are sums in another order (measured: 5e-8 apart)."""
    made = accelerator(gradient_accumulation_steps=2)
    accumulated = train(made, False, stop=2)
    model = build()
    optimizer = qsub.optim.AdamW8bit(qsub.optim.param_groups(model), lr=1e-2, min_8bit_size=256, backend="eager")
    x, y = (torch.cat(parts) for parts in zip(*batches(2), strict=True))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = list(build().parameters())
    for param, expected, start in zip(accumulated, model.parameters(), before, strict=True):
        assert (param - expected).abs().max() < 1e-6 < (expected - start).abs().max()


def test_bf16_mixed_precision(accelerator):
    params = train(accelerator(mixed_precision="bf16"), False)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in params)


def test_prepare_keeps_the_state_of_a_used_optimizer(accelerator):
    model = build()
    optimizer = qsub.optim.AdamW8bit(model.parameters(), min_8bit_size=256, backend="eager")
    model(X).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    prepared = accelerator().prepare(optimizer)
    for index, state in prepared.state_dict()["state"].items():
        for name, value in state.items():
            assert type(value) is type(before["state"][index][name])
            assert torch.equal(getattr(value, "codes", value), getattr(before["state"][index][name], "codes", value))


def test_steps_through_a_gradient_scaler(accelerator):
    """What fp16 mixed precision does; a scale of 2**10 changes no bit of fp32 gradients."""
    accelerator()  # AcceleratedOptimizer asks for its state
    model, plain = build(), build()
    optimizer = qsub.optim.AdamW8bit(plain.parameters(), lr=1e-2, min_8bit_size=256, backend="eager")
    scaled = qsub.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled = AcceleratedOptimizer(scaled, device_placement=False, scaler=scaler)
    for x, y in batches(3):
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaled.step()
        assert not scaled.step_was_skipped
        scaled.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(X).sum()).backward()
    model[0].weight.grad[0, 0] = float("inf")
    scaled.step()
    assert scaled.step_was_skipped  # which Accelerator.optimizer_step_was_skipped and its schedulers go by
    assert all(map(torch.equal, model.parameters(), before)) and scaler.get_scale() == 2.0**9
