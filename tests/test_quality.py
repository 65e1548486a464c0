"""benchmarks/quality.py runs in its small mode on a CPU, on the real models and on texts and images made up here."""

import csv
import math
import pathlib
import sys

import pytest
import torch
from torch import nn

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("transformers")
import quality  # noqa: E402
import quality_inference  # noqa: E402
import quality_modes  # noqa: E402
import quality_tables  # noqa: E402
import quality_tasks  # noqa: E402
import real_inputs  # noqa: E402

import qsub  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft

SENTENCE = "It was a very good evening, and the soup that the two sisters had made of peas was praised by all. "


@pytest.fixture(autouse=True)
def made_up_inputs(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(512) % 10
    images = torch.randint(0, 256, (512, 1, 28, 28), dtype=torch.uint8, generator=generator)
    images[:, 0, 0] = (labels * 25).to(torch.uint8)[:, None]  # the first row of pixels tells the class
    words = SENTENCE.split()
    texts = [(" ".join(words[i % 7 :]), i % 2) for i in range(40)]
    monkeypatch.setattr(real_inputs, "fashion_mnist", lambda: (images, labels, images, labels))
    monkeypatch.setattr(real_inputs, "reviews", lambda: (texts, texts))
    monkeypatch.setitem(quality.OPTIMIZERS, "AdamW8bit", ("qsub.optim", "AdamW8bit", {"backend": "eager"}))
    monkeypatch.setattr(real_inputs, "austen", lambda: dict.fromkeys(real_inputs.NOVELS, SENTENCE * 20))


def call(monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["quality.py", "--device", "cpu", "--small", "--out", str(folder), *arguments])
    quality.main()
    return {path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in folder.glob("*.csv")}


@pytest.mark.slow
def test_training_writes_a_row_for_each_seed_and_later_calls_add_to_it(tmp_path, monkeypatch):
    arguments = ["--tasks", "ViT, Fashion-MNIST", "--runs"]
    first = call(monkeypatch, tmp_path, *arguments, "torch AdamW", "--parts", "training", "--seeds", "2")
    rows = first["quality_training"]
    assert [(row["run"], row["seed"]) for row in rows] == [("torch AdamW", "0"), ("torch AdamW", "1")]
    assert rows[0]["train_loss"] != rows[1]["train_loss"] and all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    steps = int(rows[0]["steps"])
    assert len(first["quality_curves"]) == 2 * steps == 16
    assert float(first["quality_curves"][0]["loss"]) == pytest.approx(math.log(10), rel=0.3)  # chance, among 10 classes

    again = call(monkeypatch, tmp_path, *arguments, "torch AdamW", "qsub AdamW8bit", "--seeds", "1")
    assert again["quality_training"][:2] == rows  # the same numbers, in the same place
    assert [row["run"] for row in again["quality_training"]] == ["torch AdamW", "torch AdamW", "qsub AdamW8bit"]
    fp32, int8 = (float(again["quality_training"][i]["state_mb"]) for i in (0, 2))
    assert int8 < 0.3 * fp32
    assert [row["run"] for row in again["quality_speed"]] == ["torch AdamW", "qsub AdamW8bit"]
    assert all(float(row["step_ms"]) > 0 for row in again["quality_speed"])


@pytest.mark.slow
def test_the_classifier_trains_the_encoder(tmp_path, monkeypatch):
    arguments = ["--parts", "training", "--tasks", "MiniLM, reviews", "--runs", "qsub AdamW8bit", "--seeds", "1"]
    (row,) = call(monkeypatch, tmp_path, *arguments)["quality_training"]
    assert float(row["state_mb"]) == pytest.approx(22.7 * 2.06, rel=0.01)  # of all 22.7M parameters


@pytest.mark.slow
def test_embeddings_of_int8_are_near_and_of_int4_are_not():
    rows = {row["mode"]: row for row in quality_inference.minilm_rows("cpu", small=True)}
    assert list(rows) == ["fp32", *quality_modes.MODES]
    failed = {mode: row["error"] for mode, row in rows.items() if "error" in row}
    assert not failed
    for mode in ("qsub weight only", "qsub int8, threshold 6"):
        assert rows[mode]["cosine_min"] > 0.99 > rows["int4"]["cosine_mean"]
    assert rows["fp32"]["cosine_min"] == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_next_tokens_of_int8_are_near_and_of_int4_are_not(monkeypatch):
    kept = ("qsub weight only", "int4")
    monkeypatch.setattr(quality_inference, "MODES", {mode: quality_modes.MODES[mode] for mode in kept})
    exact, int8, int4 = quality_inference.smollm2_rows("cpu", small=True)
    assert exact["austen_kl"] == 0 and exact["austen_top1_agreement"] == 1
    assert 0 < int8["austen_kl"] < 0.02 < int4["austen_kl"]
    assert abs(math.log(int8["austen_perplexity"] / exact["austen_perplexity"])) < 0.05


@pytest.mark.slow
def test_lora_trains_on_an_int8_base_and_leaves_it_alone():
    torch.manual_seed(0)
    task = quality_tasks.lora("cpu", True, "qsub weight only")
    model = task.model()
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, qsub.Int8RowwiseTensor)}
    assert len(weights) == 210
    before = {name: weight.int_data.clone() for name, weight in weights.items()}
    adapters = [p for p in model.parameters() if p.requires_grad]
    sums = [p.detach().clone() for p in adapters]
    optimizer = quality.make_optimizer(task, "qsub weight only", model)
    losses = list(quality.steps(task, optimizer, model, 0))
    assert len(losses) == task.steps and all(loss.isfinite() for loss in losses)
    assert all(torch.equal(before[name], weight.int_data) for name, weight in weights.items())
    assert not all(map(torch.equal, sums, adapters))


