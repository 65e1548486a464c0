"""Merges and other updates that are small against the steps of the int8 codes: what is lost, and the ways out."""

import copy
import warnings

import pytest
import torch
from hf_models import output, tiny_batch
from test_pages import ROOT, load
from test_peft import adapted, half_step, layer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import qsub
from qsub import Int8RowwiseTensor
from qsub.interop.hf_config import int8_weights
from qsub.interop.peft import merge_and_unload
from qsub.tensors.rounding import collected

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def gentle(factor=2e-5, dora=False):
    """Adapters whose change is a few thousandths of a step; at 7e-4, a tenth of one."""
    model = adapted(dora=dora)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.mul_(factor)
    return model


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")  # which shows a text once for each line of code
        result = call()
    return result, found


def share_kept(model, merged):
    """Of the change in up_proj, from the tensors themselves."""
    before = layer(model).base_layer.weight.dequantize(torch.float64)
    delta = layer(model).get_delta_weight("default").double()
    after = merged.get_submodule("model.layers.0.mlp.up_proj").weight.double()
    return ((after - before) * delta).sum().item() / delta.square().sum().item()


@pytest.mark.parametrize("safe", [False, True])
def test_a_merge_that_is_rounded_away_warns_once(safe):
    model = gentle()
    before = layer(model).base_layer.weight.int_data.clone()
    _, found = warned(lambda: model.merge_adapter(safe_merge=safe))
    assert torch.equal(layer(model).base_layer.weight.int_data, before)
    assert [(w.category, w.filename) for w in found] == [(UserWarning, __file__)]  # for four weights, at this line
    assert "kept less than 1% of itself" in str(found[0].message) and "merge_and_unload" in str(found[0].message)


@pytest.mark.parametrize("safe", [False, True])
def test_a_change_of_many_steps_does_not_warn(safe):
    model = adapted()
    _, found = warned(lambda: model.merge_adapter(safe_merge=safe))
    assert not found
    with collected(False) as updates:  # the negative control: it was looked at
        model.unmerge_adapter()
    assert len(updates.total) == 4 and updates.share == pytest.approx(1, abs=0.02)


def test_dora_is_measured_too():
    """Its new weight is assigned to .data."""
    model = gentle(dora=True)
    for name, param in model.named_parameters():
        if "lora_magnitude_vector" in name:  # so that the change of the lengths is as small
            base = model.get_submodule(name.rsplit(".", 3)[0]).base_layer.weight
            param.data.copy_(base.dequantize().norm(dim=1))
    _, found = warned(model.merge_adapter)
    assert len(found) == 1 and "kept less than 1%" in str(found[0].message)
    model = gentle(dora=True)
    expected = output(model, tiny_batch())
    merged = merge_and_unload(model)
    assert (output(merged, tiny_batch()) - expected).norm() < 0.02 * expected.norm()


def test_stochastic_rounding_keeps_the_change():
    """The expected share is 1, and each element's draw has a variance of f (1 - f) for a change of f steps.

    So the share's is below sum(f**3) / sum(f**2)**2, with the steps of each row as unit; five times its root is the
    tolerance.
    """
    model = gentle(7e-4)
    steps = layer(model).get_delta_weight("default").double() / (2 * half_step(layer(model).base_layer.weight))
    weight = (2 * half_step(layer(model).base_layer.weight)) ** 2
    variance = (weight**2 * steps.abs() ** 3).sum() / (weight * steps**2).sum() ** 2
    nearest, _ = warned(copy.deepcopy(model).merge_and_unload)
    merged, found = warned(lambda: merge_and_unload(copy.deepcopy(model)))
    assert share_kept(model, merged) == pytest.approx(1, abs=5 * variance.sqrt().item())
    assert variance.sqrt() < 0.1 and share_kept(model, nearest) < 0.5  # the negative control
    assert len(int8_weights(merged)) == 15 and not any(weight.requires_grad for weight in int8_weights(merged))
    safe = merge_and_unload(copy.deepcopy(model), safe_merge=True)
    assert share_kept(model, safe) == pytest.approx(1, abs=5 * variance.sqrt().item())
    again = merge_and_unload(copy.deepcopy(model))
    assert all(torch.equal(a.int_data, b.int_data) for a, b in zip(*map(int8_weights, (merged, again)), strict=True))


