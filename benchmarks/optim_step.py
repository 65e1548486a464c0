"""Time of one optimizer step: qsub on each backend against torch and the 8-bit optimizers that are installed.

Every optimizer first passes a reference check (10 steps against torch.optim.AdamW in fp64). Times are wall times of
several steps between two synchronizations, so they include the host where the host is the bound. Examples:

    python benchmarks/optim_step.py                        # on a GPU: all sets, dtypes and optimizers
    python benchmarks/optim_step.py --sets tiny --device cpu
"""

import argparse
import gc
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

import harness
import torch

import qsub

_REFERENCE_ERROR = 0.1  # |update - fp64 update| / |fp64 update| after 10 steps: 8-bit state gives .002 to .03


def vit_b() -> list[tuple[int, ...]]:
    """ViT-B/16 of timm, 1,000 classes: 86.6M parameters in 152 tensors."""
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(3072, 768), (3072,), (768, 3072), (768,)]
    return [(768, 3, 16, 16), (768,), (1, 197, 768), (1, 1, 768), *block * 12, (768,), (768,), (1000, 768), (1000,)]


def llama_1b() -> list[tuple[int, ...]]:
    """Llama 3.2 1B: 1.236B parameters in 146 tensors."""
    block = [(2048,), (2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (2048,)]
    block += [(8192, 2048), (8192, 2048), (2048, 8192)]
    return [(128256, 2048), *block * 16, (2048,)]


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "vit-b": vit_b,
    "llama-1b": llama_1b,
    "many-small": lambda: [(64, 64)] * 1000,
    "one-2048": lambda: [(2048, 2048)],
    # Narrow rows: splats, tables of scalars, LoRA's B, beside the same number of elements in one row.
    "one-row": lambda: [(1_500_000,)] * 32,
    "rows-of-1": lambda: [(1_500_000, 1)] * 32,
    "rows-of-3": lambda: [(500_000, 3)] * 32,
    "rows-of-8": lambda: [(187_500, 8)] * 32,
    "rows-of-14": lambda: [(107_142, 14)] * 32,
    "rows-of-45": lambda: [(33_333, 15, 3)] * 32,
    "tiny": lambda: [(64 * i, 64) for i in range(1, 21)] + [(64,)] * 20,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _qsub(backend: str, **options: Any) -> Callable[..., Any]:
    return lambda params, **kwargs: qsub.optim.AdamW8bit(params, backend=backend, **options, **kwargs)


def _peer(module: str, name: str, **options: Any) -> Callable[..., Any]:
    return lambda params, **kwargs: getattr(importlib.import_module(module), name)(params, **options, **kwargs)


def _flashoptim(params: list[torch.nn.Parameter], **kwargs: Any) -> Any:
    """Its default of 24-bit master weights is for parameters of fewer bits, and refused for others."""
    flashoptim = importlib.import_module("flashoptim")
    bits = None if params[0].dtype == torch.float32 else 24
    return flashoptim.FlashAdamW(params, master_weight_bits=bits, **kwargs)


# Name: (module that must be there, how to make it, bytes moved per parameter of `size` bytes, or None)
OPTIMIZERS: dict[str, tuple[str, Callable[..., Any], Callable[[int], float] | None]] = {
    "torch fused": ("torch", _peer("torch.optim", "AdamW", fused=True), lambda size: 7 * size),
    "torch foreach": ("torch", _peer("torch.optim", "AdamW", foreach=True), None),
    "torch default": ("torch", _peer("torch.optim", "AdamW"), None),
    "qsub triton": ("triton", _qsub("triton"), lambda size: 3 * size + 4 + 8 / 64),
    "qsub triton, stochastic": ("triton", _qsub("triton", stochastic_round=True), lambda size: 3 * size + 4 + 8 / 64),
    "qsub compile": ("torch", _qsub("compile"), lambda size: 3 * size + 4 + 8 / 64),
    "qsub eager": ("torch", _qsub("eager"), None),
    "bitsandbytes": ("bitsandbytes", _peer("bitsandbytes.optim", "AdamW8bit"), None),
    "torchao": ("torchao", _peer("torchao.optim", "AdamW8bit"), None),
    "flashoptim": ("flashoptim", _flashoptim, None),
    "torch-optimi": ("optimi", _peer("optimi", "AdamW", triton=True), None),
}
DEFAULTS = {
    "cuda": [name for name in OPTIMIZERS if name not in ("torch default", "qsub eager")],
    "cpu": ["torch default", "torch fused", "qsub compile", "qsub eager", "bitsandbytes", "torchao"],
}


def make_params(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    """Random parameters with random gradients."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter((torch.randn(shape, device=device, generator=generator) * 0.02).to(dtype))
        param.grad = (torch.randn(shape, device=device, generator=generator) * 1e-3).to(dtype)
        params.append(param)
    return params


def reference_error(make: Callable[..., Any], device: str) -> float:
    """Relative error of the update after 10 steps of fp32 parameters, against torch.optim.AdamW in fp64."""
    shapes = [(128, 128), (64,)]
    params = make_params(shapes, torch.float32, device)
    start = [param.detach().double() for param in params]
    twins = [torch.nn.Parameter(value.clone()) for value in start]
    optimizers = make(params, lr=1e-3, weight_decay=0.1), torch.optim.AdamW(twins, lr=1e-3, weight_decay=0.1)
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(10):
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn(param.shape, device=device, generator=generator)
            twin.grad = param.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    moved = torch.cat([(p.detach().double() - s).flatten() for p, s in zip(params, start, strict=True)])
    wanted = torch.cat([(t.detach() - s).flatten() for t, s in zip(twins, start, strict=True)])
    return float((moved - wanted).norm() / wanted.norm())


def first_step(make: Callable[..., Any], params: list[Any], device: str) -> float:
    """Seconds of the first step, compilation included (unless a cache on the disk holds its result)."""
    optimizer = make(params, lr=1e-4, weight_decay=0.1)
    harness.synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    harness.synchronize(device)
    return time.perf_counter() - start


def measure(make: Callable[..., Any], params: list[Any], device: str, repeats: int, steps: int) -> dict[str, float]:
    """Times in ms of a step (median, p20, p80), of the host in it, of the first step (s), and of a step with new lr."""
    optimizer = make(params, lr=1e-4, weight_decay=0.1)
    harness.synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    harness.synchronize(device)
    first = time.perf_counter() - start
    for _ in range(3):
        optimizer.step()

    def run(schedule: bool) -> tuple[float, float]:
        harness.synchronize(device)
        start = time.perf_counter()
        for step in range(steps):
            if schedule:
                _set_lr(optimizer, 1e-4 * (1 - 1e-3 * step))
            optimizer.step()
        host = time.perf_counter()
        harness.synchronize(device)
        return (time.perf_counter() - start) / steps * 1e3, (host - start) / steps * 1e3

    # In turn, so that clocks and temperature are the same for both.
    times = [(run(schedule=False), run(schedule=True)) for _ in range(repeats)]
    median, p20, p80 = harness.percentiles([same[0] for same, _ in times])
    return {
        "step_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "host_ms": harness.percentiles([same[1] for same, _ in times])[0],
        "new_lr_ms": harness.percentiles([scheduled[0] for _, scheduled in times])[0],
        "first_step_s": first,
    }


def _set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # torchao keeps its lr in a tensor
        else:
            group["lr"] = lr


def run_set(args: argparse.Namespace, set_name: str, dtype_name: str, copy_rate: float) -> list[dict[str, Any]]:
    shapes, dtype = SETS[set_name](), DTYPES[dtype_name]
    count = sum(math.prod(shape) for shape in shapes)
    rows: list[dict[str, Any]] = []
    for name in args.optimizers:
        module, make, moved = OPTIMIZERS[name]
        if importlib.util.find_spec(module) is None or ("stochastic" in name and dtype != torch.bfloat16):
            continue
        row: dict[str, Any] = {"set": set_name, "dtype": dtype_name, "parameters": count, "tensors": len(shapes)}
        row["optimizer"] = name
        gc.collect()
        harness.reset_peak_memory(args.device)
        graphs = harness.graph_count()
        try:
            if args.cold:
                row["cold_first_step_s"] = first_step(make, make_params(shapes, dtype, args.device), args.device)
            row["reference_error"] = round(reference_error(make, args.device), 5)
            if not row["reference_error"] <= _REFERENCE_ERROR:
                raise ArithmeticError(f"fails the reference check: error {row['reference_error']}")
            harness.reset_peak_memory(args.device)
            row.update(measure(make, make_params(shapes, dtype, args.device), args.device, args.repeats, args.steps))
            row["graphs"] = harness.graph_count() - graphs
            row["peak_gib"] = harness.peak_memory(args.device)
        except Exception as error:  # a peer that fails is a row of the table, too
            row["error"] = f"{type(error).__name__}: {error}"[:160]
        if "step_ms" in row and moved is not None:
            row["gb_per_s"] = moved(dtype.itemsize) * count / row["step_ms"] / 1e6
            row["share_of_copy"] = row["gb_per_s"] / copy_rate
        rows.append(row)
        print(harness.one_line(row), flush=True)
    base = next((row["step_ms"] for row in rows if row["optimizer"] == "torch fused" and "step_ms" in row), None)
    for row in rows:
        if base and "step_ms" in row:
            row["vs_torch_fused"] = row["step_ms"] / base
    return rows


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device)
    parser.add_argument("--sets", nargs="+", choices=SETS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps between two synchronizations")
    parser.add_argument("--cold", action="store_true", help="time a first step before the reference check compiles")
    parser.add_argument("--out", default="benchmarks/results/optim_step", help="path of the .csv, less the suffix")
    args = parser.parse_args()
    on_gpu = args.device.startswith("cuda")
    args.sets = args.sets or (["vit-b", "llama-1b", "many-small"] if on_gpu else ["one-2048", "tiny"])
    args.optimizers = args.optimizers or DEFAULTS["cuda" if on_gpu else "cpu"]
    copy_rate = harness.copy_rate(args.device)
    print(f"copy rate {copy_rate:.0f} GB/s (bytes read and written)")
    rows = []
    for set_name in args.sets:
        for dtype_name in args.dtypes:
            rows += run_set(args, set_name, dtype_name, copy_rate)
            harness.write_results(args.out, rows, {"copy_gb_per_s": round(copy_rate)}, args.device)


if __name__ == "__main__":
    main()
