"""benchmarks/linear.py --keep: rows measured again take the place of earlier ones, which keep their record."""

import csv
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
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
