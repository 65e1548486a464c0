"""Quality on real models: int8 inference against float, 8-bit Adam against fp32, LoRA on an int8 base.

    python benchmarks/quality.py --jobs 8                          # on a GPU, everything
    python benchmarks/quality.py --parts training --runs "torchao AdamW8bit"
    python benchmarks/quality.py --parts inference --device cpu --small --out /tmp/quality

Needs `make data`. Writes quality_minilm.csv, quality_smollm2.csv, quality_training.csv (a row for each seed),
quality_curves.csv and quality_speed.csv, each row as soon as it is known; rows of earlier calls stay unless they are
measured again. Losses don't depend on what else the machine does, so `--jobs` runs train at once; step times and peak
memory are measured afterwards, one run at a time. The runs of `ALONE` are one at a time too: processes take turns on
the GPU, so each wait for it lasts as long as the others' turns, and these wait at every parameter or layer.
"""

import argparse
import csv
import gc
import importlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import harness
import quality_inference
import torch
from quality_jobs import Job, Rows, run_alone, run_beside
from quality_tasks import LORA, TASKS, Task, lora
from torch import Tensor, nn
from train_vit import OPTIMIZERS

NAMES = {
    "torch AdamW": "AdamW",
    "torch AdamW, fused": "AdamWFused",
    "qsub AdamW8bit": "AdamW8bit",
    "bitsandbytes AdamW8bit": "AdamWBnb8bit",
    "torchao AdamW8bit": "AdamWAo8bit",
    "torch Adam": "Adam",
    "qsub Adam8bit": "Adam8bit",
}
ADAMW = ["torch AdamW", "qsub AdamW8bit", "bitsandbytes AdamW8bit", "torchao AdamW8bit"]
ADAM = ["torch Adam", "qsub Adam8bit"]
BASES = ["bf16", "qsub weight only", "qsub int8", "bitsandbytes, threshold 0"]
# What is trained, and what is timed
TRAINED = {"SmolLM2, Austen": ADAMW, LORA: BASES, "ViT, Fashion-MNIST": ADAMW + ADAM, "MiniLM, reviews": ADAMW + ADAM}
FUSED = ["torch AdamW, fused"]
TIMED = {
    "SmolLM2, Austen": FUSED + ADAMW,
    LORA: BASES,
    "ViT, Fashion-MNIST": FUSED + ADAMW,
    "MiniLM, reviews": FUSED + ADAMW,
}
COMPARED = {"SmolLM2-135M": "smollm2", "MiniLM": "minilm"}  # models of the inference part, and their files' names
ALONE = ("bitsandbytes AdamW8bit", "bitsandbytes, threshold 6")
POINTS = 60  # of a loss curve


def make_task(name: str, run: str, device: str, small: bool) -> Task:
    return lora(device, small, run) if name == LORA else TASKS[name](device, small)


def make_optimizer(task: Task, run: str, model: nn.Module) -> torch.optim.Optimizer:
    """Of the parameters that train. Adam's weight decay is not AdamW's: it gets none."""
    module, name, options = OPTIMIZERS[NAMES.get(run, "AdamW")]
    decay = 0.0 if run in ADAM else task.weight_decay
    params = [param for param in model.parameters() if param.requires_grad]
    return getattr(importlib.import_module(module), name)(params, lr=task.lr, weight_decay=decay, **options)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state but the step counts; a tensor that parameters share counts once."""
    found = {
        id(part): part.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and isinstance(value, Tensor)
        for part in harness.stored(value)
    }
    return sum(found.values())


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # torchao
        else:
            group["lr"] = lr


def steps(task: Task, optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> Iterator[Tensor]:
    """Train; yields each step's loss. The lr rises for 10% of the steps and falls to zero by a cosine."""
    device = next(model.parameters()).device.type
    ramp = torch.linspace(0, 1, task.steps + 1)[:-1]
    factors = (torch.cos(torch.pi * ramp) + 1) / 2 * ((ramp + 1 / task.steps) / 0.1).clamp(max=1)
    model.train()
    for batch, factor in zip(task.batches(seed), factors.tolist(), strict=False):
        set_lr(optimizer, task.lr * factor)
        with torch.autocast(device, torch.bfloat16, enabled=task.bf16):
            loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if task.clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], task.clip)
        optimizer.step()
        yield loss.detach()


