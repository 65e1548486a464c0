"""How far 8-bit codes of Adam's moments take its update from that of fp32.

    python benchmarks/state_codes.py                                  # the ViT trains on the digits of scikit-learn
    python benchmarks/state_codes.py --fashion-mnist PATH             # on Fashion-MNIST, folder of *-ubyte.gz files
    python benchmarks/state_codes.py --streams vit "heavy 2" --codes block_float8 "dynamic tree, 256" --seeds 1

Each code of state_code_candidates.py and fp32 Adam are fed the same gradients. u is the update from the moments as the
code stores them, U that of fp32 (lr = 1, no weight decay). Columns of the result, a row for a code, stream and seed:

    error       |u - U| / |U| in the Euclidean norm, mean of the last 100 steps
    bad         share of the elements with |u - U| over a quarter of max(|U|, .1), mean of the last 100 steps
    overshoot   max|u| / max|U|, the largest of all steps
    v_bias      mean over the elements of v / V - 1, cut to [-1, 1], at the last step
    bytes       of both moments, for each parameter
"""

import argparse
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
from state_code_candidates import CANDIDATES, Candidate
from state_code_streams import DRAWN, Images, digits, drawn_gradients, fashion_mnist, vit_gradients
from torch import Tensor
from tqdm import tqdm

ROOT = pathlib.Path(__file__).parents[1]
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
VIT_STEPS = 187  # 24,000 images
LAST = 100  # steps that error and bad are the means of
STREAMS = ("vit", *DRAWN)


def gradients(stream: str, seed: int, images: Images | None) -> tuple[int, Iterator[Tensor]]:
    """Number of steps and the gradients, (size,) fp32 with size a multiple of all block sizes."""
    if stream == "vit":
        return VIT_STEPS, vit_gradients(images or digits(), VIT_STEPS, seed)
    return DRAWN[stream].steps, drawn_gradients(DRAWN[stream], seed)


def advance(first: Tensor, second: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The moments one gradient later (arXiv 1412.6980, algorithm 1)."""
    return BETA1 * first + (1 - BETA1) * grad, BETA2 * second + (1 - BETA2) * (grad * grad)


def update(first: Tensor, second: Tensor, step: int) -> Tensor:
    return first / (1 - BETA1**step) / ((second / (1 - BETA2**step)).sqrt() + EPS)


class Run:
    """Adam with moments that go through a code after each step, and how far it is from fp32."""

    def __init__(self, candidate: Candidate, size: int, seed: int) -> None:
        self.candidate, self.seed = candidate, seed
        self.first = torch.zeros(size // candidate.block_size, candidate.block_size)
        self.second = torch.zeros_like(self.first)
        self.errors: list[float] = []
        self.bad: list[float] = []
        self.overshoot, self.v_bias = 0.0, 0.0

    def step(self, grad: Tensor, step: int) -> None:
        first, second = advance(self.first, self.second, grad.view_as(self.first))
        bits = self.candidate.bits(self.seed, step, *first.shape)
        self.first, self.second = self.candidate(first, second, bits)

    def measure(self, exact: Tensor, exact_second: Tensor, step: int, last: bool) -> None:
        """Compare with fp32's update and second moment, both (size,)."""
        u = update(self.first, self.second, step).flatten()
        self.overshoot = max(self.overshoot, (u.abs().max() / exact.abs().max()).item())
        if not last:
            return
        off, used = (u - exact).abs(), exact_second > 0
        self.errors.append((off.norm() / exact.norm()).item())
        self.bad.append(((off > 0.25 * exact.abs().clamp(min=0.1)).sum() / used.sum()).item())
        ratio = self.second.flatten()[used] / exact_second[used]
        self.v_bias = (ratio - 1).clamp(-1, 1).mean().item()

    def result(self) -> dict[str, Any]:
        return {
            "error": sum(self.errors) / len(self.errors),
            "bad": sum(self.bad) / len(self.bad),
            "overshoot": self.overshoot,
            "v_bias": self.v_bias,
            "bytes": self.candidate.bytes_per_parameter,
        }


def compare(steps: int, stream: Iterator[Tensor], codes: list[str], seed: int, label: str = "") -> dict[str, dict]:
    """Feed `steps` gradients of a stream to all codes; by code, what `Run.result` returns."""
    runs: dict[str, Run] = {}
    first = second = torch.zeros(())
    for step, grad in enumerate(tqdm(stream, label, steps, disable=not label, mininterval=5), 1):
        if not runs:
            runs = {name: Run(CANDIDATES[name], grad.numel(), seed) for name in codes}
        with torch.no_grad():
            first, second = advance(first, second, grad)
            exact = update(first, second, step)
            for run in runs.values():
                run.step(grad, step)
                run.measure(exact, second, step, step > steps - LAST)
    return {name: run.result() for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=STREAMS, metavar="NAME")
    parser.add_argument("--codes", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--fashion-mnist", metavar="PATH", help="folder of the *-ubyte.gz files (default: the digits)")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    args = parser.parse_args()

    images = fashion_mnist(args.fashion_mnist) if args.fashion_mnist and "vit" in args.streams else None
    rows = []
    for stream, seed in itertools.product(args.streams, range(args.seeds)):
        steps, grads = gradients(stream, seed, images)
        for code, result in compare(steps, grads, args.codes, seed, f"{stream}, seed {seed}").items():
            rows.append({"stream": stream, "code": code, "seed": seed, **result})
            print(harness.one_line(rows[-1]))
        record = {"vit_data": "Fashion-MNIST" if args.fashion_mnist else "digits"}
        harness.write_results(f"{args.out}/state_codes", rows, record, "cpu")


if __name__ == "__main__":
    main()
