"""Time of one linear layer, forward and backward: each int8 mode against bf16 and against the peers installed.

Every product first passes a reference check: SQNR against float64 on some rows. `us` is device time: calls captured
in a CUDA graph, over as many copies of the weight as overflow the L2 cache, the bf16 graph replayed in turn with the
other so that both see the same clocks. `eager_us` is wall time of a call among many, host included. Examples:

    python benchmarks/linear.py                                  # on a GPU
    python benchmarks/linear.py --layers llama-7b --rows 1 4096 --modes "weight only" "int8"
    python benchmarks/linear.py --device cpu
"""

import argparse
import csv
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

import qsub
from qsub.linear import dequantize, int8_linear, int8_mm_transposed

# (out_features, in_features) of the distinct linear layers
LAYERS: dict[str, list[tuple[int, int]]] = {
    "llama-1b": [(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)],
    "llama-7b": [(4096, 4096), (14336, 4096), (4096, 14336)],
    "llama-70b": [(8192, 8192), (28672, 8192), (8192, 28672)],
    "vit-b": [(768, 768), (3072, 768), (768, 3072)],
}
MODES: dict[str, dict[str, Any]] = {
    "weight only": {},
    "int8": {"activations": "int8"},
    "int8, threshold 6": {"activations": "int8", "outlier_threshold": 6.0},
}
LEAST_SQNR = {"weight only": 40.0, "int8": 30.0, "int8, threshold 6": 30.0}  # dB, inputs of a normal distribution
_L2_BYTES = 150e6
_CPU_SECONDS = 6.0  # of repeats for a CPU case


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (N, K) int8 and row magnitudes (N,) fp16 of a float weight."""
    scale = weight.float().abs().amax(dim=1).half()
    codes = (weight.float() * 127 / scale.float().unsqueeze(1)).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def int8_layer(weight: Tensor, **mode: Any) -> torch.nn.Linear:
    """A frozen nn.Linear without bias of one mode, as `qsub.quantize_` leaves it."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(qsub.Int8RowwiseTensor.from_float(weight, **mode), requires_grad=False)
    return layer


