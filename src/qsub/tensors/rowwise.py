"""Int8RowwiseTensor: a weight matrix as int8 codes and one fp16 scale a row."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors import codes as math8
from qsub.tensors.dispatch import OpTable, cache_key, float_dtype

OPS = OpTable(
    "Int8RowwiseTensor",
    "Call .dequantize() first to work on a plain float copy, or use .int_data and .scale.",
)
FUNCTIONS: dict[Any, Any] = {}  # replacements of torch functions, filled by rowwise_matmul


class Int8RowwiseTensor(torch.Tensor):
    """A float matrix stored as int8 codes and one fp16 scale for each row; value = int_data * scale / 127.

    It acts as a weight of its float dtype: matmul, `to`, copies and in-place updates are carried out on the int8
    data through `__torch_dispatch__`. An operator that is not implemented raises NotImplementedError; nothing
    dequantizes silently. Results of arithmetic are plain float tensors.

    In-place arithmetic (add_, mul_, addcdiv_, ...) on a weight that requires grad, which is what an optimizer does,
    rounds stochastically with torch's generator; on any other weight, and in copy_, it rounds to nearest.

    Args:
        int_data: (out_features, in_features) int8 codes in [-127, 127]. Or another Int8RowwiseTensor, which is
            shared; the arguments that follow are then left out.
        scale: (out_features,) fp16, the largest magnitude of each row.
        dtype: float dtype that the tensor shows. Default: fp32.
        scale_dim: dimension of `int_data` that `scale` runs along: -2, or -1 for the transpose.
        requires_grad: as in torch.nn.Parameter.

    Raises:
        TypeError: int_data is not int8, scale not fp16, or dtype not a float dtype.
        ValueError: the shapes or devices don't fit.
    """

    int_data: Tensor
    scale: Tensor
    scale_dim: int

    @staticmethod
    def __new__(
        cls,
        int_data: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        scale_dim: int = -2,
        requires_grad: bool = False,
    ):
        """See the class."""
        if isinstance(int_data, Int8RowwiseTensor) and scale is None:
            source = int_data
            int_data, scale, dtype, scale_dim = source.int_data, source.scale, source.dtype, source.scale_dim
        if scale is None or int_data.dtype != torch.int8 or scale.dtype != torch.float16:
            got = f"{int_data.dtype} and {None if scale is None else scale.dtype}"
            raise TypeError(
                f"Int8RowwiseTensor takes int8 codes and an fp16 scale, got {got}. "
                "For a float weight use Int8RowwiseTensor.from_float(weight)."
            )
        if int_data.dim() < 2 or scale_dim not in (-2, -1) or scale.shape != (int_data.shape[scale_dim],):
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
        self.int_data, self.scale, self.scale_dim = int_data, scale, scale_dim
        return self

    @classmethod
    def from_float(cls, weight: Tensor, *, requires_grad: bool = False) -> "Int8RowwiseTensor":
        """Quantize a float matrix row by row, to nearest.

        Args:
            weight: (out_features, in_features), any float dtype.
            requires_grad: of the result.

        Raises:
            TypeError: the weight is not floating point.
            ValueError: it is not a matrix, or a row has NaN, Inf or a magnitude over 65504; the row is named.
        """
        if isinstance(weight, Int8RowwiseTensor):
            raise TypeError("the weight is an Int8RowwiseTensor already")
        if weight.dim() != 2:
            raise ValueError(f"weight must be (out_features, in_features), got shape {tuple(weight.shape)}")
        float_dtype(weight.dtype, weight.dtype, "Int8RowwiseTensor.from_float")
        weight = weight.detach()
        math8.check_rows(weight)
        int_data, scale = math8.quantize_rows(weight)
        return cls(int_data, scale, weight.dtype, requires_grad=requires_grad)  # type: ignore[call-overload]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Plain float tensor `int_data * scale / 127` of the same shape.

        Args:
            dtype: of the result. Default: the dtype that the weight shows.
        """
        return math8.dequantize_rows(self.int_data, self.scale, dtype or self.dtype, self.scale_dim)

    def requantize_(self, value: Tensor, *, noise: Tensor | None = None) -> "Int8RowwiseTensor":
        """Replace the content by the code of a float matrix, in place.

        Nothing is read back from the device, so values are not checked: a row with NaN, Inf or a magnitude over
        65504 becomes NaN, as a weight that diverged does. `copy_` checks.

        Args:
            value: float, the shape of this tensor.
            noise: the same shape, uniform in [0, 1), to round stochastically; None rounds to nearest.

        Raises:
            ValueError: the shape differs.
        """
        if value.shape != self.shape or self.dim() != 2:
            raise ValueError(f"expected a float matrix of shape {tuple(self.shape)}, got {tuple(value.shape)}")
        if self.scale_dim == -1:
            value, noise = value.t(), None if noise is None else noise.t()
        codes, scale = math8.quantize_rows(value, noise)
        self.int_data.copy_(codes if self.scale_dim == -2 else codes.t())
        self.scale.copy_(scale)
        return self

    def like(self, int_data: Tensor, scale: Tensor, **changes: Any) -> "Int8RowwiseTensor":
        """A tensor of other inner tensors with the remaining fields of this one, or those in `changes`."""
        return type(self)(int_data, scale, **{"dtype": self.dtype, "scale_dim": self.scale_dim, **changes})

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Inner tensors and metadata, for torch.compile and serialization."""
        return ["int_data", "scale"], {"dtype": self.dtype, "scale_dim": self.scale_dim}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: dict[str, Any], outer_size: Any, outer_stride: Any):
        """Inverse of `__tensor_flatten__`."""
        return cls(inner["int_data"], inner["scale"], **meta)

    def _stable_hash_for_caching(self) -> str:
        """Key of torch.compile's caches."""
        return cache_key(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        fields = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        fields += ", transposed" if self.scale_dim == -1 else ""
        fields += ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({fields})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Linear and matmul are brought to two dimensions (FUNCTIONS); all else goes straight to the operators."""
        with torch._C.DisableTorchFunctionSubclass():
            return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handlers are in the modules rowwise_ops (copies, views, in place) and rowwise_matmul."""
        return OPS.dispatch(func, args, kwargs)


torch.serialization.add_safe_globals([Int8RowwiseTensor])
