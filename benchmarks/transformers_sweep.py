"""Every model type of transformers, saved and loaded in int8 by every route: no weight may be lost or changed.

Small models with random weights are made from the configs alone (`tiny_models.py`), so nothing is downloaded. Reference
is `qsub.quantize_` of the model that from_pretrained reads from its float folder. The routes, as columns of the result:

    float           what transformers itself loses or changes of the float model, without qsub
    save_load       quantize_, save_pretrained, from_pretrained
    save_file       quantize_, save_pretrained, qsub.load_file
    cli_load        qsub quantize of the float folder, from_pretrained
    cli_file        qsub quantize of the float folder, qsub.load_file
    config_load     from_pretrained of the float folder with a QsubConfig
    back            from_pretrained of the int8 folder, dequantize(), save_pretrained, from_pretrained
    cli_back        qsub dequantize of the int8 folder, from_pretrained

A cell is "equal", or what differs first. Each type runs in a process of its own with a limit of time; rows are written
one by one, and types that the result file has are not repeated (remove it to start over).

    python benchmarks/transformers_sweep.py [--types bert vit ...] [--output benchmarks/results/transformers_sweep]
"""

import argparse
import contextlib
import csv
import io
import multiprocessing
import os
import pathlib
import queue
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import harness
import tiny_models
import torch
import transformers
import transformers.modeling_utils  # here rather than in each process
from torch import nn

import qsub
from qsub import Int8RowwiseTensor, QsubConfig
from qsub.cli.app import run
from qsub.interop import hf_names

ROUTES = ("float", "save_load", "save_file", "cli_load", "cli_file", "config_load", "back", "cli_back")


def parts(value: Any) -> tuple[Any, ...]:
    """The plain tensors of one."""
    return (value.int_data, value.scale) if isinstance(value, Int8RowwiseTensor) else (value,)


def difference(state: dict[str, Any], expected: dict[str, Any]) -> str:
    """The word "equal", or the first name whose tensors differ in kind, dtype or a bit; NaN equals NaN."""
    for name in expected:
        if name not in state:
            return f"{name} is missing"
        if state[name].dtype != expected[name].dtype:
            return f"{name}: {state[name].dtype}, not {expected[name].dtype}"
        first, second = parts(state[name]), parts(expected[name])
        if len(first) != len(second):
            return f"{name} is {type(state[name]).__name__}, not {type(expected[name]).__name__}"
        for a, b in zip(first, second, strict=True):
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{name}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
            if not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return f"{name} differs"
    extra = [name for name in state if name not in expected]
    return f"{extra[0]} is extra" if extra else "equal"


def command(*arguments: Any) -> None:
    """A command line of qsub, or RuntimeError with what it printed."""
    texts = io.StringIO()
    with contextlib.redirect_stdout(texts), contextlib.redirect_stderr(texts):
        code = run([str(argument) for argument in arguments])
    if code:
        raise RuntimeError(f"exit code {code}: {texts.getvalue().strip().splitlines()[-1]}")


def sweep_one(model_type: str, folder: pathlib.Path) -> dict[str, Any]:
    """All routes for one model type.

    Args:
        model_type: of `tiny_models.model_types`.
        folder: to write in, empty.
    """
    row: dict[str, Any] = {"model_type": model_type, "class": tiny_models.class_of(model_type).__name__}
    model = tiny_models.tiny_model(model_type)
    kind = type(model)
    row["parameters"] = sum(param.numel() for param in model.parameters())
    row["linears"] = sum(isinstance(module, nn.Linear) for module in model.modules())
    model.save_pretrained(folder / "float")
    reference = kind.from_pretrained(folder / "float")
    row["float"] = difference(reference.state_dict(), model.state_dict())
    rules = hf_names.moves(model, qsub.load_file(folder / "float"))
    row["renamed"] = sum(move.rule is None and move.sources[0][1] != move.target for move in rules)
    row["converted"] = sum(move.rule is not None for move in rules)
    with contextlib.suppress(ValueError):  # of a model that has nothing to quantize
        qsub.quantize_(reference)
    expected = reference.state_dict()
    row["int8"] = sum(isinstance(param, Int8RowwiseTensor) for param in reference.parameters())
    if not row["int8"]:
        return {**row, **dict.fromkeys(ROUTES[1:], "nothing to quantize")}

    def loaded(name: str, **options: Any) -> dict[str, Any]:
        return kind.from_pretrained(folder / name, **options).state_dict()

    reference.save_pretrained(folder / "int8")
    command("quantize", folder / "float", folder / "cli")
    routes: dict[str, Callable[[], dict[str, Any]]] = {
        "save_load": lambda: loaded("int8"),
        "save_file": lambda: qsub.load_file(folder / "int8"),
        "cli_load": lambda: loaded("cli"),
        "cli_file": lambda: qsub.load_file(folder / "cli"),
        "config_load": lambda: loaded("float", quantization_config=QsubConfig()),
    }
    for route, load in routes.items():
        row[route] = attempt(load, expected)
    floats = {name: parts_to_float(value) for name, value in expected.items()}

    def back() -> dict[str, Any]:
        kind.from_pretrained(folder / "int8").dequantize().save_pretrained(folder / "back")
        return loaded("back")

    def cli_back() -> dict[str, Any]:
        command("dequantize", folder / "cli", folder / "cli_back")
        return loaded("cli_back")

    row["back"] = attempt(back, floats)
    row["cli_back"] = attempt(cli_back, floats)
    return row


