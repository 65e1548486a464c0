"""benchmarks/quality.py runs in its small mode on a CPU, on the real models and on texts and images made up here."""

import csv
import math
import os
import pathlib
import sys
import time

import pytest
import torch
from torch import nn

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("transformers")
import quality  # noqa: E402
import quality_inference  # noqa: E402
import quality_jobs  # noqa: E402
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
def test_next_tokens_of_int8_are_near_and_of_int4_are_not():
    modes = ["fp32", "qsub weight only", "int4"]
    exact, int8, int4 = quality_inference.smollm2_rows("cpu", True, modes)
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


def test_rows_outlive_jobs_that_raise_crash_or_hang(capsys):
    """What a process sent counts, whatever becomes of it and of the others."""
    got = []
    first, last = ("a", [{"seed": 0}]), ("b", [{"seed": 1}])
    work = [(time.sleep, (600,)), (iter, ([first],)), (int, ("x",)), (os._exit, (3,)), (iter, ([last],))]
    start = time.perf_counter()
    quality_jobs.run_beside(work, lambda *item: got.append(item), start + 40, count=2)
    assert got == [first, last] and time.perf_counter() - start < 60
    assert capsys.readouterr().out.splitlines() == [
        "failed: int ('x',): exit code 1",
        "failed: _exit (3,): exit code 3",
        "failed: sleep (600,): out of time",
    ]


def test_a_job_that_raises_costs_the_later_ones_nothing_and_none_begins_too_late(capsys):
    got = []
    work = [(int, ("x",)), (iter, ([("a", [])],))]
    quality_jobs.run_alone(work, lambda *item: got.append(item), time.perf_counter() + 60)
    assert got == [("a", [])]
    quality_jobs.run_alone(work[1:], lambda *item: got.append(item), time.perf_counter() - 1)
    assert len(got) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("failed: int ('x',): ValueError") and lines[1].endswith("out of time")


def arguments(*given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quality.py", "--device", "cpu", *given])
        return quality.parse()


def test_what_waits_for_the_gpu_at_each_parameter_or_layer_runs_alone():
    beside, alone, timed = quality.jobs(arguments())
    together = [str(job) for job in beside]
    assert not any(name in job for job in together for name in quality.ALONE)
    assert [values[:2] for function, values in alone if function is quality.inference] == [
        ("SmolLM2-135M", ["bitsandbytes, threshold 6"]),
        ("MiniLM", ["bitsandbytes, threshold 6"]),
    ]
    trained = {values[:2] + values[-1:] for job in (beside, alone) for function, values in job if len(values) == 5}
    expected = {(name, run, seed) for name, runs in quality.TRAINED.items() for run in runs for seed in range(3)}
    assert trained == expected and len(timed) == sum(map(len, quality.TIMED.values()))
    assert quality.jobs(arguments("--parts", "speed")) == ([], [], timed)
    assert not quality.jobs(arguments("--parts", "training", "lora"))[2]
    some = quality.jobs(arguments("--tasks", "SmolLM2-135M", "--runs", "fp32", "int4"))
    assert [values[:2] for _, values in some[0]] == [("SmolLM2-135M", ["fp32", "int4"])] and some[1:] == ([], [])


def test_rows_stand_in_the_same_order_whichever_ends_first(tmp_path):
    runs = [("torchao AdamW8bit", 1), ("qsub AdamW8bit", 2), ("torch AdamW", 0), ("torchao AdamW8bit", 0)]
    for run, seed in runs:
        results = quality.Results(tmp_path, {"device": "x"})
        results.add("quality_training", [{"task": "ViT, Fashion-MNIST", "run": run, "seed": seed}])
    for mode in ("int4", "qsub weight only", "fp32"):
        results.add("quality_minilm", [{"model": "MiniLM", "mode": mode}])
    read = {path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in tmp_path.iterdir()}
    assert [(row["run"], row["seed"]) for row in read["quality_training"]] == [
        ("torch AdamW", "0"),
        ("qsub AdamW8bit", "2"),
        ("torchao AdamW8bit", "0"),
        ("torchao AdamW8bit", "1"),
    ]
    assert [row["mode"] for row in read["quality_minilm"]] == ["fp32", "qsub weight only", "int4"]


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
