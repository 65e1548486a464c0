"""transformers: options and checkpoints that don't fit, and the order of imports."""

import json
import logging
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import transformers
from hf_models import tiny_batch, tiny_llama
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import qsub
from qsub import QsubConfig
from qsub.interop.hf_config import int8_weights
from qsub.interop.transformers import from_bitsandbytes

WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def saved(tmp_path):
    qsub.quantize_(tiny_llama()).save_pretrained(tmp_path)
    return tmp_path


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@contextmanager
def reports():
    """A list of what transformers logs meanwhile."""
    lines, logger, handler = [], logging.getLogger("transformers"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("WARNING")
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


# ---- Options ----


@pytest.mark.parametrize(
    "options, kind, text",
    [
        ({"activations": "int4"}, ValueError, "activations must be None or \"int8\", got 'int4'"),
        ({"outlier_threshold": 6.0}, ValueError, 'comes with activations="int8"'),
        ({"activations": "int8", "outlier_threshold": -1}, ValueError, "must be positive"),
        ({"backward": "fp8"}, ValueError, "got 'fp8'"),
        ({"skip": "lm_head"}, TypeError, r'list of names of modules such as \["lm_head"\], got \'lm_head\''),
        ({"skip": [3]}, TypeError, r"got \[3\]"),
        ({"bits": 8}, TypeError, "bits"),
    ],
)
def test_options_that_do_not_fit(options, kind, text):
    with pytest.raises(kind, match=text):
        QsubConfig(**options)


def test_a_name_to_skip_that_no_layer_has(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"skip names \['classifier', 'proj'\], but no layer of LlamaForCausalLM"):
        load(tmp_path, quantization_config=QsubConfig(skip=["lm_head", "classifier", "proj"]))
    config = QsubConfig(skip=["lm_head"])
    load(tmp_path, quantization_config=config).save_pretrained(tmp_path / "int8")
    assert int8_weights(load(tmp_path / "int8").model)  # a saved list may name more than a part of the model has


def test_a_model_without_a_weight_to_quantize(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)).save_pretrained(tmp_path / "gpt2")
    tiny_llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no weight to quantize: no nn.Linear"):
        load(tmp_path / "gpt2", quantization_config=QsubConfig())
    with pytest.raises(ValueError, match="or in skip. Load it without quantization_config"):
        load(tmp_path / "llama", quantization_config=QsubConfig(skip=["layers", "lm_head"]))
    model = load(tmp_path / "gpt2", quantization_config=QsubConfig(embeddings=True))
    assert len(int8_weights(model)) == 2 and model.lm_head.weight is model.transformer.wte.weight


def test_an_option_of_a_later_version(saved):
    edit_config(saved, quantization_config={"quant_method": "qsub", "bits": 4})
    with pytest.raises(ValueError, match=r"options \['bits'\] that this qsub doesn't know: install a newer one"):
        load(saved)


def test_disk_offload_is_refused(saved):
    with pytest.raises(ValueError, match='int8 weights are not offloaded to disk. Offload to "cpu"'):
        load(saved, device_map={"model": "disk", "lm_head": "cpu"})


# ---- Checkpoints ----


def test_float_files_under_an_int8_config(saved):
    tiny_llama().save_pretrained(saved / "float")
    edit_config(saved / "float", quantization_config={"quant_method": "qsub"})
    with pytest.raises(ValueError, match="says that weights are int8, but no file holds any. Remove its"):
        load(saved / "float")


@pytest.mark.parametrize(
    "part, text", [("int_data", "weight.int_data is missing"), ("scale", "weight.scale is missing")]
)
def test_half_of_a_weight(saved, part, text):
    edit_tensors(saved, lambda tensors: tensors.pop(f"{WEIGHT}.{part}"))
    with reports() as lines, pytest.raises(RuntimeError, match="conversion"):
        load(saved)
    assert f"{WEIGHT.removesuffix('weight')}{text} in the checkpoint" in "\n".join(lines)


