"""Small random models of all model types of transformers, from their configs alone."""

import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The class of a model type: the first of these lists that has one. Heads come first, since they may be tied.
_LISTS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)

# Small values, by what the name of an integer of a config says. The first pattern that fits counts.
_SIZES: list[tuple[str, int]] = [
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|num_query_groups|n_groups|num_groups", 2),
    (r"num_experts_per_tok|moe_topk|num_selected_experts|top_k|topk_group|experts_per_tok|num_experts_per_token", 1),
    (r"n_group$", 1),
    (r"(^|_)(num|n)_(\w+_)?experts$|num_local_experts|num_experts|moe_num_experts|n_experts", 4),
    (r"first_k_dense|num_dense_layers|moe_layer_start|decoder_start_layer", 1),
    (r"num_hidden_layers|(^|_)(n_|num_)?(\w+_)?layers?$|num_blocks|depth$|n_layer$|num_encoder_blocks", 2),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_ssm", 64),
    (r"head_dim|attention_head_size|d_kv|kv_channels|d_head", 8),
    (r"heads?$|num_attention_heads|n_head", 4),
    (r"(q_lora_rank|kv_lora_rank|lora_rank|bottleneck)", 16),
    (r"codebook_size", 64),
    (r"vocab_size|vocab_size_or_config|n_vocab|num_embeddings$", 99),
    (r"max_position|n_positions|max_source_pos|max_target_pos|seq_length|n_ctx|context_length|max_sequence", 64),
    (r"intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden|feedforward|mlp_dim|inner_dim|ffn_size|dim_ff", 48),
    (r"image_size|img_size|input_size|crop_size", 32),
    (r"patch_size", 8),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|proj_dim|_dim|^dim|width)$", 32),
    (r"hidden_size|d_model|embed_dim", 32),
    (r"num_labels", 3),
    (r"num_queries", 5),
]


_WIDTHS = next(number for number, (pattern, _) in enumerate(_SIZES) if "intermediate" in pattern)

# Values of those that have no default, and are needed.
_GIVEN = {
    "vocab_size": 99,
    "prediction_length": 4,
    "pad_token_id": 0,
    "vocabulary_map": {"<image>": 3},
    "head_dim": 8,
    "attention_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
}


def _small(name: str, value: Any, level: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1 or "token_id" in name or "index" in name:
        return value
    if level == 3 and re.search(r"head_dim|mamba", name):  # sections of rotary embeddings are parts of it
        return value
    for pattern, size in _SIZES[: (None, _WIDTHS)[level > 3]]:
        if re.search(pattern, name):
            return min(value, 4 if level > 1 and size == 2 and "key_value" in name else size)
    return value


def _shrunk(config: dict[str, Any], level: int) -> dict[str, Any]:
    """A config with small values, less so from level to level, for models that check how their sizes fit.

    1 makes all small, 2 gives keys and values as many heads as queries, 3 keeps the widths of heads, 4 all widths, 5
    makes layers and vocabularies small and nothing else.
    """
    result = {}
    for name, value in config.items():
        if name in (
            "transformers_version",
            "model_type",
            "architectures",
            "out_features",
            "out_indices",
            "stage_names",
        ):
            continue
        if name in _GIVEN and value is None:
            result[name] = _GIVEN[name]
            continue
        if isinstance(value, dict) and name.endswith("config") or name in ("encoder", "decoder", "generator"):
            result[name] = _shrunk(value, level) | (
                {"model_type": value["model_type"]} if "model_type" in value else {}
            )
        elif level < 5 or re.search(r"layers?$|vocab|experts$|depth$", name):
            result[name] = _small(name, value, level)
        else:
            result[name] = value
    layers = next(
        (result[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(result.get(k), int)), 0
    )
    before = next(
        (config[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(config.get(k), int)), 0
    )
    for name, value in list(result.items()):  # one entry a layer
        if layers and isinstance(value, list) and len(value) == before and before > layers:
            result[name] = _spread(value, layers)
    for name, value in result.items():  # layers that are named by their numbers
        if re.search(r"feature_layers?$|select_layers?$|deepstack\w*index\w*|block_index\w*", name) and isinstance(
            value, list
        ):
            result[name] = [1, 0][: len(value)] if all(isinstance(v, int) for v in value) else value
    if isinstance(result.get("per_layer_config"), dict):
        result["per_layer_config"] = {k: v for k, v in result["per_layer_config"].items() if int(k) < layers}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(result.get(name), int) and result[name] >= 99:
            result[name] = 1
    return result


def _spread(values: list[Any], number: int) -> list[Any]:
    """As many as asked for, of each kind one if there is room."""
    kinds = [v for i, v in enumerate(values) if v not in values[:i]]
    return (kinds + values)[:number]


def class_of(model_type: str) -> Any:
    """The class of transformers that the type is tried with, or None."""
    for name in _LISTS:
        found = getattr(modeling_auto, name, {}).get(model_type)
        found = found[0] if isinstance(found, (list, tuple)) else found
        if found and hasattr(transformers, found):
            return getattr(transformers, found)
    return None


def model_types() -> list[str]:
    """All that have a class."""
    return [name for name in CONFIG_MAPPING if class_of(name) is not None]


def config_of(model_type: str, level: int) -> Any:
    """A config of the type, made small; level 6 is the default one."""
    kind = CONFIG_MAPPING[model_type]
    if level == 6:
        return kind()
    return kind(**_shrunk(kind().to_dict(), level))


def tiny_model(model_type: str, limit: int = 100_000_000) -> Any:
    """A model with random weights, in fp32.

    Args:
        model_type: of `model_types`.
        limit: of parameters.

    Raises:
        ValueError: no level of shrinking gives one of at most `limit` parameters; with what each failed of.
    """
    failures = []
    for level in range(1, 7):
        try:
            config = config_of(model_type, level)
            kind = class_of(model_type)
            with torch.device("meta"):
                size = sum(param.numel() for param in kind(config).parameters())
            if size > limit:
                failures.append(f"level {level}: {size / 1e6:.0f}M parameters")
                continue
            model = kind(config).float().eval()
            randomize(model)
            return model
        except Exception as error:  # whatever a config or a model raises of sizes that don't fit
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
            failures.append(f"level {level}: {type(error).__name__}: {lines[-1]}"[:160])
    raise ValueError("; ".join(failures))


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Values that are all different and finite, as some models leave parameters as memory was, and norms are ones."""
    draw = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.is_floating_point():
            param.copy_(torch.randn(param.shape, generator=draw) * 0.05 + 0.01)
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=draw) * 0.1 + 0.5)
