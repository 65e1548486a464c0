"""Matrix products of Int8RowwiseTensor: the operators that linear, matmul and their backward come down to.

A frozen weight needs nothing special in backward: autograd's mm keeps the weight (int8 data and scale) and not the
input, and the gradient of the input is one more mm, with the weight the other way round.
"""

from typing import Any

import torch
from torch import Tensor

from qsub.linear import int8_mm, int8_mm_transposed
from qsub.tensors.rowwise import OPS, Int8RowwiseTensor

aten = torch.ops.aten


def _product(x: Tensor, weight: Int8RowwiseTensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight (+ bias)` for (M, K) and (K, N)."""
    if isinstance(x, Int8RowwiseTensor):
        raise NotImplementedError("the product of two Int8RowwiseTensors: call .dequantize() on one of them")
    if x.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({x.shape[0]}x{x.shape[1]} and "
            f"{weight.shape[0]}x{weight.shape[1]})"
        )
    if weight.scale_dim == -1:  # the forward of linear: weight is W.t(), with a scale for each column of the result
        return int8_mm(x, weight.int_data.t(), weight.scale, bias)
    result = int8_mm_transposed(x, weight.int_data, weight.scale)
    return result if bias is None else result.add_(bias)


@OPS.implements(aten.mm.default)
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x @ w.t()`, `g @ w`, and `w @ x` by (x.t() @ w.t()).t()."""
    if isinstance(b, Int8RowwiseTensor):
        return _product(a, b)
    return _product(b.t(), a.t()).t()  # type: ignore[arg-type]


@OPS.implements(aten.addmm.default)
def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """The form of linear with a bias; the bias stays in its own dtype."""
    if isinstance(bias, Int8RowwiseTensor):
        raise NotImplementedError("addmm with an Int8RowwiseTensor as bias: call .dequantize() on it")
    if isinstance(b, Int8RowwiseTensor) and beta == 1 and alpha == 1 and bias.dim() == 1:
        return _product(a, b, bias)
    return _mm(aten.mm.default, a, b).mul_(alpha).add_(bias, alpha=beta)


@OPS.implements(aten.linear.default)
def _linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Under inference_mode linear arrives whole."""
    if not isinstance(weight, Int8RowwiseTensor) or isinstance(bias, Int8RowwiseTensor):
        raise NotImplementedError("linear with an Int8RowwiseTensor as input or bias: call .dequantize() on it")
    result = _product(x.reshape(-1, x.shape[-1]), weight.t(), bias)  # type: ignore[arg-type]
    return result.reshape(*x.shape[:-1], weight.shape[0])
