"""Where the tensors of a checkpoint are: one safetensors file, an index of several, or a folder that holds either."""

import json
from pathlib import Path
from typing import Any

INDEX = ".safetensors.index.json"


def read_json(path: Path) -> Any:
    """Content of a JSON file.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


def locate(path: Path) -> tuple[str, Path]:
    """Kind of a checkpoint, "file", "index" or "folder", and the file or index that it starts with.

    Raises:
        FileNotFoundError: there is no such path, or the folder has no safetensors.
        ValueError: the folder has several models, or the file is of another format, or a pipe or device.
    """
    if path.is_dir():
        files = sorted(path.iterdir())  # glob would find nothing in a folder that can't be read
        found = [p for p in files if p.name.endswith(INDEX)] or [p for p in files if p.suffix == ".safetensors"]
        main = [p for p in found if p.name in ("model" + INDEX, "model.safetensors")] or found
        if not main:
            raise FileNotFoundError(
                f"{path}: no safetensors files in this folder; save it with save_pretrained, which writes them"
            )
        if len(main) > 1:
            raise ValueError(f"{path}: several models ({', '.join(p.name for p in main)}): name one of the files")
        return "folder", main[0]
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_file():
        raise ValueError(f"{path}: neither a file nor a folder; a pipe can't be read, as tensors are read in any order")
    if path.name.endswith(".json") and not path.name.endswith(INDEX):
        raise ValueError(f"{path}: expected a folder, a .safetensors file or a *{INDEX}")
    return ("index" if path.name.endswith(INDEX) else "file"), path


def weight_map(index: Path) -> dict[str, str]:
    """Tensors of an index to the names of the files beside it that hold them.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: the index is damaged, or names a file outside its folder.
    """
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ValueError(f"{index}: no weight_map from tensors to files in this index")
    for name in sorted(set(table.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is outside the folder of the index")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index}: the file {name!r} is missing beside the index")
    return table
