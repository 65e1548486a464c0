"""Blockwise8bitTensor: optimizer state in 8 bits an element and two or four bytes a block."""

import math
from typing import Any

import torch
from torch import Tensor

from qsub.tensors import dynamic_codes
from qsub.tensors import state_codes as math8
from qsub.tensors.dispatch import OpTable, cache_key, float_dtype, reduced, view_of

aten = torch.ops.aten
OPS = OpTable("Blockwise8bitTensor", "Call .dequantize() to get a plain float tensor.")

# Name of a code and its inverse. "signed" is exp_avg's, "unsigned" that of the second moments.
DECODE = {
    "float8_signed": math8.decode_exp_avg,
    "float8_unsigned": math8.decode_exp_avg_sq,
    "dynamic_signed": dynamic_codes.decode_signed,
    "dynamic_unsigned": dynamic_codes.decode_unsigned,
}


def row_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """(rows, elements per row) of a parameter: dim 0 and the product of the rest; up to 1-D it is one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def is_dynamic(code: str) -> bool:
    """Whether `code` is one of the dynamic tree, with an fp32 scale, rather than one of two bytes a block."""
    return code.startswith("dynamic")


def scale_shape(shape: torch.Size | tuple[int, ...], block_size: int, code: str) -> tuple[int, ...]:
    """Shape of the scales, (rows, blocks per row) or (rows, blocks per row, 2).

    Blocks never cross a row, the last one of a row may be short.
    """
    rows, length = row_shape(shape)
    blocks = -(-length // block_size)
    return (rows, blocks) if is_dynamic(code) else (rows, blocks, 2)


def scale_dtype(code: str) -> torch.dtype:
    """Dtype of the scales of `code`."""
    return torch.float32 if is_dynamic(code) else torch.uint8


def to_blocks(flat: Tensor, shape: torch.Size | tuple[int, ...], block_size: int) -> Tensor:
    """View or zero-padded copy (blocks, block_size) of a contiguous tensor of shape `shape`."""
    rows, length = row_shape(shape)
    short = -length % block_size
    if short:
        flat = torch.nn.functional.pad(flat.reshape(rows, length), (0, short))
    return flat.reshape(-1, block_size)


def from_blocks(blocks: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Inverse of `to_blocks`: (blocks, block_size) without the padding, in shape `shape`."""
    rows, length = row_shape(shape)
    row = -(-length // blocks.shape[1]) * blocks.shape[1]
    return blocks.reshape(rows, row)[:, :length].reshape(shape)


class Staged:
    """A tensor of any layout as `blocks`, (blocks, block_size), to be changed in place.

    `blocks` is a view of the tensor where its layout allows that, else a copy, which `finish` writes back.
    """

    def __init__(self, target: Tensor, block_size: int) -> None:
        self.target = target
        self.blocks = to_blocks(target.contiguous(), target.shape, block_size)

    def finish(self) -> None:
        """Bring the target up to date."""
        if self.blocks.data_ptr() != self.target.data_ptr():
            self.target.copy_(from_blocks(self.blocks, self.target.shape))


class Blockwise8bitTensor(Tensor):
    """A float tensor stored as uint8 codes and a scale for each block of elements.

    Blocks run along the flattened trailing dimensions and never cross a row of dim 0, so any slice of rows is a
    slice of codes and of scales. See `qsub.tensors.state_codes` and `qsub.tensors.dynamic_codes` for the codes.

    Args:
        codes: uint8, the shape of the float tensor, contiguous.
        scale: of "float8" codes (rows, ceil(rest / block_size), 2) uint8, where a block's codes start and how dense
            they are; of "dynamic" ones (rows, ceil(rest / block_size)) fp32, the block's largest magnitude. A 0-D or
            1-D tensor is one row.
        block_size: elements per block.
        code: "float8_signed" or "dynamic_signed" (exp_avg), "float8_unsigned" or "dynamic_unsigned" (exp_avg_sq).
        dtype: float dtype that the tensor shows. Default: fp32.
    """

    codes: Tensor
    scale: Tensor
    block_size: int
    code: str

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, block_size: int, code: str, dtype: torch.dtype = torch.float32):
        """See the class."""
        if code not in DECODE:
            raise ValueError(f"code must be one of {sorted(DECODE)}, got {code!r}")
        wanted = scale_shape(codes.shape, block_size, code)
        if tuple(scale.shape) != wanted:
            raise ValueError(
                f"scale of codes {tuple(codes.shape)} in blocks of {block_size} must have shape "
                f"{wanted}, got {tuple(scale.shape)}"
            )
        if scale.dtype != scale_dtype(code):
            raise ValueError(f"scale of code {code!r} must be {scale_dtype(code)}, got {scale.dtype}")
        self = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device, requires_grad=False
        )
        self.codes, self.scale, self.block_size, self.code = codes, scale, block_size, code
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def zeros(
        cls, shape: torch.Size | tuple[int, ...], block_size: int, code: str, device: torch.device | None = None
    ) -> "Blockwise8bitTensor":
        """All-zero tensor of `shape`; the arguments are those of the class."""
        return cls(
            torch.zeros(shape, dtype=torch.uint8, device=device),
            torch.zeros(scale_shape(shape, block_size, code), dtype=scale_dtype(code), device=device),
            block_size,
            code,
        )

    @classmethod
    def from_float(
        cls, value: Tensor, block_size: int, code: str, second: Tensor | None = None
    ) -> "Blockwise8bitTensor":
        """Encode a float tensor to nearest.

        Args:
            value: any shape and float dtype.
            block_size: see the class, as `code`.
            code: see the class.
            second: for "float8_signed", the second moment of the same shape, which tells how fine small magnitudes
                must be. Default: the square of the value. Other codes don't need it.

        Raises:
            ValueError: a value is not finite, over 1e38, or negative in an unsigned code.
        """
        value = value.detach().float().contiguous()
        on_meta = value.device.type == "meta"
        if not on_meta and not bool((value.abs() <= 1e38).all()):
            raise ValueError(
                "cannot encode NaN, Inf or magnitudes over 1e38 in 8-bit state; load that of a healthy run"
            )
        if code.endswith("_unsigned") and not on_meta and bool((value < 0).any()):
            raise ValueError("a second moment must not be negative")
        if value.numel() == 0:
            return cls.zeros(value.shape, block_size, code, value.device)
        blocks = to_blocks(value, value.shape, block_size)
        if is_dynamic(code):
            encode = dynamic_codes.encode_signed if code == "dynamic_signed" else dynamic_codes.encode_unsigned
            encoded, scale = encode(blocks)
        elif code == "float8_unsigned":
            encoded, scale = math8.encode_exp_avg_sq(blocks, *math8.exponent_range(blocks))
        else:
            second = value.square() if second is None else second.detach().float().contiguous()
            low, _ = math8.exponent_range(to_blocks(second, value.shape, block_size))
            encoded, scale = math8.encode_exp_avg(blocks, low)
        codes = from_blocks(encoded, value.shape).contiguous()
        return cls(codes, scale.view(scale_shape(value.shape, block_size, code)), block_size, code)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Plain float tensor of the same shape, in `dtype` (default: the dtype that the tensor shows)."""
        blocks = to_blocks(self.codes, self.shape, self.block_size)
        value = DECODE[self.code](blocks, self.scale.flatten(0, 1))
        return from_blocks(value, self.shape).to(dtype or self.dtype)

    def same_layout(self, other: Tensor) -> bool:
        """Whether `other` is coded as this one, so that its codes can be copied."""
        return isinstance(other, Blockwise8bitTensor) and (other.block_size, other.code) == (self.block_size, self.code)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Inner tensors and metadata, for torch.compile and serialization."""
        return ["codes", "scale"], {"block_size": self.block_size, "code": self.code, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: dict[str, Any], outer_size: Any, outer_stride: Any):
        """Inverse of `__tensor_flatten__`."""
        return cls(inner["codes"], inner["scale"], **meta)

    def share_memory_(self) -> "Blockwise8bitTensor":
        """Move both inner tensors to shared memory, in place."""
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether both inner tensors are in shared memory."""
        return self.codes.is_shared() and self.scale.is_shared()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def like(self, codes: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> "Blockwise8bitTensor":
        """A tensor of other inner tensors with the remaining fields of this one."""
        return type(self)(codes, scale, self.block_size, self.code, dtype or self.dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """torch.save, pickle, copy."""
        return reduced(self)

    def _stable_hash_for_caching(self) -> str:
        """Key of torch.compile's caches."""
        return cache_key(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"block_size={self.block_size}, code={self.code!r})"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handlers are here and in blockwise_ops."""
        return OPS.dispatch(func, args, kwargs)


@OPS.implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, x: Blockwise8bitTensor) -> Any:
    """nn.Parameter, state_dict and torch.optim's bookkeeping."""
    return view_of(func, x, (), lambda: x.like(func(x.codes), func(x.scale)))


@OPS.implements(aten.clone.default)
def _clone(func: Any, x: Blockwise8bitTensor, *, memory_format: Any = None) -> Any:
    """Deepcopy of an optimizer."""
    return x.like(x.codes.clone(), x.scale.clone())


@OPS.implements(aten._to_copy.default)
def _to_copy(func: Any, x: Blockwise8bitTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """`.to`, `.cpu`, `.cuda`: the dtype changes in appearance only, the device moves both inner tensors."""
    shown = float_dtype(dtype, x.dtype, OPS.owner)
    move = {"device": device, "non_blocking": options.get("non_blocking", False), "copy": True}
    return x.like(x.codes.to(**move), x.scale.to(**move), shown)


@OPS.implements(aten.copy_.default)
def _copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Copy codes between equal layouts, otherwise decode, or encode to nearest."""
    if not isinstance(x, Blockwise8bitTensor):
        return x.copy_(source.dequantize(), non_blocking)  # type: ignore[attr-defined]
    if x.shape != source.shape:
        raise ValueError(
            f"copy_ into a Blockwise8bitTensor takes its shape {tuple(x.shape)}, got {tuple(source.shape)}"
        )
    if not x.same_layout(source):
        value = source.dequantize() if isinstance(source, Blockwise8bitTensor) else source
        source = Blockwise8bitTensor.from_float(value, x.block_size, x.code)
    x.codes.copy_(source.codes, non_blocking)  # type: ignore[attr-defined]
    x.scale.copy_(source.scale, non_blocking)  # type: ignore[attr-defined]
    return x


torch.serialization.add_safe_globals([Blockwise8bitTensor])
