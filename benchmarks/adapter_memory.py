"""Memory of a training step through frozen layers: activations kept for backward, and the peak.

Eight linears of 4096 with GELU between, x (8192, 4096) bf16, alone and with a LoRA-style adapter (rank 16) on each:
frozen bf16, int8 of each mode, and bitsandbytes where it is installed; eager and compiled.

    python benchmarks/adapter_memory.py
"""

import argparse
from typing import Any

import harness
import torch
import torch.nn.functional as F
from linear import MODES, int8_layer
from torch import Tensor, nn

DEPTH, WIDTH, ROWS, RANK = 8, 4096, 8192, 16


def frozen_linear(mode: str) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    if mode == "bf16":
        return layer
    if mode == "bitsandbytes":
        import bitsandbytes as bnb

        quantized = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False, threshold=0.0)
        quantized.load_state_dict(layer.state_dict())
        return quantized.to("cuda").requires_grad_(False)
    return int8_layer(layer.weight, **MODES[mode])


class Stack(nn.Module):
    def __init__(self, mode: str, adapters: bool):
        super().__init__()
        self.layers = nn.ModuleList(frozen_linear(mode) for _ in range(DEPTH))
        kind = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        count = DEPTH if adapters else 0
        self.down = nn.ModuleList(nn.Linear(WIDTH, RANK, **kind) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(RANK, WIDTH, **kind) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if self.down:
                y = y + self.up[index](self.down[index](x))
            x = F.gelu(y)
        return x


def measure(mode: str, adapters: bool, compiled: bool) -> dict[str, Any]:
    """MiB: the model, what forward leaves allocated beside its result, and the peak of the step beside the model."""
    torch._dynamo.reset()
    harness.reset_peak_memory("cuda")
    start = torch.cuda.memory_allocated()
    model = Stack(mode, adapters)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run = torch.compile(model, fullgraph=True) if compiled else model
    run(x).sum().backward()
    x.grad = None
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated() - start - x.nbytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run(x)
    saved = torch.cuda.memory_allocated() - before - result.nbytes
    loss = result.sum()
    del result
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    row = {"mode": mode, "adapters": adapters, "compiled": compiled, "weights_mib": weights / 2**20}
    return row | {"saved_mib": saved / 2**20, "peak_mib": peak / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["bf16", *MODES, "bitsandbytes"])
    parser.add_argument("--output", default="benchmarks/results/adapter_memory")
    options = parser.parse_args()
    harness.require_cuda(parser)
    rows = []
    measure("bf16", False, False)  # cuBLAS takes its workspaces, once a process
    for adapters in (False, True):
        for compiled in (False, True):
            for mode in options.modes:
                try:
                    rows.append(measure(mode, adapters, compiled))
                except Exception as error:  # a peer that fails is a result
                    message = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                    rows.append({"mode": mode, "adapters": adapters, "compiled": compiled, "error": message})
                print(harness.one_line(rows[-1]), flush=True)
                harness.write_results(options.output, rows, {"rows": ROWS, "width": WIDTH, "depth": DEPTH}, "cuda")


if __name__ == "__main__":
    main()
