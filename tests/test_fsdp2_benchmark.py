"""benchmarks/fsdp2.py on two processes of a CPU: it runs, and its counts are those of the formula."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARK = ROOT / "benchmarks" / "fsdp2.py"


@pytest.mark.dist
def test_counts_of_the_small_model(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", BENCHMARK]
    command += ["--device", "cpu", "--small", "--steps", "2", "--output", tmp_path / "fsdp2"]
    command += ["--ways", "bf16, torch AdamW", "bf16, qsub AdamW8bit"]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    theirs, ours = csv.DictReader((tmp_path / "fsdp2.csv").read_text(encoding="utf-8").splitlines())
    assert not theirs.get("error") and not ours.get("error"), (theirs, ours)
    # Per block: q and o (128, 128), k and v (64, 128), gate, up and down of 128 * 256, and two norms.
    block = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256 + 2 * 128
    root = 512 * 128 + 128
    assert int(ours["parameters"]) == 2 * block + root
    for row in (theirs, ours):
        assert float(row["weights_mib"]) * 2**20 == (2 * block + root) / 2 * 2  # two ranks, two bytes
        # A block is gathered for the forward and for the backward pass, the root once.
        assert float(row["gathered_mib"]) * 2**20 == 2 * (2 * 2 * block + root)
        assert float(row["last_loss"]) < float(row["first_loss"])
    scalars = 4 * (2 * 9 + 2)  # the step of each parameter, fp32
    norms = (2 * 2 + 1) * 128 // 2  # elements a rank, with fp32 state
    assert float(theirs["state_mib"]) * 2**20 == 2 * 2 * (2 * block + root) / 2 + scalars  # two moments in bf16
    # Two codes of a byte and two scales of two bytes for each 64 elements: all rows are multiples of 64.
    matrices = (2 * block + root) // 2 - norms
    assert float(ours["state_mib"]) * 2**20 == 2 * matrices * (1 + 2 / 64) + 2 * 4 * norms + scalars
