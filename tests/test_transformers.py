"""transformers: from_pretrained with a QsubConfig, saving, loading and going back, on real models offline."""

import json
import subprocess
import sys

import pytest
import torch
from hf_models import folder_of, output, tiny_batch, tiny_llama, tokens
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

import qsub
from qsub import Int8RowwiseTensor, QsubConfig
from qsub.interop.hf_config import int8_weights
from qsub.interop.transformers import from_bitsandbytes
from qsub.streaming.source import open_source

CLASSES = {"minilm": AutoModel, "smollm2": AutoModelForCausalLM}
MODES = [{}, {"activations": "int8"}, {"activations": "int8", "outlier_threshold": 6.0}, {"backward": "int8"}]


def equal_state(a, b):
    theirs = b.state_dict()
    return a.state_dict().keys() == theirs.keys() and all(
        type(value) is type(theirs[name]) and torch.equal(plain(value), plain(theirs[name]))
        for name, value in a.state_dict().items()
    )


def plain(value):
    return value.dequantize() if isinstance(value, Int8RowwiseTensor) else value


@pytest.fixture
def tiny(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "float")
    return tmp_path / "float"


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


# ---- Quantized while loading ----


@pytest.mark.parametrize(
    "name, options", [*(("minilm", m) for m in MODES), pytest.param("smollm2", MODES[1], marks=pytest.mark.slow)]
)
def test_loading_is_quantize_of_the_float_model(name, options):
    folder, kind = folder_of(name), CLASSES[name]
    batch = tokens(folder)
    model = kind.from_pretrained(folder, quantization_config=QsubConfig(**options))
    expected = qsub.quantize_(kind.from_pretrained(folder), **options)
    other = qsub.quantize_(kind.from_pretrained(folder), **MODES[0 if options.get("activations") else 1])
    assert equal_state(model, expected) and len(int8_weights(model)) == {"minilm": 37, "smollm2": 210}[name]
    assert torch.equal(output(model, batch), output(expected, batch))
    assert not torch.equal(output(model, batch), output(other, batch))
    assert not any(weight.requires_grad for weight in int8_weights(model))


def test_the_head_of_smollm2_stays_tied_to_the_embedding_in_float_or_in_int8():
    folder = folder_of("smollm2")
    model = load(folder, quantization_config=QsubConfig())
    assert type(model.lm_head.weight) is nn.Parameter and model.lm_head.weight is model.model.embed_tokens.weight
    model = load(folder, quantization_config=QsubConfig(embeddings=True))
    assert isinstance(model.lm_head.weight, Int8RowwiseTensor)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "skip, kept",
    [
        (["lm_head"], {"lm_head"}),
        (["model.layers.0"], {f"model.layers.0.{part}" for part in ("self_attn", "mlp")}),
        (["down_proj", "lm_head"], {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
    ],
)
def test_skip_leaves_modules_in_float(tiny, skip, kept):
    model = load(tiny, quantization_config=QsubConfig(skip=skip))
    floats = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and type(m.weight) is nn.Parameter}
    assert floats and all(any(f"{name}.".startswith(f"{part}.") for part in kept) for name in floats)
    assert all(any(f"{name}.".startswith(f"{part}.") for name in floats) for part in kept)


def test_trainable_keeps_requires_grad(tiny):
    model = load(tiny, quantization_config=QsubConfig(trainable=True))
    assert all(weight.requires_grad for weight in int8_weights(model))
    model(**tiny_batch(), labels=tiny_batch()["input_ids"]).loss.backward()
    assert all(type(weight.grad) is torch.Tensor for weight in int8_weights(model))


def test_a_new_head_stays_float_and_trainable():
    folder = folder_of("minilm")
    model = AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=QsubConfig(), num_labels=3)
    assert type(model.classifier.weight) is nn.Parameter and model.classifier.weight.requires_grad
    assert len(int8_weights(model)) == 37


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_device_map(tiny, device_map):
    model = load(tiny, quantization_config=QsubConfig(), device_map=device_map)
    assert torch.equal(output(model, tiny_batch()), output(qsub.quantize_(load(tiny)), tiny_batch()))


