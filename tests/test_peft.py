"""PEFT: adapters on int8 weights: training, merging, saving, with quantize_ before and after get_peft_model."""

import copy

import pytest
import torch
from hf_models import folder_of, output, tiny_batch, tiny_llama, tokens
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM

import qsub
from qsub import Int8RowwiseTensor, QsubConfig
from qsub.interop.hf_config import int8_weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LAYER = "model.layers.0.mlp.up_proj"


def adapted(order="after", dora=False, base=None, dtype=torch.float32):
    """A model with int8 weights and adapters whose delta is not zero."""
    base = (base or tiny_llama()).to(dtype)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "up_proj"], use_dora=dora, task_type="CAUSAL_LM")
    if order == "before":
        model = get_peft_model(base, config)
        qsub.quantize_(model, filter_fn=lambda name, _: "lora" not in name)
    else:
        model = get_peft_model(qsub.quantize_(base), config)
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.05)
    return model.eval()


def layer(model):
    return model.get_submodule(f"base_model.model.{LAYER}")


def train(model, batch, steps=5, lr=1e-2):
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = qsub.optim.AdamW8bit(params, lr=lr, backend="eager")
    losses = []
    for _ in range(steps):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- Training ----


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_train_and_the_int8_weights_stay(order, dora):
    model = adapted(order, dora)
    base = layer(model).base_layer.weight
    before = base.int_data.clone()
    assert isinstance(base, Int8RowwiseTensor) and len(int8_weights(model)) == 15
    trained = {name.rsplit(".", 3)[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if dora else set())
    losses = train(model, tiny_batch())
    assert losses[-1] < losses[0] and torch.equal(base.int_data, before) and base.grad is None


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_are_those_of_the_dequantized_model(dora):
    """The same computation in fp32: sums in another order, measured 3e-7 of the largest element."""
    model = adapted(dora=dora)
    twin = qsub.dequantize_(copy.deepcopy(model))
    other = copy.deepcopy(twin)
    layer(other).base_layer.weight.data.mul_(1.05)
    for each in (model, twin, other):
        each(**tiny_batch(), labels=tiny_batch()["input_ids"]).loss.backward()
    apart = {"same": 0.0, "other": 0.0}
    for param, same, wrong in zip(model.parameters(), twin.parameters(), other.parameters(), strict=True):
        if param.grad is not None:
            largest = same.grad.abs().max()
            apart["same"] = max(apart["same"], ((param.grad - same.grad).abs().max() / largest).item())
            apart["other"] = max(apart["other"], ((wrong.grad - same.grad).abs().max() / largest).item())
    assert apart["same"] < 1e-5 < apart["other"]


def test_adapters_on_a_real_model(tmp_path):
    folder = folder_of("smollm2")
    batch = tokens(folder, ["It is a truth universally acknowledged, that a single man must be in want of a wife."])
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QsubConfig(), dtype=torch.float32)
    model = adapted(base=base)
    losses = train(model, batch, steps=4, lr=1e-3)
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QsubConfig(), dtype=torch.float32)
    expected = output(model, batch)
    assert not torch.equal(output(again, batch), expected)
    assert torch.equal(output(PeftModel.from_pretrained(again, tmp_path).eval(), batch), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_take_the_dtype_that_the_weight_shows(dtype):
    model = qsub.quantize_(tiny_llama().to(dtype))
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj"]), autocast_adapter_dtype=False)
    assert layer(model).lora_A["default"].weight.dtype == dtype == output(model, tiny_batch()).dtype


def test_adapters_that_add_to_the_result_in_place():
    """AdaLoRA's layers do `result += ...`; in int8 as on the dequantized model, to the order of fp32 sums."""
    config = AdaLoraConfig(target_modules=["q_proj", "up_proj"], total_step=10, init_r=4, task_type="CAUSAL_LM")
    model = get_peft_model(qsub.quantize_(tiny_llama()), config)
    twin = qsub.dequantize_(copy.deepcopy(model))
    found, expected = (train(each, tiny_batch()) for each in (model, twin))
    assert found == pytest.approx(expected, abs=1e-5) and found[-1] < found[0] - 1e-3


# ---- Merging ----


def half_step(weight):
    """(rows, 1): half the distance of two codes of each row, the most that rounding to nearest is off."""
    return (weight.scale.double() / 127 / 2)[:, None]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_merge_is_within_half_a_step_and_unmerge_goes_back(order, safe, dora):
    model = adapted(order, dora)
    base = layer(model).base_layer.weight
    before = base.dequantize(torch.float64)
    delta = layer(model).get_delta_weight("default").double()
    exact, factor = before + delta, torch.ones(())
    if dora:
        magnitude = layer(model).lora_magnitude_vector["default"].weight.double()
        factor = magnitude[:, None] / exact.norm(dim=1, keepdim=True)
        exact = exact * factor
    expected = output(model, tiny_batch())
    model.merge_adapter(safe_merge=safe)
    merged = layer(model).base_layer.weight
    step = half_step(merged)
    error = (merged.dequantize(torch.float64) - exact).abs()
    # the sum is rounded to fp32 before it is coded, and the row's maximum to fp16 (2**-11), which moves the codes
    assert isinstance(merged, Int8RowwiseTensor) and (error <= step * (1 + 2**-8) + 1e-6).all()
    assert (before - exact).abs().max() > 4 * step.max()  # a merge that did nothing would be seen
    close = (output(model, tiny_batch()) - expected).norm() / expected.norm()
    model.unmerge_adapter()
    back = layer(model).base_layer.weight
    error = (back.dequantize(torch.float64) - before).abs()
    assert (error <= (step / factor + half_step(back)) * (1 + 2**-8) + 1e-6).all()
    assert close < 0.02


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unload_gives_an_int8_model_that_is_saved(tmp_path, safe):
    model = adapted()
    expected = output(model, tiny_batch())
    merged = model.merge_and_unload(safe_merge=safe)
    assert len(int8_weights(merged)) == 15 and not any("lora" in name for name, _ in merged.named_parameters())
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(output(again, tiny_batch()), output(merged, tiny_batch()))
    assert (output(merged, tiny_batch()) - expected).norm() < 0.02 * expected.norm()


def test_a_merge_of_nan_is_refused_when_asked_to_be_safe():
    model = adapted()
    layer(model).lora_B["default"].weight.data[0, 0] = float("nan")
    before = layer(model).base_layer.weight.int_data.clone()
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer(model).base_layer.weight.int_data, before)