def test_a_float_merge_is_exact_and_leaves_the_rest_in_int8(tmp_path):
    model = gentle()
    expected = output(model, tiny_batch())
    merged, found = warned(lambda: merge_and_unload(model, "float"))
    assert not found and len(int8_weights(merged)) == 11
    weight = merged.get_submodule("model.layers.0.mlp.up_proj").weight
    assert type(weight) is nn.Parameter
    assert torch.allclose(output(merged, tiny_batch()), expected, atol=1e-5)  # fp32 sums in another order
    qsub.save_file(merged.state_dict(), tmp_path / "model.safetensors")
    assert torch.equal(qsub.load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"], weight)


def test_a_float_merge_of_all_layers_is_a_float_model(tmp_path):
    from hf_models import tiny_llama
    from peft import LoraConfig, get_peft_model

    model = qsub.quantize_(tiny_llama(), filter_fn=lambda name, _: "up_proj" in name)
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj"], init_lora_weights=False)).eval()
    expected = output(model, tiny_batch())
    merge_and_unload(model, "float").save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(output(again, tiny_batch()), expected, atol=1e-5)


def test_nearest_tells_the_share_in_one_warning():
    model = gentle(7e-4)
    merged, found = warned(lambda: merge_and_unload(copy.deepcopy(model), "nearest"))
    assert len(found) == 1 and found[0].filename == __file__
    text = str(found[0].message)
    assert r"of the adapter's change is left in the int8 weights (4 of 4 lost more than a tenth)" in text
    assert 0 <= float(text.partition("%")[0]) < 50
    assert int8_weights(merged)[0].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an update in place:UserWarning")  # as the script does
def test_the_benchmark_on_a_real_model(monkeypatch):
    """The setting of benchmarks/results/adapter_merge.csv on less text, a page of the documentation."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = load(ROOT / "benchmarks" / "adapter_merge.py")
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    monkeypatch.setattr(script.real_inputs, "austen", lambda: {"emma": text, script.HELD_OUT: text[3000:]})
    rows = {row["way"]: row for row in script.rows(5, 1e-3, 0, small=True)}
    adapter = rows.pop("adapter beside int8")
    lost = rows.pop("int8, no adapter")["seen"] - adapter["seen"]
    off = {way: row["seen"] - adapter["seen"] for way, row in rows.items()}
    assert lost > 0.1 and rows["into int8, to nearest"]["kept"] < 0.1
    assert off["into int8, to nearest"] > 0.8 * lost and abs(off["into int8, stochastic"]) < 0.1 * lost
    assert abs(off["int8 dequantized, kept in float"]) < 1e-4  # fp32 sums in another order


def test_errors():
    with pytest.raises(ValueError, match="rounding must be one of stochastic, nearest, float, got 'up'"):
        merge_and_unload(nn.Linear(2, 2), "up")
    with pytest.raises(TypeError, match="takes a PeftModel whose adapters can be merged, got Linear"):
        merge_and_unload(nn.Linear(2, 2))


# ---- Other updates in place ----


def frozen():
    torch.manual_seed(0)
    return nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(64, 64)), requires_grad=False)


@pytest.mark.parametrize(
    "update",
    [
        lambda w: w.data.add_(torch.full((64, 64), 1e-4)),
        lambda w: torch._foreach_add_([w.data], [torch.full((64, 64), 1e-4)]),
        lambda w: w.data.lerp_(w.dequantize() + 1e-2, 1e-2),
        lambda w: w.data.mul_(1.0001),  # less than an fp16 scale can say
        lambda w: setattr(w, "data", w.dequantize() + 1e-4),
    ],
)
def test_any_update_that_is_lost_warns(update):
    weight = frozen()
    with pytest.warns(UserWarning, match="kept less than 1% of itself"):
        update(weight)


@pytest.mark.parametrize(
    "update",
    [
        lambda w: w.data.add_(torch.full((64, 64), 0.1)),
        lambda w: w.data.mul_(0.5),
        lambda w: w.data.zero_(),
        lambda w: w.data.neg_(),
        lambda w: w.data.normal_(),
        lambda w: w.data.add_(0.0),
        lambda w: w.data.clamp_(-1, 1),
        lambda w: w.data.copy_(w.dequantize() + 1e-4),  # loads a value, which is no update
        lambda w: setattr(w, "data", w.dequantize()),
        lambda w: setattr(w, "data", w.dequantize(torch.bfloat16).to(torch.bfloat16)),
    ],
)
def test_updates_that_are_kept_do_not_warn(update):
    update(frozen())


def test_weights_that_train_are_rounded_stochastically_and_do_not_warn():
    weight = frozen().requires_grad_(True)
    with torch.no_grad():
        weight.add_(torch.full((64, 64), 1e-4))


def test_an_average_in_int8_warns():
    model = qsub.quantize_(nn.Linear(64, 64), trainable=True)
    average = AveragedModel(copy.deepcopy(model).requires_grad_(False), multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(0.01)
    with pytest.warns(UserWarning, match="keep averages of weights in float"):
        average.update_parameters(model)
