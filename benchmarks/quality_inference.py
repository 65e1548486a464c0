"""How near a quantized model stays to the float one: sentence embeddings of MiniLM, next tokens of SmolLM2.

The float model multiplies in fp32, TF32 off. `int4` (a row's largest magnitude over 7, rounded to nearest) is the
negative control: what a measure would show of a code that is not good enough. The tied head of SmolLM2 stays in float
in every mode, as do the embeddings.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import real_inputs
import torch
import torch.nn.functional as F
from quality_modes import MODES, quantize_as
from quality_tasks import HELD_OUT, smollm2_model, windows
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

COMPARED = ("fp32", *MODES)


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Unit vectors (texts, 384): the mean of the last hidden states."""
    result = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1)
        result.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(result)


@torch.no_grad()
def next_tokens(reference: nn.Module, model: nn.Module, ids: Tensor, size: int = 8) -> dict[str, float]:
    """Perplexity of `model` on ids (windows, T), and how its next tokens differ from the reference's.

    Returns:
        perplexity; top1_agreement, the share of places where both rank the same token first; kl, the mean of
        KL(reference || model) in nats a token.
    """
    loss = agree = divergence = 0.0
    for part in ids.split(size):
        expected = reference(input_ids=part, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        got = model(input_ids=part, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        loss -= got.gather(-1, part[:, 1:, None]).sum().item()
        agree += (got.argmax(-1) == expected.argmax(-1)).sum().item()
        divergence += F.kl_div(got, expected, reduction="sum", log_target=True).item()
    count = ids.numel() - len(ids)
    return {"perplexity": math.exp(loss / count), "top1_agreement": agree / count, "kl": divergence / count}


def _compare(
    reference: nn.Module, modes: Sequence[str], device: str, measure: Callable[[nn.Module], dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """A row for each mode, fp32 being the reference itself; a peer that fails is a row that says so."""
    for mode in modes:
        try:
            with warnings.catch_warnings():  # bitsandbytes tells of its fp16 cast
                warnings.simplefilter("ignore")
                model = reference if mode == "fp32" else quantize_as(mode, copy.deepcopy(reference), device)
                row = {"mode": mode, **measure(model)}
            yield row
        except Exception as error:
            if not mode.startswith(("bitsandbytes", "torchao")):
                raise
            yield {"mode": mode, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}


def minilm_rows(device: str, small: bool, modes: Sequence[str] = COMPARED) -> Iterator[dict[str, Any]]:
    """Cosine to the fp32 embeddings of 1,000 reviews, 256 tokens at most: mean and minimum."""
    folder = real_inputs.minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = sorted((text for text, _ in real_inputs.reviews()[1][: 8 if small else None]), key=len)
    batches = [
        dict(
            tokenizer(texts[i : i + 50], padding=True, truncation=True, max_length=256, return_tensors="pt").to(device)
        )
        for i in range(0, len(texts), 50)
    ]
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    expected = embeddings(reference, batches)

    def measure(model: nn.Module) -> dict[str, float]:
        cosine = (embeddings(model, batches).double() * expected.double()).sum(1)
        return {"cosine_mean": cosine.mean().item(), "cosine_min": cosine.min().item()}

    for row in _compare(reference, modes, device, measure):
        yield {"model": "MiniLM", "texts": len(texts), **row}


def smollm2_rows(device: str, small: bool, modes: Sequence[str] = COMPARED) -> Iterator[dict[str, Any]]:
    """Perplexity, agreement and KL on a novel and on the reviews, in windows of 512 tokens; on a CPU, fewer of 256."""
    length, count = (32, 2) if small else (512, 128) if device.startswith("cuda") else (256, 16)
    review_text = "\n\n".join(text for text, _ in real_inputs.reviews()[1])
    texts = {"austen": real_inputs.austen()[HELD_OUT], "reviews": review_text}
    ids = {name: windows(text[: 1000 if small else None], length, device)[:count] for name, text in texts.items()}
    reference = smollm2_model(device).eval()

    def measure(model: nn.Module) -> dict[str, float]:
        result = {}
        for name, part in ids.items():
            result |= {f"{name}_{key}": value for key, value in next_tokens(reference, model, part).items()}
        return result

    for row in _compare(reference, modes, device, measure):
        yield {"model": "SmolLM2-135M", "texts": f"{len(ids['austen'])} + {len(ids['reviews'])} x {length}", **row}
