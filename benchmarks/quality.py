"""Quality on real models: int8 inference against float, 8-bit Adam against fp32, LoRA on an int8 base.

    python benchmarks/quality.py --jobs 8                          # on a GPU, everything
    python benchmarks/quality.py --parts training --runs "torchao AdamW8bit"
    python benchmarks/quality.py --parts inference --device cpu --small --out /tmp/quality

Needs `make data`. Writes quality_minilm.csv, quality_smollm2.csv, quality_training.csv (a row for each seed),
quality_curves.csv and quality_speed.csv, each row as soon as it is known; rows of earlier calls stay unless they are
measured again. Losses don't depend on what else the machine does, so `--jobs` runs train at once; step times and peak
memory are measured afterwards, one run at a time.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import gc
import importlib
import multiprocessing
import pathlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import quality_inference
import torch
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
POINTS = 60  # of a loss curve
Rows = list[dict[str, Any]]


def make_task(name: str, run: str, device: str, small: bool) -> Task:
    return lora(device, small, run) if name == LORA else TASKS[name](device, small)


def make_optimizer(task: Task, run: str, model: nn.Module) -> torch.optim.Optimizer:
    """Of the parameters that train. Adam's weight decay is not AdamW's: it gets none."""
    module, name, options = OPTIMIZERS[NAMES.get(run, "AdamW")]
    decay = 0.0 if run in ADAM else task.weight_decay
    params = [param for param in model.parameters() if param.requires_grad]
    return getattr(importlib.import_module(module), name)(params, lr=task.lr, weight_decay=decay, **options)


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor, perhaps of a subclass, consists of."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    for name in names:
        yield from _stored(getattr(tensor, name))
    if not names:
        yield tensor


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state but the step counts; a tensor that parameters share counts once."""
    found = {
        id(part): part.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and isinstance(value, Tensor)
        for part in _stored(value)
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


def train_seeds(name: str, run: str, device: str, small: bool, seeds: int) -> Iterator[tuple[str, Rows]]:
    """All seeds of one run: rows of quality_training.csv and quality_curves.csv."""
    task = make_task(name, run, device, small)
    for seed in range(seeds):
        result, losses = train(task, run, seed)
        key = {"task": name, "run": run, "seed": seed}
        yield "quality_training", [{**key, **result}]
        yield "quality_curves", [{**key, "step": step, "loss": f"{loss:.5f}"} for step, loss in curve(losses)]


def inference(model: str, device: str, small: bool) -> Iterator[tuple[str, Rows]]:
    """The rows of quality_minilm.csv or quality_smollm2.csv."""
    for row in getattr(quality_inference, f"{model}_rows")(device, small):
        yield f"quality_{model}", [row]


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


class Results:
    """CSV files that are whole after each addition."""

    def __init__(self, folder: pathlib.Path, record: dict[str, Any]) -> None:
        self.folder, self.record = folder, record
        self.rows: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, rows: Rows) -> None:
        """Append rows, or put them in the place of those of the same keys."""
        path = self.folder / f"{name}.csv"
        if name not in self.rows:
            self.rows[name] = {}
            if path.exists():
                with open(path, newline="", encoding="utf-8") as file:
                    self.rows[name] = {self._key(row): row for row in csv.DictReader(file)}
        record = {} if name == "quality_curves" else self.record
        for row in rows:
            self.rows[name][self._key(row)] = {**row, **record}
        kept = self.rows[name].values()
        columns = [key for key in dict.fromkeys(key for row in kept for key in row) if key not in record]
        harness.write_csv(str(path), [{**dict.fromkeys([*columns, *record], ""), **row} for row in kept])
        if record:
            print(harness.one_line(rows[-1]), flush=True)

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(key, "")) for key in KEYS)


def _chosen(cases: dict[str, list[str]], args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The cases that the options ask for, a round of first runs of each task, then of second ones, and so on."""
    chosen = {
        name: [run for run in runs if not args.runs or run in args.runs]
        for name, runs in cases.items()
        if (args.tasks is None or name in args.tasks) and ("lora" if name == LORA else "training") in args.parts
    }
    for turn in range(max(map(len, chosen.values()), default=0)):
        yield from ((name, runs[turn]) for name, runs in chosen.items() if turn < len(runs))


Job = tuple[Callable[..., Iterator[tuple[str, Rows]]], tuple[Any, ...]]


def jobs(args: argparse.Namespace) -> tuple[list[Job], list[Job], list[Job]]:
    """What may run beside others, what must run alone, and what is timed and runs alone too.

    bitsandbytes' runs come alone: beside others they made no progress in the time that those took.
    """
    beside: list[Job] = []
    alone: list[Job] = []
    if "inference" in args.parts:
        beside += [(inference, (model, args.device, args.small)) for model in ("smollm2", "minilm")]
    for name, run in _chosen(TRAINED, args):
        waits = run == "bitsandbytes AdamW8bit"
        (alone if waits else beside).append((train_seeds, (name, run, args.device, args.small, args.seeds)))
    timed = [(speed, (name, run, args.device, args.small)) for name, run in _chosen(TIMED, args)]
    return beside, alone, timed if "speed" in args.parts else []


def run_alone(work: list[Job], results: Results, end: float) -> None:
    """One job after the other; one that fails is printed, and the others go on."""
    for function, values in work:
        if time.perf_counter() > end:
            print(f"out of time: {function.__name__} {values}", flush=True)
            continue
        try:
            for file, rows in function(*values):
                results.add(file, rows)
        except Exception as error:
            print(f"failed: {function.__name__} {values}: {type(error).__name__}: {error}", flush=True)


def _prepare_worker() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(max(1, torch.get_num_threads() // 8))


def _forward(rows_to: Any, job: Job) -> None:
    for item in job[0](*job[1]):
        rows_to.put(item)


def run_beside(work: list[Job], results: Results, end: float, count: int) -> None:
    """Up to `count` jobs at a time, each in a process; at the time `end` those still running are stopped."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, concurrent.futures.ProcessPoolExecutor(count, context, _prepare_worker) as pool:
        rows_from = manager.Queue()
        futures = {pool.submit(_forward, rows_from, job): job for job in work}
        while not (all(future.done() for future in futures) and rows_from.empty()):
            with contextlib.suppress(queue.Empty):
                results.add(*rows_from.get(timeout=1))
            if time.perf_counter() > end:
                for process in list(pool._processes.values()):
                    process.terminate()
                break
    for future, (function, values) in futures.items():
        if not future.done() or future.cancelled() or future.exception():
            print(f"failed or out of time: {function.__name__} {values}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["inference", "training", "lora", "speed"])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, LORA], help="default: all")
    parser.add_argument("--runs", nargs="+", help="optimizers, and bases of LoRA; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a few steps and windows: to see that it runs")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time in processes of their own; 0: in this one")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no run begins or stays")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    args = parser.parse_args()
    results = Results(args.out, harness.environment(args.device))
    end = time.perf_counter() + args.limit
    torch.backends.cuda.matmul.allow_tf32 = False
    beside, alone, timed = jobs(args)
    if args.jobs:
        run_beside(beside, results, end, args.jobs)
        beside = []
    run_alone([*beside, *alone, *timed], results, end)


if __name__ == "__main__":
    main()
