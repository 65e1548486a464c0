"""State dicts in safetensors files: plain tensors and a header that says which of them belong together.

Layout, version 1. A quantized tensor NAME is stored as its inner tensors `NAME.int_data` and `NAME.scale` (an optimizer
moment as `NAME.codes` and `NAME.scale`, the latter U8 or F32 by its code); other tensors under their own names. The
header's metadata holds `format: pt` and one entry `qsub`, a JSON object:

    {"version": 1,
     "tensors": {NAME: {"class": "Int8RowwiseTensor", "dtype": "float32", "scale_dim": -2}, ...},
     "shared": {NAME: NAME of the tensor that it is the same memory as, ...}}

The entry of a weight that torch.optim has trained has "updates", the number of its stochastic roundings so far.

Any reader of safetensors can read such a file; int8 data times scale / 127 is the weight.
"""

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsub.checkpoint_files import INDEX, locate, weight_map
from qsub.tensors import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.tensors.blocks import scale_dtype

VERSION = 1
HEADER = "qsub"
CLASSES = {"Int8RowwiseTensor": Int8RowwiseTensor, "Blockwise8bitTensor": Blockwise8bitTensor}
INNER = {"Int8RowwiseTensor": ("int_data", "scale"), "Blockwise8bitTensor": ("codes", "scale")}
DTYPE_NAMES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.float32: "F32",
}  # as safetensors has them
FLOAT_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def safetensors_package() -> Any:
    """The package, or ImportError that says how to get it."""
    try:
        import safetensors
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError("save_file and load_file need safetensors: pip install 'qsub[safetensors]'") from error
    return safetensors


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """What two names of the same tensor have in common; None where sharing can't be told (meta, empty)."""
    if isinstance(tensor, (Int8RowwiseTensor, Blockwise8bitTensor)):
        names, meta = tensor.__tensor_flatten__()
        inner = [_identity(getattr(tensor, name)) for name in names]
        return None if None in inner else (*inner, *sorted(meta.items()))
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def same_tensor(first: Tensor, second: Tensor) -> bool:
    """Whether two are one and the same in memory, where that can be told."""
    identity = _identity(first)
    return identity is not None and identity == _identity(second)


def describe(tensor: Tensor) -> dict[str, Any]:
    """Entry of a quantized tensor in the header."""
    meta = tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    fields = {key: value for key, value in meta.items() if key != "dtype"}
    if getattr(tensor, "count", 0):  # of an Int8RowwiseTensor that has trained; see GatheredByRows
        fields["updates"] = tensor.count  # type: ignore[attr-defined]
    return {"class": type(tensor).__name__, "dtype": str(tensor.dtype).removeprefix("torch."), **fields}


