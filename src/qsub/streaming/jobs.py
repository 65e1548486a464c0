"""Whole checkpoints: quantize, dequantize, and exchange with bitsandbytes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsub.checkpoint_files import INDEX, read_json
from qsub.interop.hf_names import MARK
from qsub.serialization import HEADER, VERSION
from qsub.streaming import foreign, steps
from qsub.streaming.select import Selection, float_linears, names_by_model, names_of_modules
from qsub.streaming.source import DTYPES, FLOATS, Entry, Source
from qsub.streaming.target import Step, appearing, write_file

Progress = Callable[[int], Any]
Config = dict[str, Any]
_WEIGHTS = (".safetensors", INDEX, ".bin", ".bin.index.json", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")


class _Plan:
    """Steps and header entries of each file to write, which has the name of the file that its tensors come from."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.steps: dict[Path, list[Step]] = {file: [] for file in source.files}
        self.quantized: dict[Path, dict[str, Any]] = {file: {} for file in source.files}
        self.shared: dict[str, str] = {}
        self.by_model_names = False  # which the header of each file then says

    def add(self, file: Path, step: Step) -> None:
        self.steps[file].append(step)

    def add_quantized(self, name: str, file: Path, step: Step, fields: dict[str, Any]) -> None:
        self.add(file, step)
        self.quantized[file][name] = fields

    def keep_quantized(self) -> None:
        """Quantized tensors of the source as they are."""
        for name, fields in self.source.quantized.items():
            for entry in self.source.inner(name):
                self.add(entry.file, steps.copy(entry))
            self.quantized[self.source.inner(name)[0].file][name] = fields
        self.shared = self.source.shared
        self.by_model_names = self.source.by_model_names

    def nbytes(self) -> int:
        return sum(step.nbytes for file in self.steps.values() for step in file)

    def write(self, target: Path, config: Config | None, progress: Progress) -> int:
        """Write the target as the kind of checkpoint that the source is; returns the bytes of its tensors."""
        source = self.source
        with appearing(target) as part:
            if source.kind == "file":
                self._write_file(source.files[0], part, progress)
            else:
                part.mkdir()
                for file in source.files:
                    self._write_file(file, part / file.name, progress)
                self._write_rest(part, config)
        return sum(output.nbytes for file in self.steps.values() for step in file for output in step.outputs)

    def _write_file(self, file: Path, path: Path, progress: Progress) -> None:
        metadata = self.source.metadata[file]
        stored = {*self.quantized[file], *(output.name for step in self.steps[file] for output in step.outputs)}
        here = {name: other for name, other in self.shared.items() if other in stored}
        if self.quantized[file] or here or self.by_model_names:
            header = {"version": VERSION, "tensors": self.quantized[file], "shared": here}
            header.update([MARK] if self.by_model_names else [])
            metadata = {**metadata, HEADER: json.dumps(header)}
        write_file(path, self.steps[file], metadata, progress)

    def _write_rest(self, part: Path, config: Config | None) -> None:
        source = self.source
        if source.index:
            outputs = [(o, file.name) for file, all_ in self.steps.items() for step in all_ for o in step.outputs]
            index = read_json(source.index)
            index["metadata"] = {**index.get("metadata", {}), "total_size": sum(o.nbytes for o, _ in outputs)}
            index["weight_map"] = {o.name: name for o, name in sorted(outputs, key=lambda pair: pair[0].name)}
            (part / source.index.name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name in beside(source)[0]:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            if config is None or name != Path("config.json"):
                shutil.copy(source.path / name, part / name)
        if config is not None:
            (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def beside(source: Source) -> tuple[list[Path], list[Path]]:
    """Files of a folder beside the checkpoint, as paths within it: those to copy, and those to leave out.

    Left out are weights in other forms, such as pytorch_model.bin or onnx/model.onnx. Folders that a modules.json names
    hold modules of their own (sentence-transformers), and are copied whole.
    """
    copied: list[Path] = []
    left_out: list[Path] = []
    if source.kind != "folder":
        return copied, left_out
    index = source.path / "modules.json"
    listed = read_json(index) if index.is_file() else []
    modules = {Path(entry["path"]) for entry in listed if isinstance(entry, dict) and entry.get("path")}
    own = {file.name for file in source.files} | ({source.index.name} if source.index else set())
    for root, folders, names in os.walk(source.path, followlinks=True):
        here = Path(root)
        folders[:] = [name for name in folders if not name.startswith(".") and not _is_above(here / name, here)]
        inside = here.relative_to(source.path)
        whole = any(inside.is_relative_to(module) for module in modules)
        for name in names:
            if not (here / name).is_file() or (here == source.path and name in own):
                continue
            (left_out if name.endswith(_WEIGHTS) and not whole else copied).append(inside / name)
    return sorted(copied), sorted(left_out)


def _is_above(folder: Path, here: Path) -> bool:
    """Whether a folder is a link back to where one comes from."""
    return here.resolve().is_relative_to(folder.resolve())


def quantization_config(modes: dict[str, Any], floats: list[str]) -> Config:
    """Entry of a config.json, as `qsub.QsubConfig` reads it.

    Args:
        modes: activations and outlier_threshold.
        floats: Linear layers that are not quantized.
    """
    return {
        "quant_method": "qsub",
        "activations": modes.get("activations"),
        "outlier_threshold": modes.get("outlier_threshold"),
        "skip": sorted(floats),
        "backward": None,
        "embeddings": False,
        "trainable": False,
    }


def quantize(source: Source, target: Path, selection: Selection, modes: dict[str, Any], progress: Progress) -> int:
    """Write a checkpoint with the selected weights in int8. If some are int8 already, they are copied.

    Args:
        source: what to read.
        target: what to write; there is nothing at that path yet.
        selection: which tensors stay as they are, see `select`.
        modes: activations and outlier_threshold of the int8 weights.
        progress: called with the bytes that have been read since the last call.

    Returns:
        Bytes of the tensors written.

    Raises:
        ValueError: nothing is selected, or a weight can't be quantized: it is named. Or another method has quantized
            the checkpoint.
        NotWritten: there is something at `target`, or the system refuses to write it.
    """
    foreign.check_float(source)
    chosen = [entry for name, entry in selection.tensors.items() if name not in selection.reasons]
    if not chosen and source.quantized:
        raise ValueError(f"{source.path}: its weights are int8 already, and there is no other to quantize")
    if not chosen:
        raise ValueError(f"{source.path}: no tensor to quantize (by {selection.rule}); --dry-run tells why")
    plan = _Plan(source)
    plan.keep_quantized()
    plan.shared = {**plan.shared, **selection.shared}
    plan.by_model_names = selection.by_model_names
    for name, entry in selection.tensors.items():
        if name in selection.reasons:
            plan.add(entry.file, steps.copy(entry))
        else:
            plan.add_quantized(name, entry.file, *steps.quantize(entry, modes))
    config = source.config()
    if config is not None:
        config["quantization_config"] = quantization_config(modes, selection.floats)
        if not config.get("dtype") and not config.get("torch_dtype"):
            config["dtype"] = _first_dtype(source)  # transformers would take that of a scale
    return plan.write(target, config, progress)


def _first_dtype(source: Source) -> str:
    """The dtype that transformers load a float checkpoint in whose config.json names none."""
    name = next((entry.dtype for entry in source.entries.values() if entry.dtype in FLOATS), "F32")
    return str(DTYPES[name]).removeprefix("torch.")


def dequantize(source: Source, target: Path, progress: Progress) -> int:
    """Write a checkpoint of plain float tensors, which any reader of safetensors reads.

    Names that share a tensor get a copy each, but for those that the model of a config.json ties itself. Arguments,
    result and errors as `quantize`.
    """
    if not source.quantized:
        raise ValueError(f"{source.path}: no quantized tensor to dequantize")
    plan = _Plan(source)
    plain = source.plain()
    for name in (*plain, *source.quantized, *_copied(source)):
        stored = source.shared.get(name, name)
        if stored in source.quantized:
            inner = source.inner(stored)
            plan.add(inner[0].file, steps.dequantize(name, inner, source.quantized[stored]))
        else:
            plan.add(plain[stored].file, steps.copy(plain[stored], name))
    config = source.config()
    if config is not None:
        config.pop("quantization_config", None)
    return plan.write(target, config, progress)


def _copied(source: Source) -> dict[str, str]:
    """Names that share a tensor, to its name, of those that are to have one of their own in other formats."""
    return {} if source.by_model_names else source.shared


def from_bitsandbytes(source: Source, target: Path, dtype: str | None, progress: Progress) -> int:
    """Write the int8 layers of a bitsandbytes checkpoint as int8 weights of qsub, codes unchanged.

    Args:
        source: what to read.
        target: what to write.
        dtype: float dtype that the weights show, as safetensors names it. Default: that of config.json, else F16.
        progress: as in `quantize`.

    Raises:
        ValueError: it has no 8-bit layers, or damaged ones; or its names don't lead to those of the model.
        NotWritten: as `quantize`.
    """
    layers = {n.removesuffix("SCB") for n in source.entries if n == "SCB" or n.endswith(".SCB")}
    if not layers:
        raise ValueError(f"{source.path}: no 8-bit layers of bitsandbytes (weight with SCB); 4-bit ones are not read")
    config = source.config()
    modes, skip = _bitsandbytes_modes(config)
    plan = _Plan(source)
    plan.keep_quantized()
    shown = DTYPES[dtype or _config_dtype(config)]
    names = names_by_model(source, [f"{prefix}weight" for prefix in sorted(layers)])
    plan.by_model_names = names is not None
    taken: set[str] = set()
    for prefix in sorted(layers):
        others = [source.entries[f"{prefix}{k}"] for k in ("SCB", "weight_format") if f"{prefix}{k}" in source.entries]
        weight = source.entries.get(f"{prefix}weight")
        if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
            got = "nothing" if weight is None else f"{weight.dtype} {weight.shape}"
            raise ValueError(f"{source.path}: {prefix}SCB comes with an int8 matrix {prefix}weight, got {got}")
        name = (names or {}).get(weight.name, weight.name)
        step, fields = steps.from_bitsandbytes(weight, others, shown, modes, name)
        plan.add_quantized(name, weight.file, step, fields)
        taken |= {weight.name, *(entry.name for entry in others)}
    for entry in source.plain().values():
        if entry.name not in taken:
            plan.add(entry.file, steps.copy(entry, (names or {}).get(entry.name)))
    if config is not None:
        config["quantization_config"] = quantization_config(modes, names_of_modules(source, skip))
    return plan.write(target, config, progress)


def _bitsandbytes_modes(config: Config | None) -> tuple[dict[str, Any], list[str]]:
    """How the layers multiplied, and the modules that stayed float, from a config.json; weight only without one."""
    theirs = (config or {}).get("quantization_config") or {}
    threshold = theirs.get("llm_int8_threshold")
    skip = theirs.get("llm_int8_skip_modules") or []
    if threshold is None:
        return {}, list(skip)
    return {"activations": "int8", "outlier_threshold": float(threshold) or None}, list(skip)


def _config_dtype(config: Config | None) -> str:
    name = str((config or {}).get("dtype") or (config or {}).get("torch_dtype") or "float16").removeprefix("torch.")
    for key in FLOATS:
        if str(DTYPES[key]) == f"torch.{name}":
            return key
    raise ValueError(f"config.json: dtype {name!r} is no float dtype that an int8 weight can show; pass --dtype")


def to_bitsandbytes(source: Source, target: Path, progress: Progress) -> int:
    """Write int8 weights as the 8-bit layers of bitsandbytes, codes unchanged. Arguments and errors as `quantize`."""
    if not source.quantized:
        raise ValueError(f"{source.path}: no int8 weights to convert; use: qsub quantize")
    plan = _Plan(source)
    plain: dict[str, Entry] = source.plain()
    for name, fields in source.quantized.items():
        inner = source.inner(name)
        plan.add(inner[0].file, steps.to_bitsandbytes(name, inner, fields))
    for name in (*plain, *_copied(source)):
        stored = source.shared.get(name, name)
        if stored in source.quantized:
            plan.add(
                source.inner(stored)[0].file,
                steps.to_bitsandbytes(name, source.inner(stored), source.quantized[stored]),
            )
        else:
            plan.add(plain[stored].file, steps.copy(plain[stored], name))
    config = source.config()
    if config is not None:
        ours = config.get("quantization_config") or {}
        if ours.get("embeddings"):
            raise ValueError(
                f"{source.path}: its embeddings are int8, which bitsandbytes doesn't have; dequantize it, and quantize "
                "the result, which leaves them in float"
            )
        floats = float_linears(source)
        if floats is None:  # a guess: the head is tied unless it is int8
            head = any(name.endswith("lm_head.weight") for name in source.quantized)
            floats = ours.get("skip") or ([] if head else ["lm_head"])
        config["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "llm_int8_threshold": ours.get("outlier_threshold") or 0.0,
            "llm_int8_skip_modules": floats,
        }
    return plan.write(target, config, progress)
