"""Int8RowwiseTensor: a weight matrix as int8 codes and one fp16 scale a row."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors import codes as math8
from qsub.tensors.dispatch import OpTable, cache_key, float_dtype, jit_refusal, reduced
from qsub.tensors.no_memory import NoMemory, seal
from qsub.tensors.rowwise_fsdp import GatheredByRows

OPS = OpTable(
    "Int8RowwiseTensor",
    "Call .dequantize() first to work on a plain float copy, or use .int_data and .scale.",
)
FUNCTIONS: dict[Any, Any] = {}  # replacements of torch functions, filled by rowwise_matmul and rowwise_methods


class Int8RowwiseTensor(GatheredByRows, NoMemory, torch.Tensor):
    """A float matrix stored as int8 codes and one fp16 scale for each row; value = int_data * scale / 127.

    It acts as a weight of its float dtype: matmul, `to`, views, copies and in-place updates are carried out on the
    int8 data through `__torch_dispatch__`. Arithmetic (`w * 2`, `w.sum()`) dequantizes, and its results are plain float
    tensors. Any other operator raises NotImplementedError. docs/tensors.md has the table of operators.

    In-place arithmetic (add_, mul_, addcdiv_, ...) on a weight that requires grad, or on its shards, views and copies,
    which is what an optimizer does, rounds stochastically. On any other weight, and in copy_, it rounds to nearest; a
    warning tells of an update of which that loses more than a tenth (qsub.tensors.rounding). The random bits are a hash
    of the new values of the row and the number of the update, not of torch's generator: the replicas of DDP draw the
    same, and the shards of FSDP2 those of the whole weight. (An update within torch.compile draws from the generator.)

    Args:
        int_data: (out_features, in_features) int8 codes in [-127, 127]. Or another Int8RowwiseTensor, which is
            shared; the arguments that follow are then left out.
        scale: (out_features,) fp16, the largest magnitude of each row.
        dtype: float dtype that the tensor shows: fp32 (the default), bf16, fp16 or fp64.
        scale_dim: negative index of the dimension of `int_data` that `scale` runs along: -2, or -1 for the transpose;
            None for a single row with a 0-dim scale. Views set it.
        whole_rows: False for a view of some columns, which can't be updated in place, since its scales belong to
            the whole rows.
        activations: how linear multiplies: None in the dtype of the input, "int8" with the rows of the input quantized.
        outlier_threshold: with "int8", columns of the input over this magnitude are multiplied in float.
        backward_mode: None for the exact gradient of the input, "int8" for the product of quantized gradients.
        requires_grad: as in torch.nn.Parameter.
        updates: how often the content was rounded stochastically so far. The next random bits depend on it, so it is
            saved and copied with the content.

    Raises:
        TypeError: int_data is not int8, scale not fp16, or dtype not a float dtype.
        ValueError: the shapes or devices don't fit.
    """

    _no_address_for = "torch.distributed.checkpoint._state_dict_stager"
    int_data: Tensor
    scale: Tensor
    scale_dim: int | None
    whole_rows: bool
    activations: str | None
    outlier_threshold: float | None
    backward_mode: str | None

    @staticmethod
    def __new__(
        cls,
        int_data: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        scale_dim: int | None = -2,
        whole_rows: bool = True,
        activations: str | None = None,
        outlier_threshold: float | None = None,
        backward_mode: str | None = None,
        requires_grad: bool = False,
        updates: int = 0,
    ):
        """See the class."""
        if isinstance(int_data, Int8RowwiseTensor) and scale is None:
            self = cls(int_data.int_data, int_data.scale, **int_data.fields(), requires_grad=requires_grad)
            self._updates = int_data.updates
            self._is_param = True  # as nn.Parameter(int_data): this is how accelerate makes parameters
            return self
        if scale is None or int_data.dtype != torch.int8 or scale.dtype != torch.float16:
            got = f"{int_data.dtype} and {None if scale is None else scale.dtype}"
            raise TypeError(
                f"Int8RowwiseTensor takes int8 codes and an fp16 scale, got {got}. "
                "For a float weight use Int8RowwiseTensor.from_float(weight)."
            )
        fits = scale_dim is None or -int_data.dim() <= scale_dim <= -1
        if not fits or scale.shape != (() if scale_dim is None else (int_data.shape[scale_dim],)):
            raise ValueError(
                "Int8RowwiseTensor takes (out_features, in_features) codes and an (out_features,) scale, "
                f"got {tuple(int_data.shape)} and {tuple(scale.shape)} along dimension {scale_dim}"
            )
        if int_data.device != scale.device:
            raise ValueError(f"codes are on {int_data.device} but the scale is on {scale.device}: move one of them")
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            int_data.shape,
            strides=int_data.stride(),
            storage_offset=int_data.storage_offset(),
            dtype=float_dtype(dtype, dtype, "Int8RowwiseTensor"),
            device=int_data.device,
            requires_grad=requires_grad,
        )
        seal(self)
        self.int_data, self.scale, self.scale_dim, self.whole_rows = int_data, scale, scale_dim, whole_rows
        self.set_modes(activations, outlier_threshold, backward_mode)
        if updates:
            self._updates = [int(updates)]
        return self

    @classmethod
    def from_float(cls, weight: Tensor, *, requires_grad: bool = False, **modes: Any) -> "Int8RowwiseTensor":
        """Quantize a float matrix row by row, to nearest.

        Args:
            weight: (out_features, in_features), any float dtype.
            requires_grad: of the result.
            **modes: activations, outlier_threshold and backward_mode, see the class.

        Raises:
            TypeError: the weight is not floating point.
            ValueError: it is not a dense matrix, or a row has NaN, Inf or a magnitude over 65504; the row is named.
        """
        if isinstance(weight, Int8RowwiseTensor):
            raise TypeError("the weight is an Int8RowwiseTensor already")
        if not weight.dtype.is_floating_point:
            float_dtype(weight.dtype, weight.dtype, "Int8RowwiseTensor.from_float")
        math8.check_matrix(weight)
        weight = weight.detach()
        math8.check_rows(weight)
        int_data, scale = math8.quantize_rows(weight)
        return cls(int_data, scale, weight.dtype, requires_grad=requires_grad, **modes)  # type: ignore[call-overload]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Plain float tensor `int_data * scale / 127` of the same shape; gradients flow back to a trainable weight.

        Args:
            dtype: of the result. Default: the dtype that the weight shows.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype or self.dtype)
        return self.decode(dtype)

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """`dequantize` below autograd, for handlers of operators."""
        return math8.dequantize_rows(self.int_data, self.scale, dtype or self.dtype, self.scale_dim)

    def requantize_(self, value: Tensor, *, noise: Tensor | None = None) -> "Int8RowwiseTensor":
        """Replace the content by the code of a float matrix, in place. Rows that have this value already stay.

        Nothing is read back from the device, so values are not checked: a row with NaN, Inf or a magnitude over
        65504 becomes NaN, as a weight that diverged does. `copy_` checks.

        Args:
            value: float, the shape of this tensor.
            noise: the same shape, uniform in [0, 1), to round stochastically; None rounds to nearest.

        Raises:
            ValueError: the shape differs.
            TypeError: the value is not floating point.
            NotImplementedError: this is a view of some columns.
        """
        if value.shape != self.shape:
            raise ValueError(f"expected a float tensor of shape {tuple(self.shape)}, got {tuple(value.shape)}")
        if not value.dtype.is_floating_point:
            float_dtype(value.dtype, value.dtype, "requantize_")
        rows = self.as_rows(value)
        held = self.as_rows(self.int_data)
        codes, scale = math8.quantize_rows(
            rows, None if noise is None else self.as_rows(noise), held=(held, self.scale.view(-1))
        )
        held.copy_(codes)
        self.scale.copy_(scale.view(self.scale.shape))
        return self.written()

    def written(self) -> "Int8RowwiseTensor":
        """Tell autograd that the content has changed, which it doesn't see below; returns self.

        A product that keeps the int8 data of this tensor, or of its base, then refuses its backward.
        """
        if type(self.int_data) is Tensor and not self.is_inference():
            weight: Any = self if self._base is None else self._base
            parts = (self.int_data, self.scale, weight.int_data, weight.scale)
            torch.autograd.graph.increment_version((self, *parts))
        return self

    def as_rows(self, value: Tensor) -> Tensor:
        """View of a tensor of this shape as (rows, columns), a row for each scale.

        Raises:
            NotImplementedError: this view can't be updated in place.
        """
        one_row = self.scale_dim is None  # of any shape with one dimension that isn't 1
        if not self.whole_rows or self.dim() > 2 or (one_row and self.dim() == 2 and 1 not in self.shape):
            raise NotImplementedError(
                f"this {tuple(self.shape)} view of an Int8RowwiseTensor can't be updated in place: its scales belong "
                "to whole rows. Update the weight or a range of its rows, or call .dequantize() for a float copy."
            )
        if self.scale_dim == -2:
            return value
        return value.reshape(1, -1) if one_row else value.t() if self.dim() == 2 else value.unsqueeze(1)

    def set_modes(self, activations: Any, outlier_threshold: Any, backward_mode: Any) -> None:
        """Change how products with this tensor are computed, in place; ValueError unless the three fit together."""
        check_modes(activations, outlier_threshold, backward_mode)
        # A plain number: another one, of NumPy, would be in the metadata, which torch.load refuses.
        self.outlier_threshold = None if outlier_threshold is None else float(outlier_threshold)
        self.activations, self.backward_mode = activations, backward_mode

    def fields(self) -> dict[str, Any]:
        """What the tensor is besides its inner tensors, as keywords of the class."""
        return {
            "dtype": self.dtype,
            "scale_dim": self.scale_dim,
            "whole_rows": self.whole_rows,
            "activations": self.activations,
            "outlier_threshold": self.outlier_threshold,
            "backward_mode": self.backward_mode,
        }

    def like(self, int_data: Tensor, scale: Tensor, **changes: Any) -> "Int8RowwiseTensor":
        """A tensor of other inner tensors with the remaining fields of this one, or those in `changes`."""
        made = type(self)(int_data, scale, **{**self.fields(), **changes})
        made.trainable, made.keeps_requires_grad = self.is_trained(), self.keeps_requires_grad
        if self._updates is not None:
            made._updates = [*self._updates]
        return made

    def view_like(self, int_data: Tensor, scale: Tensor, **changes: Any) -> "Int8RowwiseTensor":
        """`like` for views of the inner tensors: the updates of a view count as those of the weight."""
        made = self.like(int_data, scale, **changes)
        made._updates, made.gathered = self.updates, self.gathered
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Inner tensors and metadata, for torch.compile and serialization."""
        return ["int_data", "scale"], self.fields()

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: dict[str, Any], outer_size: Any, outer_stride: Any):
        """Inverse of `__tensor_flatten__`."""
        return cls(inner["int_data"], inner["scale"], **meta)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """torch.save, pickle, copy."""
        return reduced(self, {"updates": self.count} if self.count else {})

    def _stable_hash_for_caching(self) -> str:
        """Key of torch.compile's caches."""
        return cache_key(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        fields = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        fields += "" if self.scale_dim == -2 else f", scale_dim={self.scale_dim}"
        for name in ("activations", "outlier_threshold", "backward_mode"):
            fields += "" if getattr(self, name) is None else f", {name}={getattr(self, name)!r}"
        fields += ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({fields})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Linear and matmul are brought to two dimensions (FUNCTIONS); all else goes straight to the operators."""
        if torch._C._get_tracing_state() is not None:
            raise jit_refusal(cls.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handlers are in the modules rowwise_views, rowwise_copies, rowwise_arithmetic and rowwise_matmul."""
        return OPS.dispatch(func, args, kwargs)


def check_modes(activations: Any, outlier_threshold: Any, backward_mode: Any) -> None:
    """ValueError unless the three fit together."""
    for name, value in (("activations", activations), ("backward_mode", backward_mode)):
        if value not in (None, "int8"):
            raise ValueError(f'{name} must be None or "int8", got {value!r}')
    if outlier_threshold is not None and (activations is None or not outlier_threshold > 0):
        raise ValueError(
            f'outlier_threshold must be positive and comes with activations="int8", got {outlier_threshold!r} with '
            f"activations={activations!r}"
        )


class _Dequantize(torch.autograd.Function):
    """The identity to autograd: the gradient of the float copy is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Int8RowwiseTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.decode(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


torch.serialization.add_safe_globals([Int8RowwiseTensor])
