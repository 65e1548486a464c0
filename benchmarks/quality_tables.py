"""Tables of benchmarks/quality.py's training runs: means over seeds, and whether a difference is more than noise."""

from statistics import fmean, stdev

Row = dict[str, str]
_REFERENCES = ("torch AdamW", "bf16")  # of a task; Adam is compared with Adam
_ADAM = {"qsub Adam8bit": "torch Adam"}


def _over_seeds(rows: list[Row], key: str, form: str) -> str:
    values = [float(row[key]) for row in rows if row[key]]
    if not values:
        return ""
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{spread}"


def difference(rows: list[Row], reference: list[Row]) -> str:
    """Mean difference of the test loss, seed by seed, and what it means beside the reference's spread over seeds.

    A seed fixes the initial weights, the order of the batches and dropout, so the runs of a seed differ by the
    optimizer or the base alone. A difference of no more than the reference's standard deviation over its seeds is
    less than the choice of a seed makes.
    """
    others = {row["seed"]: float(row["test_loss"]) for row in reference}
    pairs = [float(row["test_loss"]) - others[row["seed"]] for row in rows if row["seed"] in others]
    if not pairs or len(others) < 2:
        return ""
    mean, noise = fmean(pairs), stdev(others.values())
    if abs(mean) <= noise:
        return f"{mean:+.4f}, within noise"
    return f"{mean:+.4f}, {'lower' if mean < 0 else 'higher'}"


def over_seeds(rows: list[Row]) -> list[Row]:
    """A row for each task and run: mean ± standard deviation over seeds, and the difference from torch or bf16."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["task"], row["run"]), []).append(row)
    table = []
    for (task, run), lines in runs.items():
        compared = [_ADAM[run]] if run in _ADAM else _REFERENCES
        reference = next((runs[task, name] for name in compared if (task, name) in runs), [])
        is_reference = reference is lines or run == "torch Adam"
        table.append(
            {
                **lines[0],
                "seeds": str(len(lines)),
                "train_loss": _over_seeds(lines, "train_loss", ".3f"),
                "test_loss": _over_seeds(lines, "test_loss", ".4f"),
                "accuracy": _over_seeds(lines, "accuracy", ".4f"),
                "perplexity": _over_seeds(lines, "perplexity", ".2f"),
                "difference": "" if is_reference else difference(lines, reference),
                "state_mb": f"{float(lines[0]['state_mb']):.4g}",
            }
        )
    return table
