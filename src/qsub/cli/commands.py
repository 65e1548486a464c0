"""What the commands do: read, show progress, convert, tell what came out."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from qsub.checkpoint_files import INDEX
from qsub.cli.stopping import Stopping
from qsub.streaming import foreign, inspection, jobs
from qsub.streaming.select import Selection, select
from qsub.streaming.source import Source, open_source
from qsub.streaming.target import check_free
from qsub.tensors.rowwise import check_modes

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@contextmanager
def _bar(source: Source, text: str) -> Iterator[Callable[[int], Any]]:
    """A bar of the bytes read, on stderr if that is a terminal; each update stops where a signal says so."""
    stopping = click.get_current_context().find_object(Stopping) or Stopping()
    total = sum(entry.nbytes for entry in source.entries.values())
    with tqdm(total=total, desc=text, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:

        def update(nbytes: int) -> None:
            stopping.check()
            bar.update(nbytes)

        yield update


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _done(source: Source, target: Path, text: str, after: int) -> None:
    before = sum(entry.nbytes for entry in source.entries.values())
    click.echo(f"{target}: {text}, {_mib(before)} -> {_mib(after)}")
    left_out = jobs.beside(source)[1]
    if left_out:
        click.echo(f"left out, as weights in other forms: {', '.join(map(str, left_out))}")


def _check_target(path: Path, target: Path) -> None:
    """UsageError if the name of `target` is that of another kind, or if it is inside of `path`; `check_free`."""
    named = target.suffix == ".safetensors"
    if named and (path.is_dir() or path.name.endswith(INDEX)):
        raise click.UsageError(f"DST {target} becomes a folder: choose a name without .safetensors")
    if not named and path.is_file() and not path.name.endswith(INDEX):
        raise click.UsageError(f"DST {target} becomes a file as SRC is: choose a name that ends in .safetensors")
    check_free(target)
    if path.is_dir() and target.resolve().is_relative_to(path.resolve()):
        raise click.UsageError(f"DST {target} is inside SRC {path}: choose a place outside of it")


def quantize(
    path: Path,
    target: Path,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    activations: str | None,
    outlier_threshold: float | None,
    dry_run: bool,
) -> None:
    """`qsub quantize`, see there."""
    modes = {"activations": activations, "outlier_threshold": outlier_threshold}
    try:
        check_modes(activations, outlier_threshold, None)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not dry_run:
        _check_target(path, target)
    source = open_source(path)
    foreign.check_float(source)
    selection = select(source, only, skip)
    if selection.guess:
        click.echo(f"qsub: {path}: names and shapes decide which tensors are layers, as {selection.guess}", err=True)
    chosen = len(selection.tensors) - len(selection.reasons)
    weights = [fields for fields in source.quantized.values() if fields["class"] == "Int8RowwiseTensor"]
    others = any({key: fields.get(key) for key in modes} != modes for fields in weights)
    if others and (source.kind == "folder" if chosen else activations):  # a config.json holds one set of modes
        raise click.UsageError(f"{path} has int8 weights, which keep their activations and threshold: pass the same")
    if dry_run:
        _list(source, selection)
        return
    with _bar(source, "quantize") as progress:
        after = jobs.quantize(source, target, selection, modes, progress)
    _done(source, target, f"{chosen} of {len(selection.tensors)} tensors to int8 (by {selection.rule})", after)


def _list(source: Source, selection: Selection) -> None:
    click.echo(f"{source.path}: by {selection.rule}")
    for name in source.quantized:
        click.echo(f"kept   {name}  quantized already")
    for name, entry in sorted(selection.tensors.items()):
        reason = selection.reasons.get(name)
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        click.echo(f"{'kept ' if reason else 'int8 '}  {name}  {entry.dtype} {shape}{'  ' + reason if reason else ''}")


def dequantize(path: Path, target: Path) -> None:
    """`qsub dequantize`, see there."""
    _check_target(path, target)
    source = open_source(path)
    with _bar(source, "dequantize") as progress:
        after = jobs.dequantize(source, target, progress)
    _done(source, target, f"{len(source.quantized)} tensors to float", after)


def convert(path: Path, target: Path, reading: bool, dtype: str | None) -> None:
    """`qsub convert`, see there."""
    _check_target(path, target)
    source = open_source(path)
    with _bar(source, "convert") as progress:
        if reading:
            after = jobs.from_bitsandbytes(source, target, _DTYPES.get(dtype or ""), progress)
        else:
            after = jobs.to_bitsandbytes(source, target, progress)
    _done(source, target, "from bitsandbytes" if reading else "to bitsandbytes", after)


def inspect(path: Path, original: Path | None, as_json: bool) -> None:
    """`qsub inspect`, see there."""
    source = open_source(path)
    layers = inspection.layers(source, open_source(original) if original else None)
    total = sum(layer.nbytes for layer in layers)
    floats = sum(inspection.float_bytes(layer) for layer in layers)
    if as_json:
        content = {
            "path": str(path),
            "nbytes": total,
            "float_nbytes": floats,
            "shared": source.shared,
            "tensors": [layer.as_dict() for layer in layers],
        }
        click.echo(json.dumps(content, indent=2))
        return
    rows = [("tensor", "code", "shape", "bytes", *(("SQNR, dB",) if original else ()))]
    for layer in layers:
        shape = " x ".join(map(str, layer.shape)) or "scalar"
        rows.append(
            (layer.name, layer.code, shape, str(layer.nbytes), *((inspection.shown(layer),) if original else ()))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.rjust(w) if column > 2 else cell.ljust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(cells).rstrip())
    for name, other in source.shared.items():
        click.echo(f"{name} shares {other}")
    click.echo(f"{len(layers)} tensors, {_mib(total)}; in float {_mib(floats)}")
