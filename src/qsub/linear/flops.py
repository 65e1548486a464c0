"""What torch.utils.flop_counter.FlopCounterMode counts for the operators of qsub: 2 M N K each, as for float products.

`import qsub` doesn't import the counter, which takes a second; `register` is called when it is imported.
"""

from typing import Any

import torch


def _product(a_shape: torch.Size, int_data_shape: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """(M, K) and (N, K), or (M, N) and (N, K): in either case 2 M N K, whatever the mode."""
    return 2 * a_shape[0] * int_data_shape[0] * int_data_shape[1]


def register() -> None:
    """Tell the counter of the operators; once."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    products = [torch.ops.qsub.int8_mm, torch.ops.qsub.int8_mm_transposed]
    register_flop_formula([product for product in products if product not in flop_registry])(_product)
