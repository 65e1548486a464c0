"""Which compiled kernel a launch takes, and what it is given: with a stand-in for Triton's, so without a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from qsub import kernel_launch  # noqa: E402


class Compiled:
    """What Triton returns of a launch: called by its grid, or run by what it has been resolved to."""

    function, packed_metadata = "function", "packed"

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *args: self.log.append(("by Triton", grid, args))

    def run(self, *args):
        self.log.append(("run", *args))


class Kernel:
    """A kernel that notes when it is compiled."""

    def __init__(self):
        self.compiled, self.log = [], []

    def __getitem__(self, grid):
        def compile(*args, **options):
            self.compiled.append((grid, args, options))
            return Compiled(self.log)

        return compile


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(kernel_launch, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: ("stream of", device), raising=False)
    return Kernel()


def _launch(kernel, *arguments, constants=(64,), warps=4):
    kernel_launch.launch(kernel, (3, 2, 1), arguments, constants, warps, launch_pdl=True)


def test_kept_kernel_gets_addresses(kernel):
    x, y = torch.zeros(8), torch.zeros(8, dtype=torch.int8)
    _launch(kernel, x, y, None, 7, 1.5)
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True, "launch_pdl": True}
    ((grid, args, given),) = kernel.compiled
    assert (grid, args[2:], given) == ((3, 2, 1), (None, 7, 1.5, 64), options) and args[0] is x
    x2 = torch.ones(8)
    _launch(kernel, x2, y, None, 9, 2.5)
    assert len(kernel.compiled) == 1
    head = ("run", 3, 2, 1, ("stream of", -1), "function", "packed", None, None, None)
    assert kernel.log == [(*head, x2.data_ptr(), y.data_ptr(), None, 9, 2.5, 64)]


@pytest.mark.parametrize(
    "change",
    ["dtype", "alignment", "integer 1", "multiple of 16", "None", "constants", "warps", "kernel"],
)
def test_another_kernel_where_triton_compiles_another(kernel, change):
    x = torch.zeros(32)
    _launch(kernel, x, 7, x)
    other, constants, warps = [x, 7, x], (64,), 4
    if change == "dtype":
        other[0] = x.half()
    elif change == "alignment":
        other[0] = x[1:]
    elif change == "integer 1":
        other[1] = 1
    elif change == "multiple of 16":
        other[1] = 32
    elif change == "None":
        other[2] = None
    constants = (128,) if change == "constants" else constants
    warps = 8 if change == "warps" else warps
    second = Kernel() if change == "kernel" else kernel
    _launch(second, *other, constants=constants, warps=warps)
    assert len(kernel.compiled) + (len(second.compiled) if second is not kernel else 0) == 2
    _launch(second, *other, constants=constants, warps=warps)
    assert len(kernel.compiled) + (len(second.compiled) if second is not kernel else 0) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_launches(kernel, hook):
    from triton import knobs

    x, chain, watch = torch.zeros(8), getattr(knobs.runtime, hook), print
    _launch(kernel, x)
    chain.add(watch)
    try:
        _launch(kernel, x)
    finally:
        chain.remove(watch)
    _launch(kernel, x)
    by_triton, run = kernel.log
    assert by_triton == ("by Triton", (3, 2, 1), (x, 64)) and run[0] == "run"


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000])
@pytest.mark.parametrize("b", [1, 3, 16])
def test_integer_functions_equal_tritons(n, b):
    import triton

    assert kernel_launch.cdiv(n, b) == triton.cdiv(n, b)
    assert kernel_launch.next_power_of_2(n) == triton.next_power_of_2(n)


def test_kernels_are_for_nvidia(monkeypatch):
    """PyTorch for AMD has devices named "cuda" and a Triton too; there the plain torch paths run."""
    from qsub.optim.compiled import resolve_backend

    cuda = torch.device("cuda")
    for version, backend in ((None, "triton"), ("7.0.51831", "eager")):
        kernel_launch.has_triton.cache_clear()
        monkeypatch.setattr(torch.version, "hip", version)
        assert resolve_backend(None, cuda) == backend
        assert kernel_launch.has_triton() == (version is None)
    kernel_launch.has_triton.cache_clear()
