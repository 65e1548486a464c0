"""Parameter groups: which parameters decay, and which keep fp32 state."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Choice = Callable[[str, Tensor], bool]


def param_groups(
    model: nn.Module,
    weight_decay: float = 1e-2,
    *,
    no_decay: Choice | None = None,
    state_32bit: Choice | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into groups for `AdamW8bit` and `Adam8bit`.

    By default biases and the weights of norms (parameters of fewer than two dimensions) don't decay, and the tables of
    embeddings, with heads tied to them, keep fp32 state: the gradient of a row that is not in the batch is zero, and
    those of frequent and rare rows differ by orders of magnitude (arXiv 2110.02861, section 2.3).

    Args:
        model: any module. A parameter that is shared comes once, under its first name.
        weight_decay: of the parameters that decay.
        no_decay: called with name and parameter instead of the rule above; True for weight_decay=0.
        state_32bit: called with name and parameter instead of the rule above; True for fp32 state.

    Returns:
        One to four groups with `params`, `weight_decay` and `state_bits` (8 or 32); those without parameters are left
        out. Set further options in them, or in the call of the optimizer.

    Raises:
        TypeError: `model` is no module.
        ValueError: no parameter requires grad.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups takes a module, got {type(model).__name__}: the rules go by names and modules")
    tables = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    no_decay = no_decay or (lambda _, param: param.dim() < 2)
    state_32bit = state_32bit or (lambda _, param: id(param) in tables)
    groups: dict[tuple[float, int], list[Tensor]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            key = 0.0 if no_decay(name, param) else weight_decay, 32 if state_32bit(name, param) else 8
            groups.setdefault(key, []).append(param)
    if not groups:
        raise ValueError(
            f"no parameter of {type(model).__name__} requires grad: quantize_ freezes what it quantizes, pass it "
            "trainable=True or add adapters"
        )
    return [{"params": p, "weight_decay": decay, "state_bits": bits} for (decay, bits), p in groups.items()]
