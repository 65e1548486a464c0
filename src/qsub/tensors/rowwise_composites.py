"""Operators that torch computes whole modules with, taken apart for int8 weights. Each handler says who calls it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsub.tensors.rowwise import OPS, Int8RowwiseTensor
from qsub.tensors.rowwise_matmul import linear

aten = torch.ops.aten


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (linear if isinstance(weight, Int8RowwiseTensor) else F.linear)(x, weight, bias)


def _mask(mask: Tensor | None, mask_type: int | None, x: Tensor) -> Tensor | None:
    """The mask of attention that adds to the scores (B, H, L, L).

    Args:
        mask: bool, True where there is no attention, or float, which is added.
        mask_type: 0 for (L, L), 1 for (B, L) of keys that are padding, 2 for all four dimensions.
        x: (B, L, E).
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(mask, float("-inf"))
    return mask[:, None, None, :] if mask_type == 1 else mask


@OPS.implements(aten._native_multi_head_attention.default)
def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention in eval mode under torch.compile: all inputs are (B, L, E) and the same tensor."""
    heads = [
        part.unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)  # (B, H, L, E / H)
        for part in _linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    ]
    added = _mask(mask, mask_type, query)
    weights = None
    if need_weights:
        scores = heads[0] @ heads[1].transpose(-2, -1) / (embed_dim // num_head) ** 0.5
        weights = (scores if added is None else scores + added).softmax(-1)
        context = weights @ heads[2]
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        context = F.scaled_dot_product_attention(*heads, attn_mask=added)
    return _linear(context.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


@OPS.implements(aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(
    func: Any,
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """nn.TransformerEncoderLayer in eval mode under torch.compile, which doesn't see that a weight is of a subclass."""

    def attend(x: Tensor) -> Tensor:
        attention = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)
        return _attention(None, x, x, x, *attention)[0]

    def feed(x: Tensor) -> Tensor:
        hidden = _linear(x, ffn_weight_1, ffn_bias_1)
        return _linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        src = src + attend(norm_1(src))
        return src + feed(norm_2(src))
    src = norm_1(src + attend(src))
    return norm_2(src + feed(src))
