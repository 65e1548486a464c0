"""The command line when things go wrong: one line, the documented exit code, and no DST."""

import json
import os
import resource
import signal
import sys
import time

import pytest
import safetensors.torch
import torch
from command_line import FILES, left, qsub, start, state, write_file, write_shards, write_zeros
from torch import nn

import qsub as package
from qsub.streaming import target


def fails(capsys, code, text, *arguments):
    got, out, err = qsub(capsys, *arguments)
    assert (got, out) == (code, "") and err.startswith("qsub: ") and err.count("\n") == 1
    assert text in err, err


def truncated(folder):
    path = write_file(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return path


def not_safetensors(folder):
    path = folder / "x.safetensors"
    path.write_bytes(b"PK\x03\x04 a zip file")
    return path


def missing_shard(folder):
    index = write_shards(folder)
    (folder / FILES[1]).unlink()
    return index


def tensor_in_no_shard(folder):
    index = write_shards(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = FILES[0]
    index.write_text(json.dumps(content))
    return index


def tensor_in_two_shards(folder):
    index = write_shards(folder)
    safetensors.torch.save_file(state(), folder / FILES[1])
    return index


def damaged_index(folder):
    index = write_shards(folder)
    index.write_text("{")
    return index


def index_without_map(folder):
    index = write_shards(folder)
    index.write_text('{"metadata": {}}')
    return index


def index_outside(folder):
    index = write_shards(folder)
    index.write_text('{"weight_map": {"a": "../x.safetensors"}}')
    return index


def damaged_config(folder):
    write_shards(folder)
    (folder / "config.json").write_text("[]")
    return folder


def wrong_inner_dtype(folder):
    path = folder / "x.safetensors"
    header = {"version": 1, "tensors": {"w": {"class": "Int8RowwiseTensor", "dtype": "float32"}}, "shared": {}}
    parts = {"w.int_data": torch.zeros(2, 2, dtype=torch.uint8), "w.scale": torch.zeros(2, dtype=torch.float16)}
    safetensors.torch.save_file(parts, path, {"qsub": json.dumps(header)})
    return path


def no_float(folder):
    path = folder / "x.safetensors"
    safetensors.torch.save_file({"a.weight": torch.ones(4, 4, dtype=torch.int32)}, path)
    return path


def with_nan(folder):
    weight = torch.ones(3000, 4096)  # of several chunks
    weight[2500, 7] = float("nan")
    return write_file(folder, **{"layers.9.bad.weight": weight})


def names_collide(folder):
    return write_file(folder, **{"layers.0.q.weight.scale": torch.ones(1)})


def of_bitsandbytes(folder):
    return write_file(folder, **{"layers.1.weight": torch.ones(4, 4, dtype=torch.int8), "layers.1.SCB": torch.ones(4)})


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda folder: folder / "nowhere.safetensors", 3, "nowhere.safetensors: no such file or folder"),
        (lambda folder: folder, 3, "no safetensors files in this folder"),
        (missing_shard, 3, f"the file '{FILES[1]}' is missing beside the index"),
        (truncated, 4, "x.safetensors: not a whole safetensors file"),
        (not_safetensors, 4, "x.safetensors: not a whole safetensors file"),
        (tensor_in_no_shard, 4, "'ghost.weight' is in none of the files"),
        (tensor_in_two_shards, 4, "is in model-00001-of-00002.safetensors too"),
        (damaged_index, 4, "not JSON"),
        (index_without_map, 4, "no weight_map"),
        (index_outside, 4, "outside the folder of the index"),
        (damaged_config, 4, "config.json: expected a JSON object, got a list"),
        (wrong_inner_dtype, 4, "'w.int_data' has dtype U8, expected I8"),
        (no_float, 4, "no tensor to quantize (by names and shapes)"),
        (with_nan, 4, "layers.9.bad.weight: row 2500 has NaN"),
        (names_collide, 4, "two tensors would be stored as 'layers.0.q.weight.scale'"),
        (of_bitsandbytes, 4, "use: qsub convert --from bitsandbytes"),
    ],
)
def test_sources(tmp_path, capsys, make, code, text):
    source = make(tmp_path)
    before = left(tmp_path)
    fails(capsys, code, text, "quantize", source, tmp_path.parent / f"{tmp_path.name}-out")
    assert left(tmp_path) == before
    assert not [name for name in left(tmp_path.parent) if name.startswith(f"{tmp_path.name}-out")]


