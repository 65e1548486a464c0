"""Every public method of torch.Tensor, and what reads its memory, on both subclasses: right, or refused with a remedy.

tests/every_method.py tries them, in a process of its own, since a bad one reads memory that isn't there.
"""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from every_method import FUNCTIONS, SPECIAL

SCRIPT = pathlib.Path(__file__).with_name("every_method.py")
OPERATORS = """
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
    __floordiv__ __mod__ __pow__ __rpow__ __matmul__ __rmatmul__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__
    __gt__ __ge__ __getitem__ __len__ __contains__ __reversed__ __dlpack__ __dlpack_device__ __cuda_array_interface__
""".split()
# Where the answer is another than of a plain tensor, and why.
DIFFERENT = {
    "data_ptr": "the address of the codes",
    "const_data_ptr": "the same",
    "element_size": "of the codes",
    "itemsize": "of the codes",
    "nbytes": "of codes and scales",
    "new_empty": "not initialized",
}
NO_REMEDY = {
    "imag": "what torch says of any real tensor",
    "function:to_dlpack": "a function of C: torch's own words for tensors without memory",
    "function:_to_dlpack_versioned": "the same",
    "function:Tensor.numpy": "a function of C that isn't asked, for Blockwise8bitTensor: torch's own words",
    "function:frombuffer": "what Python says of any tensor",
    "function:memoryview": "the same",
    "function:bytes": "what torch says of any tensor",
}
REMEDIES = ("dequantize", "from_float", "copy_", "save_file", "torch.export", "floats can be cut")


def names():
    public = [name for name in dir(torch.Tensor) if not name.startswith("_")]
    own = [name for name in SPECIAL if name.startswith("_")]
    return [*public, *OPERATORS, *own, *(f"function:{name}" for name in FUNCTIONS)]


def outcomes(kind):
    """name to (outcome, detail), in as many processes as it takes."""
    found, left = {}, names()
    while left:
        command = [sys.executable, str(SCRIPT), kind, *left]
        run = subprocess.run(command, capture_output=True, text=True)
        for line in run.stdout.splitlines():
            if line.startswith("["):
                name, outcome, detail = json.loads(line)
                found[name] = outcome, detail
        if run.returncode == 0:
            break
        last = list(found)[-1]
        found[last] = "wrong", f"the process ended with {run.returncode}: {run.stderr[-500:]}"
        left = left[left.index(last) + 1 :]
    return found


@pytest.mark.parametrize("kind", ["int8", "state"])
def test_right_or_refused(kind):
    found = outcomes(kind)
    assert set(found) == set(names())
    wrong = {name: detail for name, (outcome, detail) in found.items() if outcome == "wrong" and name not in DIFFERENT}
    assert not wrong
    refused = {name: detail for name, (outcome, detail) in found.items() if outcome == "refused"}
    bare = {name: detail for name, detail in refused.items() if not any(word in detail for word in REMEDIES)}
    assert {name: detail for name, detail in bare.items() if name not in NO_REMEDY} == {}
    # Nothing is called right that wasn't tried: what no arguments were found for is what plain tensors refuse as well.
    tried = [name for name, (outcome, _) in found.items() if outcome in ("right", "refused")]
    assert len(tried) > 0.85 * len(found)
    must = ["numpy", "__dlpack__", "__array__", "set_", "apply_", "map_", "resize_", "storage", "untyped_storage"]
    must += ["function:np.from_dlpack", "function:torch.from_dlpack", "function:to_dlpack", "function:jit.trace"]
    assert set(must) <= refused.keys()


def test_the_script_finds_what_is_wrong(monkeypatch):
    """Negative control: an operator that is off by 5%, and one that writes what it refuses."""
    import every_method

    from qsub import Int8RowwiseTensor

    monkeypatch.setattr(Int8RowwiseTensor, "abs", lambda x: x.dequantize().abs() * 1.05)
    assert every_method.attempt("int8", "abs")[0] == "wrong"
    assert every_method.attempt("int8", "neg")[0] == "right"

    def write_and_refuse(x):
        x.int_data.zero_()
        raise NotImplementedError("no; call .dequantize()")

    monkeypatch.setattr(Int8RowwiseTensor, "neg", write_and_refuse)
    assert every_method.attempt("int8", "neg")[0] == "wrong"