def test_generate_on_int8():
    folder = folder_of("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = load(folder, quantization_config=QsubConfig(embeddings=True))
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


_PEAK = """
import re, sys
import qsub
assert "transformers" not in sys.modules
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
grown = 0
def anonymous():  # what is mapped from the file is not counted
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
quantize_rows = qsub.tensors.codes.quantize_rows
def recording(*args):
    global grown
    grown = max(grown, anonymous() - start)
    return quantize_rows(*args)
qsub.tensors.codes.quantize_rows = recording
folder, on_the_fly = sys.argv[1], sys.argv[2] == "True"
start = anonymous()
options = {"quantization_config": qsub.QsubConfig()} if on_the_fly else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
qsub.quantize_(model)
print(max(grown, anonymous() - start), sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
def test_peak_memory_is_the_int8_model_and_a_tensor():
    """Of SmolLM2 in fp32: 538 MB of float, 219 MB with int8 layers, of which the embedding is 113."""
    peaks = {}
    for on_the_fly in (True, False):
        command = [sys.executable, "-c", _PEAK, str(folder_of("smollm2")), str(on_the_fly)]
        peaks[on_the_fly], size = map(int, subprocess.check_output(command, text=True).splitlines()[-1].split())
    largest = 49152 * 576 * 4
    assert peaks[True] < size + 1.5 * largest < 425e6
    assert peaks[False] > 538e6  # what is measured does see a float model


# ---- Saving and loading ----


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name, embeddings, share",
    [
        pytest.param("smollm2", False, 0.61, marks=pytest.mark.slow),
        pytest.param("smollm2", True, 0.51, marks=pytest.mark.slow),
        ("minilm", True, 0.51),
    ],
)
def test_round_trip_is_bit_identical_and_small(tmp_path, name, embeddings, share):
    folder, kind = folder_of(name), CLASSES[name]
    batch = tokens(folder)
    float_model = kind.from_pretrained(folder, dtype=torch.float16)
    model = kind.from_pretrained(folder, quantization_config=QsubConfig(embeddings=embeddings), dtype=torch.float16)
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert torch.equal(output(again, batch), output(model, batch)) and equal_state(again, model)
    assert not torch.equal(output(float_model, batch), output(model, batch))
    assert size_of(tmp_path) < share * sum(p.nbytes for p in float_model.parameters())
    again.save_pretrained(tmp_path / "again")
    assert equal_state(kind.from_pretrained(tmp_path / "again"), model)


def test_the_file_is_that_of_save_file(tmp_path):
    model = qsub.quantize_(tiny_llama())
    model.save_pretrained(tmp_path)
    loaded = qsub.load_file(tmp_path / "model.safetensors")
    other = qsub.quantize_(tiny_llama(hidden_act="relu")).requires_grad_(False)
    assert other.load_state_dict(loaded) and equal_state(other, model)


def test_shards(tmp_path):
    model = qsub.quantize_(tiny_llama())
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert files["lm_head.weight.int_data"] != files["lm_head.weight.scale"]
    assert equal_state(load(tmp_path), model)
    other = tiny_llama()
    other.load_state_dict(qsub.load_file(tmp_path), assign=True)
    assert equal_state(other, model)
    assert len(open_source(tmp_path).quantized) == 15  # what the command line sees


def test_a_headless_model_and_back(tmp_path):
    model = qsub.quantize_(tiny_llama())
    model.save_pretrained(tmp_path / "whole")
    body = AutoModel.from_pretrained(tmp_path / "whole")
    assert equal_state(body, model.model)
    body.save_pretrained(tmp_path / "body")
    again = load(tmp_path / "body")
    assert equal_state(again.model, model.model) and type(again.lm_head.weight) is nn.Parameter
    model.model.save_pretrained(tmp_path / "inner")  # the body of a model that was quantized with its head
    assert equal_state(AutoModel.from_pretrained(tmp_path / "inner"), body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_what_the_weights_show(tmp_path, dtype):
    model = qsub.quantize_(tiny_llama(), activations="int8")
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=dtype)
    assert {p.dtype for p in again.parameters()} == {dtype} == {output(again, tiny_batch()).dtype}
    for weight, before in zip(int8_weights(again), int8_weights(model), strict=True):
        assert torch.equal(weight.int_data, before.int_data) and weight.activations == "int8"


def test_quantize_and_save_pretrained(tmp_path):
    model = qsub.quantize_(tiny_llama(), activations="int8", outlier_threshold=6.0, trainable=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "qsub" and config["outlier_threshold"] == 6.0 and config["trainable"]
    assert equal_state(load(tmp_path), model)
    qsub.dequantize_(model).save_pretrained(tmp_path / "float")
    assert "quantization_config" not in json.loads((tmp_path / "float/config.json").read_text())
    assert equal_state(load(tmp_path / "float"), model)


def test_layers_of_different_modes_are_refused(tmp_path):
    model = qsub.quantize_(tiny_llama(), filter_fn=lambda name, _: "mlp" in name)
    qsub.quantize_(model, activations="int8", filter_fn=lambda name, _: "mlp" not in name)
    with pytest.raises(ValueError, match="different modes .*qsub.save_file"):
        model.save_pretrained(tmp_path)


def test_ties_of_int8_layers_are_saved_once(tmp_path):
    model = load(folder_of("smollm2"), quantization_config=QsubConfig(embeddings=True))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not any(name.startswith("lm_head") for name in file.keys())  # noqa: SIM118


def test_weights_shared_in_another_way_are_saved_under_each_name(tmp_path):
    """A float model like that is refused by transformers; stored once, the second name would come back at random."""
    model = tiny_llama()
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    model.lm_head.weight = model.model.embed_tokens.weight  # though the config says that they aren't tied
    qsub.quantize_(model).save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert equal_state(again, model) and not report["missing_keys"] and not report["unexpected_keys"]
    assert first.up_proj.weight is second.up_proj.weight


# ---- And back ----


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_dequantize(tmp_path, dtype):
    folder = folder_of("minilm")
    batch = tokens(folder)
    model = AutoModel.from_pretrained(folder, quantization_config=QsubConfig(), dtype=torch.bfloat16)
    values = {
        name: p.dequantize(torch.float32) for name, p in model.named_parameters() if isinstance(p, Int8RowwiseTensor)
    }
    model.dequantize(dtype)
    shown = dtype or torch.bfloat16
    assert {type(p) for p in model.parameters()} == {nn.Parameter} and {p.dtype for p in model.parameters()} == {shown}
    for name, value in values.items():
        assert torch.equal(model.get_parameter(name), value.bfloat16().to(shown))
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(output(AutoModel.from_pretrained(tmp_path), batch), output(model, batch))


# ---- bitsandbytes ----


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """MiniLM as transformers saves it with bitsandbytes, and the model."""
    folder = tmp_path_factory.mktemp("bitsandbytes")
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["pooler"])
    model = AutoModel.from_pretrained(folder_of("minilm"), quantization_config=config, dtype=torch.float16)
    model.save_pretrained(folder)
    return folder, model


def test_a_folder_of_bitsandbytes(theirs, tmp_path):
    folder, model = theirs
    ours = from_bitsandbytes(AutoModel, folder)
    assert len(int8_weights(ours)) == 36 and type(ours.pooler.dense.weight) is nn.Parameter
    for name, weight in ours.named_parameters():
        theirs_ = model.get_parameter(name)
        if isinstance(weight, Int8RowwiseTensor):
            assert torch.equal(weight.int_data, theirs_.data) and torch.equal(weight.scale.float(), theirs_.SCB)
            assert weight.activations == "int8" and weight.outlier_threshold == 6.0
        else:
            assert torch.equal(weight, theirs_)
    ours.save_pretrained(tmp_path)
    assert equal_state(AutoModel.from_pretrained(tmp_path), ours)
    shown = from_bitsandbytes(AutoModel, folder, QsubConfig(), dtype=torch.float32)
    assert {p.dtype for p in shown.parameters()} == {torch.float32} and int8_weights(shown)[0].activations is None


def test_it_answers_as_bitsandbytes_does(theirs):
    folder, model = theirs
    batch = tokens(folder_of("minilm"))
    expected = output(model, batch).float()[batch["attention_mask"].bool()]
    cosine = nn.functional.cosine_similarity
    ours = output(from_bitsandbytes(AutoModel, folder), batch).float()[batch["attention_mask"].bool()]
    assert cosine(ours, expected).min() > 0.99
    wrong = from_bitsandbytes(AutoModel, folder)
    for weight in int8_weights(wrong):
        weight.scale.fill_(weight.scale.mean())
    assert cosine(output(wrong, batch).float()[batch["attention_mask"].bool()], expected).min() < 0.99
