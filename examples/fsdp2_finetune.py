"""Fine-tuning of a language model under fully_shard, on any number of GPUs or CPU processes, with 8-bit AdamW.

    torchrun --nproc_per_node=2 examples/fsdp2_finetune.py --model FOLDER --text FILE --mode adapters --checkpoint DIR
    torchrun --nproc_per_node=3 examples/fsdp2_finetune.py ... --steps 200 --resume    # goes on, on three ranks

FOLDER holds a causal language model for from_pretrained. `--mode adapters` trains LoRA adapters on a frozen int8 base,
`--mode full` all weights in float. A batch is the same windows of the text whatever the number of ranks, so a run that
is resumed on more or fewer goes on as it would have (models with dropout excepted). DIR gets step-N, written by
torch.distributed.checkpoint, and log.csv. All ranks must see FOLDER, FILE and DIR. Needed: pip install
".[transformers,progress]" peft, in a clone
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import qsub

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAME = ("mode", "batch", "length", "lr", "rank", "dtype", "seed")  # options that a resumed run shares with the first


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--mode", choices=("adapters", "full"), default="adapters")
    parser.add_argument("--steps", type=int, default=100, help="in all, those before a resume included")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in DIR")
    parser.add_argument("--batch", type=int, default=8, help="windows a step, of all ranks together")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the windows and of the adapters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32", help="of the float weights")
    return parser.parse_args(argv)


def last_checkpoint(folder: Path) -> int:
    """Steps of the last whole checkpoint, 0 if there is none: its .metadata is written last."""
    return max((int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata")), default=0)


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, of which each rank sees the same; None if nothing."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        return f"{', '.join(missing)} must be set: start it by torchrun --nproc_per_node=N"
    world, start = int(os.environ["WORLD_SIZE"]), last_checkpoint(options.checkpoint)
    for name, least in {"steps": 1, "save_every": 1, "length": 2, "rank": 1}.items():
        if getattr(options, name) < least:
            return f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}"
    if options.batch < world:
        return f"--batch must be at least the number of ranks, {world}, got {options.batch}: raise it or use fewer"
    if options.device == "cuda" and torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        return f"each rank of a machine needs a GPU, and there are {torch.cuda.device_count()}: lower --nproc_per_node"
    if not (options.model / "config.json").is_file():
        return f"--model must be a folder with config.json, got {options.model}"
    if not options.text.is_file():
        return f"--text must be a file, got {options.text}"
    if options.mode == "adapters" and importlib.util.find_spec("peft") is None:
        return "--mode adapters needs peft: pip install peft, or pass --mode full"
    if start and not options.resume:
        return f"{options.checkpoint} has a checkpoint of step {start}: pass --resume, or another folder"
    if not options.resume:
        return None
    if not start:
        return f"--resume needs a checkpoint, and {options.checkpoint} has none: leave --resume out to start"
    if start >= options.steps:
        return f"--steps must be over {start}, the step of the checkpoint, got {options.steps}"
    saved = json.loads((options.checkpoint / "settings.json").read_text(encoding="utf-8"))
    for name in SAME:
        if saved[name] != getattr(options, name):
            return f"--{name} must be {saved[name]}, as in the run to resume, got {getattr(options, name)}"
    return None


# ---- Text: the same windows whatever the number of ranks ----


def read_windows(options: argparse.Namespace) -> Tensor:
    """The text as windows of tokens, (windows, length)."""
    tokens = AutoTokenizer.from_pretrained(options.model)(options.text.read_text(encoding="utf-8"))["input_ids"]
    count = len(tokens) // options.length
    if count < options.batch:
        raise SystemExit(
            f"--text must have a batch of tokens, {options.batch * options.length}, got {len(tokens)}: "
            "lower --batch or --length"
        )
    return torch.tensor(tokens[: count * options.length]).view(count, options.length)


@functools.lru_cache(2)
def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(windows: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """Those of a step, of all ranks, (batch, length); each epoch in an order of its own."""
    places = (divmod(step * options.batch + number, len(windows)) for number in range(options.batch))
    return windows[[shuffled(len(windows), options.seed + epoch)[place] for epoch, place in places]]


# ---- Model, optimizer, checkpoint ----


def build(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model, and the optimizer of what trains. Each rank reads the model to the CPU and keeps its rows."""
    dtype, config = DTYPES[options.dtype], qsub.QsubConfig() if options.mode == "adapters" else None
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, quantization_config=config)
    kinds = set(model._no_split_modules)
    if options.mode == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.seed)  # of the adapters: FSDP takes each rank's rows as they are
        model = get_peft_model(model, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.config.use_cache = False
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in list(model.modules()):
        if type(module).__name__ in kinds:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    groups = qsub.optim.param_groups(model.train(), weight_decay=0.01)
    return model, qsub.optim.AdamW8bit(groups, lr=options.lr, stochastic_round=dtype == torch.bfloat16)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What trains, and its optimizer: the frozen base comes from the model's folder."""
    parts = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return dict(zip(("model", "optimizer"), parts, strict=True))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    dcp.save(_states(model, optimizer), checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Of a checkpoint of any number of ranks."""
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=options
    )


# ---- Training ----


def over_ranks(value: float, kind: Any, device: str) -> float:
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, kind)
    return float(number)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, device: str) -> float:
    """One step on this rank's part of a batch of windows; returns the loss of the whole batch."""
    tokens = batch[dist.get_rank() :: dist.get_world_size()].to(device)
    targets = len(batch) * (batch.shape[1] - 1)
    logits = model(input_ids=tokens).logits[:, :-1]
    part = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum") / targets
    (part * dist.get_world_size()).backward()  # gradients become the mean over ranks, whose parts may be uneven
    nn.utils.clip_grad_norm_([param for param in model.parameters() if param.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return over_ranks(part.item(), dist.ReduceOp.SUM, device)


def peak_memory(device: str) -> float:
    """GiB of the rank that needs most: allocated on the GPU, or resident on the CPU."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else _resident()
    return over_ranks(peak, dist.ReduceOp.MAX, device)


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextlib.contextmanager
def log_of(options: argparse.Namespace, start: int) -> Iterator[Any]:
    """Function that writes a row to log.csv, in which those after step `start` are from a run that broke off."""
    path = options.checkpoint / "log.csv"
    kept = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if start and path.exists() else []
    with open(path, "w", newline="", encoding="utf-8", buffering=1) as file:
        writer = csv.DictWriter(file, ["step", "ranks", "loss", "tokens_per_s", "peak_gib"])
        writer.writeheader()
        writer.writerows(row for row in kept if int(row["step"]) <= start)
        yield writer.writerow


def train(options: argparse.Namespace, windows: Tensor) -> list[dict[str, Any]]:
    """Train to `options.steps`, with checkpoints; returns a row for each step. The process group is there."""
    start, first = last_checkpoint(options.checkpoint), dist.get_rank() == 0
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (start, tuple(windows.shape), int(windows.sum())))
    if len(set(seen)) > 1:
        raise ValueError(f"all ranks must see the same checkpoint and text, got (step, windows, sum of tokens) {seen}")
    model, optimizer = build(options)
    if start:
        load(model, optimizer, options.checkpoint / f"step-{start}")
    elif first:
        options.checkpoint.mkdir(parents=True, exist_ok=True)
        settings = {name: getattr(options, name) for name in SAME}
        (options.checkpoint / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    rows = []
    with contextlib.ExitStack() as stack:
        write = stack.enter_context(log_of(options, start)) if first else None
        bar = stack.enter_context(tqdm(total=options.steps, initial=start, unit="step", disable=not first))
        for step in range(start, options.steps):
            begin = time.perf_counter()
            loss = train_step(model, optimizer, batch_of(windows, step, options), options.device)
            rate = options.batch * options.length / (time.perf_counter() - begin)
            row = {"step": step + 1, "ranks": len(seen), "loss": loss, "tokens_per_s": rate}
            rows.append(row | {"peak_gib": peak_memory(options.device)})
            if write:
                write(rows[-1])
                bar.set_postfix(loss=f"{loss:.4f}", tokens_per_s=f"{rate:.0f}", gib=f"{rows[-1]['peak_gib']:.2f}")
                bar.update()
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                save(model, optimizer, options.checkpoint / f"step-{step + 1}")
    return rows


def main() -> None:
    options = arguments()
    logging.disable_progress_bar()  # of from_pretrained: each rank would show one
    found = problem(options)
    if found:
        raise SystemExit(found)
    windows = read_windows(options)
    device = None
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device else "gloo", device_id=device)
    try:
        rows = train(options, windows)
        if dist.get_rank() == 0:
            rate = sum(row["tokens_per_s"] for row in rows[1:] or rows) / len(rows[1:] or rows)
            print(f"loss {rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f}, {rate:.0f} tokens/s,", end=" ")
            print(f"peak {rows[-1]['peak_gib']:.2f} GiB a rank; {options.checkpoint}/log.csv, step-{options.steps}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
