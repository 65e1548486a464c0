"""A sample of benchmarks/transformers_sweep.py: model types of transformers through all routes of saving, loading."""

import contextlib
import csv
import pathlib
import sys
import warnings

import pytest
import torch

import qsub
from qsub.interop import hf_names
from qsub.streaming import converted
from qsub.streaming.source import open_source

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
with warnings.catch_warnings():  # of the packages that it imports
    warnings.simplefilter("ignore")
    import transformers_sweep as sweep
del sys.path[0]

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers say of small configs

# Of each kind one: how the file differs from the model, and what is tied.
TYPES = {
    "llama": "nothing differs, the head is untied",
    "gemma": "nothing differs, the head is tied",
    "gpt_neox": "renamed",
    "vit": "renamed, of images",
    "nomic_bert": "one tensor is split by rows",
    "minimax_m3_vl": "tensors are joined by rows, experts stacked",
    "molmo2": "embeddings are joined, tensors split, of images and text",
    "mixtral": "experts are stacked and joined",
    "phimoe": "experts are stacked and joined, renamed",
    "llava": "renamed, of images and text",
    "t5": "encoder and decoder, tied embeddings",
    "whisper": "encoder and decoder, of sound",
    "olmo_hybrid": "convolutions are joined",
}


@pytest.fixture(autouse=True)
def _quiet():
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        sweep.quiet()
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_route_gives_the_same_bits(tmp_path, model_type):
    row = sweep.sweep_one(model_type, tmp_path)
    assert row["int8"] > 0 and {route: row[route] for route in sweep.ROUTES} == dict.fromkeys(sweep.ROUTES, "equal")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["t5", "nomic_bert"])
def test_weights_that_a_model_keeps_in_fp32_show_it(tmp_path, model_type, dtype):
    """As T5 does with some, if it is loaded in fp16."""
    model = sweep.tiny_models.tiny_model(model_type)
    model.to(dtype).save_pretrained(tmp_path / "float")
    expected = qsub.quantize_(type(model).from_pretrained(tmp_path / "float"))
    shown = {param.dtype for param in expected.parameters()}
    assert shown == ({torch.float32, dtype} if (model_type, dtype) == ("t5", torch.float16) else {dtype})
    expected.save_pretrained(tmp_path / "int8")
    sweep.command("quantize", tmp_path / "float", tmp_path / "cli")
    for folder in ("int8", "cli"):
        again = type(model).from_pretrained(tmp_path / folder)
        assert sweep.difference(again.state_dict(), expected.state_dict()) == "equal"
    config = qsub.QsubConfig()
    again = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    assert sweep.difference(again.state_dict(), expected.state_dict()) == "equal"


def test_the_sample_has_what_it_says(tmp_path):
    """Else transformers has changed these types, and others must take their places."""
    kinds = {"gpt_neox": "renamed", "vit": "renamed", "nomic_bert": "converted", "mixtral": "converted"}
    for model_type, kind in kinds.items():
        model = sweep.tiny_models.tiny_model(model_type)
        model.save_pretrained(tmp_path / model_type)
        found = hf_names.moves(model, qsub.load_file(tmp_path / model_type))
        changed = [move for move in found if (move.rule is not None or move.sources[0][1] != move.target)]
        assert any((move.rule is not None) == (kind == "converted") for move in changed)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda state: state.pop("b"), "b is missing"),
        (lambda state: state["a"].int_data.view(-1)[3].add_(1), "a differs"),
        (lambda state: state["a"].scale[1].mul_(1.01), "a differs"),
        (lambda state: state.update(a=state["a"].dequantize()), "a is Tensor, not Int8RowwiseTensor"),
        (lambda state: state.update(b=state["b"].half()), "b: torch.float16, not torch.float32"),
        (lambda state: state.update(a=state["a"].to(torch.float16)), "a: torch.float16, not torch.float32"),
        (lambda state: state.update(c=torch.ones(1)), "c is extra"),
    ],
)
def test_the_comparison_sees_a_bit(change, text):
    def state():
        weight = qsub.Int8RowwiseTensor.from_float(torch.arange(12.0).view(3, 4))
        return {"a": weight, "b": torch.arange(3.0)}

    changed = state()
    change(changed)
    assert sweep.difference(state(), state()) == "equal"
    assert sweep.difference(changed, state()) == text
    assert sweep.lost({"save_load": sweep.difference(changed, state())}) == ["save_load"]


def test_no_model_type_of_the_whole_sweep_loses_a_weight():
    with open(BENCHMARKS / "results" / "transformers_sweep.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tried = [row for row in rows if not row["note"]]
    assert len(tried) > 400 and not {row["model_type"]: sweep.lost(row) for row in tried if sweep.lost(row)}


# ---- Rows of stored tensors ----


@pytest.mark.parametrize(
    "model_type, rows_only",
    [("nomic_bert", True), ("mixtral", True), ("minimax_m3_vl", True), ("molmo2", True), ("gpt_neox", True)],
)
def test_rules_that_move_rows_are_streamed(tmp_path, model_type, rows_only):
    """Instead of calling transformers' code; what is read a few rows at a time is what that gives."""
    model = sweep.tiny_models.tiny_model(model_type)
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    tensors, moves = converted.by_model_names(source.plain(), model)
    made = {type(entry).__name__ for entry in tensors.values()}
    assert made <= {"Entry", "Rows"} if rows_only else "Result" in made
    for move in moves:
        for name, value in move.apply(model, lambda key: source.entries[key].read()).items():
            entry = tensors[name]
            assert b"".join(map(bytes, entry.raw())) == bytes(value.contiguous().view(torch.uint8).view(-1).tolist())
            if len(entry.shape) == 2:
                pieces = list(entry.rows(limit=3 * value.shape[1] * value.element_size()))
                assert torch.equal(torch.cat([part for _, part in pieces]), value) and len(pieces) >= value.shape[0] / 3
                assert [first for first, _ in pieces] == [
                    sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))
                ]
            assert entry.nbytes == value.nbytes


def test_what_transformers_must_compute_is_computed_once(tmp_path, monkeypatch):
    model = sweep.tiny_models.tiny_model("nomic_bert")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(converted, "_blocks", lambda *_: None)
    source = open_source(tmp_path)
    tensors, _ = converted.by_model_names(source.plain(), model)
    results = [entry for entry in tensors.values() if isinstance(entry, converted.Result)]
    assert len(results) == 6
    calls = []
    apply = hf_names.Move.apply
    monkeypatch.setattr(hf_names.Move, "apply", lambda *args: calls.append(1) or apply(*args))
    for entry in results:
        assert torch.equal(entry.read(), model.state_dict()[entry.name])
    assert len(calls) == 2  # layers, of three tensors each
    with contextlib.suppress(StopIteration):
        first, rows = next(results[0].rows(limit=1))
        assert first == 0 and rows.shape == (1, 32)
