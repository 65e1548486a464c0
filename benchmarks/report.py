"""Write the tables of README.md and docs/ from the files under benchmarks/results.

    python benchmarks/report.py           # rewrite what stands between the markers
    python benchmarks/report.py --check   # exit 1 if a page is out of date

A page asks for a table by `<!-- table: NAME -->` and ends it by `<!-- end -->`; NAME is a key of TABLES.
"""

import argparse
import csv
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean

from quality_tables import over_seeds

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARKER = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
Row = dict[str, str]


@dataclass
class Table:
    """A table of a page.

    Attributes:
        file: name under benchmarks/results.
        columns: column of the file to heading.
        keep: which rows.
        reshape: makes the rows of the table from those of the file, see `pivot`.
        record: columns of the file that tell what was measured on; they make the line below the table.
    """

    file: str
    columns: dict[str, str]
    keep: Callable[[Row], bool] = lambda row: True
    reshape: Callable[[list[Row]], list[Row]] = lambda rows: rows
    record: tuple[str, ...] = field(default=("device", "packages", "date"))


def pivot(row: str, column: str, **values: str) -> Callable[[list[Row]], list[Row]]:
    """Rows for the values of `row` with a cell for each value of `column`: means, joined by a slash.

    Args:
        row: column of the file that names the rows of the table.
        column: column of the file that names the columns of the table.
        values: columns of the file to their format, such as error=".3f".
    """

    def reshape(rows: list[Row]) -> list[Row]:
        table: dict[str, Row] = {}
        cells: dict[tuple[str, str], list[Row]] = {}
        for line in rows:
            table.setdefault(line[row], dict(line))
            cells.setdefault((line[row], line[column]), []).append(line)
        for (name, heading), lines in cells.items():
            if not all(line[key] for line in lines for key in values):
                table[name][heading] = "fails"  # the file has the error
                continue
            means = (format(fmean(float(line[key]) for line in lines), form) for key, form in values.items())
            table[name][heading] = " / ".join(means)
        return list(table.values())

    return reshape


def _mean_and_deviation(*keys: str) -> Callable[[list[Row]], list[Row]]:
    """Each of the columns as "mean ± standard deviation", from the columns KEY and KEY_sd."""
    return lambda rows: [
        {**row, **{key: f"{float(row[key]):.4f} ± {float(row[f'{key}_sd']):.4f}" for key in keys}} for row in rows
    ]


_SHORT = ("vit", "heavy 1", "heavy 2", "heavy 3", "sparse", "smooth", "constant", "dead")
_LONG = tuple(f"heavy {sigma}, 3000 steps" for sigma in (1, 2, 3))
_CODES = ("block_float8", "dynamic tree, 256", "linear, sqrt(v) linear", "e3m4, e4m4", "e3m4, e4m4, m stochastic too")
_CODES += ("e4m3, e5m3", "three floats by flag", "three floats by flag, m stochastic too")


def _codes(streams: Iterable[str], rivals: bool, **values: str) -> Table:
    """Of benchmarks/state_codes.py: the codes of others, or parts of ours left out; the default in both."""
    return Table(
        "state_codes.csv",
        {"code": "code", "bytes": "bytes", **{stream: stream for stream in streams}},
        lambda row: row["code"] == _CODES[0] or (row["code"] in _CODES) == rivals,
        pivot("code", "stream", **values),
    )


def _joined(name: str, *keys: str, between: str = " ") -> Callable[[list[Row]], list[Row]]:
    """Another column, `name`, of the values of `keys`."""
    return lambda rows: [{**row, name: between.join(row[key] for key in keys)} for row in rows]


def _rounded(**forms: str) -> Callable[[list[Row]], list[Row]]:
    """The columns in their formats, such as error=".3f"; what is empty stays so."""
    return lambda rows: [
        {**row, **{key: format(float(row[key]), form) for key, form in forms.items() if row.get(key)}} for row in rows
    ]


def _then(*steps: Callable[[list[Row]], list[Row]]) -> Callable[[list[Row]], list[Row]]:
    def reshape(rows: list[Row]) -> list[Row]:
        for step in steps:
            rows = step(rows)
        return rows

    return reshape


def _merged(rows: list[Row]) -> list[Row]:
    """Of benchmarks/adapter_merge.py: a row for each way, losses as differences from that of the adapter by itself."""
    beside = {row["steps"]: row for row in rows if row["way"] == "adapter beside int8"}
    table: dict[str, Row] = {}
    for row in rows:
        cells = table.setdefault(row["way"], dict(row))
        reference = beside[row["steps"]]
        cells[f"kept {row['steps']}"] = f"{100 * float(row['kept']):.1f}%" if row["kept"] else ""
        for key in ("seen", "unseen"):
            difference = float(row[key]) - float(reference[key])
            cells[f"{key} {row['steps']}"] = f"{float(row[key]):.4f}" if row is reference else f"{difference:+.4f}"
    return list(table.values())


_ROWS = ("1", "16", "64", "256", "1024", "4096", "16384")


