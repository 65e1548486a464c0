"""The command line on small files: what it writes, which tensors it takes, what it prints."""

import json

import pytest
import safetensors.torch
import torch
from command_line import FILES, left, qsub, start, state, write_file, write_shards

import qsub as package
from qsub import Blockwise8bitTensor, Int8RowwiseTensor

TAKEN = {"layers.0.q.weight", "layers.0.up.weight"}


def check_quantized(loaded, taken=TAKEN):
    """As from_float encodes each tensor that is taken, all others unchanged."""
    assert set(loaded) == set(state())
    for name, value in state().items():
        if name in taken:
            expected = Int8RowwiseTensor.from_float(value)
            assert loaded[name].dtype == value.dtype
            assert torch.equal(loaded[name].int_data, expected.int_data)
            assert torch.equal(loaded[name].scale, expected.scale)
        else:
            assert type(loaded[name]) is torch.Tensor and torch.equal(loaded[name], value)


def test_a_file(tmp_path, capsys):
    code, out, err = qsub(capsys, "quantize", write_file(tmp_path), tmp_path / "y.safetensors")
    assert (code, err) == (0, "")
    assert "2 of 9 tensors to int8 (by names and shapes)" in out
    check_quantized(package.load_file(tmp_path / "y.safetensors"))
    with safetensors.safe_open(tmp_path / "y.safetensors", "pt") as file:
        assert file.metadata()["note"] == "mine"
    assert left(tmp_path) == ["x.safetensors", "y.safetensors"]