def test_kl_agreement_and_perplexity_are_those_of_their_definitions():
    class Table(nn.Module):
        """Logits of the next token by the last one."""

        def __init__(self, logits):
            super().__init__()
            self.logits = logits

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": self.logits[input_ids]})

    p, q = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.5, 0.5], [0.7, 0.3]])
    ids = torch.tensor([[0, 1, 1]])
    got = quality_inference.next_tokens(Table(p.log()), Table((q * 7).log()), ids)  # logits but for a constant
    kl = (p * (p / q).log()).sum(1).mean().item()
    assert got["kl"] == pytest.approx(kl, rel=1e-5)
    assert got["perplexity"] == pytest.approx((1 / (0.5 * 0.3)) ** 0.5, rel=1e-5)
    assert got["top1_agreement"] == 0.5  # a tie counts for the first


def row(run, seed, loss):
    fixed = {"task": "t", "train_loss": "1", "accuracy": "", "perplexity": "2", "state_mb": "3"}
    return {**fixed, "run": run, "seed": seed, "test_loss": loss}


def test_a_difference_is_told_from_the_spread_of_the_seeds():
    reference = [row("torch AdamW", "0", "1.0"), row("torch AdamW", "1", "1.2")]  # a standard deviation of .1414
    near = [row("near", "0", "1.1"), row("near", "1", "1.3")]
    far = [row("far", "0", "0.5"), row("far", "1", "0.6"), row("far", "2", "9")]  # a seed of its own doesn't count
    table = {line["run"]: line for line in quality_tables.over_seeds([*reference, *near, *far])}
    assert table["torch AdamW"]["difference"] == "" and table["torch AdamW"]["test_loss"] == "1.1000 ± 0.1414"
    assert table["near"]["difference"] == "+0.1000, within noise"
    assert table["far"]["difference"] == "-0.5500, lower" and table["far"]["seeds"] == "3"
    assert table["far"]["accuracy"] == "" and table["far"]["perplexity"] == "2.00 ± 0.00"


def test_shared_state_and_subclasses_are_counted_once():
    params = [nn.Parameter(torch.ones(64, 128)), nn.Parameter(torch.ones(3))]
    for make, expected in ((torch.optim.AdamW, 8 * 8195), (qsub.optim.AdamW8bit, 2 * 8192 + 2 * 2 * 128 + 8 * 3)):
        optimizer = make(params)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert quality.state_bytes(optimizer) == expected
