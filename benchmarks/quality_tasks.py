"""What benchmarks/quality.py trains: a model, its batches, its loss and its test, all from benchmarks/real_inputs.py.

Each task stands for a use: from scratch (ViT), a fine-tuned encoder (MiniLM), a fine-tuned language model (SmolLM2)
and adapters on a frozen language model (LoRA).
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import real_inputs
import torch
import torch.nn.functional as F
from quality_modes import quantize_as
from torch import Tensor, nn
from train_vit import SmallViT
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

HELD_OUT = "persuasion"  # the novel that perplexity is taken on


@dataclass
class Task:
    """Attributes as `quality.train` uses them.

    Attributes:
        model: makes the model, after the seed is set.
        batches: of a seed, at least `steps` of them.
        loss: of the model on a batch.
        test: of the trained model: test_loss and accuracy or perplexity.
        bf16: multiply in bf16 (autocast; parameters stay fp32).
        clip: largest norm of the gradient; 0 for none.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    test: Callable[[nn.Module], dict[str, float]]
    steps: int
    lr: float
    weight_decay: float
    bf16: bool = False
    clip: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)


def _classes(logits: Callable[[Any], Tensor], batches: list[tuple[Any, Tensor]]) -> dict[str, float]:
    """Loss and accuracy on (inputs, labels) batches."""
    loss = right = count = 0.0
    for inputs, labels in batches:
        scores = logits(inputs).float()
        loss += F.cross_entropy(scores, labels, reduction="sum").item()
        right += (scores.argmax(1) == labels).sum().item()
        count += len(labels)
    return {"test_loss": loss / count, "accuracy": right / count}


def vit(device: str, small: bool) -> Task:
    """A ViT of 455k parameters from scratch on Fashion-MNIST: 3 epochs in batches of 128."""
    train_x, train_y, test_x, test_y = (part[: 512 if small else None] for part in real_inputs.fashion_mnist())
    train_x, test_x = (((part.to(device).float() / 255) - 0.286) / 0.353 for part in (train_x, test_x))
    train_y, test_y = train_y.to(device), test_y.to(device)
    epochs, size = (1, 64) if small else (3, 128)

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(train_x), generator=generator).to(device)
            for part in order.split(size)[: len(train_x) // size]:
                yield train_x[part], train_y[part]

    return Task(
        model=lambda: SmallViT(28, 1, 10).to(device),
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05),
        test=lambda model: _classes(model, list(zip(test_x.split(1000), test_y.split(1000), strict=True))),
        steps=epochs * (len(train_x) // size),
        lr=1.5e-3,
        weight_decay=0.05,
        record={"data": f"Fashion-MNIST, {len(train_x)} images", "epochs": epochs, "batch": size},
    )


class Classifier(nn.Module):
    """MiniLM with mean pooling and a linear head for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(real_inputs.minilm_folder(), dtype=torch.float32)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # (B, 2)
        hidden = self.encoder(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def minilm(device: str, small: bool) -> Task:
    """MiniLM fine-tuned on 2,000 reviews of food, one epoch in batches of 16, 64 tokens at most."""
    train, test = (
        part[:count] for part, count in zip(real_inputs.reviews(), (32, 32) if small else (2000, 1000), strict=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(real_inputs.minilm_folder())

    def encoded(part: list[tuple[str, int]]) -> tuple[dict[str, Tensor], Tensor]:
        texts = [text for text, _ in part]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        return dict(tokens.to(device)), torch.tensor([label for _, label in part], device=device)

    def batches(seed: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        starts = range(0, len(train) - 15, 16)
        yield from [encoded([train[i] for i in order[start : start + 16]]) for start in starts]

    return Task(
        model=lambda: Classifier().to(device),
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        test=lambda model: _classes(model, [encoded(test[i : i + 50]) for i in range(0, len(test), 50)]),
        steps=len(train) // 16,
        lr=1e-4,
        weight_decay=0.01,
        clip=1.0,
        record={"data": f"reviews, {len(train)}", "epochs": 1, "batch": 16},
    )


@functools.cache
def windows(text: str, length: int, device: str) -> Tensor:
    """Token ids of a text in windows that don't overlap: (windows, length); what is left at the end is dropped."""
    tokenizer = AutoTokenizer.from_pretrained(real_inputs.smollm2_folder())
    ids = torch.tensor(tokenizer(text)["input_ids"], device=device)
    return ids[: len(ids) // length * length].view(-1, length)


def token_loss(model: nn.Module, ids: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of each next token, ids (B, T)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def _language(device: str, small: bool, model: Callable[[], nn.Module], **options: Any) -> Task:
    """Next-token training on five of Austen's novels, tested on the sixth."""
    length, size, steps, tests = (32, 2, 2, 2) if small else (512, 8, 100, 96)
    novels = real_inputs.austen()
    text = "\n\n".join(novels[name] for name in novels if name != HELD_OUT)
    train = windows(text[:5000] if small else text, length, device)
    test = windows(novels[HELD_OUT][: 2000 if small else None], length, device)[:tests]

    def batches(seed: int) -> Iterator[Tensor]:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).to(device)
        for part in order.split(size)[:steps]:
            yield train[part]

    def perplexity(model: nn.Module) -> dict[str, float]:
        total = sum(token_loss(model, part, "sum").item() for part in test.split(size))
        loss = total / (test.numel() - len(test))
        return {"test_loss": loss, "perplexity": math.exp(loss)}

    record = {"data": f"Austen, {steps * size * length} tokens", "epochs": 1, "batch": f"{size} x {length} tokens"}
    return Task(model, batches, token_loss, perplexity, steps, bf16=True, clip=1.0, record=record, **options)


def smollm2_model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(real_inputs.smollm2_folder(), dtype=dtype).to(device)


def smollm2(device: str, small: bool) -> Task:
    """SmolLM2-135M fine-tuned: fp32 parameters, bf16 matmuls."""
    return _language(device, small, lambda: smollm2_model(device), lr=5e-5, weight_decay=0.01)


def lora(device: str, small: bool, base: str) -> Task:
    """LoRA of rank 16 on all linear layers of SmolLM2-135M; the frozen base in bf16, or as `quantize_as` makes it."""
    import peft

    def adapted() -> nn.Module:
        model = smollm2_model(device, torch.bfloat16)
        if base != "bf16":
            model = quantize_as(base, model, device)
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, adapters)

    return _language(device, small, adapted, lr=2e-4, weight_decay=0.0)


TASKS: dict[str, Callable[[str, bool], Task]] = {
    "ViT, Fashion-MNIST": vit,
    "MiniLM, reviews": minilm,
    "SmolLM2, Austen": smollm2,
}
LORA = "SmolLM2, LoRA"