def sqnr(result: Tensor, reference: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    noise = (result.double() - reference).square().sum()
    return float(10 * torch.log10(reference.square().sum() / noise))


def captured(call: Callable[[int], Any], copies: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of several calls, each with its own copy of the weight, and their number."""
    calls = copies * max(1, (24 if copies > 1 else 8) // copies)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % copies)
    graph.replay()
    return graph, calls


def in_turn(graphs: list[tuple[torch.cuda.CUDAGraph, int]], repeats: int = 7) -> list[list[float]]:
    """Microseconds per call of each graph, all of them replayed in turn."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for (graph, calls), found in zip(graphs, times, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(stop) * 1e3 / calls)
    return times


def eager_time(call: Callable[[int], Any], copies: int, seconds: float = 0.01) -> float:
    """Microseconds of wall time per call, many calls between two synchronizations."""
    for index in range(3):
        call(index % copies)
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < 5:
        call(count % copies)
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / count


def gpu_case(n: int, k: int, m: int, modes: list[str], ceiling: float) -> list[dict[str, Any]]:
    """Rows of the table for one layer and number of rows."""
    copies = max(1, min(160, int(_L2_BYTES / (n * k)) + 1)) if m <= 256 else 1
    weight = torch.randn(n, k, device="cuda") / k**0.5
    int_data, scale = quantize_weight(weight)
    codes = [int_data] + [int_data.clone() for _ in range(copies - 1)]
    weights = [weight.bfloat16() for _ in range(copies)]
    x = torch.randn(m, k, device="cuda").bfloat16()
    grad = torch.randn(m, n, device="cuda").bfloat16()
    w64 = dequantize(int_data, scale, torch.float64)
    forward = x[:64].double() @ w64.t()
    backward = grad[:64].double() @ w64
    del weight, w64

    calls: list[tuple[str, str, Callable[[int], Tensor], Tensor]] = [
        ("forward", "bf16", lambda i: F.linear(x, weights[i]), forward),
        ("backward", "bf16", lambda i: torch.mm(grad, weights[i]), backward),
    ]
    for mode in modes:
        calls.append(("forward", mode, lambda i, mode=mode: int8_linear(x, codes[i], scale, **MODES[mode]), forward))
    if "weight only" in modes:
        calls.append(("backward", "weight only", lambda i: int8_mm_transposed(grad, codes[i], scale), backward))
    if "int8" in modes:
        int8 = {"backward": "int8"}
        calls.append(("backward", "int8", lambda i: int8_mm_transposed(grad, codes[i], scale, **int8), backward))

    rows = []
    baseline: dict[str, tuple[Any, float]] = {}
    for direction, mode, call, reference in calls:
        quality = sqnr(call(0)[:64], reference)
        if mode != "bf16" and not quality >= LEAST_SQNR[mode]:
            raise RuntimeError(f"{direction} {mode} ({n}, {k}), {m} rows: SQNR {quality:.1f} dB")
        graph, eager = captured(call, copies), eager_time(call, copies)
        if mode == "bf16":
            baseline[direction] = graph, eager
            times = base = in_turn([graph])[0]
        else:
            base, times = in_turn([baseline[direction][0], graph])
        median, p20, p80 = harness.percentiles(times)
        tops = 2 * m * n * k / median / 1e6
        rows.append(
            {
                "pass": direction,
                "n": n,
                "k": k,
                "rows": m,
                "mode": mode,
                "us": median,
                "p20": p20,
                "p80": p80,
                "ratio": median / harness.percentiles(base)[0],
                "eager_us": eager,
                "eager_ratio": eager / baseline[direction][1],
                "tops": tops,
                "share_of_bf16_ceiling": tops / ceiling,
                "sqnr_db": quality,
            }
        )
    return rows


def matmul_ceiling() -> float:
    """TFLOP/s of a large bf16 product."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    times = in_turn([captured(lambda _: a @ a, 1)])[0]
    return 2 * 8192**3 / harness.percentiles(times)[0] / 1e6


def peers(n: int, k: int, m: int) -> list[dict[str, Any]]:
    """Eager wall time of bitsandbytes and compiled torchao layers, against bf16 and qsub in the same way."""
    x = torch.randn(m, k, device="cuda").bfloat16()
    base = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layers: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "bf16": lambda: base,
        **{mode: lambda mode=mode: int8_layer(base.weight, **MODES[mode]) for mode in MODES},
    }

    def bitsandbytes(threshold: float) -> torch.nn.Module:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=threshold)
        layer.load_state_dict(base.state_dict())
        return layer.to("cuda")

    def torchao(config: str) -> Callable[[Tensor], Tensor]:
        import copy

        import torchao.quantization as ao

        layer = copy.deepcopy(base)
        ao.quantize_(layer, getattr(ao, config)())
        return torch.compile(layer, dynamic=True)

    layers["bitsandbytes, threshold 0"] = lambda: bitsandbytes(0.0)
    layers["bitsandbytes, threshold 6"] = lambda: bitsandbytes(6.0)
    layers["torchao Int8WeightOnly"] = lambda: torchao("Int8WeightOnlyConfig")
    layers["torchao Int8DynamicActivation"] = lambda: torchao("Int8DynamicActivationInt8WeightConfig")
    rows, bf16 = [], 0.0
    reference = x[:64].double() @ base.weight.double().t()
    for name, make in layers.items():
        row: dict[str, Any] = {"n": n, "k": k, "rows": m, "mode": name}
        try:
            layer = make()
            row["sqnr_db"] = sqnr(layer(x)[:64], reference)
            row["eager_us"] = eager_time(lambda _, layer=layer: layer(x), 1, 0.05)
            bf16 = bf16 or row["eager_us"]
            row["ratio"] = row["eager_us"] / bf16
        except Exception as error:  # a peer that fails at a shape is a result
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        rows.append(row)
    return rows


def cpu_case(n: int, k: int, m: int) -> list[dict[str, Any]]:
    """Milliseconds on the CPU, each variant for 50 ms in turn, with their ratios to fp32 and bf16 F.linear.

    Calls are repeated, so that a weight smaller than the last-level cache (16 MiB of codes, not 64 MiB of fp32) stays
    in it: with cold caches the first call of a few rows takes up to twice as long.
    """
    weight = torch.randn(n, k) / k**0.5
    int_data, scale = quantize_weight(weight)
    half = weight.bfloat16()
    x, grad = torch.randn(m, k), torch.randn(m, n)
    x_half = x.bfloat16()
    w64 = dequantize(int_data, scale, torch.float64)
    forward, backward = x.double() @ w64.t(), grad.double() @ w64
    calls: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "fp32": (lambda: F.linear(x, weight), forward),
        "bf16": (lambda: F.linear(x_half, half), forward),
        "weight only, fp32": (lambda: int8_linear(x, int_data, scale), forward),
        "weight only, bf16": (lambda: int8_linear(x_half, int_data, scale), forward),
        "int8, fp32": (lambda: int8_linear(x, int_data, scale, activations="int8"), forward),
        "int8, bf16": (lambda: int8_linear(x_half, int_data, scale, activations="int8"), forward),
        "int8, threshold 6, fp32": (lambda: int8_linear(x, int_data, scale, **MODES["int8, threshold 6"]), forward),
        "fp32, backward": (lambda: grad @ weight, backward),
        "weight only, fp32, backward": (lambda: int8_mm_transposed(grad, int_data, scale), backward),
        "int8, fp32, backward": (lambda: int8_mm_transposed(grad, int_data, scale, backward="int8"), backward),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    quality = {name: sqnr(call(), reference) for name, (call, reference) in calls.items()}
    stop = time.perf_counter() + _CPU_SECONDS
    while time.perf_counter() < stop:
        for name, (call, _) in calls.items():
            turn = time.perf_counter() + 0.05
            while time.perf_counter() < turn:
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: harness.percentiles(found) for name, found in times.items()}
    rows = []
    for name, (median, p20, p80) in medians.items():
        base = "fp32, backward" if name.endswith("backward") else "fp32"
        row = {"n": n, "k": k, "rows": m, "mode": name, "ms": median, "p20": p20, "p80": p80}
        row |= {"ratio_to_fp32": median / medians[base][0], "ratio_to_bf16": median / medians["bf16"][0]}
        rows.append(row | {"sqnr_db": quality[name]})
    return rows


def replaced(table: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`table` with the rows of `found` in place of earlier ones of the same case, or at its end."""

    def case(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(key, "")) for key in ("pass", "n", "k", "rows", "mode"))

    rows = {case(row): row for row in table}
    rows.update((case(row), row) for row in found)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--peers", action="store_true", help="compare with bitsandbytes and torchao (eager wall time)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--keep", action="store_true", help="keep what the output file has of other layers and rows")
    parser.add_argument("--output", default="benchmarks/results/linear")
    options = parser.parse_args()
    if options.peers or options.device != "cpu":
        harness.require_cuda(parser)
    start = time.perf_counter()
    torch.manual_seed(0)
    record: dict[str, Any] = {}
    if options.device == "cpu":
        table = [row for m in options.rows or (1, 4, 32, 512) for row in cpu_case(4096, 4096, m)]
        harness.write_results(f"{options.output}-cpu", table, record, "cpu")
        print("\n".join(map(harness.one_line, table)))
        return
    ceiling = matmul_ceiling()
    record = {"bf16_ceiling_tflops": round(ceiling), "copy_gb_s": round(harness.copy_rate("cuda"))}
    target = f"{options.output}-peers" if options.peers else options.output
    table: list[dict[str, Any]] = []
    if options.keep:
        with open(f"{target}.csv", newline="") as file:
            table = list(csv.DictReader(file))
    for layer in options.layers:
        for n, k in LAYERS[layer]:
            for m in options.rows or (1, 16, 64, 256, 1024, 4096, 16384):
                if time.perf_counter() - start > options.seconds:
                    continue
                found = peers(n, k, m) if options.peers else gpu_case(n, k, m, options.modes, ceiling)
                for row in found:
                    print(layer, harness.one_line(row), flush=True)
                table = replaced(table, found)
                harness.write_results(target, table, record, "cuda")  # each time: a run may be stopped


if __name__ == "__main__":
    main()
