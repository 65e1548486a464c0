"""Draw the plots of docs/concepts.md: errors of the codes, computed by the package itself, or read from a CSV.

    python benchmarks/plot_codes.py                 # writes docs/images/*.svg
    python benchmarks/plot_codes.py --out FOLDER

- row-scale: error of a row by its magnitude, with the row's maximum as the fp16 scale, and with a 127th of it
- row-bits: error of rows that hold an outlier, in 8 and in 4 bits
- block-range: error of each second moment in a block that spans many octaves
- block-stall: a second moment that is to grow slowly, rounded to nearest and stochastically
- update-error: error of the update for each stream of benchmarks/results/state_codes.csv
"""

import argparse
import csv
import pathlib
from statistics import fmean

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from qsub.tensors import dynamic_codes, state_codes
from qsub.tensors.codes import dequantize_rows, quantize_rows

ROOT = pathlib.Path(__file__).parents[1]
Curves = dict[str, list[float]]


def sqnr(value: Tensor, decoded: Tensor) -> float:
    """10 log10 of the signal's energy over the error's."""
    value, decoded = value.double(), decoded.double()
    noise = (value - decoded).square().sum().clamp(min=1e-300)
    return (10 * torch.log10(value.square().sum() / noise)).item()


def with_divided_scale(rows: Tensor) -> Tensor:
    """The row code as it would be with max|row| / 127 as the fp16 scale."""
    step = (rows.abs().amax(1) / 127).half().float().unsqueeze(1)
    codes = torch.where(step > 0, rows / torch.where(step > 0, step, 1.0), 0.0).round().clamp(-127, 127)
    return codes * step


def row_scale() -> tuple[list[float], Curves]:
    """SQNR in dB of rows of 1,024 normal numbers, by their largest magnitude."""
    row = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0))
    row /= row.abs().max()
    magnitudes = (10.0 ** torch.linspace(-8, 4.8, 129)).tolist()
    curves: Curves = {"scale = fp16(max|row|)": [], "scale = fp16(max|row| / 127)": []}
    for magnitude in magnitudes:
        rows = row * magnitude
        for name, decoded in zip(
            curves, (dequantize_rows(*quantize_rows(rows), torch.float32), with_divided_scale(rows)), strict=True
        ):
            curves[name].append(max(0.0, sqnr(rows, decoded)))
    return magnitudes, curves


def row_bits() -> tuple[list[float], Curves]:
    """SQNR in dB of rows of 4,096 normal numbers with one outlier, by its size in standard deviations."""
    row = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    sizes = torch.linspace(4, 100, 97).tolist()
    curves: Curves = {"8 bits": [], "4 bits": []}
    for size in sizes:
        rows = row.clone()
        rows[0, 0] = size
        curves["8 bits"].append(sqnr(rows[:, 1:], dequantize_rows(*quantize_rows(rows), torch.float32)[:, 1:]))
        step = size / 7
        curves["4 bits"].append(sqnr(rows[:, 1:], (rows / step).round()[:, 1:] * step))
    return sizes, curves


def block_range() -> tuple[list[float], Curves]:
    """Relative error of the elements of blocks of second moments that span 24 octaves, by their size in the block."""
    draw = torch.Generator().manual_seed(0)
    octaves = torch.rand(4096, 64, generator=draw) * 24
    octaves[:, 0], octaves[:, 1] = 0, 24
    second = 2.0**-octaves
    decoded = {
        "block_float8": state_codes.decode_exp_avg_sq(
            *state_codes.encode_exp_avg_sq(second, *state_codes.exponent_range(second))
        ),
        "dynamic tree": dynamic_codes.decode_unsigned(*dynamic_codes.encode_unsigned(second)),
        "linear": (second * 255).round().clamp(min=1) / 255,
    }
    bins = octaves.long()
    curves: Curves = {}
    for name, value in decoded.items():
        error = (value / second - 1).abs()
        curves[name] = [error[bins == number].mean().item() for number in range(24)]
    return [2.0 ** -(number + 0.5) for number in range(24)], curves


def block_stall() -> tuple[list[float], Curves]:
    """v of constant gradients of 1 from v = .2, beta2 = .999: the mean of 1,024 elements over 3,000 steps."""
    steps, beta = 3000, 0.999
    start = torch.full((16, 64), 0.2)
    start[:, 0] = 1e-3  # so that the block spans ten octaves
    seed, first = torch.tensor(0, dtype=torch.int32), torch.tensor(0)
    curves: Curves = {"fp32": [], "to nearest": [], "stochastic": []}
    values = {name: start.clone() for name in curves}
    for step in range(steps):
        for name, value in values.items():
            value = beta * value + (1 - beta)
            value[:, 0] = 1e-3
            curves[name].append(value[:, 1:].mean().item())
            if name != "fp32":
                bits = state_codes.random_bits(seed, torch.tensor(step, dtype=torch.int32), first, 16, 64)
                noise = state_codes.HALF if name == "to nearest" else state_codes.noise_of(bits, 1)
                coded = state_codes.encode_exp_avg_sq(value, *state_codes.exponent_range(value), noise)
                value = state_codes.decode_exp_avg_sq(*coded)
            values[name] = value
    return list(range(1, steps + 1)), curves


def update_error() -> tuple[list[str], Curves]:
    """Mean error of the update by stream, for three codes of the CSV."""
    with open(ROOT / "benchmarks" / "results" / "state_codes.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ("block_float8", "dynamic tree, 256", "linear, sqrt(v) linear")
    streams = [s for s in dict.fromkeys(row["stream"] for row in rows) if "steps" not in s]
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        errors.setdefault((row["code"], row["stream"]), []).append(float(row["error"]))
    return streams, {name: [fmean(errors[name, stream]) for stream in streams] for name in names}


def draw(name: str, folder: pathlib.Path) -> None:
    """Compute one plot and write it."""
    x, curves = PLOTS[name]()
    figure, axis = plt.subplots(figsize=(7, 3.4))
    if name == "update-error":
        width = 0.8 / len(curves)
        for number, (label, values) in enumerate(curves.items()):
            axis.bar([i + (number - 1) * width for i in range(len(x))], values, width, label=label)
        axis.set_xticks(range(len(x)), x)
    else:
        for label, values in curves.items():
            axis.plot(x, values, "--" if label == "stochastic" else "-", label=label)
    axis.set(**AXES[name])
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


PLOTS = {
    "row-scale": row_scale,
    "row-bits": row_bits,
    "block-range": block_range,
    "block-stall": block_stall,
    "update-error": update_error,
}
AXES = {
    "row-scale": {"xscale": "log", "xlabel": "largest magnitude of the row", "ylabel": "SQNR, dB"},
    "row-bits": {"xlabel": "outlier, in standard deviations of the row", "ylabel": "SQNR of the others, dB"},
    "block-range": {
        "xscale": "log",
        "yscale": "log",
        "xlabel": "v, relative to the largest of the block",
        "ylabel": "mean relative error",
    },
    "block-stall": {"xlabel": "step", "ylabel": "mean of v"},
    "update-error": {"ylabel": "|u - U| / |U|"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "images")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "qsub"  # the same file at each run
    for name in PLOTS:
        draw(name, folder)
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
