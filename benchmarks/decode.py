"""Decoding of a Llama-shaped model under CUDA graphs: tokens per second of bf16 and of each int8 mode.

Random weights, a static key-value cache, blocks compiled by torch.compile, and the whole step replayed as one CUDA
graph. The embedding and the norms stay bf16; every linear, the head included, is of the mode. Example:

    python benchmarks/decode.py --batches 1 8 64
"""

import argparse
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F
from linear import MODES, captured, in_turn, int8_layer
from torch import Tensor, nn

LAYERS, DIM, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 16, 2048, 32, 8, 8192, 128256  # Llama 3.2 1B
HEAD_DIM = DIM // HEADS
PIECE = 256  # logits compared together


def make_linear(out_features: int, in_features: int, mode: str) -> nn.Module:
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5
    if mode == "bf16":
        layer = nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.bfloat16)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer
    if mode == "torchao Int8WeightOnly":
        import torchao.quantization as ao

        layer = make_linear(out_features, in_features, "bf16")
        ao.quantize_(layer, ao.Int8WeightOnlyConfig())
        return layer
    return int8_layer(weight, **MODES[mode])


class Step(NamedTuple):
    """What the layers share: position (1,), the rotations at it, (HEAD_DIM / 2,), and the mask of the cache."""

    position: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor


class Block(nn.Module):
    """A layer of the decoder. The residual sum comes in two parts, so that their addition is fused with the norm."""

    def __init__(self, mode: str, batch: int, context: int):
        super().__init__()
        self.q, self.o = make_linear(DIM, DIM, mode), make_linear(DIM, DIM, mode)
        self.k, self.v = (make_linear(KV_HEADS * HEAD_DIM, DIM, mode) for _ in range(2))
        self.gate, self.up = (make_linear(HIDDEN, DIM, mode) for _ in range(2))
        self.down = make_linear(DIM, HIDDEN, mode)
        self.norms = nn.ParameterList(torch.ones(DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        shape = (batch, KV_HEADS, context, HEAD_DIM)
        self.register_buffer("keys", torch.randn(shape, device="cuda").bfloat16())
        self.register_buffer("values", torch.randn(shape, device="cuda").bfloat16())

    @torch.compile(fullgraph=True, dynamic=False)
    def forward(self, x: Tensor, added: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """x and added: (batch, DIM), the parts of the residual sum. Returns its parts after this layer."""
        batch = x.shape[0]
        x = x + added
        y = F.rms_norm(x, (DIM,), self.norms[0], 1e-5)
        q = rotate(self.q(y).view(batch, HEADS, 1, HEAD_DIM), step.cos, step.sin)
        k = rotate(self.k(y).view(batch, KV_HEADS, 1, HEAD_DIM), step.cos, step.sin)
        self.keys.index_copy_(2, step.position, k)
        self.values.index_copy_(2, step.position, self.v(y).view(batch, KV_HEADS, 1, HEAD_DIM))
        attention = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=step.mask, enable_gqa=True)
        x = x + self.o(attention.reshape(batch, DIM))
        y = F.rms_norm(x, (DIM,), self.norms[1], 1e-5)
        return x, self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, pairs of halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.compile(dynamic=False)
def begin(embedding: Tensor, token: Tensor, position: Tensor, context: int) -> tuple[Tensor, Step]:
    """Rows of the embedding (batch, DIM), and what the layers share."""
    angle = position.float() * 10000 ** (-torch.arange(HEAD_DIM // 2, device="cuda") * 2 / HEAD_DIM)
    mask = (torch.arange(context, device="cuda") <= position).view(1, 1, 1, -1)
    return embedding[token], Step(position, angle.cos().bfloat16(), angle.sin().bfloat16(), mask)


@torch.compile(dynamic=False)
def normalized_sum(x: Tensor, added: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x + added, (DIM,), norm, 1e-5)


@torch.compile(dynamic=False)
def largest(logits: Tensor) -> Tensor:
    """Greedy choice in two steps: in one, a row of logits is read by a single multiprocessor."""
    values, columns = logits.view(logits.shape[0], -1, PIECE).max(dim=-1)
    piece = values.argmax(dim=-1, keepdim=True)
    return piece.squeeze(-1) * PIECE + columns.gather(1, piece).squeeze(-1)


class Decoder(nn.Module):
    def __init__(self, mode: str, batch: int, context: int):
        super().__init__()
        self.embedding = torch.randn(VOCABULARY, DIM, device="cuda", dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(mode, batch, context) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(DIM, device="cuda", dtype=torch.bfloat16))
        self.head = make_linear(VOCABULARY, DIM, mode)
        self.context = context

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        x, step = begin(self.embedding, token, position, self.context)
        added = torch.zeros_like(x)
        for block in self.blocks:
            x, added = block(x, added, step)
        return largest(self.head(normalized_sum(x, added, self.norm)))


def measure(batch: int, modes: list[str], context: int) -> list[dict[str, Any]]:
    """A row for each mode, whose steps are replayed in turn; the speedup is over bf16."""
    graphs, alive = [], []  # a graph reads its inputs again at each replay
    for mode in modes:
        torch.manual_seed(0)
        torch._dynamo.reset()
        with torch.inference_mode():
            model = Decoder(mode, batch, context)
            token = torch.zeros(batch, dtype=torch.long, device="cuda")
            position = torch.full((1,), context // 2, device="cuda")
            alive.append((model, token, position))
            graphs.append(captured(lambda _, m=model, t=token, p=position: m(t, p), 1))
    rows: list[dict[str, Any]] = []
    for mode, times in zip(modes, in_turn(graphs), strict=True):
        median, p20, p80 = harness.percentiles(times)
        row = {"batch": batch, "mode": mode, "ms_per_step": median / 1e3, "p20": p20 / 1e3, "p80": p80 / 1e3}
        rows.append(row | {"tokens_per_s": batch * 1e6 / median})
    for row in rows:
        row["speedup"] = row["tokens_per_s"] / next(r["tokens_per_s"] for r in rows if r["mode"] == "bf16")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    modes = ["bf16", *MODES, "torchao Int8WeightOnly"]
    parser.add_argument("--modes", nargs="+", default=["bf16", "weight only", "int8"], choices=modes)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", default="benchmarks/results/decode")
    options = parser.parse_args()
    harness.require_cuda(parser)
    peers = [mode for mode in options.modes if mode.startswith("torchao")]
    own = ["bf16", *(mode for mode in options.modes if mode not in ("bf16", *peers))]
    cases = [(batch, own) for batch in options.batches]
    cases += [(batch, ["bf16", *peers]) for batch in options.batches if peers]  # last: they compile for minutes
    rows: list[dict[str, Any]] = []
    for batch, modes in cases:
        found = measure(batch, modes, options.context)
        print("\n".join(map(harness.one_line, found)), flush=True)
        rows += [row for row in found if (batch, row["mode"]) not in {(r["batch"], r["mode"]) for r in rows}]
        harness.write_results(options.output, rows, {"context": options.context}, "cuda")


if __name__ == "__main__":
    main()
