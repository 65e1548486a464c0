"""What the tests of the command line share: running it, and files to run it on."""

import json
import os
import pathlib
import struct
import subprocess
import sys

import safetensors.torch
import torch

import qsub as package
from qsub.cli.app import run

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def qsub(capsys, *arguments):
    """Exit code, stdout and stderr of a command line run in this process."""
    capsys.readouterr()  # what was printed before
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(*arguments, **options):
    """The command line in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(pathlib.Path(package.__file__).parents[1])}
    command = [sys.executable, "-m", "qsub", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=env, **options)


def state():
    """Entries of all kinds: Linears, an embedding, a tied head, a norm, convolutions, integers."""
    draw = torch.Generator().manual_seed(0)
    embedding = torch.randn(20, 16, generator=draw)
    return {
        "embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "layers.0.q.weight": torch.randn(16, 16, generator=draw),
        "layers.0.q.bias": torch.randn(16, generator=draw),
        "layers.0.up.weight": torch.randn(48, 16, generator=draw).bfloat16(),
        "layers.0.norm.weight": torch.ones(16),
        "layers.0.conv.weight": torch.randn(4, 2, 3, 3, generator=draw),
        "layers.0.mask.weight": torch.ones(4, 4, dtype=torch.int64),
        "layers.0.in_proj_weight": torch.randn(8, 16, generator=draw),
    }


def write_file(folder, **changes):
    path = folder / "x.safetensors"
    safetensors.torch.save_file({**state(), **changes}, path, {"format": "pt", "note": "mine"})
    return path


def write_shards(folder):
    """Two files and their index; returns the index."""
    names = list(state())
    shards = {FILES[0]: names[:3], FILES[1]: names[3:]}
    for file, keys in shards.items():
        safetensors.torch.save_file({key: state()[key] for key in keys}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {k: file for file, keys in shards.items() for k in keys}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def write_zeros(path, shapes):
    """A file of fp32 zeros that takes no space on the disk, with the tensors `layers.N.weight`."""
    header, end = {}, 0
    for number, (rows, columns) in enumerate(shapes):
        start_, end = end, end + 4 * rows * columns
        header[f"layers.{number}.weight"] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start_, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def left(folder: pathlib.Path):
    """Names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def fails(capsys, code, text, *arguments):
    """The command line ends with this exit code, and one line on stderr that has the text."""
    got, out, err = qsub(capsys, *arguments)
    assert (got, out) == (code, "") and err.startswith("qsub: ") and err.count("\n") == 1
    assert text in err, err
