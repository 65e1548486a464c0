r"""Train a vision transformer with one of many optimizers: memory, time and accuracy.

The script of torchao PR #463 in its scope, without downloads. Examples:

    python benchmarks/train_vit.py --data digits --optim AdamW8bit
    python benchmarks/train_vit.py --model vit_base_patch16_224 --data fashion-mnist:DIR --amp bf16 \
        --optim AdamW8bit --cosine_lr_scheduler --out benchmarks/results/train_vit
"""

import argparse
import importlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import real_inputs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

# Name: module, class and what it is called with beside lr and weight_decay
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Adam": ("torch.optim", "Adam", {}),
    "AdamW": ("torch.optim", "AdamW", {}),
    "AdamFused": ("torch.optim", "Adam", {"fused": True}),
    "AdamWFused": ("torch.optim", "AdamW", {"fused": True}),
    "Adam8bit": ("qsub.optim", "Adam8bit", {}),
    "AdamW8bit": ("qsub.optim", "AdamW8bit", {}),
    "AdamW8bitStochastic": ("qsub.optim", "AdamW8bit", {"stochastic_round": True}),
    "AdamBnb8bit": ("bitsandbytes.optim", "Adam8bit", {}),
    "AdamWBnb8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "AdamAo8bit": ("torchao.optim", "Adam8bit", {}),
    "AdamWAo8bit": ("torchao.optim", "AdamW8bit", {}),
    "FlashAdamW": ("flashoptim", "FlashAdamW", {}),
    "OptimiAdamW": ("optimi", "AdamW", {"triton": True}),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallViT(nn.Module):
    """A ViT for images of 28 pixels and less: patches of 1/4 of the side, 4 blocks, 455k parameters at width 96."""

    def __init__(self, image_size: int, channels: int, classes: int, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        patch = image_size // 4
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        tokens = (image_size // patch) ** 2 + 1
        self.cls, self.position = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, tokens, width))
        nn.init.normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, side, side)
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x)[:, 0]))


