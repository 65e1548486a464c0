"""What all benchmarks share: machine record, percentiles, memory, copy rate, CSV and markdown."""

import argparse
import csv
import importlib.metadata
import os
import pathlib
import platform
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "bitsandbytes", "torchao", "flashoptim", "torch-optimi", "transformers", "timm")


def _processor() -> str:
    """Name of the CPU, from Linux where that tells it."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(device: str) -> dict[str, str]:
    """Hardware and versions that the numbers belong to."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": gpu or f"{_processor()}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": "; ".join(versions),
    }


def require_cuda(parser: argparse.ArgumentParser) -> None:
    """Leave with a message where there is no GPU to measure."""
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU")


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    return tuple(float(ordered.quantile(share)) for share in (0.5, 0.2, 0.8))  # type: ignore[return-value]


def copy_rate(device: str) -> float:
    """GB/s of a large copy on the device, bytes read plus bytes written: the ceiling of memory-bound code."""
    size = 1 << (30 if device.startswith("cuda") else 26)
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / percentiles(times[3:])[0] / 1e9


def reset_peak_memory(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: str) -> float:
    """GiB: allocated on the GPU since the reset, or resident on the CPU since the process started."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def graph_count() -> int:
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def one_line(row: dict[str, Any]) -> str:
    return "  ".join(f"{key}={_text(value)}" for key, value in row.items())


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor, perhaps of a subclass, consists of on this rank."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []  # type: ignore[operator]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh, too
            yield from stored(part)
    if not names:
        yield tensor


def write_csv(path: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of equal keys. The file is whole at any time, also if the process is killed here."""
    part = f"{path}.part"
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


def write_results(path: str, rows: list[dict[str, Any]], record: dict[str, Any], device: str = "") -> None:
    """Write `path`.csv, with the record of the machine in each row (`report.py` makes tables of it).

    Args:
        path: without suffix; folders are made.
        rows: one dict each; columns are the union of their keys. A row of an earlier file keeps its own record.
        record: what holds for all rows, beside `environment`.
        device: of the environment. Default: CUDA if there is one.
    """
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    record = {**environment(device or ("cuda" if torch.cuda.is_available() else "cpu")), **record}
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_csv(f"{path}.csv", [{**dict.fromkeys(columns, ""), **record, **row} for row in rows])
