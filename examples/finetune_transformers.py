"""Adapters on a language model with int8 weights, trained by transformers' Trainer with 8-bit AdamW.

    python examples/finetune_transformers.py FOLDER TEXT.txt OUT [--steps 50]

FOLDER holds a causal language model for from_pretrained, TEXT.txt what it learns. OUT/adapter gets the adapters, and
OUT/merged the float model with them, since int8 would round small changes away. Needed: pip install
".[transformers]" peft, in a clone
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import qsub


class Blocks(Dataset):
    """A text as blocks of tokens, each its own label."""

    def __init__(self, text: str, tokenizer: Any, length: int) -> None:
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        if len(tokens) < length:
            raise ValueError(f"the text must have at least {length} tokens, one block, got {len(tokens)}")
        self.blocks = tokens[: len(tokens) // length * length].view(-1, length)  # (blocks, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def finetune(
    folder: Path, text: str, out: Path, steps: int = 50, length: int = 128, dtype: torch.dtype | None = None
) -> list[float]:
    """Train adapters on an int8 model, save them and the merged model; returns the losses.

    `dtype` is that of the activations and of the merged model: bf16 on a GPU and fp32 on a CPU, unless given.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = dtype or (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=qsub.QsubConfig(), dtype=dtype, device_map="auto"
    )
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    groups = qsub.optim.param_groups(model, weight_decay=0.01)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Blocks(text, tokenizer, length),
        optimizer_cls_and_kwargs=(qsub.optim.AdamW8bit, {"lr": 1e-3, "params": groups}),
    )
    trainer.train()
    model.save_pretrained(out / "adapter")
    qsub.dequantize_(model).merge_and_unload().save_pretrained(out / "merged")
    tokenizer.save_pretrained(out / "merged")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("text", metavar="TEXT.txt", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if not (options.folder / "config.json").is_file():
        parser.error(f"FOLDER must hold a config.json, got {options.folder}")
    if not options.text.is_file():
        parser.error(f"TEXT must be a file, got {options.text}")
    if options.out.exists():
        parser.error(f"OUT exists: remove {options.out}, or choose another folder")
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    losses = finetune(options.folder, options.text.read_text(encoding="utf-8"), options.out, options.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved under {options.out}")


if __name__ == "__main__":
    main()