# ---- Saving ----


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_saved_and_loaded(tmp_path, dora):
    model = adapted(dora=dora)
    model.save_pretrained(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 64_000
    again = PeftModel.from_pretrained(qsub.quantize_(tiny_llama()), tmp_path).eval()
    assert torch.equal(output(again, tiny_batch()), output(model, tiny_batch()))
    other = output(qsub.quantize_(tiny_llama()), tiny_batch())
    assert not torch.equal(other, output(model, tiny_batch()))


def test_adapters_of_transformers_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)  # asks for peft 0.22
    tiny_llama().save_pretrained(tmp_path / "base")
    load = AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "base", quantization_config=QsubConfig())
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    expected = output(model, tiny_batch())
    model.save_pretrained(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = load(tmp_path / "base", quantization_config=QsubConfig())
    again.load_adapter(tmp_path / "adapter")
    assert torch.equal(output(again, tiny_batch()), expected)


# ---- prepare_model_for_kbit_training ----


def test_preparation_leaves_weights_that_show_fp32_alone():
    model = qsub.quantize_(tiny_llama().to(torch.bfloat16))
    before = [weight.int_data.clone() for weight in int8_weights(model)]
    prepared = prepare_model_for_kbit_training(model.to(torch.float32))
    assert all(map(torch.equal, before, (weight.int_data for weight in int8_weights(prepared))))
    assert not any(param.requires_grad for param in prepared.parameters())
    losses = train(get_peft_model(prepared, LoraConfig(target_modules=["q_proj"])), tiny_batch())
    assert losses[-1] < losses[0]


def test_preparation_of_weights_in_16_bits_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"must keep its dtype torch.bfloat16.*call .to\(torch.float32\) on the module"
    ):
        prepare_model_for_kbit_training(qsub.quantize_(tiny_llama().to(torch.bfloat16)))