def test_an_index(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "other.txt").write_text("not copied: only a folder is copied whole")
    code, _, err = qsub(capsys, "quantize", write_shards(tmp_path / "in"), tmp_path / "out")
    assert (code, err) == (0, "")
    assert left(tmp_path / "out") == [*FILES, "model.safetensors.index.json"]
    check_quantized(package.load_file(tmp_path / "out"))
    check_quantized(package.load_file(tmp_path / "out" / "model.safetensors.index.json"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = {key for file in FILES for key in safetensors.torch.load_file(tmp_path / "out" / file)}
    assert set(index["weight_map"]) == stored
    sizes = [v.nbytes for file in FILES for v in safetensors.torch.load_file(tmp_path / "out" / file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_a_folder_is_copied_with_what_is_not_weights(tmp_path, capsys):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    write_shards(tmp_path / "in")
    for name in ("tokenizer.json", "pytorch_model.bin", "sub/settings.json", "sub/model.onnx"):
        (tmp_path / "in" / name).write_text("{}")
    (tmp_path / "in" / "sub" / "back").symlink_to(tmp_path / "in")
    code, out, _ = qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")
    assert code == 0 and out.endswith("left out, as weights in other forms: pytorch_model.bin, sub/model.onnx\n")
    assert left(tmp_path / "out") == [*FILES, "model.safetensors.index.json", "sub", "tokenizer.json"]
    assert left(tmp_path / "out" / "sub") == ["settings.json"]


def test_modules_of_sentence_transformers_are_copied_whole(tmp_path, capsys):
    """Their folders hold weights of their own, not those of the model in another form."""
    (tmp_path / "in" / "2_Dense").mkdir(parents=True)
    write_shards(tmp_path / "in")
    (tmp_path / "in" / "modules.json").write_text(json.dumps([{"path": "", "idx": 0}, {"path": "2_Dense", "idx": 1}]))
    safetensors.torch.save_file(state(), tmp_path / "in" / "2_Dense" / "model.safetensors")
    code, out, _ = qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")
    assert code == 0 and "left out" not in out
    copied, original = (tmp_path / name / "2_Dense" / "model.safetensors" for name in ("out", "in"))
    assert copied.read_bytes() == original.read_bytes()


def test_a_folder_that_cannot_be_written_to_is_read(tmp_path, capsys):
    """As those of a download cache: config.json is written anew, and no copy of it, which would be as protected."""
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in")
    config = tmp_path / "in" / "config.json"
    config.write_text("{}")
    config.chmod(0o444)
    assert qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "config.json").stat().st_mode & 0o200


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (["--skip", "layers.0.q"], {"layers.0.up.weight"}),
        (["--skip", "*.q.weight", "--skip", "*.up"], set()),
        (["--only", "*.q"], {"layers.0.q.weight"}),
        (["--only", "embed_tokens", "--only", "*.q"], {"embed_tokens.weight", "layers.0.q.weight"}),
        (["--only", "layers.*", "--skip", "*.up"], {"layers.0.q.weight"}),
    ],
)
def test_patterns(tmp_path, capsys, options, taken):
    code, _, err = qsub(capsys, "quantize", write_file(tmp_path), tmp_path / "y.safetensors", *options)
    if not taken:
        assert code == 4 and "no tensor to quantize" in err
        return
    assert code == 0
    check_quantized(package.load_file(tmp_path / "y.safetensors"), taken)


def test_dry_run_lists_and_writes_nothing(tmp_path, capsys):
    code, out, _ = qsub(capsys, "quantize", write_file(tmp_path), tmp_path / "y", "--dry-run", "--skip", "*.up")
    assert code == 0 and left(tmp_path) == ["x.safetensors"]
    rows = {line.split()[1]: line for line in out.splitlines()[1:]}
    assert rows["layers.0.q.weight"] == "int8   layers.0.q.weight  F32 16 x 16"
    reasons = {
        "embed_tokens.weight": "an embedding, by its name",
        "lm_head.weight": "tied to embed_tokens.weight",
        "layers.0.up.weight": "in --skip",
        "layers.0.norm.weight": "1 dimensions",
        "layers.0.mask.weight": "I64 is no float dtype",
        "layers.0.in_proj_weight": "not called weight",
    }
    for name, reason in reasons.items():
        assert rows[name].startswith("kept ") and rows[name].endswith(reason)


def test_a_head_that_is_not_tied_is_taken(tmp_path, capsys):
    head = state()["lm_head.weight"] + 1
    path = write_file(tmp_path, **{"lm_head.weight": head})
    assert qsub(capsys, "quantize", path, tmp_path / "y.safetensors")[0] == 0
    assert isinstance(package.load_file(tmp_path / "y.safetensors")["lm_head.weight"], Int8RowwiseTensor)


def test_modes_are_stored(tmp_path, capsys):
    options = ["--activations", "int8", "--outlier-threshold", "6"]
    assert qsub(capsys, "quantize", write_file(tmp_path), tmp_path / "y.safetensors", *options)[0] == 0
    weight = package.load_file(tmp_path / "y.safetensors")["layers.0.q.weight"]
    assert (weight.activations, weight.outlier_threshold) == ("int8", 6.0)


def test_the_rest_of_a_file_is_quantized_later(tmp_path, capsys):
    x, y, z, whole = (tmp_path / f"{name}.safetensors" for name in ("x", "y", "z", "whole"))
    write_file(tmp_path)
    assert qsub(capsys, "quantize", x, y, "--only", "*.q")[0] == qsub(capsys, "quantize", x, whole)[0] == 0
    assert qsub(capsys, "quantize", y, z)[0] == 0
    assert z.read_bytes() == whole.read_bytes() != y.read_bytes()


def test_dequantize(tmp_path, capsys):
    qsub(capsys, "quantize", write_file(tmp_path), tmp_path / "y.safetensors")
    code, out, _ = qsub(capsys, "dequantize", tmp_path / "y.safetensors", tmp_path / "z.safetensors")
    assert code == 0 and "2 tensors to float" in out
    plain = safetensors.torch.load_file(tmp_path / "z.safetensors")  # any reader
    assert set(plain) == set(state())
    for name, value in state().items():
        expected = Int8RowwiseTensor.from_float(value).dequantize() if name in TAKEN else value
        assert plain[name].dtype == value.dtype and torch.equal(plain[name], expected)


def test_dequantize_views_moments_and_shared_tensors(tmp_path, capsys):
    weight = Int8RowwiseTensor.from_float(torch.randn(6, 10))
    moment = Blockwise8bitTensor.from_float(torch.rand(5, 100), 64, "float8_unsigned")
    saved = {"w": weight, "same": weight, "t": weight.clone().t(), "row": weight.clone()[2], "moment": moment}
    package.save_file(saved, tmp_path / "y.safetensors")
    assert qsub(capsys, "dequantize", tmp_path / "y.safetensors", tmp_path / "z.safetensors")[0] == 0
    plain = safetensors.torch.load_file(tmp_path / "z.safetensors")
    assert set(plain) == set(saved)
    for name, value in saved.items():
        assert torch.equal(plain[name], value.dequantize())


def test_shared_tensors_stay_shared_when_quantized(tmp_path, capsys):
    value = torch.randn(6, 10)
    package.save_file({"a.weight": value, "b.weight": value}, tmp_path / "x.safetensors")
    assert qsub(capsys, "quantize", tmp_path / "x.safetensors", tmp_path / "y.safetensors")[0] == 0
    loaded = package.load_file(tmp_path / "y.safetensors")
    assert loaded["a.weight"] is loaded["b.weight"] and isinstance(loaded["a.weight"], Int8RowwiseTensor)


def test_inspect(tmp_path, capsys):
    path = write_file(tmp_path)
    qsub(capsys, "quantize", path, tmp_path / "y.safetensors")
    code, out, _ = qsub(capsys, "inspect", tmp_path / "y.safetensors", "--original", path)
    assert code == 0
    value = state()["layers.0.q.weight"]
    error = Int8RowwiseTensor.from_float(value).dequantize().double() - value.double()
    sqnr = 10 * torch.log10(value.double().square().sum() / error.square().sum()).item()
    row = next(line.split() for line in out.splitlines() if line.startswith("layers.0.q.weight"))
    assert row == ["layers.0.q.weight", "int8", "rows", "16", "x", "16", str(16 * 16 + 2 * 16), f"{sqnr:.2f}"]
    assert 35 < sqnr < 50

    code, out, _ = qsub(capsys, "inspect", tmp_path / "y.safetensors", "--original", path, "--json")
    content = json.loads(out)
    tensors = {tensor["name"]: tensor for tensor in content["tensors"]}
    assert tensors["layers.0.q.weight"]["sqnr_db"] == pytest.approx(sqnr, abs=1e-9)
    assert tensors["layers.0.q.weight"]["shows"] == "float32" and tensors["layers.0.q.bias"]["sqnr_db"] is None
    assert content["nbytes"] == sum(tensor["nbytes"] for tensor in content["tensors"])
    assert content["float_nbytes"] == sum(value.nbytes for value in state().values())


def test_inspect_tells_a_wrong_original(tmp_path, capsys):
    """A scale that is off by 10% leaves 20 dB of the signal; the original itself is exact."""
    value = torch.randn(64, 64)
    weight = Int8RowwiseTensor.from_float(value)
    package.save_file({"a.weight": weight}, tmp_path / "y.safetensors")
    for name, original in (("wrong", weight.dequantize() / 1.1), ("same", weight.dequantize())):
        safetensors.torch.save_file({"a.weight": original}, tmp_path / f"{name}.safetensors")
    arguments = ["inspect", tmp_path / "y.safetensors", "--json", "--original"]
    wrong = json.loads(qsub(capsys, *arguments, tmp_path / "wrong.safetensors")[1])["tensors"][0]
    assert wrong["sqnr_db"] == pytest.approx(20, abs=0.01) and wrong["exact"] is False
    same = json.loads(qsub(capsys, *arguments, tmp_path / "same.safetensors")[1])["tensors"][0]
    assert same["sqnr_db"] is None and same["exact"] is True


def test_help(capsys):
    code, out, err = qsub(capsys, "--help")
    assert code == 0 and "Exit codes:" in out and err == ""
    code, out, err = qsub(capsys)
    assert code == 2 and "Exit codes:" in err and out == ""
    for command in ("quantize", "dequantize", "inspect", "convert"):
        code, out, _ = qsub(capsys, command, "--help")
        assert code == 0 and f"qsub {command} [OPTIONS]" in out


def test_version_of_the_module():
    process = start("--version")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and package.__version__ in out and err == ""


def test_without_click_one_line_says_what_to_install(tmp_path):
    (tmp_path / "click.py").write_text("raise ImportError('no click', name='click')")
    process = start("--version", cwd=tmp_path)
    assert process.communicate(timeout=60) == ("", "qsub: the command line needs click: pip install 'qsub[cli]'\n")
    assert process.returncode == 1
