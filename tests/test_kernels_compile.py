"""Every Triton kernel compiles for a GPU, in the variants that launches ask for: Triton needs no GPU for that.

The interpreter takes what the compiler refuses, such as a variable whose shape changes in a loop.
"""

import importlib

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from qsub import Int8RowwiseTensor  # noqa: E402
from qsub.optim import AdamW8bit  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
SHARED_MEMORY = 227 * 1024  # bytes that a program can have on H100 and H200
LINEAR = ("code_gemv", "digits", "few_rows", "few_rows_backward", "gemm", "gemv", "quantize", "weight")


class Hopper:
    """The driver of a GPU that isn't there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that were compiled in place of their launch."""
    names = []

    def launch(kernel, grid, arguments, constants, warps, stages=3, **options):
        options |= {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        result = kernel.run(*arguments, *constants, grid=grid, warmup=True, **options)
        assert result.asm["cubin"] and result.metadata.shared <= SHARED_MEMORY
        names.append(kernel.fn.__name__)

    modules = [importlib.import_module(f"qsub.linear.kernels.{name}") for name in LINEAR]
    modules += [importlib.import_module(f"qsub.optim.{name}") for name in ("one_launch", "requantize_kernel")]
    replaced = {"launch": launch, "overlaps": lambda device: True, "multiprocessors": lambda device: 132}
    for module in modules:
        for name in replaced.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, replaced[name])
    monkeypatch.setattr(driver, "_active", Hopper())  # driver.reset_active() would look for a GPU
    return names


def _operands(m, n, k, dtype):
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return torch.randn(m, k).to(dtype), codes, torch.ones(n, dtype=torch.float16)


FORWARD = [
    (1, 4096, 512, torch.bfloat16, {}, ["gemv_kernel"]),
    (1, 64, 100, torch.float32, {"int8_activations": True}, ["quantize_rows_kernel", "pointer_kernel"]),
    (1, 4096, 1000, torch.bfloat16, {"int8_activations": True}, ["quantize_rows_kernel", "code_gemv_kernel"]),
    (1, 8192, 2048, torch.float16, {"int8_activations": True}, ["quantize_rows_kernel", "code_gemv_kernel"]),
    (5, 8192, 512, torch.float16, {}, ["wide_kernel"]),
    (5, 8192, 256, torch.bfloat16, {}, ["wide_kernel"]),
    (5, 2048, 1024, torch.bfloat16, {}, ["deep_kernel"]),
    (5, 2048, 2048, torch.bfloat16, {}, ["quantize_digits_kernel", "digit_gemm_kernel", "sum_partials_kernel"]),
    (5, 100, 130, torch.float16, {}, ["deep_kernel"]),
    (60, 2048, 512, torch.bfloat16, {}, ["quantize_digits_kernel", "digit_gemm_kernel", "sum_partials_kernel"]),
    (200, 16384, 512, torch.bfloat16, {}, ["quantize_digits_kernel", "digit_gemm_kernel"]),
    (30, 16384, 512, torch.bfloat16, {"int8_activations": True}, ["quantize_rows_kernel", "digit_gemm_kernel"]),
    (300, 100, 130, torch.float16, {"int8_activations": True}, ["quantize_rows_kernel", "pointer_kernel"]),
    (300, 16384, 512, torch.bfloat16, {"int8_activations": True}, ["quantize_rows_kernel", "descriptor_kernel"]),
    (300, 128, 20000, torch.float32, {"int8_activations": True}, ["quantize_rows_kernel", "descriptor_kernel"]),
]
OUTLIERS = ["column_magnitude_kernel", "select_outliers_kernel", "gather_weight_kernel", "quantize_rows_kernel"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m, n, k, dtype, mode, kernels", FORWARD)
def test_forward(compiled, m, n, k, dtype, mode, kernels, bias):
    from qsub.linear import cuda

    x, codes, scale = _operands(m, n, k, dtype)
    cuda.int8_mm(x, codes, scale, torch.zeros(n) if bias else None, **mode)
    assert compiled == kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m, n, k, last", [(3, 100, 130, "pointer_kernel"), (300, 1024, 512, "descriptor_kernel")])
def test_forward_with_outliers(compiled, m, n, k, dtype, last):
    from qsub.linear import cuda

    cuda.int8_mm(*_operands(m, n, k, dtype), int8_activations=True, outlier_threshold=6.0)
    assert compiled == [*OUTLIERS, last]


@pytest.mark.parametrize("m", [1, 20, 60, 128])
def test_backward_of_a_few_rows(compiled, m):
    from qsub.linear.kernels import few_rows_backward

    _, codes, scale = _operands(m, 1024, 512, torch.bfloat16)
    few_rows_backward.few_rows_backward(torch.randn(m, 1024).bfloat16(), codes, scale)
    assert compiled == ["grad_kernel", "sum_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_passes_over_a_weight(compiled, dtype):
    from qsub.linear import cuda

    _, codes, scale = _operands(1, 96, 144, dtype)
    cuda.dequantize(codes, scale, dtype)
    cuda.int8_mm_transposed(torch.randn(40, 96).to(dtype), codes, scale, int8_grad=True)
    assert compiled == ["dequantize_kernel", "quantize_rows_kernel", "transpose_kernel", "descriptor_kernel"]


OPTIONS = [{}, {"amsgrad": True}, {"stochastic_round": True}, {"block_size": 128}]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(d, o) for d in FLOATS for o in OPTIONS if d != torch.float16 or "stochastic_round" not in o],
)
def test_optimizer(compiled, dtype, options, monkeypatch):
    """8-bit state in each layout (whole blocks, rows of 16, of 4, any rows and tails), fp32 state, an int8 weight."""
    from qsub.optim import one_launch

    monkeypatch.setattr(one_launch, "check_device", lambda device: None)
    shapes = [(64, 128), (64, 80), (64, 76), (64, 77), (1601, 1), (16,)]
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    params.append(torch.nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(64, 128))))
    for param in params:
        param.grad = torch.randn(param.shape).to(param.dtype)
    AdamW8bit(params, backend="triton", min_8bit_size=64, **options).step()
    assert compiled == ["prepare_kernel", "adam_kernel", "requantize_kernel"]
