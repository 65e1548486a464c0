"""transformers 5.6 and later: `from_pretrained(path, quantization_config=qsub.QsubConfig())`, bitsandbytes' folders.

A float checkpoint is quantized tensor by tensor while it is read, so that memory holds the int8 model and one float
tensor. What save_pretrained writes is the layout of `qsub.save_file` (`NAME.int_data` and `NAME.scale` for each int8
weight) under the names of the model (`qsub.interop.hf_names`); the options are in config.json under
`quantization_config`, with quant_method "qsub".

`import qsub` registers this with transformers, whichever of the two is imported first (see `qsub.interop.hook`).
"""

import os
from typing import Any

from transformers import AutoConfig

from qsub.interop.hf_config import QsubConfig
from qsub.interop.hf_quantizer import QsubHfQuantizer

__all__ = ["QsubConfig", "QsubHfQuantizer", "from_bitsandbytes"]


def from_bitsandbytes(
    model_class: Any, folder: str | os.PathLike[str], config: QsubConfig | None = None, **kwargs: Any
) -> Any:
    """Load a folder that transformers saved with bitsandbytes' 8-bit layers; codes and scales are taken as they are.

    Args:
        model_class: a class of transformers with from_pretrained: AutoModelForCausalLM, say.
        folder: on this machine, with config.json and safetensors files.
        config: how the weights multiply. Default: as bitsandbytes does, activations="int8" with its threshold.
        **kwargs: for from_pretrained.

    Returns:
        The model; its save_pretrained writes qsub's layout.

    Raises:
        ValueError: config.json is not that of an 8-bit bitsandbytes model, or the files don't fit.
    """
    own = AutoConfig.from_pretrained(folder)
    theirs = getattr(own, "quantization_config", None) or {}
    if theirs.get("quant_method") != "bitsandbytes" or not theirs.get("load_in_8bit"):
        got = theirs.get("quant_method") or "no quantization_config"
        raise ValueError(f"{folder}: expected config.json of 8-bit bitsandbytes layers (load_in_8bit), got {got}")
    if config is None:
        config = QsubConfig("int8", theirs.get("llm_int8_threshold") or None, theirs.get("llm_int8_skip_modules"))
    own.quantization_config = config.to_dict()
    return model_class.from_pretrained(folder, config=own, **kwargs)
