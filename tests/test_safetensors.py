"""save_file and load_file: round trips, sharing, lazy and atomic behaviour, damaged files."""

import json
import random
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qsub
from qsub import Blockwise8bitTensor, Int8RowwiseTensor


def tied_model():
    model = nn.ModuleDict({"a": nn.Linear(16, 8), "b": nn.Linear(16, 8), "norm": nn.LayerNorm(8)})
    model["b"].weight = model["a"].weight
    return qsub.quantize_(model)


def read_header(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def edit_qsub_header(path, change):
    header, body = read_header(path)
    inner = json.loads(header["__metadata__"]["qsub"])
    change(header, inner)
    header["__metadata__"]["qsub"] = json.dumps(inner)
    write_header(path, header, body)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    qsub.save_file(tied_model().state_dict(), path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_exact(tmp_path, dtype):
    state = {"w": Int8RowwiseTensor.from_float(torch.randn(6, 10, dtype=dtype)), "b": torch.randn(6, dtype=dtype)}
    state["t"] = state["w"].clone().t()
    state["m"] = Blockwise8bitTensor.from_float(torch.rand(5, 100), 64, "float8_unsigned")
    state["view"] = torch.randn(10, 10)[2:5].t()
    state["empty"] = torch.empty(0, 3)
    qsub.save_file(state, tmp_path / "x.safetensors", metadata={"note": "mine"})
    loaded = qsub.load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(state)
    for name, value in state.items():
        assert type(loaded[name]) is type(value) and loaded[name].dtype == value.dtype
        plain = (x.dequantize() if hasattr(x, "scale") else x for x in (loaded[name], value))
        assert torch.equal(*plain)
    assert torch.equal(loaded["w"].int_data, state["w"].int_data) and torch.equal(loaded["w"].scale, state["w"].scale)
    assert read_header(tmp_path / "x.safetensors")[0]["__metadata__"]["note"] == "mine"


def test_names_and_header_are_the_documented_ones(file):
    header, _ = read_header(file)
    metadata = header.pop("__metadata__")
    assert set(header) == {"a.weight.int_data", "a.weight.scale", "a.bias", "b.bias", "norm.weight", "norm.bias"}
    assert header["a.weight.int_data"]["dtype"] == "I8" and header["a.weight.scale"]["dtype"] == "F16"
    assert metadata["format"] == "pt"
    assert json.loads(metadata["qsub"]) == {
        "version": 1,
        "tensors": {
            "a.weight": {
                "class": "Int8RowwiseTensor",
                "dtype": "float32",
                "scale_dim": -2,
                "whole_rows": True,
                "activations": None,
                "outlier_threshold": None,
                "backward_mode": None,
            }
        },
        "shared": {"b.weight": "a.weight"},
    }


def test_shared_tensors_stay_shared(file, tmp_path):
    loaded = qsub.load_file(file)
    assert loaded["b.weight"] is loaded["a.weight"]
    plain = torch.randn(3, 4)
    qsub.save_file({"x": plain, "y": plain, "z": plain[1:]}, tmp_path / "p.safetensors")
    again = qsub.load_file(tmp_path / "p.safetensors")
    assert again["x"] is again["y"] and torch.equal(again["z"], plain[1:])


def test_views_of_one_storage_are_stored_as_copies(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    weight = Int8RowwiseTensor.from_float(torch.randn(6, 10))
    state = {"x": base, "flat": base.view(-1), "turned": base.t(), "w": weight, "rows": weight[2:4], "w_t": weight.t()}
    qsub.save_file(state, tmp_path / "v.safetensors")
    loaded = qsub.load_file(tmp_path / "v.safetensors")
    for name, value in state.items():
        plain = (x.dequantize() if isinstance(x, Int8RowwiseTensor) else x for x in (loaded[name], value))
        assert torch.equal(*plain)


def test_plain_files_load_too(tmp_path):
    import safetensors.torch

    safetensors.torch.save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    assert torch.equal(qsub.load_file(tmp_path / "x.safetensors")["x"], torch.ones(3))


def test_a_fresh_process_loads_the_file(file):
    script = (
        "import sys, torch, qsub; from torch import nn\n"
        "m = nn.ModuleDict({'a': nn.Linear(16, 8), 'b': nn.Linear(16, 8), 'norm': nn.LayerNorm(8)})\n"
        "m.load_state_dict(qsub.load_file(sys.argv[1]), assign=True)\n"
        "assert isinstance(m['a'].weight, qsub.Int8RowwiseTensor); print(float(m['a'](torch.ones(16)).sum()))\n"
    )
    printed = subprocess.run([sys.executable, "-c", script, str(file)], check=True, capture_output=True, text=True)
    model = tied_model()
    model.load_state_dict(qsub.load_file(file))
    assert float(printed.stdout) == model["a"](torch.ones(16)).sum().item()


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"x": 3}, TypeError, "'x' is a int"),
        ({"x": torch.empty(2, device="meta")}, ValueError, "meta"),
        (
            {"w": Int8RowwiseTensor.from_float(torch.ones(2, 2)), "w.scale": torch.ones(2)},
            ValueError,
            "'w.scale' of its own",
        ),
    ],
)
def test_save_refuses_and_leaves_no_file(tmp_path, state, error, text):
    with pytest.raises(error, match=text):
        qsub.save_file(state, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_keeps_the_old_file(file, monkeypatch):
    import safetensors.torch

    before = file.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        qsub.save_file({"x": torch.ones(2)}, file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def _wrong_dtype(header, inner):
    header["a.weight.int_data"]["dtype"] = "U8"


def _wrong_shape(header, inner):
    header["a.weight.int_data"]["shape"] = [16, 8]


def _unknown_class(header, inner):
    inner["tensors"]["a.weight"]["class"] = "Int3Tensor"


def _unknown_field(header, inner):
    inner["tensors"]["a.weight"]["zero_point"] = 3


def _version(header, inner):
    inner["version"] = 2


def _dangling(header, inner):
    inner["shared"]["b.weight"] = "c.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_wrong_dtype, "'a.weight.int_data' has dtype U8, expected I8"),
        (_wrong_shape, r"'a.weight': .*scale, got \(16, 8\) and \(8,\)"),
        (_unknown_class, "unknown class 'Int3Tensor'"),
        (_unknown_field, "'a.weight': .*zero_point"),
        (_version, "format version 2, this qsub reads version 1"),
        (_dangling, "'b.weight' shares 'c.weight', which is missing"),
    ],
)
def test_a_damaged_header_names_file_and_key(file, change, text):
    edit_qsub_header(file, change)
    with pytest.raises(ValueError, match=text) as caught:
        qsub.load_file(file)
    assert str(file) in str(caught.value)