@pytest.mark.parametrize(
    "part, value, text",
    [
        ("scale", torch.ones(31, dtype=torch.float16), r"\(out_features,\) scale"),
        ("scale", torch.ones(32), "an fp16 scale, got"),
        ("int_data", torch.zeros(32, 48), "takes int8 codes"),
    ],
)
def test_parts_that_do_not_fit(saved, part, value, text):
    edit_tensors(saved, lambda tensors: tensors.update({f"{WEIGHT}.{part}": value}))
    with reports() as lines, pytest.raises(RuntimeError, match="conversion"):
        load(saved)
    assert re.search(text, "\n".join(lines))


@pytest.mark.parametrize("int8", [False, True])
def test_shapes_that_do_not_fit(tmp_path, int8):
    tiny_llama().save_pretrained(tmp_path / "float")
    model = load(tmp_path / "float", quantization_config=QsubConfig())
    if int8:
        model.save_pretrained(tmp_path / "int8")
    folder, options = (tmp_path / "int8", {}) if int8 else (tmp_path / "float", {"quantization_config": QsubConfig()})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder, intermediate_size=40, **options)
    if Version(transformers.__version__) < Version("5.23"):  # whose models with a quantizer ignore none
        with pytest.raises(RuntimeError, match=r"is \(48, 32\) in the checkpoint, but \(40, 32\) in the model"):
            load(folder, intermediate_size=40, ignore_mismatched_sizes=True, **options)
        return
    again = load(folder, intermediate_size=40, ignore_mismatched_sizes=True, **options)
    assert again.model.layers[0].mlp.up_proj.weight.shape == (40, 32) and len(int8_weights(again)) == 9
    assert output_is_finite(again)


def output_is_finite(model):
    with torch.no_grad():
        return bool(model(**tiny_batch()).logits.isfinite().all())


def test_missing_weights_are_reported_by_transformers(saved):
    edit_tensors(saved, lambda tensors: [tensors.pop(f"{WEIGHT}.{part}") for part in ("int_data", "scale")])
    with reports() as lines:
        model, info = load(saved, output_loading_info=True)
    assert info["missing_keys"] == {WEIGHT} and "MISSING" in "\n".join(lines) and output_is_finite(model)


@pytest.mark.parametrize(
    "quantization, got",
    [
        (None, "got no quantization_config"),
        ({"quant_method": "qsub"}, "got qsub"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "got bitsandbytes"),
    ],
)
def test_folders_that_are_not_of_bitsandbytes_in_8_bits(tmp_path, quantization, got):
    tiny_llama().save_pretrained(tmp_path)
    if quantization:
        edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ValueError, match=rf"expected config.json of 8-bit bitsandbytes layers \(load_in_8bit\), {got}"):
        from_bitsandbytes(AutoModelForCausalLM, tmp_path)


# ---- Imports ----

_ORDERS = {
    "qsub first": "import qsub, sys; assert 'transformers' not in sys.modules\nimport transformers",
    "transformers first": "import transformers\nimport qsub",
    "its registry first": "from transformers import PreTrainedModel\nimport qsub",
    "the integration first": "from qsub.interop.transformers import from_bitsandbytes",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", _ORDERS)
def test_any_order_of_imports_will_do(saved, order):
    code = f"""
{_ORDERS[order]}
import sys
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model.lm_head.weight).__name__ == "Int8RowwiseTensor"
assert not [f for f in sys.meta_path if "qsub" in type(f).__module__ and f.name.startswith("transformers")]
"""
    subprocess.run([sys.executable, "-c", code, str(saved)], check=True, timeout=100)


def test_without_transformers():
    code = """
import sys
sys.modules["transformers"] = None
import qsub
assert [name for name in dir(qsub) if name.startswith("quantize")]
try:
    qsub.QsubConfig
except ImportError as error:
    assert "pip install 'transformers>=5.6'" in str(error)
else:
    raise AssertionError
try:
    qsub.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
