"""Training of a Llama-shaped model (1.236B parameters) under fully_shard: memory, time and bytes gathered on N GPUs.

Random weights and tokens, bf16, no recomputation. Each way of training starts from the same weights, and its loss must
fall. Bytes gathered are those of the outputs of all-gathers in a step, counted where torch.distributed is called.

    torchrun --nproc_per_node=2 benchmarks/fsdp2.py
    torchrun --nproc_per_node=2 benchmarks/fsdp2.py --device cpu --small --output /tmp/fsdp2
"""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import qsub


@dataclass
class Shape:
    """Of the model, and of the batch of each rank."""

    layers: int = 16  # Llama 3.2 1B, as benchmarks/decode.py
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    vocabulary: int = 128256
    batch: int = 2
    length: int = 2048


SMALL = Shape(2, 128, 4, 2, 256, 512, 2, 32)


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, width = shape, shape.dim // shape.heads
        linear = functools.partial(nn.Linear, bias=False)
        self.q, self.o = linear(shape.dim, shape.dim), linear(shape.dim, shape.dim)
        self.k, self.v = (linear(shape.dim, shape.kv_heads * width) for _ in range(2))
        self.gate, self.up = (linear(shape.dim, shape.hidden) for _ in range(2))
        self.down = linear(shape.hidden, shape.dim)
        self.before, self.between = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (-1, x.shape[-1] // self.shape.heads)) for layer in (self.q, self.k, self.v))
        q, k = rotate(q), rotate(k)  # (batch, length, heads, width)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding, pairs of halves."""
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[1], device=x.device)[:, None, None]
    angle = position * 10000 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Llama(nn.Module):
    """The head is the embedding, transposed."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter of rank 16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        kind: Any = {"bias": False, "dtype": linear.weight.dtype, "device": linear.weight.device}
        self.down, self.up = nn.Linear(linear.in_features, 16, **kind), nn.Linear(16, linear.out_features, **kind)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


# ---- Ways of training: how the model is changed before it is sharded, and its optimizer ----


def _with_adapters(model: Llama, int8: bool = True) -> None:
    if int8:
        qsub.quantize_(model.blocks)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    model.embedding.requires_grad_(False)


def _plain(model: Llama) -> None:
    """As it is."""


def _optimizer(module: str, name: str, **options: Any) -> Callable[[Iterable[Any]], Any]:
    return lambda params: getattr(importlib.import_module(module), name)(params, lr=1e-3, **options)


_OURS = _optimizer("qsub.optim", "AdamW8bit")
_ROUNDED = _optimizer("qsub.optim", "AdamW8bit", stochastic_round=True)
WAYS: dict[str, tuple[Callable[[Llama], None], Callable[[Iterable[Any]], Any]]] = {
    "bf16, torch AdamW": (_plain, _optimizer("torch.optim", "AdamW", fused=True)),
    "bf16, qsub AdamW8bit": (_plain, _ROUNDED),
    "bf16 frozen, adapters, qsub AdamW8bit": (functools.partial(_with_adapters, int8=False), _ROUNDED),
    "int8 frozen, adapters, qsub AdamW8bit": (_with_adapters, _ROUNDED),
    "int8 trainable, qsub AdamW8bit": (lambda model: qsub.quantize_(model.blocks, trainable=True), _OURS),  # type: ignore[dict-item]
    "bf16, torchao AdamW8bit": (_plain, _optimizer("torchao.optim", "AdamW8bit")),
}


# ---- Measurement ----


class Gathered(TorchDispatchMode):
    """Counts the bytes of the outputs of all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.bytes += args[0].nbytes
        elif func is torch.ops.c10d.allgather_into_tensor_coalesced_.default:
            self.bytes += sum(output.nbytes for output in args[0])
        return func(*args, **(kwargs or {}))


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on this rank; of wrapper subclasses those of their parts."""
    return sum(part.nbytes for tensor in tensors for part in harness.stored(tensor))


def largest(value: float, device: str) -> float:
    """Of all ranks."""
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def measure(way: str, shape: Shape, device: str, steps: int) -> dict[str, Any]:
    change, make_optimizer = WAYS[way]
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(shape).bfloat16()
    change(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    held = [param.to_local() for param in model.parameters()]
    if "int8" in way and not any(isinstance(part, qsub.Int8RowwiseTensor) for part in held):
        raise RuntimeError("fully_shard made floats of the int8 weights")
    optimizer = make_optimizer([param for param in model.parameters() if param.requires_grad])
    gc.collect()
    harness.reset_peak_memory(device)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length), device=device, generator=generator)

    gathered = Gathered()

    def step(count: bool = False) -> tuple[float, float, float]:
        start = time.perf_counter()
        with gathered if count else contextlib.nullcontext():
            loss = model(tokens)
            loss.backward()
        harness.synchronize(device)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        harness.synchronize(device)
        end = time.perf_counter()
        return (end - start) * 1e3, (end - middle) * 1e3, float(loss.detach())

    warm = [step() for _ in range(3)]
    step(count=True)
    dist.barrier()
    timed = [step() for _ in range(steps)]
    if not timed[-1][2] < warm[0][2]:
        raise ArithmeticError(f"the loss did not fall: {warm[0][2]:.4f} to {timed[-1][2]:.4f}")
    median, p20, p80 = harness.percentiles([total for total, _, _ in timed])
    states = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "weights_mib": largest(local_bytes(model.parameters()) / 2**20, device),
        "state_mib": largest(local_bytes(states) / 2**20, device),
        "peak_gib": largest(harness.peak_memory(device), device),
        "step_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "optimizer_ms": harness.percentiles([inner for _, inner, _ in timed])[0],
        "gathered_mib": gathered.bytes / 2**20,
        "first_loss": warm[0][2],
        "last_loss": timed[-1][2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="a model of 0.4M parameters")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", default="benchmarks/results/fsdp2", help="path of the .csv, less the suffix")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=2))
    shape = SMALL if options.small else Shape()
    rows: list[dict[str, Any]] = []
    for way in options.ways:
        row: dict[str, Any] = {"way": way, "ranks": dist.get_world_size()}
        try:
            row |= measure(way, shape, options.device, options.steps)
        except Exception as error:  # a way that fails is a row of the table, too
            row["error"] = f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]
        rows.append(row)
        if dist.get_rank() == 0:
            print(harness.one_line(row), flush=True)
            record = {"batch": shape.batch, "length": shape.length, "steps": options.steps}
            harness.write_results(options.output, rows, record, options.device)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
