"""The Triton kernels of the int8 linear in Triton's interpreter: interpreted_linear.py in a process of its own.

Triton decides between compiler and interpreter when it is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    cases = pathlib.Path(__file__).with_name("interpreted_linear.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
