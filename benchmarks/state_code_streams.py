"""Gradient streams of benchmarks/state_codes.py: drawn ones, and those of a small vision transformer in training."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_vit import SmallViT, load_data, prepare

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


@dataclass
class Images:
    """Normalized images (N, 1, side, side) and labels (N,), from train_vit.py."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, fashion_mnist: str | None) -> "Images":
        """Fashion-MNIST (60,000 images) from the folder of its *-ubyte.gz files, or the digits of scikit-learn."""
        data = load_data(f"fashion-mnist:{fashion_mnist}" if fashion_mnist else "digits", seed=0)
        train, test = (prepare(images, images.shape[-1], torch.float32) for images in data[::2])
        return cls(train, data[1], test, data[3])

    def model(self) -> nn.Module:
        return SmallViT(self.train.shape[-1], 1, 10)


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
    model = images.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=steps, pct_start=0.15)
    for batch, labels in batches(images, steps):
        F.cross_entropy(model(batch), labels, label_smoothing=0.05).backward()
        yield torch.cat([padded(param.grad) for param in large_parameters(model) if param.grad is not None])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
