"""Gradient streams of benchmarks/state_codes.py: drawn ones, and those of a small vision transformer in training."""

import gzip
import math
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_BLOCK = 256
MIN_SIZE = 4096  # elements of the smallest parameter with 8-bit state
BATCH = 128


# ---- Drawn streams ----


@dataclass(frozen=True)
class Drawn:
    """Gradients s * x, with s log-normal over the elements and x drawn anew at each step.

    Attributes:
        kind: of x. "noise": .3 + N(0, 1). "sparse": the same in 1% of the steps of an element, else 0. "smooth": a sine
            of the step around 1, of a period of 50 to 500 steps, and noise of .05. "constant": 1.
        sigma: of log s: neighbours in a block differ by orders of magnitude (embeddings, outlier channels).
        steps: number of them.
        size: elements.
        dead: share of the elements whose gradient is 1e-12 of what it would be.
    """

    kind: str = "noise"
    sigma: float = 1.0
    steps: int = 300
    size: int = 65536
    dead: float = 0.0


DRAWN = {
    "heavy 1": Drawn(sigma=1),
    "heavy 2": Drawn(sigma=2),
    "heavy 3": Drawn(sigma=3),
    "heavy 1, 3000 steps": Drawn(sigma=1, steps=3000, size=16384),
    "heavy 2, 3000 steps": Drawn(sigma=2, steps=3000, size=16384),
    "heavy 3, 3000 steps": Drawn(sigma=3, steps=3000, size=16384),
    "sparse": Drawn("sparse", steps=1000),
    "smooth": Drawn("smooth"),
    "constant": Drawn("constant"),
    "dead": Drawn(dead=0.02),
}


def drawn_gradients(stream: Drawn, seed: int) -> Iterator[Tensor]:
    """`stream.steps` gradients, (size,) fp32."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def uniform() -> Tensor:
        return torch.rand(stream.size, generator=generator)

    def normal() -> Tensor:
        return torch.randn(stream.size, generator=generator)

    spread = torch.exp(stream.sigma * normal()) * 1e-3
    spread = torch.where(uniform() < stream.dead, spread * 1e-12, spread)
    frequency, phase = 2 * math.pi / (50 + 450 * uniform()), 2 * math.pi * uniform()
    for step in range(stream.steps):
        if stream.kind == "smooth":
            yield spread * (1 + 0.5 * torch.sin(step * frequency + phase) + 0.05 * normal())
        elif stream.kind == "constant":
            yield spread.clone()
        elif stream.kind == "sparse":
            yield spread * (0.3 + normal()) * (uniform() < 0.01)
        else:
            yield spread * (0.3 + normal())


# ---- A vision transformer ----


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, heads, T, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images of 28 x 28 in patches of 7 x 7, ten classes: 455k parameters."""

    def __init__(self, width: int = 96, depth: int = 4, heads: int = 4, patch: int = 7) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, (28 // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, 28, 28) to (B, 10)
        x = self.embed(F.unfold(images, self.patch, stride=self.patch).transpose(1, 2))
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x)[:, 0]))


@dataclass
class Images:
    """Images (N, 1, 28, 28), normalized to mean 0 and standard deviation 1 over the training images; labels (N,)."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def fashion_mnist(folder: str) -> Images:
    """Fashion-MNIST (arXiv 1708.07747) from its four files *-ubyte.gz: 60,000 and 10,000 images."""

    def read(name: str, header: int) -> Tensor:
        data = gzip.decompress((pathlib.Path(folder) / name).read_bytes())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header)

    def images(part: str) -> Tensor:
        return (read(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).float() / 255 - 0.286) / 0.353

    def labels(part: str) -> Tensor:
        return read(f"{part}-labels-idx1-ubyte.gz", 8).long()

    return Images(images("train"), labels("train"), images("t10k"), labels("t10k"))


def digits() -> Images:
    """The digits of scikit-learn, 8 x 8 enlarged to 28 x 28: 1,437 and 360 images."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = F.interpolate(torch.tensor(data.images[:, None], dtype=torch.float32), size=28, mode="bilinear")
    images, labels = (images - images.mean()) / images.std(), torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return Images(images[train], labels[train], images[test], labels[test])


def batches(images: Images, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches of training images and labels, shuffled by torch's generator in each epoch."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(images.train))
        index, order = order[:BATCH], order[BATCH:]
        yield images.train[index], images.train_labels[index]


def large_parameters(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.numel() >= MIN_SIZE]


def padded(value: Tensor) -> Tensor:
    """Flat, with zeros up to a whole number of the largest blocks, so that no block holds two parameters."""
    return F.pad(value.flatten(), (0, -value.numel() % LARGEST_BLOCK))


def vit_gradients(images: Images, steps: int, seed: int) -> Iterator[Tensor]:
    """Gradients of the large parameters along a training in fp32: AdamW, one-cycle schedule, label smoothing .05."""
    torch.manual_seed(seed)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=steps, pct_start=0.15)
    for batch, labels in batches(images, steps):
        F.cross_entropy(model(batch), labels, label_smoothing=0.05).backward()
        yield torch.cat([padded(param.grad) for param in large_parameters(model) if param.grad is not None])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
