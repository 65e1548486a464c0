"""The command line on what is quantized already, by another method or by qsub."""

import json

import pytest
import torch
from command_line import fails, left, qsub, write_file, write_shards


@pytest.mark.parametrize("make", [write_file, write_shards])
def test_what_is_int8_already_is_not_copied(tmp_path, capsys, make):
    (tmp_path / "in").mkdir()
    suffix = ".safetensors" if make is write_file else ""
    assert qsub(capsys, "quantize", make(tmp_path / "in"), tmp_path / f"int8{suffix}")[0] == 0
    text = "its weights are int8 already, and there is no other to quantize"
    fails(capsys, 4, text, "quantize", tmp_path / f"int8{suffix}", tmp_path / f"out{suffix}")
    assert left(tmp_path) == ["in", f"int8{suffix}"]


METHODS = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "torchao"}, "torchao"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}, "bitsandbytes in 4 bits"),
    ({"bits": 4}, "a method that it doesn't name"),
]


@pytest.mark.parametrize(("entry", "name"), METHODS)
@pytest.mark.parametrize("inner", [False, True])
def test_folders_of_other_methods(tmp_path, capsys, entry, name, inner):
    """A model that sees may have the config of its language model within its own."""
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in")
    config = {"quantization_config": entry}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"text_config": config} if inner else config))
    text = f"in: quantized by {name} already, says config.json. Quantize the float checkpoint that it was made from"
    for options in ([], ["--dry-run"], ["--only", "*.q"]):
        fails(capsys, 4, text, "quantize", tmp_path / "in", tmp_path / "out", *options)
    assert left(tmp_path) == ["in"]


def test_a_folder_of_bitsandbytes_in_8_bits_is_sent_to_convert(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in")
    entry = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": entry}))
    fails(capsys, 4, "use: qsub convert --from bitsandbytes", "quantize", tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("layers.0.v.weight", torch.ones(4, 4).to(torch.float8_e4m3fn), "layers.0.v.weight is F8_E4M3, whose scales"),
        ("layers.0.v.weight", torch.ones(4, 4).to(torch.float8_e5m2), "layers.0.v.weight is F8_E5M2, whose scales"),
        ("layers.0.v.qweight", torch.ones(4, 4, dtype=torch.int32), "v.qweight is a part of a weight that another"),
        ("layers.0.v.weight_packed", torch.ones(4, 4, dtype=torch.int32), "weight_packed is a part"),
        ("layers.0.v.weight_scale", torch.ones(4, 1), "layers.0.v.weight_scale is a part"),
        ("layers.0.v.weight_scale_inv", torch.ones(1, 1), "layers.0.v.weight_scale_inv is a part"),
        ("layers.0.v.weight.absmax", torch.ones(4), "layers.0.v.weight.absmax is a part"),
        ("layers.0.experts.down_proj_blocks", torch.ones(4, 4, dtype=torch.uint8), "down_proj_blocks is a part"),
    ],
)
def test_files_of_other_methods_without_a_config(tmp_path, capsys, name, value, text):
    source = write_file(tmp_path, **{name: value})
    fails(capsys, 4, text, "quantize", source, tmp_path / "y.safetensors")
    assert left(tmp_path) == ["x.safetensors"]


def test_a_model_type_that_cannot_be_built_is_said_on_stderr(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"architectures": ["NoModel"], "model_type": "none"}))
    code, out, err = qsub(capsys, "quantize", tmp_path / "in", tmp_path / "out")
    assert code == 0 and "2 of 9 tensors to int8 (by names and shapes, as NoModel can't be built" in out
    assert err.startswith("qsub: ") and err.count("\n") == 1
    assert "names and shapes decide which tensors are layers, as NoModel can't be built" in err
