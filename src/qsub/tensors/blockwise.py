"""Blockwise8bitTensor: optimizer state in 8 bits an element and two or four bytes a block."""

from typing import Any

import torch
from torch import Tensor

from qsub.tensors import dynamic_codes
from qsub.tensors import state_codes as math8
from qsub.tensors.blocks import from_blocks, is_dynamic, row_shape, scale_dtype, scale_shape, to_blocks
from qsub.tensors.dispatch import OpTable, cache_key, float_dtype, reduced, view_of
from qsub.tensors.no_memory import NoMemory, seal

aten = torch.ops.aten
OPS = OpTable("Blockwise8bitTensor", "Call .dequantize() to get a plain float tensor.")
_PIECE = 1 << 21  # elements that are float at a time when rows are grouped

# Name of a code and its inverse. "signed" is exp_avg's, "unsigned" that of the second moments.
DECODE = {
    "float8_signed": math8.decode_exp_avg,
    "float8_unsigned": math8.decode_exp_avg_sq,
    "dynamic_signed": dynamic_codes.decode_signed,
    "dynamic_unsigned": dynamic_codes.decode_unsigned,
}


class _Scales:
    """The scales of a tensor and of all that share its memory."""

    def __init__(self, scale: Tensor, rows_per_block: int) -> None:
        self.scale, self.rows_per_block = scale, rows_per_block