def test_destinations(tmp_path, capsys):
    source = write_file(tmp_path)
    for command in ("quantize", "dequantize", "convert --to bitsandbytes"):
        fails(capsys, 5, "x.safetensors exists: remove it", *command.split(), source, source)
        fails(capsys, 5, "no such folder to write y into", *command.split(), source, tmp_path / "nowhere" / "y")
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in")
    fails(capsys, 2, "is inside SRC", "quantize", tmp_path / "in", tmp_path / "in" / "out")
    assert left(tmp_path) == ["in", "x.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quantise"], "No such command 'quantise'"),
        (["quantize", "x"], "Missing argument 'DST'"),
        (["quantize", "x", "y", "--bits", "4"], "No such option"),
        (["quantize", "x", "y", "--outlier-threshold", "6"], 'comes with activations="int8"'),
        (["convert", "x", "y"], "pass either --from bitsandbytes"),
        (["convert", "--from", "gguf", "x", "y"], "'gguf' is not"),
        (["convert", "--to", "bitsandbytes", "--dtype", "float32", "x", "y"], "pass either --from"),
    ],
)
def test_usage(capsys, arguments, text):
    fails(capsys, 2, text, *arguments)


def test_a_pattern_that_fits_nothing(tmp_path, capsys):
    source = write_file(tmp_path)
    fails(capsys, 2, "'*.k_proj' fits no tensor", "quantize", source, tmp_path / "y", "--skip", "*.k_proj")


def test_nothing_to_dequantize_or_convert(tmp_path, capsys):
    source = write_file(tmp_path)
    fails(capsys, 4, "no quantized tensor", "dequantize", source, tmp_path / "y")
    fails(capsys, 4, "no 8-bit layers of bitsandbytes", "convert", "--from", "bitsandbytes", source, tmp_path / "y")
    fails(capsys, 4, "no int8 weights to convert", "convert", "--to", "bitsandbytes", source, tmp_path / "y")


def test_inspect_refuses_another_model(tmp_path, capsys):
    model = package.quantize_(nn.ModuleDict({"a": nn.Linear(4, 3)}))
    package.save_file(model.state_dict(), tmp_path / "y.safetensors")
    original = write_file(tmp_path)
    fails(capsys, 4, "'a.weight' must be a float", "inspect", tmp_path / "y.safetensors", "--original", original)


def test_a_full_disk(tmp_path, capsys, monkeypatch):
    def full(file, data):
        raise OSError(28, os.strerror(28))

    source = write_file(tmp_path)
    monkeypatch.setattr(target, "write_all", full)
    fails(capsys, 5, "No space left on device; DST was not written", "quantize", source, tmp_path / "y.safetensors")
    assert left(tmp_path) == ["x.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on the size of files")
def test_the_system_refuses_to_write_in_the_middle(tmp_path):
    source = write_zeros(tmp_path / "x.safetensors", [(2048, 4096)] * 4)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))

    process = start("quantize", source, tmp_path / "y.safetensors", preexec_fn=limit)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "") and err == "qsub: DST: File too large\n"
    assert left(tmp_path) == ["x.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "qsub: interrupted; nothing was written\n"),
        (signal.SIGTERM, 143, "qsub: terminated; nothing was written\n"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_stopped_in_the_middle(tmp_path, number, code, text):
    source = write_zeros(tmp_path / "x.safetensors", [(8192, 8192)] * 16)  # 4 GiB: seconds of work
    process = start("quantize", source, tmp_path / "y.safetensors")
    deadline = time.monotonic() + 60
    while len(left(tmp_path)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    part = [name for name in left(tmp_path) if name.endswith(".part")]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert len(part) == 1, "it was stopped while it wrote"
    assert (process.returncode, out, err) == (code, "", text)
    kept = part if number == signal.SIGKILL else []  # nothing can be removed by a process that is killed
    assert left(tmp_path) == sorted(["x.safetensors", *kept])