def test_a_missing_inner_tensor_is_named(tmp_path):
    import safetensors.torch

    path = tmp_path / "x.safetensors"
    header = {"version": 1, "tensors": {"w": {"class": "Int8RowwiseTensor", "dtype": "float32"}}, "shared": {}}
    parts = {"w.int_data": torch.zeros(2, 2, dtype=torch.int8)}
    safetensors.torch.save_file(parts, path, {"qsub": json.dumps(header)})
    with pytest.raises(ValueError, match=r"'w.scale' is missing"):
        qsub.load_file(path)


def test_the_file_has_the_usual_permissions(file):
    other = file.with_name("other")
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


def test_missing_file():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        qsub.load_file("nowhere.safetensors")


def test_truncated_files(file):
    data = file.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            qsub.load_file(file)


def test_random_damage_raises_value_error_or_loads_whole(file):
    """A fuzz target of bounded size: bytes of the header changed at random."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(8 + length)] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            loaded = qsub.load_file(file)
        except ValueError as error:
            assert str(file) in str(error)
            refused += 1
        else:
            assert all(isinstance(value, torch.Tensor) for value in loaded.values())
    assert refused > 100


# ---- Parts that another reader took from a file ----


def parts_of(model, path):
    qsub.save_file(model.state_dict(), path)
    return load_file(path)


@pytest.mark.parametrize("assign", [False, True])
def test_parts_of_int8_weights_load_into_a_quantized_model(tmp_path, assign):
    source = qsub.quantize_(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), activations="int8")
    model = qsub.quantize_(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), activations="int8")
    parts = parts_of(source, tmp_path / "m.safetensors")
    assert "0.weight.int_data" in parts and "0.weight" not in parts
    assert str(model.load_state_dict(parts, assign=assign)) == "<All keys matched successfully>"
    assert torch.equal(model[0].weight.int_data, source[0].weight.int_data)
    assert model[0].weight.activations == "int8" and "0.weight" not in parts
    x = torch.randn(3, 16)
    assert torch.equal(model(x), source(x))


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda parts: parts.pop("1.weight.scale"),
            "1.weight.int_data comes without the other part of the int8 weight",
        ),
        (lambda parts: parts.pop("1.weight.int_data"), "1.weight.scale comes without the other part"),
        (lambda parts: parts.update({"1.weight.scale": torch.ones(4)}), "an fp16 scale"),
        (lambda parts: parts.update({"1.weight.int_data": parts["0.weight.int_data"]}), "scale"),
    ],
)
def test_parts_that_do_not_fit_leave_the_model_as_it_was(tmp_path, change, text):
    source, model = (qsub.quantize_(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))) for _ in range(2))
    before = model[0].weight.int_data.clone()
    parts = parts_of(source, tmp_path / "m.safetensors")
    change(parts)
    with pytest.raises(RuntimeError, match=text):
        model.load_state_dict(parts, strict=False)
    assert torch.equal(model[0].weight.int_data, before)
