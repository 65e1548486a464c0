"""Weight-only int8 products as opaque operators with fake kernels.

`torch.compile` sees one node per product: its batch size stays symbolic, and the float copy of the weight
that the product builds inside can't be saved for backward.

The weight W is (N, K): row n of the float weight is `int_data[n] * scale[n] / 127`.
"""

import torch
from torch import Tensor

from qsub.tensors.codes import dequantize_rows

_LIBRARY = torch.library.Library("qsub", "DEF")
_LIBRARY.define("int8_mm(Tensor x, Tensor int_data, Tensor scale, Tensor? bias=None) -> Tensor")
_LIBRARY.define("int8_mm_transposed(Tensor grad, Tensor int_data, Tensor scale) -> Tensor")


def _int8_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = dequantize_rows(int_data, scale, x.dtype)  # (N, K)
    if bias is None:
        return x @ weight.t()
    return torch.addmm(bias.to(x.dtype), x, weight.t())


def _int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor) -> Tensor:
    return grad @ dequantize_rows(int_data, scale, grad.dtype)


def _fake_int8_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], int_data.shape[0])


def _fake_int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], int_data.shape[1])


_LIBRARY.impl("int8_mm", _int8_mm, "CompositeExplicitAutograd")
_LIBRARY.impl("int8_mm_transposed", _int8_mm_transposed, "CompositeExplicitAutograd")
torch.library.register_fake("qsub::int8_mm", _fake_int8_mm, lib=_LIBRARY)
torch.library.register_fake("qsub::int8_mm_transposed", _fake_int8_mm_transposed, lib=_LIBRARY)


def int8_mm(x: Tensor, int_data: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product `x @ W.T + bias` with an int8 weight.

    Args:
        x: (M, K), any float dtype.
        int_data: (N, K) int8 codes of W.
        scale: (N,) row magnitudes of W, fp16.
        bias: (N,) any float dtype, or None.

    Returns:
        (M, N) in the dtype of `x`, accumulated in fp32 (fp64 for an fp64 input).
    """
    return torch.ops.qsub.int8_mm.default(x, int_data, scale, bias)


def int8_mm_transposed(grad: Tensor, int_data: Tensor, scale: Tensor) -> Tensor:
    """Product `grad @ W` with an int8 weight: the backward of `int8_mm` with respect to its input.

    Args:
        grad: (M, N), any float dtype.
        int_data: (N, K) int8 codes of W.
        scale: (N,) row magnitudes of W, fp16.

    Returns:
        (M, K) in the dtype of `grad`.
    """
    return torch.ops.qsub.int8_mm_transposed.default(grad, int_data, scale)
