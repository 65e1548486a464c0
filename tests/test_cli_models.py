"""The command line on Hugging Face folders, on checkpoints of bitsandbytes, and its memory."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from command_line import left, qsub, write_zeros
from torch import nn

import qsub as package
from qsub import Int8RowwiseTensor

with warnings.catch_warnings():  # of its imports
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")
    import transformers
    from hf_models import folder_of, output, tiny_llama, tokens

LIMIT = 64  # MiB
pytestmark = pytest.mark.filterwarnings("default")  # what transformers warns of is its own


def peak(command):
    """Largest resident size of a process, in MiB, which the kernel counts."""
    script = f"import resource, subprocess; subprocess.run({command!r}, check=True, stdout=-3)\n"
    script += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10)"
    return float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


def in_processes(monkeypatch):
    """For those that `peak` starts: one thread, whose stacks and arenas count, and this qsub."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(package.__file__)))


def tiny_gpt2():
    """Its matrices belong to Conv1D, which is no Linear, and are stored (in, out); only a head is a Linear."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96, tie_word_embeddings=False)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    "make", [lambda: tiny_llama(tie_word_embeddings=True), lambda: tiny_llama(tie_word_embeddings=False), tiny_gpt2]
)
def test_a_folder_becomes_what_quantize_makes_of_the_model(tmp_path, capsys, make):
    model = make()
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert "model.safetensors.index.json" in left(tmp_path / "in")
    code, out, err = qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")
    assert (code, err) == (0, "") and f"by the nn.Linear modules of {type(model).__name__}" in out
    expected = package.quantize_(model).state_dict()
    loaded = package.load_file(tmp_path / "out")
    assert {name for name in expected if name not in loaded} <= {"lm_head.weight"}  # tied, stored once
    for name, value in loaded.items():
        assert isinstance(value, Int8RowwiseTensor) == isinstance(expected[name], Int8RowwiseTensor)
        plain = (x.dequantize() if isinstance(x, Int8RowwiseTensor) else x for x in (value, expected[name]))
        assert torch.equal(*plain)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "qsub" and config["quantization_config"]["skip"] == []


MLP = [f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")]


@pytest.mark.parametrize(
    ("options", "skip"),
    [
        ([], []),
        (["--skip", "lm_head", "--skip", "*.0.mlp.*"], ["lm_head", *MLP]),
        (["--activations", "int8"], []),
    ],
)
def test_from_pretrained_reads_the_folder(tmp_path, capsys, options, skip):
    """As transformers quantizes the float folder itself, and with the same config."""
    tiny_llama(tie_word_embeddings=False).save_pretrained(tmp_path / "in")
    assert qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out", *options)[0] == 0
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    config = package.QsubConfig("int8" if "int8" in options else None, skip=skip)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == config.to_dict()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=config)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    kinds = {name: type(param) for name, param in expected.named_parameters()}
    assert {name: type(param) for name, param in model.named_parameters()} == kinds
    assert sum(kind is Int8RowwiseTensor for kind in kinds.values()) == 15 - len(skip)


def test_save_pretrained_of_an_int8_model_is_read_here(tmp_path, capsys):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=package.QsubConfig())
    model.save_pretrained(tmp_path / "int8")
    code, out, _ = qsub(capsys, "inspect", tmp_path / "int8", "--original", tmp_path / "in", "--json")
    assert code == 0 and sum(t["sqnr_db"] is not None for t in json.loads(out)["tensors"]) == 14
    assert qsub(capsys, "dequantize", tmp_path / "int8", tmp_path / "float")[0] == 0
    tokens = torch.arange(12).view(2, 6)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    assert not any(isinstance(param, Int8RowwiseTensor) for param in again.parameters())
    with torch.no_grad():
        # The same weights, once decoded: products differ by the order of fp32 sums of 32 to 64 terms.
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_parts_of_a_weight_in_different_files(tmp_path, capsys):
    """transformers splits by size: the codes may be in one file and their scales in the next."""
    model = package.quantize_(tiny_llama())
    model.save_pretrained(tmp_path / "int8", max_shard_size="1KB")
    files = json.loads((tmp_path / "int8" / "model.safetensors.index.json").read_text())["weight_map"]
    names = [key.removesuffix(".scale") for key in files if key.endswith(".scale")]
    assert any(files[f"{name}.scale"] != files[f"{name}.int_data"] for name in names)
    for command, written in (("dequantize", "float"), ("convert --to bitsandbytes", "bnb")):
        assert qsub(capsys, *command.split(), tmp_path / "int8", tmp_path / written)[0] == 0
    state, theirs = model.state_dict(), package.load_file(tmp_path / "bnb")
    for read in (package.load_file(tmp_path / "int8"), package.load_file(tmp_path / "float")):
        assert set(read) == set(state)
        for name, value in state.items():
            plain = (x.dequantize() if isinstance(x, Int8RowwiseTensor) else x for x in (read[name], value))
            assert torch.equal(*plain)
    for name in names:
        assert torch.equal(theirs[name], state[name].int_data)
        assert torch.equal(theirs[name.replace("weight", "SCB")], state[name].scale.float())


def test_a_base_model_of_a_checkpoint_with_a_head(tmp_path, capsys):
    """Names in the file lack or have the prefix of the base model."""
    model = tiny_llama(tie_word_embeddings=True)
    for name, change in (("bare", lambda key: key.removeprefix("model.")), ("full", lambda key: key)):
        model.save_pretrained(tmp_path / name)
        state = {change(key): v for key, v in package.load_file(tmp_path / name).items()}
        package.save_file(state, tmp_path / name / "model.safetensors")
        assert qsub(capsys, "quantize", tmp_path / name, tmp_path / f"{name}-out")[0] == 0
        loaded = package.load_file(tmp_path / f"{name}-out")
        assert sum(isinstance(value, Int8RowwiseTensor) for value in loaded.values()) == 14


def test_skipped_layers_are_in_the_config(tmp_path, capsys):
    tiny_llama(tie_word_embeddings=False).save_pretrained(tmp_path / "in")
    options = ["--skip", "lm_head", "--skip", "*.0.mlp.*", "--activations", "int8"]
    assert qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out", *options)[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["skip"] == ["lm_head", *MLP] and config["activations"] == "int8"


def test_a_model_that_cannot_be_built_is_judged_by_names(tmp_path, capsys):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "OwnModel"))
    code, out, _ = qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")
    assert code == 0 and "14 of 20 tensors" in out and "names and shapes, as OwnModel can't be built" in out


def test_minilm_there_and_back(tmp_path, capsys):
    folder = folder_of("minilm")
    code, out, err = qsub(capsys, "quantize", folder, tmp_path / "int8")
    assert (code, err) == (0, "") and "37 of 104 tensors to int8 (by the nn.Linear modules of BertModel)" in out
    loaded = package.load_file(tmp_path / "int8")
    expected = package.quantize_(transformers.AutoModel.from_pretrained(folder)).state_dict()
    for name in expected:
        plain = (x.dequantize() if isinstance(x, Int8RowwiseTensor) else x for x in (loaded[name], expected[name]))
        assert torch.equal(*plain)
    read = transformers.AutoModel.from_pretrained(tmp_path / "int8").state_dict()
    assert sum(isinstance(value, Int8RowwiseTensor) for value in read.values()) == 37
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    code, out, _ = qsub(capsys, "inspect", tmp_path / "int8", "--original", folder, "--json")
    sqnr = {t["name"]: t["sqnr_db"] for t in json.loads(out)["tensors"] if t["sqnr_db"] is not None}
    floats = package.load_file(folder)
    assert len(sqnr) == 37
    for name, value in sqnr.items():
        exact, int8 = floats[name].double(), expected[name].dequantize().double()
        assert value == pytest.approx(10 * torch.log10(exact.square().sum() / (exact - int8).square().sum()).item())
    assert qsub(capsys, "dequantize", tmp_path / "int8", tmp_path / "float")[0] == 0
    again = transformers.AutoModel.from_pretrained(tmp_path / "float").state_dict()
    for name, value in expected.items():
        assert torch.equal(again[name], value.dequantize() if isinstance(value, Int8RowwiseTensor) else value)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB there")
def test_smollm2(tmp_path, monkeypatch):
    """As transformers quantizes the folder itself; in memory of a tenth of the model beyond that of a dry run."""
    folder = folder_of("smollm2")
    in_processes(monkeypatch)
    command = [sys.executable, "-m", "qsub", "quantize", str(folder), str(tmp_path / "int8")]
    base = peak([*command, "--dry-run"])
    assert peak(command) - base < 0.1 * (folder / "model.safetensors").stat().st_size / 2**20
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert sum(isinstance(param, Int8RowwiseTensor) for param in model.parameters()) == 210
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = package.QsubConfig()
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    batch = tokens(folder)
    assert torch.equal(output(model, batch), output(expected, batch))
    assert (tmp_path / "int8" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


# ---- bitsandbytes ----


def their_folder(folder):
    """A checkpoint with their 8-bit layers, weight and SCB in different files, as transformers may split them."""
    folder.mkdir()
    model = nn.Sequential(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False), nn.LayerNorm(32))
    model.load_state_dict(nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32)).half().state_dict())
    state = model.to("cpu").state_dict()
    state = {key: torch.tensor(0, dtype=torch.uint8) if "format" in key else v for key, v in state.items()}
    first = {key: value for key, value in state.items() if key.endswith("weight")}
    rest = {key: value for key, value in state.items() if key not in first}
    files = {"model-1.safetensors": first, "model-2.safetensors": rest}
    for name, part in files.items():
        package.save_file({key: torch.as_tensor(value).clone() for key, value in part.items()}, folder / name)
    index = {"weight_map": {key: name for name, part in files.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    settings["llm_int8_skip_modules"] = ["head"]
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": settings}))
    return state


def test_from_bitsandbytes_and_back(tmp_path, capsys):
    theirs = their_folder(tmp_path / "bnb")
    code, _, err = qsub(capsys, "convert", "--from", "bitsandbytes", tmp_path / "bnb", tmp_path / "ours")
    assert (code, err) == (0, "")
    loaded = package.load_file(tmp_path / "ours")
    assert set(loaded) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    weight = loaded["0.weight"]
    assert torch.equal(weight.int_data, theirs["0.weight"]) and torch.equal(weight.scale.float(), theirs["0.SCB"])
    assert (weight.dtype, weight.activations, weight.outlier_threshold) == (torch.bfloat16, "int8", 6.0)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["outlier_threshold"], config["skip"]) == ("qsub", 6.0, ["head"])

    assert qsub(capsys, "convert", "--to", "bitsandbytes", tmp_path / "ours", tmp_path / "back")[0] == 0
    back = package.load_file(tmp_path / "back")
    assert set(back) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(back[name], value) and back[name].dtype == value.dtype
    config = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["head"],
    }


@pytest.mark.parametrize(
    ("tied", "skip", "floats"),
    [
        (True, [], ["lm_head"]),
        (True, ["--skip", "*.0.mlp.*"], ["lm_head", *MLP]),
        (False, [], []),
        (False, ["--skip", "lm_head"], ["lm_head"]),
    ],
)
def test_bitsandbytes_is_told_which_layers_are_float(tmp_path, capsys, tied, skip, floats):
    """Tied heads too, which they would make 8-bit, and none that has codes, which they would take for floats."""
    tiny_llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "in")
    assert qsub(capsys, "quantize", tmp_path / "in", tmp_path / "int8", *skip)[0] == 0
    assert qsub(capsys, "convert", "--to", "bitsandbytes", tmp_path / "int8", tmp_path / "bnb")[0] == 0
    config = json.loads((tmp_path / "bnb" / "config.json").read_text())["quantization_config"]
    assert config["llm_int8_skip_modules"] == floats
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bnb", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        theirs, expected = model(tokens).logits.float(), ours(tokens).logits
    # Theirs quantize their inputs, too, with 40 dB at each product. Layers that are taken for others leave no signal.
    assert 20 * torch.log10(expected.norm() / (theirs - expected).norm()) > 30


def test_a_list_of_bitsandbytes_that_names_no_module(tmp_path, capsys):
    """They ignore such names, as the usual lm_head of a model without one; a QsubConfig is refused with them."""
    assert qsub(capsys, "quantize", folder_of("minilm"), tmp_path / "int8", "--skip", "pooler.dense")[0] == 0
    assert qsub(capsys, "convert", "--to", "bitsandbytes", tmp_path / "int8", tmp_path / "bnb")[0] == 0
    path = tmp_path / "bnb" / "config.json"
    config = json.loads(path.read_text())
    assert config["quantization_config"]["llm_int8_skip_modules"] == ["pooler.dense"]
    config["quantization_config"]["llm_int8_skip_modules"].append("lm_head")
    path.write_text(json.dumps(config))
    assert qsub(capsys, "convert", "--from", "bitsandbytes", tmp_path / "bnb", tmp_path / "back")[0] == 0
    model = transformers.AutoModel.from_pretrained(tmp_path / "back")
    assert type(model.pooler.dense.weight) is nn.Parameter
    assert sum(isinstance(param, Int8RowwiseTensor) for param in model.parameters()) == 36


def test_int8_embeddings_are_none_of_bitsandbytes(tmp_path, capsys):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    config = package.QsubConfig(embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=config)
    model.save_pretrained(tmp_path / "int8")
    code, _, err = qsub(capsys, "convert", "--to", "bitsandbytes", tmp_path / "int8", tmp_path / "bnb")
    assert code == 4 and "its embeddings are int8, which bitsandbytes doesn't have" in err


def test_a_folder_written_for_bitsandbytes_multiplies_alike(tmp_path, capsys):
    from qsub.interop.transformers import from_bitsandbytes

    tiny_llama(tie_word_embeddings=False).save_pretrained(tmp_path / "in")
    options = ["--activations", "int8", "--outlier-threshold", "6", "--skip", "lm_head"]
    assert qsub(capsys, "quantize", tmp_path / "in", tmp_path / "ours", *options)[0] == 0
    assert qsub(capsys, "convert", "--to", "bitsandbytes", tmp_path / "ours", tmp_path / "bnb")[0] == 0
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs = from_bitsandbytes(transformers.AutoModelForCausalLM, tmp_path / "bnb")
    assert theirs.model.layers[0].mlp.up_proj.weight.outlier_threshold == 6.0
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_the_dtype_of_converted_weights(tmp_path, capsys):
    their_folder(tmp_path / "bnb")
    arguments = ["convert", "--from", "bitsandbytes", tmp_path / "bnb", tmp_path / "ours", "--dtype", "float32"]
    assert qsub(capsys, *arguments)[0] == 0
    assert package.load_file(tmp_path / "ours")["0.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("0.weight"), "0.SCB comes with an int8 matrix 0.weight, got nothing"),
        (lambda state: state.update({"0.weight": torch.ones(32, 64)}), "got F32 (32, 64)"),
        (lambda state: state.update({"0.SCB": torch.ones(5)}), "0.weight and 0.SCB must be (out, in) and (out,)"),
        (lambda state: state.update({"0.SCB": torch.full((32,), -1.0)}), "0.SCB has a value that is negative"),
    ],
)
def test_damaged_layers_of_bitsandbytes(tmp_path, capsys, change, text):
    state = dict(their_folder(tmp_path / "bnb"))
    change(state)
    package.save_file(state, tmp_path / "x.safetensors")
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    code, out, err = qsub(capsys, "convert", "--from", "bitsandbytes", source, target)
    assert (code, out) == (4, "") and text in err and err.count("\n") == 1
    assert left(tmp_path) == ["bnb", "x.safetensors"]


# ---- Memory ----
SHAPES = [(16384, 4096), *[(2048, 4096)] * 8]  # 512 MiB of fp32, half of it in one tensor


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB there")
def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch):
    """Beyond that of `qsub inspect`, which reads headers only, there is a chunk of 4 MiB, its codes, their bytes, and
    what the allocator keeps: under LIMIT, an eighth of the float model and a quarter of its largest tensor. Loading the
    file and quantizing it is over it."""
    in_processes(monkeypatch)
    source, target = write_zeros(tmp_path / "x.safetensors", SHAPES), tmp_path / "y.safetensors"
    command = [sys.executable, "-m", "qsub"]
    base = peak([*command, "inspect", str(source)])
    assert peak([*command, "quantize", str(source), str(target)]) - base < LIMIT
    assert peak([*command, "dequantize", str(target), str(tmp_path / "z.safetensors")]) - base < LIMIT
    whole = f"import qsub; state = qsub.load_file({str(source)!r})\n"
    whole += "for name in state: state[name] = qsub.Int8RowwiseTensor.from_float(state[name])"
    assert peak([sys.executable, "-c", whole]) - base > 2 * LIMIT
