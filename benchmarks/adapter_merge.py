"""What merging a LoRA adapter into int8 weights keeps of it: SmolLM2-135M, a few steps, every way to merge.

    python benchmarks/adapter_merge.py                    # benchmarks/results/adapter_merge.csv
    python benchmarks/adapter_merge.py --small            # seconds: that it runs, no result

The model and the novels are those of benchmarks/real_inputs.py. The adapter is trained on int8 weights, on pieces of
one novel, and the loss is taken on these (seen) and on pieces of another (unseen). `kept` is the length of the merged
change along the adapter's, over the latter. The pieces are few: 20 steps learn them by heart.
"""

import argparse
import copy
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import real_inputs
import torch
from harness import one_line, write_results
from quality_tasks import HELD_OUT, smollm2_model, token_loss, windows
from torch import Tensor, nn

import qsub
from qsub.interop.peft import merge_and_unload

RESULTS = pathlib.Path(__file__).parent / "results" / "adapter_merge"
SETUPS = ((5, 1e-3), (20, 1e-3))  # steps and learning rate; the rank is 4
PREFIX = "base_model.model."


@torch.no_grad()
def loss_of(model: nn.Module, ids: Tensor) -> float:
    model.eval()
    return sum(token_loss(model, part, "sum").item() for part in ids.split(4)) / (ids.numel() - len(ids))


def adapted(base: nn.Module) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def train(model: nn.Module, batches: list[Tensor], lr: float) -> None:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr)
    model.train()
    for batch in batches:
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def kept(model: nn.Module, base: nn.Module, merged: nn.Module) -> float:
    """<merged weights - those of the base, the adapters' changes> / <the adapters' changes, itself>."""
    along = total = 0.0
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight("default").double()  # type: ignore[operator]
            old, new = (m.get_submodule(name.removeprefix(PREFIX)).weight.double() for m in (base, merged))
            along += ((new - old) * delta).sum().item()
            total += delta.square().sum().item()
    return along / total


def ways(original: nn.Module, base: nn.Module, model: Any) -> Iterator[tuple[str, nn.Module, Callable[[], nn.Module]]]:
    """Name, the base that the change is added to, and what merges a copy of the adapted int8 `model`."""

    def in_float(quantize: bool) -> nn.Module:
        twin = adapted(copy.deepcopy(original))
        twin.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
        merged = twin.merge_and_unload()
        return qsub.quantize_(merged) if quantize else merged

    yield "into int8, to nearest", base, lambda: copy.deepcopy(model).merge_and_unload()
    yield "into int8, stochastic", base, lambda: merge_and_unload(copy.deepcopy(model))
    yield "int8 dequantized, kept in float", base, lambda: merge_and_unload(copy.deepcopy(model), "float")
    yield (
        "int8 dequantized, quantized again",
        base,
        lambda: qsub.quantize_(merge_and_unload(copy.deepcopy(model), "float")),
    )
    yield "into the original floats, quantized", original, lambda: in_float(True)
    yield "into the original floats", original, lambda: in_float(False)


def rows(steps: int, lr: float, seed: int, small: bool) -> Iterator[dict[str, Any]]:
    """One adapter: the losses without it, with it, and merged in each way."""
    novels = real_inputs.austen()
    pieces, tests = (2, 1) if small else (16, 8)
    seen = windows(novels["emma"][:200_000], 128, "cpu")[:pieces]
    unseen = windows(novels[HELD_OUT][:60_000], 128, "cpu")[:tests]
    torch.manual_seed(seed)
    original = smollm2_model("cpu").eval()
    base = qsub.quantize_(copy.deepcopy(original))
    record = {"steps": steps, "lr": lr, "rank": 4, "seed": seed}

    def measured(way: str, model: nn.Module, share: float | str = "") -> dict[str, Any]:
        return {**record, "way": way, "seen": loss_of(model, seen), "unseen": loss_of(model, unseen), "kept": share}

    yield measured("int8, no adapter", base)
    model = adapted(copy.deepcopy(base))
    order = torch.arange(steps * 4) % pieces
    train(model, [seen[part] for part in order.split(4)], lr)
    yield measured("adapter beside int8", model, 1.0)
    for way, start, merge in ways(original, base, model):
        merged = merge()
        yield measured(way, merged, kept(model, start, merged))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", UserWarning)  # what is lost is in the table
    found: list[dict[str, Any]] = []
    for steps, lr in SETUPS[:1] if args.small else SETUPS:
        for seed in range(args.seeds):
            for row in rows(steps, lr, seed, args.small):
                found.append(row)
                print(one_line(row), flush=True)
                write_results(args.out, found, {"peft": f"peft {peft.__version__}"}, "cpu")


if __name__ == "__main__":
    main()
