"""Benchmarks of the linear: rows measured again take the place of earlier ones; a machine without a GPU is told so."""

import csv
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import adapter_memory  # noqa: E402
import decode  # noqa: E402
import harness  # noqa: E402
import linear  # noqa: E402


def row(rows, mode, us):
    return {"pass": "forward", "n": 64, "k": 32, "rows": rows, "mode": mode, "us": us}


def test_rows_measured_again(tmp_path):
    target = str(tmp_path / "linear")
    harness.write_results(target, [row(1, "bf16", 5.0), row(1, "int8", 4.0), row(16, "int8", 6.0)], {"copy": 1}, "cpu")
    with open(f"{target}.csv", newline="") as file:
        earlier = list(csv.DictReader(file))
    table = linear.replaced(earlier, [row(1, "int8", 3.0), row(64, "int8", 9.0)])
    harness.write_results(target, table, {"copy": 2}, "cpu")
    with open(f"{target}.csv", newline="") as file:
        found = [(line["rows"], line["mode"], line["us"], line["copy"]) for line in csv.DictReader(file)]
    assert found == [
        ("1", "bf16", "5.0", "1"),
        ("1", "int8", "3.0", "2"),
        ("16", "int8", "6.0", "1"),
        ("64", "int8", "9.0", "2"),
    ]


@pytest.mark.parametrize(
    "module, arguments",
    [(decode, []), (adapter_memory, []), (linear, ["--peers"]), (linear, ["--device", "cuda"])],
    ids=["decode", "adapter_memory", "peers", "device"],
)
def test_what_needs_a_gpu_says_so(monkeypatch, capsys, module, arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit):
        module.main()
    assert "error: this needs a CUDA GPU" in capsys.readouterr().err
