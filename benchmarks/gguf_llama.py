"""Convert a GGUF file of a Llama model into a Hugging Face folder of fp16 weights.

transformers reads GGUF too, in four times the time and into a model that refuses `.half()`; only its tokenizer
reader is used here.
"""

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Name of a weight in block i: blk.i.KEY.weight in GGUF, model.layers.i.VALUE.weight in transformers
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key weight (heads * head_dim, in) from GGUF's order of rotary pairs to that of transformers.

    GGUF keeps the two elements that are rotated together side by side, transformers half a head apart.
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def weights(reader: Any) -> dict[str, Tensor]:
    """All weights of an open `gguf.GGUFReader`, dequantized, as fp16 under the names of transformers."""
    import gguf

    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    result = {}
    for entry in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(entry.data, entry.tensor_type).copy())
        if entry.name in _OUTER:
            name = _OUTER[entry.name]
        else:
            _, block, key, _ = entry.name.split(".")
            name = f"model.layers.{block}.{_BLOCK[key]}.weight"
            if key in heads:
                weight = rotary_halves(weight, heads[key])
        result[name] = weight.half().contiguous()
    return result


def config(reader: Any, shapes: dict[str, Tensor]) -> dict[str, Any]:
    """What goes into config.json."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": shapes["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def convert(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write weights, config and tokenizer of the GGUF file `source` into the folder `target`, which exists."""
    import gguf
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(source)
    tensors = weights(reader)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # save_file lets the owner alone read it
    (target / "config.json").write_text(json.dumps(config(reader, tensors), indent=2) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
