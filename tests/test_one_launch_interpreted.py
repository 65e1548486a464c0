"""The CPU cases of test_one_launch.py: the source of the Triton kernels in Triton's interpreter.

They run in a process of their own, because Triton decides between compiler and interpreter when it is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    cases = pathlib.Path(__file__).with_name("test_one_launch.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
