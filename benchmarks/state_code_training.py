"""Loss and accuracy after one epoch of a small vision transformer, by the code of the optimizer's state.

    python benchmarks/state_code_training.py --fashion-mnist PATH     # folder of the *-ubyte.gz files
    python benchmarks/state_code_training.py                          # the digits of scikit-learn, 14 epochs

The same initial weights and batches for all optimizers at a seed. A row of the result is an optimizer: mean and
standard deviation over the seeds of the training loss (mean of the last 100 steps, label smoothing .05), of the loss
and the accuracy on test images, and of the differences of all three from fp32 at the same seed.
"""

import argparse
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from state_code_candidates import CANDIDATES
from state_code_streams import MIN_SIZE, Images, ViT, batches, digits, fashion_mnist, padded
from torch import Tensor
from tqdm import tqdm

from qsub.optim import AdamW8bit

ROOT = pathlib.Path(__file__).parents[1]
LR, WEIGHT_DECAY = 1.5e-3, 0.05
LAST = 100


class FakeQuantizedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW whose moments go through a code after each step, where a parameter has MIN_SIZE elements.

    The step itself takes them in fp32, as those of qsub, bitsandbytes and torchao do.
    """

    def __init__(self, params: Iterable[Tensor], code: str, **options: Any) -> None:
        super().__init__(params, **options)
        self.code = CANDIDATES[code]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param, state in self.state.items():
            if param.numel() < MIN_SIZE:
                continue
            first, second = (padded(state[k]).view(-1, self.code.block_size) for k in ("exp_avg", "exp_avg_sq"))
            bits = self.code.bits(0, int(state["step"]), *first.shape)
            for key, value in zip(("exp_avg", "exp_avg_sq"), self.code(first, second, bits), strict=True):
                state[key].copy_(value.flatten()[: param.numel()].view_as(param))
        return loss


OPTIMIZERS = {
    "fp32 (torch.optim.AdamW)": torch.optim.AdamW,
    "block_float8 (qsub.optim.AdamW8bit)": AdamW8bit,
    "dynamic tree, 256": lambda params, **options: FakeQuantizedAdamW(params, "dynamic tree, 256", **options),
}


def train(name: str, images: Images, steps: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = ViT()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.15)
    losses = []
    for batch, labels in tqdm(batches(images, steps), f"{name}, seed {seed}", steps, mininterval=5):
        loss = F.cross_entropy(model(batch), labels, label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.test.split(500)])
    return {
        "train_loss": statistics.fmean(losses[-LAST:]),
        "test_loss": F.cross_entropy(logits, images.test_labels).item(),
        "test_accuracy": (logits.argmax(1) == images.test_labels).float().mean().item(),
    }


def summary(runs: list[dict[str, float]], exact: list[dict[str, float]]) -> dict[str, float]:
    """Mean and standard deviation of each measure, and of its difference from fp32 at the same seed."""
    row = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        differences = [run[key] - base[key] for run, base in zip(runs, exact, strict=True)]
        for label, numbers in ((key, values), (f"{key}_difference", differences)):
            row[label] = statistics.fmean(numbers)
            row[f"{label}_sd"] = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion-mnist", metavar="PATH", help="folder of the *-ubyte.gz files (default: the digits)")
    parser.add_argument("--steps", type=int, help="default: one epoch of Fashion-MNIST (468), 14 of the digits (154)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    args = parser.parse_args()

    images = fashion_mnist(args.fashion_mnist) if args.fashion_mnist else digits()
    steps = args.steps or (468 if args.fashion_mnist else 154)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in OPTIMIZERS}
    for seed in range(args.seeds):
        for name, results in runs.items():
            results.append(train(name, images, steps, seed))
            print(harness.one_line({"optimizer": name, "seed": seed, **results[-1]}))
    exact = next(iter(runs.values()))
    rows = [{"optimizer": name, "seeds": args.seeds, **summary(results, exact)} for name, results in runs.items()]
    data = "Fashion-MNIST" if args.fashion_mnist else "digits"
    harness.write_results(f"{args.out}/state_code_training", rows, {"data": data, "steps": steps}, "cpu")


if __name__ == "__main__":
    main()
