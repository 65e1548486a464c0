"""Models of transformers for tests: the real ones, and a small Llama that takes no time."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

SENTENCES = ["The capital of France is Paris.", "Int8 weights are a quarter of the size.", "It rained all day."]


def folder_of(name):
    """Of "minilm" or "smollm2"."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        import real_inputs
    finally:
        del sys.path[0]
    return {"minilm": real_inputs.minilm_folder, "smollm2": real_inputs.smollm2_folder}[name]()


def tokens(folder, texts=SENTENCES):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer(texts, return_tensors="pt", padding=True)


@torch.no_grad()
def output(model, batch):
    """Logits, or the last hidden state of a model without a head."""
    return model(**batch)[0]


def tiny_llama(**changes):
    """Two layers with random weights and an untied head, on which structure is tested."""
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes})).eval()


def tiny_batch(rows=2):
    return {"input_ids": torch.arange(8 * rows).reshape(rows, 8) % 64}