def train(task: Task, run: str, seed: int) -> tuple[dict[str, Any], list[float]]:
    """The result of one run, and its losses."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = make_optimizer(task, run, model)
    losses = torch.stack(list(steps(task, optimizer, model, seed))).float().tolist()
    last = losses[-max(1, len(losses) // 10) :]
    model.eval()
    with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=task.bf16):
        tested = task.test(model)
    result = {"steps": len(losses), "train_loss": sum(last) / len(last), "test_loss": tested["test_loss"]}
    result |= {key: tested.get(key, "") for key in ("accuracy", "perplexity")}
    return {**result, "state_mb": state_bytes(optimizer) / 1e6, **task.record}, losses


def curve(losses: list[float]) -> list[tuple[int, float]]:
    """Up to `POINTS` means over as many steps each, with the middle step of each."""
    width = max(1, len(losses) // POINTS)
    return [
        (start + width // 2, sum(losses[start : start + width]) / width)
        for start in range(0, len(losses) - width + 1, width)
    ]


def train_seed(name: str, run: str, device: str, small: bool, seed: int) -> Iterator[tuple[str, Rows]]:
    """Rows of quality_training.csv and quality_curves.csv."""
    result, losses = train(make_task(name, run, device, small), run, seed)
    key = {"task": name, "run": run, "seed": seed}
    yield "quality_curves", [{**key, "step": step, "loss": f"{loss:.5f}"} for step, loss in curve(losses)]
    yield "quality_training", [{**key, **result}]


def inference(model: str, modes: list[str], device: str, small: bool) -> Iterator[tuple[str, Rows]]:
    """The rows of quality_minilm.csv or quality_smollm2.csv."""
    for row in getattr(quality_inference, f"{COMPARED[model]}_rows")(device, small, modes):
        yield f"quality_{COMPARED[model]}", [row]


def speed(name: str, run: str, device: str, small: bool) -> Iterator[tuple[str, Rows]]:
    """Median step time (forward, backward and optimizer), peak memory and what of it the model and the state take."""
    gc.collect()
    task = make_task(name, run, device, small)
    harness.reset_peak_memory(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0  # the data, above all
    torch.manual_seed(0)
    model = task.model()
    optimizer = make_optimizer(task, run, model)
    loaded = (torch.cuda.memory_allocated() - before) / 2**20 if device == "cuda" else ""
    warmup, timed = (1, 1) if small else (10, 40)
    times = []
    harness.reset_peak_memory(device)
    start = time.perf_counter()
    for step, _ in enumerate(steps(task, optimizer, model, 0)):
        harness.synchronize(device)
        if step >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
        if step + 1 == warmup + timed:
            break
        start = time.perf_counter()
    median, p20, p80 = harness.percentiles(times)
    row = {
        "task": name,
        "run": run,
        "step_ms": median,
        "step_ms_p20": p20,
        "step_ms_p80": p80,
        "timed_steps": len(times),
    }
    row |= {"peak_gib": harness.peak_memory(device) - before / 2**30, "model_mib": loaded}
    yield "quality_speed", [{**row, "state_mb": state_bytes(optimizer) / 1e6}]


KEYS = ("model", "mode", "task", "run", "seed", "step")
PLACES = {
    "task": list(TRAINED),
    "run": [*FUSED, *ADAMW, *ADAM, *BASES],
    "mode": list(quality_inference.COMPARED),
}


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    """Rows stand in the order of the lists above, whichever ended first."""
    names = (known.index(row[key]) if row.get(key) in known else -1 for key, known in PLACES.items())
    return (*names, int(row.get("seed") or 0), int(row.get("step") or 0))


class Results:
    """CSV files that are whole after each addition."""

    def __init__(self, folder: pathlib.Path, record: dict[str, Any]) -> None:
        self.folder, self.record = folder, record
        self.rows: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, rows: Rows) -> None:
        """Add rows, or put them in the place of those of the same keys."""
        path = self.folder / f"{name}.csv"
        if name not in self.rows:
            self.rows[name] = {}
            if path.exists():
                with open(path, newline="", encoding="utf-8") as file:
                    self.rows[name] = {self._key(row): row for row in csv.DictReader(file)}
        record = {} if name == "quality_curves" else self.record
        for row in rows:
            self.rows[name][self._key(row)] = {**row, **record}
        kept = sorted(self.rows[name].values(), key=_place)
        columns = [key for key in dict.fromkeys(key for row in kept for key in row) if key not in record]
        harness.write_csv(str(path), [{**dict.fromkeys([*columns, *record], ""), **row} for row in kept])
        if record:
            print(harness.one_line(rows[-1]), flush=True)

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(key, "")) for key in KEYS)


def _chosen(cases: dict[str, list[str]], args: argparse.Namespace, parts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The cases that the options ask for, a round of first runs of each task, then of second ones, and so on.

    `parts` names for each task the part that it belongs to.
    """
    chosen = {
        name: [run for run in runs if not args.runs or run in args.runs]
        for name, runs in cases.items()
        if (args.tasks is None or name in args.tasks) and parts[name] in args.parts
    }
    for turn in range(max(map(len, chosen.values()), default=0)):
        yield from ((name, runs[turn]) for name, runs in chosen.items() if turn < len(runs))


def jobs(args: argparse.Namespace) -> tuple[list[Job], list[Job], list[Job]]:
    """What may run beside others, what must run alone, and what is timed and runs alone too."""
    beside: list[Job] = []
    alone: list[Job] = []
    options = (args.device, args.small)
    for model in COMPARED if "inference" in args.parts else ():
        if args.tasks is not None and model not in args.tasks:
            continue
        modes = [mode for mode in quality_inference.COMPARED if not args.runs or mode in args.runs]
        for work, kept in ((beside, set(modes) - set(ALONE)), (alone, set(modes) & set(ALONE))):
            if kept:
                work.append((inference, (model, [mode for mode in modes if mode in kept], *options)))
    training = {name: "lora" if name == LORA else "training" for name in TRAINED}
    for seed in range(args.seeds):
        for name, run in _chosen(TRAINED, args, training):
            (alone if run in ALONE else beside).append((train_seed, (name, run, *options, seed)))
    timed = [(speed, (name, run, *options)) for name, run in _chosen(TIMED, args, dict.fromkeys(TIMED, "speed"))]
    return beside, alone, timed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["inference", "training", "lora", "speed"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, LORA, *COMPARED], help="and models; default: all")
    parser.add_argument("--runs", nargs="+", help="optimizers, bases of LoRA and modes of inference; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a few steps and windows: to see that it runs")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time in processes of their own; 0: in this one")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds after which no run begins, and none of --jobs stays"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> None:
    args = parse()
    results = Results(args.out, harness.environment(args.device))
    end = time.perf_counter() + args.limit
    torch.backends.cuda.matmul.allow_tf32 = False
    beside, alone, timed = jobs(args)
    if args.jobs:
        run_beside(beside, results.add, end, args.jobs)
        beside = []
    run_alone([*beside, *alone, *timed], results.add, end)


if __name__ == "__main__":
    main()
