"""transformers: what save_pretrained writes of int8 models, under which names, and who reads it."""

import json
import warnings

import pytest
import torch
import transformers
from hf_models import tiny_llama
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, NomicBertConfig, NomicBertModel

import qsub
from qsub import Int8RowwiseTensor, QsubConfig
from qsub.interop.hf_config import int8_weights

WEIGHT = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def parts(value):
    return (value.int_data, value.scale) if isinstance(value, Int8RowwiseTensor) else (value,)


def assert_equal(state, expected):
    """Of the same names, kinds and bits."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        pairs = zip(parts(state[name]), parts(value), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs), name


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def nomic_bert():
    """Its files have one tensor for q, k and v, which transformers splits while it loads."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return NomicBertModel(NomicBertConfig(vocab_size=99, **shape)).eval()


# ---- Names ----


def test_int8_files_have_the_names_of_the_model(tmp_path):
    model = qsub.quantize_(nomic_bert())
    model.save_pretrained(tmp_path)
    assert_equal(qsub.load_file(tmp_path), model.state_dict())
    again, report = NomicBertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_equal(again.state_dict(), model.state_dict())
    again.save_pretrained(tmp_path / "again")
    assert_equal(qsub.load_file(tmp_path / "again"), model.state_dict())
    fresh = qsub.quantize_(nomic_bert())
    assert not any(fresh.load_state_dict(load_file(tmp_path / "model.safetensors")))  # as a Trainer resumes


def test_float_files_have_those_of_the_original_checkpoint_again(tmp_path):
    original = nomic_bert()
    original.save_pretrained(tmp_path / "float")
    names = set(load_file(tmp_path / "float" / "model.safetensors"))
    assert names != set(original.state_dict())  # else this tests nothing
    model = NomicBertModel.from_pretrained(tmp_path / "float")
    qsub.dequantize_(qsub.quantize_(model)).save_pretrained(tmp_path / "a")
    model = NomicBertModel.from_pretrained(tmp_path / "float", quantization_config=QsubConfig())
    model.save_pretrained(tmp_path / "int8")
    model.dequantize().save_pretrained(tmp_path / "b")
    NomicBertModel.from_pretrained(tmp_path / "int8").dequantize().save_pretrained(tmp_path / "c")
    for folder in "abc":
        assert set(load_file(tmp_path / folder / "model.safetensors")) == names
        assert_equal(NomicBertModel.from_pretrained(tmp_path / folder).state_dict(), model.state_dict())


