"""The example runs, and the tables of the pages are those of the result files."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date():
    script = ROOT / "benchmarks" / "report.py"
    checked = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what transformers and scikit-learn warn of is theirs
def test_quickstart_shows_what_it_promises():
    rows = {name: (reference, value) for name, reference, value in load(ROOT / "examples" / "quickstart.py").run()}
    assert float(rows["MiniLM, cosine to float, mean"][1]) >= 0.999
    assert rows["MiniLM, nearest neighbours unchanged"][1] == "True"
    assert rows["MiniLM, embeddings after load identical"][1] == "True"
    for name in ("MiniLM, Linear weights, MB", "ViT on digits, optimizer state, kB"):
        reference, value = map(float, rows[name])
        assert value < 0.3 * reference
    reference, value = map(float, rows["ViT on digits, test accuracy"])
    # 360 test images: a standard error of .014 at .92, and two trainings differ by twice that or less.
    assert value > 0.85 and abs(value - reference) < 0.05
