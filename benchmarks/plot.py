"""Draw the CSV files of the benchmarks: bars of optim_step.py, loss curves of train_vit.py.

python benchmarks/plot.py benchmarks/results/optim_step.csv
python benchmarks/plot.py benchmarks/results/train_vit-curves.csv --out curves.png
"""

import argparse
import csv
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

Row = dict[str, str]


def draw_bars(rows: list[Row]) -> None:
    """Step time of each optimizer, one panel for each set of parameters and dtype."""
    panels = list(dict.fromkeys((row["set"], row["dtype"]) for row in rows))
    height = -(-len(panels) // 2)
    figure, axes = plt.subplots(height, 2, figsize=(10, 2.8 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        here = [row for row in rows if (row["set"], row["dtype"]) == panel and row.get("step_ms")]
        here.sort(key=lambda row: -float(row["step_ms"]))
        colors = ["C1" if row["optimizer"].startswith("qsub") else "C0" for row in here]
        bars = axis.barh([row["optimizer"] for row in here], [float(row["step_ms"]) for row in here], color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=2)
        axis.set(title=" ".join(panel), xlabel="ms per step", xscale="log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(x=0.15)
    figure.tight_layout()


def draw_curves(rows: list[Row], width: int = 25) -> None:
    """Loss over the steps, as a mean over `width` of them."""
    runs: dict[str, list[float]] = {}
    for row in rows:
        name = row["optim"] + (" cosine" if row.get("cosine") == "True" else "")
        runs.setdefault(name, []).append(float(row["loss"]))
    figure, axis = plt.subplots(figsize=(7, 4))
    for name, losses in runs.items():
        means = [sum(losses[i : i + width]) / width for i in range(0, len(losses) - width + 1, width)]
        axis.plot([(i + 0.5) * width for i in range(len(means))], means, label=name)
    axis.set(xlabel="step", ylabel="training loss", yscale="log")
    axis.legend()
    figure.tight_layout()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="image file; default: the CSV's name with .png")
    args = parser.parse_args()
    with open(args.csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    draw_curves(rows) if "loss" in rows[0] else draw_bars(rows)
    target = args.out or args.csv.with_suffix(".png")
    plt.savefig(target, dpi=120)
    print(target)


if __name__ == "__main__":
    main()
