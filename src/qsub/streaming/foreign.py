"""Checkpoints that another method has quantized: what looks like a float matrix there may be half of one."""

import re
from typing import Any

from qsub.streaming.source import Source

_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")

# Names beside a weight in files of GPTQ and AWQ, compressed-tensors and fp8, bitsandbytes in 4 bits, MXFP4, HQQ.
_BESIDE = re.compile(
    r"(\.qweight|\.weight_packed|\.weight_scale|\.weight_scale_inv|\.weight\.absmax|\.weight\.quant_map|_blocks|\.W_q)$"
)


def check_float(source: Source) -> None:
    """Refuse what isn't a float checkpoint, or one of qsub.

    Raises:
        ValueError: config.json names another method, or the tensors are those of one.
    """
    method = _method(source.config() or {})
    layers = any(name.endswith(".SCB") or name == "SCB" for name in source.entries)
    if layers or method == "bitsandbytes in 8 bits":
        raise ValueError(f"{source.path}: a checkpoint of bitsandbytes; use: qsub convert --from bitsandbytes")
    remedy = "Quantize the float checkpoint that it was made from, or one that is dequantized."
    if method not in ("", "qsub"):
        raise ValueError(f"{source.path}: quantized by {method} already, says config.json. {remedy}")
    for entry in source.entries.values():
        if entry.dtype in _FLOAT8:
            raise ValueError(
                f"{entry.file}: {entry.name} is {entry.dtype}, whose scales are in another tensor: the checkpoint is "
                f"quantized already. {remedy}"
            )
        if _BESIDE.search(entry.name):
            raise ValueError(
                f"{entry.file}: {entry.name} is a part of a weight that another method has quantized. {remedy}"
            )


def _method(config: dict[str, Any]) -> str:
    """Who quantized the model, in words, or nothing; a language model within one that sees has a config of its own."""
    parts = [config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))]
    for part in parts:
        # `compression_config` is what compressed-tensors called it at first.
        entry = part.get("quantization_config") or part.get("compression_config")
        if isinstance(entry, dict):
            name = str(entry.get("quant_method") or "a method that it doesn't name")
            if entry.get("load_in_8bit"):
                return "bitsandbytes in 8 bits"
            return "bitsandbytes in 4 bits" if entry.get("load_in_4bit") else name
    return ""
