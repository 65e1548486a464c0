"""The table of examples/quickstart.py as a file: python benchmarks/quickstart.py --out benchmarks/results."""

import argparse
import os
import pathlib
import sys
import tempfile

import harness

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import quickstart  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    folder = parser.parse_args().out
    with tempfile.TemporaryDirectory() as cache:  # as on a machine that has compiled nothing yet
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        rows = [{"measure": name, "torch": reference, "qsub": value} for name, reference, value in quickstart.run()]
    harness.write_results(f"{folder}/quickstart", rows, {}, "cpu")


if __name__ == "__main__":
    main()