def load_data(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images (N, channels, side, side) uint8 and labels, then those of the test set."""
    kind, _, path = name.partition(":")
    generator = torch.Generator().manual_seed(seed)
    if kind == "synthetic":
        images = torch.randint(0, 256, (2048, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (2048,), generator=generator)
        return images[:1792], labels[:1792], images[1792:], labels[1792:]
    if kind == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = (torch.tensor(digits.images)[:, None] * 15.9).to(torch.uint8)
        order = torch.randperm(len(images), generator=generator)
        images, labels = images[order], torch.tensor(digits.target)[order]
        return images[:1500], labels[:1500], images[1500:], labels[1500:]
    if kind == "fashion-mnist":
        return real_inputs.fashion_mnist(pathlib.Path(path) if path else None)
    if kind == "folder":
        from torchvision.datasets import ImageFolder
        from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

        items = ImageFolder(path)
        images = torch.stack([center_crop(resize(pil_to_tensor(image), [256]), [224, 224]) for image, _ in items])
        labels = torch.tensor(items.targets)
        order = torch.randperm(len(images), generator=generator)
        images, labels, cut = images[order], labels[order], len(images) * 9 // 10
        return images[:cut], labels[:cut], images[cut:], labels[cut:]
    raise ValueError(f"data must be digits, fashion-mnist[:PATH], folder:PATH or synthetic, got {name!r}")


def make_model(name: str, size: int, channels: int, classes: int) -> nn.Module:
    if name == "small":
        return SmallViT(size, channels, classes)
    import timm

    return timm.create_model(name, num_classes=classes, in_chans=channels, img_size=size)


def prepare(images: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """uint8 images as normalized floats of side `size`."""
    x = (images.float() / 255 - 0.5) / 0.5
    if x.shape[-1] != size:
        x = F.interpolate(x, size=(size, size), mode="bilinear", antialias=False)
    return x.to(dtype)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, run: Callable[..., Tensor], batch: int) -> float:
    model.eval()
    right = sum(
        int((run(images[i : i + batch]).argmax(1) == labels[i : i + batch]).sum()) for i in range(0, len(images), batch)
    )
    model.train()
    return right / len(images)


def batches(count: int, args: argparse.Namespace, device: str) -> Iterator[Tensor]:
    """Indices of each step's batch, shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(args.seed)
    taken = 0
    for _ in range(args.epochs):
        order = torch.randperm(count, generator=generator).to(device)
        for start in range(0, count - args.batch_size + 1, args.batch_size):
            if args.max_steps and taken == args.max_steps:
                return
            taken += 1
            yield order[start : start + args.batch_size]


def train(args: argparse.Namespace, curve: list[float]) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    device = args.device
    train_x, train_y, test_x, test_y = (part.to(device) for part in load_data(args.data, args.seed))
    size = args.image_size or (train_x.shape[-1] if args.model == "small" else 224)
    dtype = torch.bfloat16 if args.full_bf16 else torch.float32
    model = make_model(args.model, size, train_x.shape[1], int(train_y.max()) + 1).to(device, dtype)
    forward = torch.compile(model) if args.compile else model
    module, name, options = OPTIMIZERS[args.optim]
    optimizer = getattr(importlib.import_module(module), name)(
        model.parameters(), lr=args.lr, weight_decay=args.weight_decay, **options
    )
    steps = args.epochs * (len(train_x) // args.batch_size)
    steps = min(steps, args.max_steps) if args.max_steps else steps
    amp = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=args.amp == "bf16")

    def run(images: Tensor) -> Tensor:
        with amp:
            return forward(prepare(images, size, dtype))

    def set_lr(step: int) -> None:
        lr = args.lr * 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / (0.05 * steps))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # torchao
            else:
                group["lr"] = lr

    harness.reset_peak_memory(device)
    losses, marks = [], []
    profiler = torch.profiler.profile() if args.profile else None
    for step, batch in enumerate(tqdm(batches(len(train_x), args, device), total=steps, disable=args.quiet)):
        if step == args.warmup:
            harness.synchronize(device)
            marks.append(time.perf_counter())
        if profiler and step == args.warmup:
            profiler.start()
        if args.cosine_lr_scheduler:
            set_lr(step)
        loss = F.cross_entropy(run(train_x[batch]).float(), train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if profiler and step == args.warmup + 5:
            profiler.stop()
            profiler.export_chrome_trace(args.profile)
            profiler = None
    harness.synchronize(device)
    seconds = time.perf_counter() - marks[0]
    timed = len(losses) - args.warmup
    peak = harness.peak_memory(device)
    curve += torch.stack(losses).float().tolist()
    return {
        "model": args.model,
        "data": args.data.partition(":")[0],
        "precision": "full bf16" if args.full_bf16 else f"amp {args.amp}" if args.amp else "fp32",
        "optim": args.optim,
        "cosine": args.cosine_lr_scheduler,
        "seed": args.seed,
        "steps": len(losses),
        "batch_size": args.batch_size,
        "max_memory_gib": round(peak, 3),
        "seconds": round(seconds, 2),
        "ms_per_step": round(seconds / timed * 1e3, 3),
        "images_per_s": round(timed * args.batch_size / seconds, 1),
        "final_loss": round(sum(curve[-50:]) / len(curve[-50:]), 5),
        "accuracy": round(accuracy(model, test_x, test_y, run, args.batch_size), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="small, or any name that timm knows")
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist[:PATH], folder:PATH or synthetic")
    parser.add_argument("--image_size", type=int, default=0, help="default: that of the data, 224 for timm models")
    parser.add_argument("--amp", choices=["bf16"])
    parser.add_argument("--full_bf16", action="store_true", help="parameters, gradients and activations in bf16")
    parser.add_argument("--optim", nargs="+", choices=OPTIMIZERS, default=["AdamW8bit"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.05)
    parser.add_argument("--cosine_lr_scheduler", action="store_true", help="a new lr at each step, warmup of 5%%")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", help="file for a chrome trace of 5 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--out", help="path of .csv and .md, and of the loss curves in -curves.csv, less the suffix")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for name in args.optim:
        row = train(argparse.Namespace(**{**vars(args), "optim": name}), losses := [])
        print(harness.one_line(row), flush=True)
        rows.append(row)
        curves += [
            {"optim": name, "cosine": args.cosine_lr_scheduler, "step": step, "loss": round(loss, 5)}
            for step, loss in enumerate(losses)
        ]
        if args.out:
            harness.write_results(args.out, rows, {}, args.device)
            harness.write_csv(f"{args.out}-curves.csv", curves)


if __name__ == "__main__":
    main()