def test_the_original_format_is_refused(tmp_path):
    model = qsub.quantize_(tiny_llama())
    with pytest.raises(ValueError, match=r"save_original_format=True: .* Leave it out, or save model.dequantize\(\)"):
        model.save_pretrained(tmp_path, save_original_format=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    tiny_llama().save_pretrained(tmp_path / "float", save_original_format=True)  # a float model is none of qsub's


def test_a_folder_of_an_earlier_version(tmp_path):
    """With the names of the original checkpoint and no mark: read where transformers only renames, else refused."""
    model = qsub.quantize_(nomic_bert())
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    qkv = [stored.pop(f"layers.0.self_attn.{name}_proj.weight.int_data") for name in "qkv"]
    stored["encoder.layers.0.attn.Wqkv.weight.int_data"] = torch.cat(qkv)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"Wqkv.weight.int_data has the name of .* quantize the float checkpoint"):
        NomicBertModel.from_pretrained(tmp_path)

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vit = qsub.quantize_(transformers.ViTModel(transformers.ViTConfig(**shape)).eval())
    vit.save_pretrained(tmp_path / "vit")
    path, old = tmp_path / "vit" / "model.safetensors", {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    stored = {}
    for key, value in load_file(path).items():
        for name, original in old.items():
            key = key.replace(f"layers.0.attention.{name}", f"encoder.layer.0.attention.attention.{original}")
        stored[key] = value
    save_file(stored, path, {"format": "pt"})
    assert any("attention.query.weight.scale" in key for key in stored)
    assert_equal(transformers.ViTModel.from_pretrained(tmp_path / "vit").state_dict(), vit.state_dict())


def test_a_model_of_another_class_finds_its_names(tmp_path):
    """A language model in the file of one that sees, whose names transformers changes for it."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**shape, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(**shape, vocab_size=64)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    model = qsub.quantize_(transformers.LlavaForConditionalGeneration(config).eval())
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body).__name__ == "LlavaModel"
    assert_equal(body.state_dict(), model.model.state_dict())
    names = {"^model.language_model": "model"}  # what a user may say
    language, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, config=text_config_of(tmp_path), key_mapping=names, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert_equal(language.model.state_dict(), model.model.language_model.state_dict())
    assert isinstance(language.lm_head.weight, Int8RowwiseTensor)


def text_config_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.text_config
    text.quantization_config = config.quantization_config
    return text


# ---- Which tensors ----


@pytest.mark.parametrize("said", [False, True])
def test_a_head_untied_by_the_user_is_saved(tmp_path, said):
    """Whether config.json was told of it or not; transformers leaves two that differ apart."""
    model = tiny_llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)
    if said:
        model.config.tie_word_embeddings = False
    qsub.quantize_(model).save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and isinstance(again.lm_head.weight, Int8RowwiseTensor)
    assert_equal(again.state_dict(), model.state_dict())


def test_a_tied_head_is_left_out_and_loads(tmp_path):
    model = qsub.quantize_(tiny_llama(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    state = qsub.load_file(tmp_path)
    assert state["lm_head.weight"] is state[EMBEDDING]
    assert not any(tiny_llama(tie_word_embeddings=True).load_state_dict(state, assign=True))


def test_a_head_that_an_adapter_replaced_is_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = qsub.quantize_(tiny_llama(tie_word_embeddings=True))
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of what is tested here
        adapted = peft.get_peft_model(model, config)
        adapted.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(1.5)
        merged = adapted.merge_and_unload()
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)
    merged.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert_equal(again.state_dict(), merged.state_dict())


def test_both_names_in_a_file_untie_on_every_route(tmp_path, capsys):
    """transformers ties what config.json says, unless the file has two that differ."""
    from qsub.cli.app import run

    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "float")
    path = tmp_path / "float" / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, "lm_head.weight": stored[EMBEDDING] * 1.5}, path, {"format": "pt"})
    expected = qsub.quantize_(load(tmp_path / "float")).state_dict()
    assert isinstance(expected["lm_head.weight"], Int8RowwiseTensor)
    assert_equal(load(tmp_path / "float", quantization_config=QsubConfig()).state_dict(), expected)
    assert run(["quantize", str(tmp_path / "float"), str(tmp_path / "int8")]) == 0
    assert_equal(load(tmp_path / "int8").state_dict(), expected)
    assert_equal(qsub.load_file(tmp_path / "int8"), expected)


def test_layers_quantized_one_by_one(tmp_path):
    model = tiny_llama()
    for layer in model.model.layers:
        qsub.quantize_(layer, activations="int8")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_equal(again.state_dict(), model.state_dict())
    assert type(again.lm_head.weight) is nn.Parameter and int8_weights(again)[0].activations == "int8"


def test_weights_that_load_state_dict_assigned(tmp_path):
    qsub.save_file(qsub.quantize_(tiny_llama()).state_dict(), tmp_path / "x.safetensors")
    model = tiny_llama()
    model.load_state_dict(qsub.load_file(tmp_path / "x.safetensors"), assign=True)
    model.save_pretrained(tmp_path / "int8")
    assert_equal(load(tmp_path / "int8").state_dict(), model.state_dict())


def test_layers_dequantized_one_by_one(tmp_path):
    model = qsub.quantize_(tiny_llama())
    for layer in (*model.model.layers, model.lm_head):
        qsub.dequantize_(layer)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_equal(load(tmp_path).state_dict(), model.state_dict())


# ---- state_dict= ----


def test_a_state_dict_takes_the_place_of_the_models_own(tmp_path):
    model = qsub.quantize_(tiny_llama(), activations="int8")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    average = {name: torch.as_tensor(value * 0.5) for name, value in model.state_dict().items()}
    assert type(average[WEIGHT]) is torch.Tensor  # a float, of which an int8 weight is made
    model.save_pretrained(tmp_path, state_dict=average)
    again = load(tmp_path)
    expected = qsub.quantize_(tiny_llama(), activations="int8")
    expected.load_state_dict(average)
    assert_equal(again.state_dict(), expected.state_dict())
    assert int8_weights(again)[0].activations == "int8"
    assert_equal(model.state_dict(), before)
    model.save_pretrained(tmp_path / "own")  # and the next call has none
    assert_equal(load(tmp_path / "own").state_dict(), before)


def test_a_state_dict_of_int8_weights(tmp_path):
    model, other = (qsub.quantize_(tiny_llama()) for _ in range(2))
    with torch.no_grad():
        for weight in int8_weights(other):
            weight.copy_(weight.dequantize() * 0.5)
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert_equal(load(tmp_path).state_dict(), other.state_dict())


@pytest.mark.parametrize("value", [torch.zeros(2, 2), torch.zeros(32, 48, dtype=torch.int32)])
def test_a_state_dict_that_does_not_fit(tmp_path, value):
    model = qsub.quantize_(tiny_llama())
    with pytest.raises(ValueError, match=rf"state_dict: {WEIGHT} must be a float tensor or an int8 weight of shape"):
        model.save_pretrained(tmp_path, state_dict={**model.state_dict(), WEIGHT: value})
    model.save_pretrained(tmp_path)


# ---- Options for a folder that is int8 already ----


@pytest.fixture
def saved(tmp_path):
    qsub.quantize_(tiny_llama(), filter_fn=lambda name, _: name != "lm_head", activations="int8").save_pretrained(
        tmp_path
    )
    return tmp_path


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, ("int8", None, None, False)),
        ({"trainable": True}, ("int8", None, None, True)),
        ({"activations": None}, (None, None, None, False)),
        ({"outlier_threshold": 6.0, "activations": "int8"}, ("int8", 6.0, None, False)),
        ({"backward": "int8"}, ("int8", None, "int8", False)),
        ({"skip": ["lm_head"], "embeddings": False}, ("int8", None, None, False)),
    ],
)
def test_options_that_are_named_take_effect(saved, options, expected):
    model = load(saved, quantization_config=QsubConfig(**options))
    weights = int8_weights(model)
    assert len(weights) == 14
    assert {(w.activations, w.outlier_threshold, w.backward_mode, w.requires_grad) for w in weights} == {expected}
    assert_equal(model.state_dict(), load(saved).state_dict())
    model.save_pretrained(saved / "again")
    entry = json.loads((saved / "again" / "config.json").read_text())["quantization_config"]
    kept = tuple(entry[key] for key in ("activations", "outlier_threshold", "backward", "trainable"))
    assert kept == expected and set(entry) == set(QsubConfig().to_dict())


@pytest.mark.parametrize(
    "options, text",
    [
        ({"skip": []}, r"skip=\[\] would choose others: lm_head.weight is float there \(1 such weights\)"),
        ({"skip": ["lm_head", "mlp"]}, r"model.layers.0.mlp.down_proj.weight is int8 there \(6 such weights\)"),
        ({"skip": ["lm_head"], "embeddings": True}, r"embeddings=True would choose others: model.embed_tokens.weight"),
    ],
)
def test_options_that_choose_other_layers_are_refused(saved, options, text):
    with pytest.raises(ValueError, match=text):
        load(saved, quantization_config=QsubConfig(**options))


def test_options_that_do_not_fit_the_folders_are_refused(saved):
    with pytest.raises(ValueError, match='comes with activations="int8"'):
        load(saved, quantization_config=QsubConfig(activations=None, outlier_threshold=6.0))


def test_a_skipped_layer_beside_others_of_its_rule(tmp_path):
    """transformers asks a quantizer about the first of the weights that it splits a tensor into."""
    nomic_bert().save_pretrained(tmp_path)
    for skip in (["q_proj"], ["k_proj"], ["q_proj", "v_proj"]):
        model = NomicBertModel.from_pretrained(tmp_path, quantization_config=QsubConfig(skip=skip))
        expected = qsub.quantize_(nomic_bert(), filter_fn=lambda name, _: name.rpartition(".")[2] not in skip)  # noqa: B023
        assert_equal(model.state_dict(), expected.state_dict())