def flatten_state_dict(state_dict: Mapping[str, Any], share: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The plain tensors that a file stores of a state dict, and its header, an object for JSON. Errors: `save_file`.

    Args:
        state_dict: names to tensors.
        share: store a tensor of several names once. False for readers that don't look into the header for them.
    """
    plain: dict[str, Tensor] = {}
    header: dict[str, Any] = {"version": VERSION, "tensors": {}, "shared": {}}
    seen: dict[tuple[Any, ...], str] = {}
    taken: set[tuple[Any, ...]] = set()
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}: a safetensors file holds tensors only")
        if tensor.device.type == "meta":
            raise ValueError(f"{name!r} is on the meta device and has no data to save")
        identity = _identity(tensor) if share else None
        if identity is not None and identity in seen:
            header["shared"][name] = seen[identity]
            continue
        if identity is not None:
            seen[identity] = name
        tensor = tensor.detach()
        parts = {name: tensor}
        kind = type(tensor).__name__
        if kind in CLASSES:
            header["tensors"][name] = describe(tensor)
            parts = {f"{name}.{key}": getattr(tensor, key) for key in INNER[kind]}
        for key, part in parts.items():
            if key in plain or (key != name and key in state_dict):
                raise ValueError(
                    f"the state dict has a tensor {key!r} of its own, which is where {name!r} would be stored"
                )
            # safetensors refuses tensors of one memory; those that aren't one and the same are stored as copies.
            part = part.contiguous()
            memory = part.device, part.untyped_storage().data_ptr()
            plain[key] = part.clone() if part.untyped_storage().nbytes() != part.nbytes or memory in taken else part
            taken.add(memory)
    return plain, header


def save_file(
    state_dict: Mapping[str, Any], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict as a safetensors file. The file appears only when it is whole.

    Args:
        state_dict: names to tensors, plain or quantized. Names that share one tensor are stored once.
        path: of the file; an existing one is replaced.
        metadata: further strings for the header.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: a tensor has no data (meta), or a name is taken.
        ImportError: safetensors is not installed.
    """
    save = safetensors_package().torch.save_file
    plain, header = flatten_state_dict(state_dict)
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        temporary.touch(exist_ok=False)
        usual = temporary.stat().st_mode  # safetensors makes files that only their owner can read
        save(plain, temporary, {**(metadata or {}), "format": "pt", HEADER: json.dumps(header)})
        temporary.chmod(usual)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_header(file: Any, path: Path) -> dict[str, Any]:
    """qsub's entry in the header of an open file; ValueError if it is damaged or of another version."""
    return header_of((file.metadata() or {}).get(HEADER), path)


def header_of(text: str | None, path: Path) -> dict[str, Any]:
    """qsub's entry in the header of a file, or what stands for one in a file without; errors as `read_header`."""
    if text is None:  # a file of plain tensors
        return {"tensors": {}, "shared": {}}
    try:
        header = json.loads(text)
        version, tensors, shared = header["version"], header["tensors"], header["shared"]
        fine = (
            isinstance(tensors, dict)
            and isinstance(shared, dict)
            and all(isinstance(v, dict) for v in tensors.values())
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the qsub header is damaged ({error})") from error
    if version != VERSION:
        raise ValueError(f"{path}: format version {version!r}, this qsub reads version {VERSION}: install a newer qsub")
    if not fine:
        raise ValueError(f"{path}: the qsub header is damaged (tensors and shared must be objects)")
    return header


def check_parts(file: Any, names: set[str], name: str, fields: dict[str, Any], path: Path) -> None:
    """ValueError unless the inner tensors of `name` are there and fit, by the file's header alone."""
    kind = fields.get("class")
    if kind not in CLASSES or fields.get("dtype") not in FLOAT_DTYPES:
        raise ValueError(f"{path}: {name!r} is of unknown class {kind!r} or dtype {fields.get('dtype')!r}")
    shapes, dtypes = [], _inner_dtypes(kind, fields)
    for key, dtype in zip(INNER[kind], dtypes, strict=True):
        inner = f"{name}.{key}"
        if inner not in names:
            raise ValueError(f"{path}: {inner!r} is missing")
        part = file.get_slice(inner)
        if part.get_dtype() != DTYPE_NAMES[dtype]:
            raise ValueError(f"{path}: {inner!r} has dtype {part.get_dtype()}, expected {DTYPE_NAMES[dtype]}")
        shapes.append(part.get_shape())
    try:  # the class itself knows what fits
        inner = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]
        build(kind, inner, fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {name!r}: {error}") from error


def _inner_dtypes(kind: str, fields: dict[str, Any]) -> tuple[torch.dtype, torch.dtype]:
    if kind == "Int8RowwiseTensor":
        return torch.int8, torch.float16
    return torch.uint8, scale_dtype(str(fields.get("code")))


def build(kind: str, inner: list[Tensor], fields: dict[str, Any]) -> Tensor:
    """A quantized tensor of its inner tensors and its entry in the header."""
    options = {key: value for key, value in fields.items() if key not in ("class", "dtype")}
    return CLASSES[kind](*inner, dtype=FLOAT_DTYPES[fields["dtype"]], **options)


def load_file(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a file written by `save_file`, or any safetensors file, tensor by tensor.

    Everything that the header tells is checked before the first tensor is read.

    Args:
        path: of the file; or of a `*.safetensors.index.json`, or a folder with either, as Hugging Face models have it:
            the tensors of all its files are read.
        device: where the tensors go.

    Returns:
        Names to tensors; names that shared a tensor when saved share it again.

    Raises:
        ValueError: the file is damaged, of another version, or its tensors don't fit; file and key are named.
        FileNotFoundError: there is no such file, or one of several is missing.
        ImportError: safetensors is not installed.
    """
    safetensors = safetensors_package()
    main = locate(Path(path))[1]
    index = main.name.endswith(INDEX)
    paths = [main.with_name(name) for name in sorted(set(weight_map(main).values()))] if index else [main]
    with ExitStack() as stack:
        files = [stack.enter_context(open_file(path, safetensors, device)) for path in paths]
        file, header = Joined(files), join_headers([read_header(f, p) for f, p in zip(files, paths, strict=True)])
        names = set(file.keys())
        for name, fields in header["tensors"].items():
            check_parts(file, names, name, fields, main)
        inner = {f"{name}.{key}" for name, f in header["tensors"].items() for key in INNER[f["class"]]}
        known = (names - inner) | set(header["tensors"])
        for name, source in header["shared"].items():
            if source not in known:
                raise ValueError(f"{main}: {name!r} shares {source!r}, which is missing")
        result = {name: file.get_tensor(name) for name in file.keys() if name not in inner}  # noqa: SIM118
        for name, fields in header["tensors"].items():
            parts = [file.get_tensor(f"{name}.{key}") for key in INNER[fields["class"]]]
            result[name] = build(fields["class"], parts, fields)
    for name, source in header["shared"].items():
        result[name] = result[source]
    return result


def open_file(path: Path, safetensors: Any, device: str | torch.device = "cpu") -> Any:
    """An open file of safetensors, whose header has been checked; ValueError that names it if it isn't whole."""
    with open(path, "rb"):  # safetensors calls any file that it can't open missing; this says why
        pass
    try:
        return safetensors.safe_open(path, framework="pt", device=str(device))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error


def join_headers(headers: list[dict[str, Any]]) -> dict[str, Any]:
    """One header of those of several files, of which each may tell of the tensors in all."""
    return {key: {k: v for header in headers for k, v in header[key].items()} for key in ("tensors", "shared")}


class Joined:
    """Open files as one: transformers splits by size, so that the parts of a tensor may be in different files."""

    def __init__(self, files: list[Any]) -> None:
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        """Names of all stored tensors."""
        return self._files.keys()

    def get_slice(self, name: str) -> Any:
        """Shape and dtype of a tensor, unread."""
        return self._files[name].get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, read."""
        return self._files[name].get_tensor(name)
