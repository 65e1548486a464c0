"""A table of aten operators for a tensor subclass, and the helpers that its handlers share."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

Handler = Callable[..., Any]


class OpTable:
    """Handlers of one tensor subclass, keyed by operator.

    A handler is called as `handler(func, *args, **kwargs)` below autograd. Whatever has no handler raises
    NotImplementedError.

    Args:
        owner: name of the subclass, for error texts.
        remedy: what the user can do when an operator is missing.
    """

    def __init__(self, owner: str, remedy: str) -> None:
        self.owner = owner
        self.remedy = remedy
        self.handlers: dict[Any, Handler] = {}

    def implements(self, *ops: Any) -> Callable[[Handler], Handler]:
        """Register the decorated function for each overload in `ops`."""

        def register(handler: Handler) -> Handler:
            for op in ops:
                self.handlers[op] = handler
            return handler

        return register

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Run the handler of `func`, or raise NotImplementedError that names operator, class and remedy."""
        if torch._C._get_tracing_state() is not None:
            raise jit_refusal(self.owner)
        try:
            return self._run(func, args, kwargs)
        except NotImplementedError as error:
            if called_from("torch.nn.utils.parametrize"):  # which takes this class of error for "no right inverse"
                raise RuntimeError(
                    f"a parametrization that {self.owner} can't have: {error}. Leave the layer in float (quantize_: "
                    "filter_fn), or call qsub.dequantize_ on it first."
                ) from error
            raise

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        handler = self.handlers.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        # Under inference_mode composite operators (chunk, einsum) arrive whole; elsewhere autograd took them apart.
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise NotImplementedError(f"{func} is not implemented for {self.owner}. {self.remedy}")
        return result


def jit_refusal(owner: str) -> NotImplementedError:
    """What torch.jit is told, which would save the memory of a tensor that has none."""
    return NotImplementedError(
        f"torch.jit can't trace or script a model with {owner} weights, and torch.onnx.export(dynamo=False), which "
        "traces, can't either: use torch.export.export or torch.compile, or call qsub.dequantize_(model) first."
    )


def view_of(func: Any, x: Tensor, args: tuple[Any, ...], make: Callable[[], Tensor]) -> Any:
    """Result of a view operator on a subclass: what `make` returns, with the storage of `x` in autograd's eyes.

    Under inference_mode a view of a normal tensor is a normal tensor, as torch wants it.
    """
    with torch.inference_mode(x.is_inference()):
        result = make()
    return return_and_correct_aliasing(func, (x, *args), {}, result)


# Arithmetic whose result is a plain tensor, and what autograd needs for it.
_PLAIN = """
    abs neg sgn sign sqrt rsqrt square exp log reciprocal relu sigmoid tanh gelu silu round floor ceil clamp
    clamp_min clamp_max add sub rsub mul div pow maximum minimum where lerp addcmul addcdiv fmod remainder
    sum mean amax amin aminmax max min std var norm linalg_vector_norm prod dot argmax argmin count_nonzero
    eq ne lt le gt ge isnan isinf isfinite isclose allclose logical_not equal _local_scalar_dense
    nan_to_num masked_fill tril triu gelu_backward silu_backward
"""

# What torch.optim and torch.nn.utils call on lists, and its relatives, out of place and in place.
_FOREACH = """
    abs add addcdiv addcmul ceil clamp_max clamp_min div exp floor frac lerp log max maximum minimum mul neg norm pow
    reciprocal round rsqrt sigmoid sign sqrt sub tanh trunc zero
"""


def plain_operators() -> list[Any]:
    """The overloads of the arithmetic whose result is a plain tensor, out of place."""
    found = []
    for name in _PLAIN.split():
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            takes_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
            if takes_tensors and not op._schema.is_mutable and "out" not in overload:
                found.append(op)
    return found


def foreach_operators(in_place: bool) -> list[Any]:
    """The overloads of the arithmetic on lists of tensors, without those with `out`."""
    names = [f"_foreach_{name}{'_' if in_place else ''}" for name in _FOREACH.split()]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [op for op in overloads if "out" not in op._overloadname]


SHOWN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what files can say, and products take


def float_dtype(dtype: torch.dtype | None, default: torch.dtype, owner: str) -> torch.dtype:
    """The dtype to show that is asked for, or `default`; TypeError for one that isn't fp32, bf16, fp16 or fp64."""
    if dtype is None:
        return default
    if dtype not in SHOWN:
        raise TypeError(
            f"{owner} can only take a float dtype, one of fp32, bf16, fp16 and fp64, got {dtype}. "
            "Its codes are `int_data` or `codes`; for other dtypes call dequantize() first."
        )
    return dtype


def cache_key(tensor: Any) -> str:
    """What torch.compile's caches must tell apart: all that a graph can depend on but the data.

    requires_grad is part of it: a graph made for a frozen weight has no gradient for a trainable one.
    """
    names, meta = tensor.__tensor_flatten__()
    inner = [(t.shape, t.stride(), t.dtype, t.device, t.storage_offset()) for t in (getattr(tensor, n) for n in names)]
    return str((type(tensor).__qualname__, tensor.shape, tensor.requires_grad, sorted(meta.items()), inner))


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor. Without an import of that class there are none, and it takes a while."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def called_from(module: str) -> bool:
    """Whether a function of the module of that name is on the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def reduced(tensor: Any, state: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """For `__reduce_ex__`: a tensor as its parts, so that torch.load takes any map_location.

    `state` is what is saved besides them and the metadata that graphs depend on; the class takes it by keyword.
    torch's own way for subclasses (2.13) takes no functions there, and a function is what Lightning passes.
    """
    names, meta = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    meta = {**meta, **(state or {})}
    return rebuild, (type(tensor), inner, meta, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


def rebuild(kind: Any, inner: dict[str, Tensor], meta: dict[str, Any], requires_grad: bool, parameter: bool) -> Tensor:
    """Inverse of `reduced`; pickles name it."""
    tensor = kind.__tensor_unflatten__(inner, meta, None, None)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])