def _linear(passes: str) -> Table:
    """Of benchmarks/linear.py on a GPU: one layer, microseconds and the ratio to bf16 by number of rows."""
    return Table(
        "linear.csv",
        {"mode": f"{passes}, 14336 x 4096", **{number: f"{number} rows" for number in _ROWS}},
        lambda row: (row["pass"], row["n"], row["k"]) == (passes, "14336", "4096"),
        pivot("mode", "rows", us=".0f", ratio=".2f"),
    )


def _layers(mode: str) -> Table:
    """Of the same file: the ratio to bf16 of each layer, forward."""
    return Table(
        "linear.csv",
        {"layer": f"{mode}, forward", **{number: f"{number} rows" for number in _ROWS}},
        lambda row: (row["pass"], row["mode"]) == ("forward", mode),
        _then(_joined("layer", "n", "k", between=" x "), pivot("layer", "rows", ratio=".2f")),
    )


_SETS = ("llama-1b fp32", "llama-1b bf16", "vit-b fp32", "vit-b bf16", "many-small fp32")
_LOSSES = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "test_loss_difference": "test loss less that of fp32",
}
_TRAINED = {
    "run": "optimizer",
    "seeds": "seeds",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "difference": "test loss less torch's",
    "state_mb": "state, MB",
}


def _trained(task: str, **columns: str) -> Table:
    """Of benchmarks/quality.py: a task's runs, over seeds; a column named "" is left out."""
    kept = {key: name for key, name in {**_TRAINED, **columns}.items() if name}
    return Table("quality_training.csv", kept, lambda row: row["task"] == task, over_seeds)