class Blockwise8bitTensor(NoMemory, Tensor):
    """A float tensor stored as uint8 codes and a scale for each block of elements.

    Blocks run along the flattened trailing dimensions and never cross a row of dim 0, so any slice of rows is a
    slice of codes and of scales. See `qsub.tensors.state_codes` and `qsub.tensors.dynamic_codes` for the codes.

    Narrow rows may share blocks, `rows_per_block` whole rows each. Slices ask for a scale for each row: the tensor,
    with all that shares its memory, takes that form then (`ungroup_`), at the same values.

    Args:
        codes: uint8, the shape of the float tensor, contiguous.
        scale: of "float8" codes (rows, ceil(rest / block_size), 2) uint8, where a block's codes start and how dense
            they are; of "dynamic" ones (rows, ceil(rest / block_size)) fp32, the block's largest magnitude. A 0-D or
            1-D tensor is one row; rows that share a block count as one.
        block_size: elements per block.
        code: "float8_signed" or "dynamic_signed" (exp_avg), "float8_unsigned" or "dynamic_unsigned" (exp_avg_sq).
        dtype: float dtype that the tensor shows. Default: fp32.
        rows_per_block: 1, or how many rows share a block; together they have at most `block_size` elements.

    Raises:
        ValueError: the code is unknown, or the parts don't fit.
    """

    codes: Tensor
    block_size: int
    code: str
    _held: _Scales

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        block_size: int,
        code: str,
        dtype: torch.dtype = torch.float32,
        rows_per_block: int = 1,
    ):
        """See the class."""
        if code not in DECODE:
            raise ValueError(f"code must be one of {sorted(DECODE)}, got {code!r}")
        narrow = codes.dim() >= 2 and row_shape(codes.shape, rows_per_block)[1] <= block_size
        if rows_per_block != 1 and not (rows_per_block > 1 and narrow):
            raise ValueError(
                f"{rows_per_block} rows of codes {tuple(codes.shape)} don't fit into a block of {block_size}"
            )
        wanted = scale_shape(codes.shape, block_size, code, rows_per_block)
        if tuple(scale.shape) != wanted:
            raise ValueError(
                f"scale of codes {tuple(codes.shape)} in blocks of {block_size} must have shape "
                f"{wanted}, got {tuple(scale.shape)}"
            )
        if scale.dtype != scale_dtype(code):
            raise ValueError(f"scale of code {code!r} must be {scale_dtype(code)}, got {scale.dtype}")
        self = Tensor._make_wrapper_subclass(
            cls,
            codes.shape,
            strides=codes.stride(),
            dtype=float_dtype(dtype, dtype, "Blockwise8bitTensor"),
            device=codes.device,
            requires_grad=False,
        )
        seal(self)
        self.codes, self.block_size, self.code = codes, block_size, code
        self._held = _Scales(scale, rows_per_block)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def scale(self) -> Tensor:
        """The scales, see the class."""
        return self._held.scale

    @scale.setter
    def scale(self, value: Tensor) -> None:
        self._held = _Scales(value, self.rows_per_block)  # what shares this memory keeps its own

    @property
    def rows_per_block(self) -> int:
        """How many rows share a block."""
        held = self.__dict__.get("_held")
        return 1 if held is None else held.rows_per_block  # a file of an earlier version sets fields one by one

    @classmethod
    def zeros(
        cls,
        shape: torch.Size | tuple[int, ...],
        block_size: int,
        code: str,
        device: torch.device | None = None,
        rows_per_block: int = 1,
    ) -> "Blockwise8bitTensor":
        """All-zero tensor of `shape`; the arguments are those of the class."""
        scale = scale_shape(shape, block_size, code, rows_per_block)
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        scales = torch.zeros(scale, dtype=scale_dtype(code), device=device)
        return cls(codes, scales, block_size, code, torch.float32, rows_per_block)  # type: ignore[call-overload]

    @classmethod
    def from_float(
        cls, value: Tensor, block_size: int, code: str, second: Tensor | None = None, rows_per_block: int = 1
    ) -> "Blockwise8bitTensor":
        """Encode a float tensor to nearest.

        Args:
            value: any shape and float dtype.
            block_size: see the class, as `code`.
            code: see the class.
            second: for "float8_signed", the second moment of the same shape, which tells how fine small magnitudes
                must be. Default: the square of the value. Other codes don't need it.
            rows_per_block: see the class.

        Raises:
            ValueError: a value is not finite, over 1e38, or negative in an unsigned code.
        """
        value = value.detach().float().contiguous()
        on_meta = value.device.type == "meta"
        if not on_meta and not bool((value.abs() <= 1e38).all()):
            raise ValueError(
                "cannot encode NaN, Inf or magnitudes over 1e38 in 8-bit state: repair the floats (.dequantize()), or "
                "load a healthy run"
            )
        if code.endswith("_unsigned") and not on_meta and bool((value < 0).any()):
            raise ValueError("a second moment must not be negative")
        return cls._encode(value, block_size, code, second, rows_per_block)

    @classmethod
    def _encode(
        cls, value: Tensor, block_size: int, code: str, second: Tensor | None, rows_per_block: int
    ) -> "Blockwise8bitTensor":
        """`from_float` of contiguous fp32 that the code can hold."""
        if value.numel() == 0:
            return cls.zeros(value.shape, block_size, code, value.device, rows_per_block)
        width = min(block_size, row_shape(value.shape, rows_per_block)[1])  # short rows need no padding here
        blocks = to_blocks(value, value.shape, width, rows_per_block)
        if is_dynamic(code):
            encode = dynamic_codes.encode_signed if code == "dynamic_signed" else dynamic_codes.encode_unsigned
            encoded, scale = encode(blocks)
        elif code == "float8_unsigned":
            encoded, scale = math8.encode_exp_avg_sq(blocks, *math8.exponent_range(blocks))
        else:
            second = value.square() if second is None else second.detach().float().contiguous()
            low, _ = math8.exponent_range(to_blocks(second, value.shape, width, rows_per_block))
            encoded, scale = math8.encode_exp_avg(blocks, low)
        codes = from_blocks(encoded, value.shape, rows_per_block).contiguous()
        scale = scale.view(scale_shape(value.shape, block_size, code, rows_per_block))
        return cls(codes, scale, block_size, code, torch.float32, rows_per_block)  # type: ignore[call-overload]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Plain float tensor of the same shape, in `dtype` (default: the dtype that the tensor shows)."""
        if self.numel() == 0:
            return torch.zeros(self.shape, dtype=dtype or self.dtype, device=self.device)
        width = min(self.block_size, row_shape(self.shape, self.rows_per_block)[1])
        blocks = to_blocks(self.codes, self.shape, width, self.rows_per_block)
        value = DECODE[self.code](blocks, self.scale.flatten(0, 1))
        return from_blocks(value, self.shape, self.rows_per_block).to(dtype or self.dtype)

    def same_layout(self, other: Tensor) -> bool:
        """Whether `other` is coded as this one, so that its codes can be copied."""
        return isinstance(other, Blockwise8bitTensor) and (other.block_size, other.code) == (self.block_size, self.code)

    def row_scales(self) -> Tensor:
        """The scales with an entry for each row, also where rows share them."""
        rows = self.rows_per_block
        return self.scale if rows == 1 else self.scale.repeat_interleave(rows, 0)[: self.shape[0]]

    def by_rows(self) -> "Blockwise8bitTensor":
        """This tensor, or if rows share blocks, one of the same codes with scales for each row."""
        return self if self.rows_per_block == 1 else self.like(self.codes, self.row_scales(), rows_per_block=1)

    def ungroup_(self) -> "Blockwise8bitTensor":
        """Take scales for each row, here and in all that shares this memory; no value changes."""
        self._held.scale, self._held.rows_per_block = self.row_scales(), 1
        return self

    def grouped(self, rows_per_block: int, second: Tensor | None = None) -> "Blockwise8bitTensor":
        """A copy whose rows share blocks. Rows of a block that have different scales are encoded anew, to nearest.

        Args:
            rows_per_block: see the class.
            second: see `from_float`; of this shape, plain or coded.
        """
        if rows_per_block == self.rows_per_block:
            return self.like(self.codes.clone(), self.scale.clone())
        whole = self.by_rows()
        if rows_per_block == 1:
            return self.like(self.codes.clone(), self.row_scales(), rows_per_block=1)
        second = second.by_rows() if isinstance(second, Blockwise8bitTensor) else second
        pieces = []
        step = max(1, _PIECE // max(1, rows_per_block * row_shape(self.shape)[1])) * rows_per_block
        for start in range(0, max(1, self.shape[0]), step):
            part = slice(start, start + step)
            rows, floor = whole.like(whole.codes[part], whole.scale[part]), None if second is None else second[part]
            floor = floor.dequantize(torch.float32) if isinstance(floor, Blockwise8bitTensor) else floor
            pieces.append(rows._group(rows_per_block, floor))
        codes, scale = (torch.cat([getattr(piece, name) for piece in pieces]) for name in ("codes", "scale"))
        return self.like(codes, scale, rows_per_block=rows_per_block)

    def _group(self, rows_per_block: int, second: Tensor | None) -> "Blockwise8bitTensor":
        new = self._encode(self.dequantize(torch.float32), self.block_size, self.code, second, rows_per_block)
        missing = -self.shape[0] % rows_per_block
        pad = torch.nn.functional.pad
        # A row of zeros suits any scale: the first of the others is the block's.
        used = pad((self.codes != 0).flatten(1).any(1), (0, missing)).view(-1, rows_per_block)
        scales = pad(self.scale.flatten(1), (0, 0, 0, missing)).unflatten(0, used.shape)
        first = scales[torch.arange(len(used), device=used.device), used.int().argmax(1)]
        same = ((scales == first.unsqueeze(1)).all(2) | ~used).all(1)  # (blocks,)
        rows = same.repeat_interleave(rows_per_block)[: self.shape[0]].view(-1, *[1] * (self.dim() - 1))
        codes = torch.where(rows, self.codes, new.codes)
        scale = torch.where(same.view(-1, *[1] * (self.scale.dim() - 1)), first.view(new.scale.shape), new.scale)
        return self.like(codes, scale, rows_per_block=rows_per_block)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Inner tensors and metadata, for torch.compile and serialization."""
        shared = {"rows_per_block": self.rows_per_block} if self.rows_per_block > 1 else {}  # unknown to old readers
        return ["codes", "scale"], {"block_size": self.block_size, "code": self.code, "dtype": self.dtype, **shared}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: dict[str, Any], outer_size: Any, outer_stride: Any):
        """Inverse of `__tensor_flatten__`."""
        return cls(inner["codes"], inner["scale"], **meta)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def like(
        self, codes: Tensor, scale: Tensor, dtype: torch.dtype | None = None, rows_per_block: int | None = None
    ) -> "Blockwise8bitTensor":
        """A tensor of other inner tensors with the remaining fields of this one."""
        return type(self)(
            codes, scale, self.block_size, self.code, dtype or self.dtype, rows_per_block or self.rows_per_block
        )

    def alias(self, codes: Tensor) -> "Blockwise8bitTensor":
        """A tensor of the same memory: `codes` is an alias of those of this one, the scales are the same object."""
        made = self.like(codes, self.scale)
        made._held = self._held
        return made

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
    return view_of(func, x, (), lambda: x.alias(func(x.codes)))


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
    source = source if isinstance(source, Tensor) else torch.full(x.shape, float(source))
    if x.shape != source.shape:
        raise ValueError(
            f"copy_ into a Blockwise8bitTensor takes its shape {tuple(x.shape)}, got {tuple(source.shape)}"
        )
    if not x.same_layout(source):
        value = source.dequantize() if isinstance(source, Blockwise8bitTensor) else source
        source = Blockwise8bitTensor.from_float(value, x.block_size, x.code, rows_per_block=x.rows_per_block)
    their: Any = source
    if x.rows_per_block != their.rows_per_block:
        x, their = x.ungroup_(), their.by_rows()
    x.codes.copy_(their.codes, non_blocking)
    x.scale.copy_(their.scale, non_blocking)
    return x


torch.serialization.add_safe_globals([Blockwise8bitTensor])
