"""Draw the CSV files of benchmarks: bars of optim_step.py, curves of train_vit.py and quality.py, ratios of linear.py.

python benchmarks/plot.py benchmarks/results/optim_step.csv
python benchmarks/plot.py benchmarks/results/train_vit-curves.csv --out curves.png
python benchmarks/plot.py benchmarks/results/linear.csv
python benchmarks/plot.py benchmarks/results/quality_curves.csv --out docs/images/quality-curves.svg
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


def draw_curves(rows: list[Row], width: int = 12) -> None:
    """Loss over the steps, as a mean over `width` of them; dashed where the learning rate is constant."""
    runs: dict[tuple[str, bool], list[float]] = {}
    for row in rows:
        runs.setdefault((row["optim"], row.get("cosine") == "True"), []).append(float(row["loss"]))
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["optim"] for row in rows))}
    figure, axis = plt.subplots(figsize=(8, 4))
    for (name, cosine), losses in runs.items():
        means = [sum(losses[i : i + width]) / width for i in range(0, len(losses) - width + 1, width)]
        places = [(i + 0.5) * width for i in range(len(means))]
        label = f"{name}, {'cosine' if cosine else 'constant'} lr"
        axis.plot(places, means, color=colors[name], linestyle="-" if cosine else "--", label=label)
    axis.set(xlabel="step", ylabel="training loss")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.tight_layout()


def draw_linear(rows: list[Row], layer: tuple[str, str] = ("14336", "4096")) -> None:
    """Time of each mode over that of bf16, by the number of rows, forward and backward."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        here = [row for row in rows if row["pass"] == direction and (row["n"], row["k"]) == layer]
        for mode in dict.fromkeys(row["mode"] for row in here):
            points = sorted((int(row["rows"]), float(row["ratio"])) for row in here if row["mode"] == mode)
            axis.plot(*zip(*points, strict=True), marker="." if mode != "bf16" else "", label=mode)
        axis.set(title=f"{direction}, {' x '.join(layer)}", xlabel="rows of x", xscale="log", yscale="log")
        axis.set_xticks([int(row["rows"]) for row in here if row["mode"] == "bf16"], minor=False)
        axis.set_yticks(ticks := [0.5, 0.7, 1, 1.5, 2, 3], map(str, ticks))
        axis.xaxis.set_major_formatter("{x:.0f}")
        for places in (axis.xaxis, axis.yaxis):
            places.set_minor_formatter(NullFormatter())
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time over that of bf16 F.linear")
    axes[0].legend()
    figure.tight_layout()


def draw_tasks(rows: list[Row]) -> None:
    """Loss of each run, the mean over seeds, a panel for each task; below, less that of the task's first run.

    The band is from the lowest to the highest seed of the first run, about its mean.
    """
    losses: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        run = losses.setdefault(row["task"], {}).setdefault(row["run"], {})
        run.setdefault(int(row["step"]), []).append(float(row["loss"]))
    figure, axes = plt.subplots(2, len(losses), figsize=(4.5 * len(losses), 6.6), squeeze=False, sharex="col")
    for (upper, lower), (task, runs) in zip(axes.T, losses.items(), strict=True):
        reference = next(iter(runs.values()))
        means = {step: sum(values) / len(values) for step, values in reference.items()}
        low = [min(values) - means[step] for step, values in reference.items()]
        high = [max(values) - means[step] for step, values in reference.items()]
        lower.fill_between(list(means), low, high, color="0.85", label="seeds")
        for index, (run, curve) in enumerate(runs.items()):
            steps = list(curve)
            values = [sum(curve[step]) / len(curve[step]) for step in steps]
            style = {"color": f"C{index}", "linestyle": ("-", "--", "-.", ":")[index % 4]}
            upper.plot(steps, values, **style)
            less = [value - means[step] for step, value in zip(steps, values, strict=True)]
            lower.plot(steps, less, label=run, **style)
        upper.set(title=task, ylabel="training loss")
        lower.set(xlabel="step", ylabel=f"less {next(iter(runs))}")
        lower.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    figure.tight_layout()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="image file; default: the CSV's name with .png")
    args = parser.parse_args()
    with open(args.csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kinds = {"task": draw_tasks, "loss": draw_curves, "pass": draw_linear}
    draw = next((kinds[column] for column in kinds if column in rows[0]), draw_bars)
    draw(rows)
    target = args.out or args.csv.with_suffix(".png")
    plt.savefig(target, dpi=120)
    print(target)


if __name__ == "__main__":
    main()
