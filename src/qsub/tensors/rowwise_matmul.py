"""Matrix products of Int8RowwiseTensor.

linear and matmul, of any number of dimensions, are brought to the two-dimensional operators mm and addmm above
autograd (left to itself, matmul would expand the weight to a batch for some layouts of the input, and autocast
would copy it). mm and addmm are carried out below autograd on the int8 data.

A frozen weight needs nothing special in backward: autograd's mm keeps the weight (int8 data and scale) and not the
input, and the gradient of the input is one more mm, with the weight the other way round.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qsub.linear import AUTOCAST_DEVICES, int8_linear, int8_mm, int8_mm_transposed
from qsub.tensors.rowwise import FUNCTIONS, OPS, Int8RowwiseTensor

aten = torch.ops.aten


def _product(x: Tensor, weight: Int8RowwiseTensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight (+ bias)` for (M, K) and (K, N)."""
    if weight.scale_dim is None or weight.dim() != 2:
        weight = weight.like(weight.int_data, weight.scale.expand(weight.shape[0]), scale_dim=-2)
    if isinstance(x, Int8RowwiseTensor):
        raise NotImplementedError("the product of two Int8RowwiseTensors: call .dequantize() on one of them")
    if x.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({x.shape[0]}x{x.shape[1]} and "
            f"{weight.shape[0]}x{weight.shape[1]})"
        )
    if weight.scale_dim == -1:  # the forward of linear: weight is W.t(), with a scale for each column of the result
        modes = {"activations": weight.activations, "outlier_threshold": weight.outlier_threshold}
        return int8_mm(x, weight.int_data.t(), weight.scale, bias, **modes)
    result = int8_mm_transposed(x, weight.int_data, weight.scale, backward=weight.backward_mode)
    return result if bias is None else result.add_(bias)


@OPS.implements(aten.mm.default)
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x @ w.t()`, `g @ w`, and `w @ x` by (x.t() @ w.t()).t()."""
    if isinstance(b, Int8RowwiseTensor):
        return _product(a, b)
    return _product(b.t(), a.t()).t()  # type: ignore[arg-type]


@OPS.implements(aten.mv.default)
def _mv(func: Any, a: Tensor, vector: Tensor) -> Tensor:
    """`w.mv(x)`."""
    return _mm(aten.mm.default, a, vector.unsqueeze(1)).squeeze(1)


@OPS.implements(aten.bmm.default)
def _bmm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """bmm and einsum with one weight for the whole batch, as expand makes it."""
    if isinstance(a, Int8RowwiseTensor):
        return _bmm(func, b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    if not isinstance(b, Int8RowwiseTensor) or (b.shape[0] > 1 and b.int_data.stride(0) != 0):
        raise NotImplementedError("bmm takes one Int8RowwiseTensor, expanded over the batch: call .dequantize() first")
    if a.shape[::2] != b.shape[:2]:
        raise RuntimeError(f"bmm: {tuple(a.shape)} and {tuple(b.shape)} can't be multiplied")
    shape = (a.shape[0], a.shape[1], b.shape[2])
    if a.shape[0] == 0:
        return a.new_empty(shape)
    return _product(a.reshape(a.shape[0] * a.shape[1], a.shape[2]), b[0]).view(shape)  # type: ignore[arg-type]


@OPS.implements(aten.addmm.default)
def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """The form of linear with a bias; the bias stays in its own dtype."""
    if isinstance(bias, Int8RowwiseTensor):
        raise NotImplementedError("addmm with an Int8RowwiseTensor as bias: call .dequantize() on it")
    if isinstance(b, Int8RowwiseTensor) and beta == 1 and alpha == 1 and bias.dim() == 1:
        return _product(a, b, bias)
    product = _mm(aten.mm.default, a, b).mul_(alpha)
    return product if beta == 0 else product.add_(bias, alpha=beta)  # with 0 the bias is ignored, NaN too


# ---- Above autograd ----


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear with an int8 weight (N, K): (..., K) to (..., N) in the dtype of the input.

    Under autocast the input is cast to autocast's dtype, as torch does; the weight and the bias never are.
    """
    if not isinstance(weight, Int8RowwiseTensor):
        raise NotImplementedError("linear with an Int8RowwiseTensor as input or bias: call .dequantize() on it")
    if input.is_nested and input.layout == torch.strided:
        raise NotImplementedError("linear of a strided nested tensor and an int8 weight: use layout=torch.jagged")
    if bias is not None and (weight.dim() == 1 or bias.dim() == input.dim() == 2):  # torch broadcasts it
        product = linear(input, weight)
        return (product + bias).to(product.dtype)
    if _is_direct(input, weight):
        return int8_linear(
            input,
            weight.int_data,
            weight.scale,
            bias,
            activations=weight.activations,
            outlier_threshold=weight.outlier_threshold,
            backward=weight.backward_mode,
        )
    return _times_transposed(input, weight.t(), bias)


def _is_direct(x: Tensor, weight: Int8RowwiseTensor) -> bool:
    """Whether one operator on plain tensors does it: a frozen weight in eager mode, outside of transforms and traces.

    That saves the two wrapper tensors that t() and autograd's saved weight make, two thirds of the overhead of a call.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and weight.scale_dim == -2
        and weight.dim() == 2
        and not (weight.requires_grad and torch.is_grad_enabled())
        and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
        and forward_ad._current_level < 0
    )


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """torch.matmul where one operand is an int8 matrix and the other has one dimension or more."""
    if isinstance(other, Int8RowwiseTensor):
        return _times_transposed(input, other, None)
    if other.dim() == 1:
        return _times_transposed(other, input.t(), None)
    if input.dim() == 1:
        return _times_transposed(other.transpose(-2, -1), input, None)
    return _times_transposed(other.transpose(-2, -1), input.t(), None).transpose(-2, -1)


def _times_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight + bias` for x (..., K) and weight (K, N) or (K,), by one two-dimensional product."""
    if weight.dim() == 1:
        return _times_transposed(x, weight.unsqueeze(1), bias).squeeze(-1)
    if weight.dim() > 2:
        raise NotImplementedError(
            f"matmul with an Int8RowwiseTensor of shape {tuple(weight.shape)}: use a matrix, torch.bmm with a matrix "
            "that is expanded over the batch, or .dequantize()"
        )
    device = weight.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x
        with torch.autocast(device, enabled=False):
            return _times_transposed(x, weight, bias)
    if x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise RuntimeError(
            f"an input of shape {tuple(x.shape)} can't be multiplied with an Int8RowwiseTensor that takes "
            f"{weight.shape[0]} features"
        )
    rows = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)  # reshape(-1, 0) is refused
    result = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    # No view to autograd, as in torch's matmul: what is computed under no_grad may be changed in place afterwards.
    return result if x.dim() == 2 else aten._unsafe_view(result, (*x.shape[:-1], weight.shape[1]))


FUNCTIONS[torch.nn.functional.linear] = linear
FUNCTIONS.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul))
FUNCTIONS[Tensor.__rmatmul__] = lambda other, input: matmul(input, other)
