"""The command line when things go wrong: one line, the documented exit code, and no DST."""

import contextlib
import errno
import io
import json
import os
import resource
import signal
import sys
import time

import pytest
import safetensors.torch
import torch
from command_line import FILES, fails, left, qsub, start, state, write_file, write_shards, write_zeros
from torch import nn

import qsub as package
from qsub.cli import commands
from qsub.streaming import target


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
    suffix = ".safetensors" if source.suffix == ".safetensors" else ""
    fails(capsys, code, text, "quantize", source, tmp_path.parent / f"{tmp_path.name}-out{suffix}")
    assert left(tmp_path) == before
    assert not [name for name in left(tmp_path.parent) if name.startswith(f"{tmp_path.name}-out")]


def test_destinations(tmp_path, capsys):
    source = write_file(tmp_path)
    for command in ("quantize", "dequantize", "convert --to bitsandbytes"):
        fails(capsys, 5, "x.safetensors exists: remove it", *command.split(), source, source)
        nowhere = tmp_path / "nowhere" / "y.safetensors"
        fails(capsys, 5, "no such folder to write y.safetensors into", *command.split(), source, nowhere)
        fails(capsys, 2, "a name that ends in .safetensors", *command.split(), source, tmp_path / "y.pt")
    (tmp_path / "in").mkdir()
    index = write_shards(tmp_path / "in")
    fails(capsys, 2, "is inside SRC", "quantize", tmp_path / "in", tmp_path / "in" / "out")
    for several in (tmp_path / "in", index):
        fails(capsys, 2, "a name without .safetensors", "quantize", several, tmp_path / "out.safetensors")
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
    fails(capsys, 2, "'*.k_proj' fits no tensor", "quantize", source, tmp_path / "y.safetensors", "--skip", "*.k_proj")


def test_nothing_to_dequantize_or_convert(tmp_path, capsys):
    source, y = write_file(tmp_path), tmp_path / "y.safetensors"
    fails(capsys, 4, "no quantized tensor", "dequantize", source, y)
    fails(capsys, 4, "no 8-bit layers of bitsandbytes", "convert", "--from", "bitsandbytes", source, y)
    fails(capsys, 4, "no int8 weights to convert", "convert", "--to", "bitsandbytes", source, y)


def test_int8_weights_of_other_modes(tmp_path, capsys):
    """An option is never accepted and then ignored; a file holds modes for each weight, a folder one for all."""
    x, y, z = write_file(tmp_path), tmp_path / "y.safetensors", tmp_path / "z.safetensors"
    assert qsub(capsys, "quantize", x, y, "--only", "*.q")[0] == 0
    text = "has int8 weights, which keep their activations and threshold"
    fails(capsys, 2, text, "quantize", y, z, "--only", "*.q", "--activations", "int8")
    assert qsub(capsys, "quantize", y, z, "--only", "*.up", "--activations", "int8")[0] == 0
    modes = {
        name: w.activations for name, w in package.load_file(z).items() if isinstance(w, package.Int8RowwiseTensor)
    }
    assert modes == {"layers.0.q.weight": None, "layers.0.up.weight": "int8"}
    (tmp_path / "in").mkdir()
    y.rename(tmp_path / "in" / "model.safetensors")
    fails(capsys, 2, text, "quantize", tmp_path / "in", tmp_path / "out", "--only", "*.up", "--activations", "int8")
    assert qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")[0] == 0


def test_inspect_refuses_another_model(tmp_path, capsys):
    model = package.quantize_(nn.ModuleDict({"a": nn.Linear(4, 3)}))
    package.save_file(model.state_dict(), tmp_path / "y.safetensors")
    original = write_file(tmp_path)
    fails(capsys, 4, "'a.weight' must be a float", "inspect", tmp_path / "y.safetensors", "--original", original)


@pytest.mark.skipif(os.name != "posix", reason="uses /dev/null, and the text of a POSIX system")
def test_what_cannot_be_read(capsys):
    fails(capsys, 4, "/dev/null: neither a file nor a folder", "inspect", "/dev/null")
    fails(capsys, 3, "File name too long", "inspect", "a" * 1000)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read and write all files")
def test_permissions(tmp_path, capsys):
    path = write_file(tmp_path)
    path.chmod(0)
    fails(capsys, 3, "x.safetensors: Permission denied", "inspect", path)
    path.chmod(0o400)
    (tmp_path / "closed").mkdir(mode=0)
    fails(capsys, 3, "closed: Permission denied", "inspect", tmp_path / "closed")
    fails(capsys, 5, "y.safetensors: Permission denied", "quantize", path, tmp_path / "closed" / "y.safetensors")


def test_a_disk_that_fails_is_named(tmp_path, capsys, monkeypatch):
    class Broken(io.BytesIO):
        def readinto(self, _):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = write_file(tmp_path)
    monkeypatch.setattr("qsub.streaming.source.open", lambda *_: Broken(path.read_bytes()), raising=False)
    fails(capsys, 3, "x.safetensors: Input/output error", "quantize", path, tmp_path / "y.safetensors")
    assert left(tmp_path) == ["x.safetensors"]


def test_a_full_disk(tmp_path, capsys, monkeypatch):
    def full(file, data):
        raise OSError(28, os.strerror(28))

    source = write_file(tmp_path)
    monkeypatch.setattr(target, "write_all", full)
    text = "y.safetensors: No space left on device; it was not written"
    fails(capsys, 5, text, "quantize", source, tmp_path / "y.safetensors")
    assert left(tmp_path) == ["x.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on the size of files")
def test_the_system_refuses_to_write_in_the_middle(tmp_path):
    source = write_zeros(tmp_path / "x.safetensors", [(2048, 4096)] * 4)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))

    process = start("quantize", source, tmp_path / "y.safetensors", preexec_fn=limit)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "") and err == f"qsub: {tmp_path / 'y.safetensors'}: File too large\n"
    assert left(tmp_path) == ["x.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a device of Linux")
def test_stdout_that_is_full(tmp_path):
    """The result is there by then; a message that it isn't would be false."""
    source = write_file(tmp_path)
    with open("/dev/full", "w") as full:
        for arguments in (["inspect", source], ["quantize", source, tmp_path / "y.safetensors"]):
            process = start(*arguments, stdout=full)
            assert process.communicate(timeout=60)[1] == "qsub: stdout: No space left on device\n"
            assert process.returncode == 1
    assert left(tmp_path) == ["x.safetensors", "y.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="closes file descriptors in a forked process")
def test_closed_streams(tmp_path):
    source = write_file(tmp_path)
    for number in (0, 1, 2):
        process = start("quantize", source, tmp_path / f"{number}.safetensors", preexec_fn=lambda n=number: os.close(n))
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "") and out.count("\n") == (number != 1)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "0.safetensors").read_bytes()
    assert (tmp_path / "2.safetensors").read_bytes() == (tmp_path / "0.safetensors").read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGTERM or SIGKILL to send")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_was_swallowed_stops_it_all_the_same(tmp_path, capsys, monkeypatch, number, code):
    """Python drops what is raised in the callback of a weak reference, of which imports have many."""

    def swallow(*arguments):
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        return select(*arguments)

    select = commands.select
    monkeypatch.setattr(commands, "select", swallow)
    before = signal.getsignal(number)
    fails(capsys, code, "nothing was written", "quantize", write_file(tmp_path), tmp_path / "y.safetensors")
    assert left(tmp_path) == ["x.safetensors"] and signal.getsignal(number) is before


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGTERM or SIGKILL to send")
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