TABLES = {
    "quality-minilm": Table(
        "quality_minilm.csv",
        {"mode": "MiniLM", "cosine_mean": "cosine to fp32, mean", "cosine_min": "minimum"},
        reshape=_rounded(cosine_mean=".4f", cosine_min=".4f"),
    ),
    "quality-smollm2": Table(
        "quality_smollm2.csv",
        {
            "mode": "SmolLM2-135M: novel / reviews",
            "perplexity": "perplexity",
            "agreement": "same first token",
            "kl": "KL to fp32, nats a token",
        },
        reshape=_then(
            _rounded(austen_perplexity=".2f", austen_top1_agreement=".3f", austen_kl=".4f"),
            _rounded(reviews_perplexity=".2f", reviews_top1_agreement=".3f", reviews_kl=".4f"),
            _joined("perplexity", "austen_perplexity", "reviews_perplexity", between=" / "),
            _joined("agreement", "austen_top1_agreement", "reviews_top1_agreement", between=" / "),
            _joined("kl", "austen_kl", "reviews_kl", between=" / "),
        ),
    ),
    "quality-vit": _trained("ViT, Fashion-MNIST", accuracy="accuracy"),
    "quality-classifier": _trained("MiniLM, reviews", accuracy="accuracy"),
    "quality-language": _trained("SmolLM2, Austen", perplexity="perplexity"),
    "quality-lora": _trained(
        "SmolLM2, LoRA", run="base", perplexity="perplexity", difference="test loss less bf16's", state_mb=""
    ),
    "quality-speed": Table(
        "quality_speed.csv",
        {
            "task": "task",
            "run": "optimizer or base",
            "step_ms": "ms a step",
            "step_ms_p20": "20th percentile",
            "step_ms_p80": "80th",
            "peak_gib": "peak memory, GiB",
            "model_mib": "model, MiB",
            "state_mb": "state, MB",
        },
        reshape=_rounded(step_ms=".1f", step_ms_p20=".1f", step_ms_p80=".1f", peak_gib=".2f", model_mib=".0f"),
    ),
    "quickstart": Table("quickstart.csv", {"measure": "`make demo`", "torch": "torch", "qsub": "qsub"}),
    "optimizer-step": Table(
        "optim_step.csv",
        {"optimizer": "ms a step / against torch fused", **{name: name for name in _SETS}},
        reshape=_then(_joined("case", "set", "dtype"), pivot("optimizer", "case", step_ms=".2f", vs_torch_fused=".2f")),
    ),
    "optimizer-step-cpu": Table(
        "optim_step_cpu.csv",
        {"optimizer": "ms a step", "one-2048 fp32": "one 2048 x 2048, fp32", "tiny fp32": "40 small tensors, fp32"},
        reshape=_then(_joined("case", "set", "dtype"), pivot("optimizer", "case", step_ms=".2f")),
    ),
    "narrow-rows": Table(
        "optim_step_narrow.csv",
        {
            "set": "ms a step, 48M parameters on a GPU",
            **{
                f"{name} {dtype}": f"{name}, {dtype}"
                for dtype in ("fp32", "bf16")
                for name in ("torch fused", "qsub triton")
            },
        },
        reshape=_then(_joined("case", "optimizer", "dtype"), pivot("set", "case", step_ms=".2f")),
    ),
    "narrow-rows-cpu": Table(
        "optim_step_narrow_cpu.csv",
        {"set": "ms a step, the same on a CPU", "torch fused": "torch fused", "qsub compile": "qsub compile"},
        reshape=pivot("set", "optimizer", step_ms=".0f"),
    ),
    "optimizer-memory": Table(
        "optim_step.csv",
        {"optimizer": "peak memory, GiB", **{name: name for name in _SETS[:4]}},
        reshape=_then(_joined("case", "set", "dtype"), pivot("optimizer", "case", peak_gib=".2f")),
    ),
    "train-vit": Table(
        "train_vit.csv",
        {
            "optim": "optimizer",
            "schedule": "lr",
            "ms_per_step": "ms a step",
            "max_memory_gib": "GiB",
            "final_loss": "loss",
            "accuracy": "accuracy",
        },
        reshape=lambda rows: [{**row, "schedule": "cosine" if row["cosine"] == "True" else "constant"} for row in rows],
    ),
    "linear-forward": _linear("forward"),
    "linear-backward": _linear("backward"),
    "linear-layers-weight-only": _layers("weight only"),
    "linear-layers-int8": _layers("int8"),
    "linear-peers": Table(
        "linear-peers.csv",
        {
            "mode": "4096 x 4096, microseconds / against bf16",
            **{number: f"{number} rows" for number in ("1", "16", "64", "256", "1024", "4096")},
        },
        lambda row: (row["n"], row["k"]) == ("4096", "4096"),
        pivot("mode", "rows", eager_us=".0f", ratio=".1f"),
    ),
    "linear-cpu": Table(
        "linear-cpu.csv",
        {"mode": "4096 x 4096, ms / against fp32", **{number: f"{number} rows" for number in ("1", "4", "32", "512")}},
        reshape=pivot("mode", "rows", ms=".2f", ratio_to_fp32=".2f"),
    ),
    "decode": Table(
        "decode.csv",
        {"mode": "tokens per second / speedup", **{number: f"batch {number}" for number in ("1", "8", "64")}},
        reshape=pivot("mode", "batch", tokens_per_s=".0f", speedup=".2f"),
    ),
    "adapter-memory": Table(
        "adapter_memory.csv",
        {
            "mode": "base weights",
            "adapters": "adapters",
            "compiled": "compiled",
            "weights_mib": "weights, MiB",
            "saved_mib": "saved for backward, MiB",
            "peak_mib": "peak, MiB",
        },
    ),
    "adapter-merge": Table(
        "adapter_merge.csv",
        {
            "way": "adapter of rank 4",
            **{
                f"{key} {steps}": f"{steps} steps: {name}"
                for steps in ("5", "20")
                for key, name in (("kept", "change kept"), ("seen", "loss"), ("unseen", "another novel"))
            },
        },
        reshape=_merged,
        record=("device", "packages", "peft", "date"),
    ),
    "fsdp2": Table(
        "fsdp2.csv",
        {
            "way": "fully_shard",
            "ranks": "ranks",
            "weights_mib": "weights, MiB a rank",
            "state_mib": "state, MiB a rank",
            "peak_gib": "peak, GiB a rank",
            "step_ms": "ms a step",
            "p20_ms": "20th percentile",
            "p80_ms": "80th",
            "optimizer_ms": "of it optimizer",
            "gathered_mib": "gathered, MiB a step",
            "error": "",
        },
    ),
    "state-codes": _codes(_SHORT, True, error=".3f", overshoot=".2f"),
    "state-codes-bad": _codes(_SHORT, True, bad=".4f", v_bias=".3f"),
    "state-codes-long": _codes(_LONG, True, error=".3f", bad=".3f", overshoot=".2f"),
    "state-code-parts": _codes(_SHORT, False, error=".3f", overshoot=".2f"),
    "state-code-parts-long": _codes(("sparse", *_LONG), False, error=".3f", v_bias=".4f"),
    "state-code-training": Table(
        "state_code_training.csv",
        {"optimizer": "state", **_LOSSES},
        reshape=_mean_and_deviation(*_LOSSES),
    ),
}


def _cell(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return text
    return text if number == int(number) or len(text) <= 7 else f"{number:.4g}"


def render(table: Table) -> str:
    """The table as markdown, with the machine and the versions below."""
    with open(RESULTS / table.file, newline="", encoding="utf-8") as file:
        rows = table.reshape([row for row in csv.DictReader(file) if table.keep(row)])
    lines = ["| " + " | ".join(table.columns.values()) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in table.columns) + " |" for row in rows]
    record = "; ".join(rows[0][name] for name in table.record if rows[0].get(name))
    return "\n".join([*lines, "", f"Measured on {record}; `benchmarks/results/{table.file}`."])


def fill(page: str) -> str:
    """The page with each table rendered anew."""
    return MARKER.sub(lambda m: f"<!-- table: {m[1]} -->\n{render(TABLES[m[1]])}\n<!-- end -->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        new = fill(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    print(("out of date: " if check else "written: ") + (", ".join(stale) or "nothing"))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
