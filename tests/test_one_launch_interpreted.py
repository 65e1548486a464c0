"""The CPU cases of the tests of the launch: the source of the Triton kernels in Triton's interpreter.

They run in a process of their own, because Triton decides between compiler and interpreter when it is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)  # the interpreter takes minutes for what a GPU does at once
@pytest.mark.parametrize(
    ("file", "cases"),
    [
        ("test_one_launch.py", ""),
        ("test_adam_drop_in.py", "triton"),  # the other backends are tested in the process that starts this one
        ("test_requantize.py", ""),
        pytest.param("test_dist_optim_launch.py", "", marks=pytest.mark.dist),
    ],
)
def test_kernels_in_the_interpreter(file, cases):
    path = pathlib.Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-k", cases, str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