def parts_to_float(value: Any) -> torch.Tensor:
    return value.dequantize() if isinstance(value, Int8RowwiseTensor) else value


def attempt(load: Callable[[], dict[str, Any]], expected: dict[str, Any]) -> str:
    """What comes of a route."""
    try:
        return difference(load(), expected)
    except Exception as error:  # whatever a model's own code raises
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def quiet() -> None:
    """Without the reports of transformers, one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _child(model_type: str, results: Any) -> None:
    quiet()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results.put(sweep_one(model_type, pathlib.Path(folder)))
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        results.put({"model_type": model_type, "note": text[:300]})


def in_a_process(model_type: str, limit: float) -> dict[str, Any]:
    """The row of a model type, or one with a note of what went wrong."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_child, args=(model_type, results))
    process.start()
    end = time.monotonic() + limit
    row = None
    while row is None and time.monotonic() < end and (process.is_alive() or not results.empty()):
        with contextlib.suppress(queue.Empty):
            row = results.get(timeout=1)
    process.kill()
    process.join()
    if row is not None:
        return row
    reason = f"took over {limit:.0f} s" if time.monotonic() >= end else f"the process ended with {process.exitcode}"
    return {"model_type": model_type, "note": reason}


def lost(row: dict[str, Any]) -> list[str]:
    """The routes that lose or change a weight in silence: neither those that raise, nor what happens without qsub."""
    quiet_ones = ("is missing", "is extra", "differs", ", not ")
    own = row.get("float", "").split(" ")[0]  # the tensor that transformers lose or change
    cells = {route: row.get(route, "") for route in ROUTES[1:]}
    return [r for r, cell in cells.items() if any(t in cell for t in quiet_ones) and cell.split(" ")[0] != own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", help="model types; default: all")
    parser.add_argument("--limit", type=float, default=180, help="seconds a type")
    parser.add_argument("--output", default="benchmarks/results/transformers_sweep", help="CSV file, without suffix")
    arguments = parser.parse_args()
    quiet()
    rows: list[dict[str, Any]] = []
    path = pathlib.Path(f"{arguments.output}.csv")
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    done = {row["model_type"] for row in rows}
    columns = ("model_type", "class", "parameters", "linears", "int8", "renamed", "converted", *ROUTES, "note")
    for model_type in arguments.types or tiny_models.model_types():
        if model_type in done:
            continue
        row = in_a_process(model_type, arguments.limit)
        rows.append({key: row.get(key, "") for key in columns})
        print(
            harness.one_line(
                {"model_type": model_type, **{k: row[k] for k in ROUTES if row.get(k) != "equal" and k in row}}
            ),
            row.get("note", ""),
            flush=True,
        )
        harness.write_results(arguments.output, rows, {"qsub": qsub.__version__}, device="cpu")
    tried = [row for row in rows if not row["note"]]
    print(f"{len(tried)} model types, {len(rows) - len(tried)} more could not be made small")
    for row in tried:
        if lost(row):
            print(f"{row['model_type']}: {', '.join(lost(row))}")


if __name__ == "__main__":
    main()
