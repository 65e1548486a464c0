"""What one launch needs to know of the parameters of a group on one device, in device memory."""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsub.optim import adam_kernel as kernel
from qsub.optim.hyper import upload
from qsub.optim.scalars_kernel import N_SCALARS
from qsub.optim.sharding import first_block, local, offsets
from qsub.optim.state_dict import check_form, is_8bit, moment_keys
from qsub.tensors.blocks import row_shape
from qsub.tensors.blockwise import Blockwise8bitTensor
from qsub.tensors.rowwise import Int8RowwiseTensor

PROGRAMS = 8  # programs per entry of the program map
_TILE = 512  # elements per program, of one warp: the fastest on an H200 (benchmarks/optim_step.py)
_ALIGNED_FLOAT = 1 << 16  # fewer elements with fp32 state take the ragged layout, to compile one layout less
# Layouts by the elements that row lengths are multiples of; 0 where there are no rows.
_LAYOUTS = {0: kernel.FLAT.value, 16: kernel.ROWS.value, 8: kernel.QUADS.value, 4: kernel.QUADS.value}
_LAYOUTS |= {2: kernel.RAGGED.value, 1: kernel.RAGGED.value}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as adam_kernel numbers them


def takes(param: Tensor, grad: Tensor, group: dict[str, Any]) -> bool:
    """Whether the launch takes this parameter; the others (fp64, dynamic codes) step one by one."""
    coded = group["state_code"] != "block_float8" and is_8bit(param, group)
    part = local(param)
    return kernel_dtype(part) in _DTYPES and grad.dtype in _DTYPES and not coded


def kernel_dtype(param: Tensor) -> torch.dtype:
    """Dtype in which the kernel sees a parameter: an int8 weight is dequantized for it."""
    return torch.float32 if isinstance(param, Int8RowwiseTensor) else param.dtype


def _form(param: Tensor) -> tuple[Any, ...]:
    return param.dtype, param.shape, param.stride()


def _options(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(map(group.get, ("amsgrad", "block_size", "state_code", "state_bits", "min_8bit_size")))


@dataclass
class _Row:
    """One parameter: its row of the table, its state tensors in the order of their addresses, its work."""

    layout: int
    last: int  # layout of the last chunk
    count: int
    length: int
    row_blocks: int
    blocks: int
    chunks: int
    first: int
    values: list[Tensor]
    scales: list[Tensor | None]  # None for a moment in fp32

    def columns(self) -> list[int]:
        row = [0] * kernel.N_COLUMNS.value
        for place, tensor in enumerate(self.values):
            row[kernel.MOMENT.value + place] = tensor.data_ptr()
        for place, tensor in enumerate(self.scales):
            row[kernel.SCALE.value + place] = 0 if tensor is None else tensor.data_ptr()
        row[kernel.LENGTH.value], row[kernel.ROW_BLOCKS.value] = self.length, self.row_blocks
        row[kernel.BLOCK_COUNT.value], row[kernel.COUNT.value] = self.blocks, self.count
        row[kernel.FIRST_BLOCK.value] = self.first
        return row

    def tensors(self) -> list[Tensor]:
        return [*self.values, *(scale for scale in self.scales if scale is not None)]

    def work(self) -> list[tuple[int, int, int]]:
        """Layout, first chunk and number of chunks: of all of them, or of all but the last one and of that."""
        if self.layout == self.last or not self.chunks:
            return [(self.layout, 0, self.chunks)]
        body = [(self.layout, 0, self.chunks - 1)] if self.chunks > 1 else []
        return [*body, (self.last, self.chunks - 1, 1)]


def _describe(param: Tensor, moments: list[Any], block_size: int, blocks: int, aligned: bool) -> _Row:
    part = local(param)
    where = f"state of a parameter of shape {tuple(param.shape)} on {part.device}"
    is_8bit, count = isinstance(moments[0], Blockwise8bitTensor), part.numel()
    values = [moment.codes if isinstance(moment, Blockwise8bitTensor) else moment for moment in moments]
    scales = [moment.scale if isinstance(moment, Blockwise8bitTensor) else None for moment in moments]
    if is_8bit:
        grouped = moments[0].rows_per_block
        (rows, length), total = row_shape(part.shape, grouped), math.prod(moments[0].scale.shape[:2])
        first, chunks = first_block(param, block_size, grouped), -(-total // blocks)
        flat = rows <= 1 or length % block_size == 0
        length, row_blocks = (count, total) if flat else (length, total // rows)
        rest = count % (16 if flat else length)  # what a wide access must not touch
        step = 0 if flat else math.gcd(length, 16)
        layout, ragged = _LAYOUTS[step], kernel.RAGGED.value
    else:
        first, chunks = first_block(param, 1), -(-count // (blocks * block_size))
        length, row_blocks, total, rest = count, 1, count, count % 16
        layout, ragged = kernel.FLOAT.value, kernel.FLOAT_RAGGED.value
        aligned = aligned and count >= _ALIGNED_FLOAT
    layout = layout if aligned and not any(tensor.data_ptr() & 15 for tensor in values) else ragged
    row = _Row(layout, ragged if rest else layout, count, length, row_blocks, total, chunks, first, values, scales)
    if not all(tensor.is_contiguous() and tensor.device == part.device for tensor in row.tensors()):
        raise ValueError(f"{where} must be contiguous and on that device. Load it with load_state_dict.")
    return row


def _program_map(work: list[tuple[int, int, int, int]]) -> Tensor:
    """(entries, 3) int32 of PROGRAMS programs each, as `adam_kernel` takes them.

    Chunks of a kind follow each other, small parameters first: the kinds run different code, and a multiprocessor
    that goes back and forth between them has to fetch it again and again.

    Args:
        work: kind, slot of the parameter, first chunk and number of chunks.
    """
    table = torch.tensor(sorted(work, key=lambda entry: (-entry[0], entry[1])), device="cpu").view(-1, 4)
    entries = -(-table[:, 3] // PROGRAMS)
    kind, slot, first, chunks = torch.repeat_interleave(table, entries, dim=0).unbind(1)
    place = torch.arange(len(kind), device="cpu") - torch.repeat_interleave(entries.cumsum(0) - entries, entries)
    left = (chunks - place * PROGRAMS).clamp(max=PROGRAMS)
    return torch.stack([slot, first + place * PROGRAMS, kind | left << 8], dim=1).to(torch.int32)


def _gather_steps(states: list[dict[str, Any]], device: torch.device) -> Tensor:
    """The step counts in one tensor on `device`."""
    counts: list[Tensor] = [state["step"].detach() for state in states]
    steps = torch.empty(len(counts), dtype=torch.float32, device=device)
    here = [slot for slot, count in enumerate(counts) if count.device == device]
    if len(here) == len(counts):
        return torch.stack(counts, out=steps)
    if not here:
        upload(steps, torch.stack(counts).float())
        return steps
    for slot, count in enumerate(counts):
        steps[slot].copy_(count, non_blocking=True)
    return steps


class Plan:
    """Tables of the parameters of a group on one device.

    Args:
        params: the parameters, some of them DTensors perhaps; each has a state.
        grad_dtypes: dtype of the gradient of each.
        states: their optimizer states. Each state's "step" becomes a view of `steps`.
        group: the group's options.
        index: of the group.
        unaligned: ids of parameters that came with addresses that are no multiple of 16 bytes.

    Raises:
        ValueError: a state has another block size than the group, or is not where its parameter is.
    """

    def __init__(
        self,
        params: list[Tensor],
        grad_dtypes: list[torch.dtype],
        states: list[dict[str, Any]],
        group: dict[str, Any],
        index: int,
        unaligned: set[int],
    ) -> None:
        self.params, self.grad_dtypes, self.index = params, grad_dtypes, index
        parts = [local(param) for param in params]
        self.device = device = parts[0].device
        self.sharded = any(part is not param for part, param in zip(parts, params, strict=True))
        self.ids = [id(param) for param in params]
        self.slots = {ident: slot for slot, ident in enumerate(self.ids)}
        self.staged = [
            slot for slot, p in enumerate(parts) if isinstance(p, Int8RowwiseTensor) or not p.is_contiguous()
        ]
        self.first_rows = {slot: sum(offsets(params[slot])[:1]) for slot in self.staged}
        self.covers_group = False  # the last step was for all of these, and for no other parameter of the group
        self._forms = [_form(part) for part in parts]
        self._dtypes = [param.dtype for param in params]
        self._sizes = [part.numel() for part in parts]
        self._contiguous = [part.is_contiguous() for part in parts]
        self._options = _options(group)
        keys, block_size = moment_keys(group), group["block_size"]
        self.blocks = max(1, _TILE // block_size)
        for param, state in zip(params, states, strict=True):
            check_form(param, group, state)
        rows = [
            _describe(param, [state[key] for key in keys], block_size, self.blocks, id(param) not in unaligned)
            for param, state in zip(params, states, strict=True)
        ]
        work = [
            (layout * 9 + _DTYPES[kernel_dtype(part)] * 3 + _DTYPES[dtype], slot, first, chunks)
            for slot, (row, part, dtype) in enumerate(zip(rows, parts, grad_dtypes, strict=True))
            for layout, first, chunks in row.work()
        ]
        # A shard may have no rows here. It has no programs then, but its step counts, as on the other ranks.
        self.empty = [slot for slot, part in enumerate(parts) if part.numel() == 0]
        self.kinds: int = functools.reduce(operator.or_, (1 << kind for kind, _, _, chunks in work if chunks), 0)
        self.aligned = [row.layout not in (kernel.RAGGED.value, kernel.FLOAT_RAGGED.value) for row in rows]
        self.steps = _gather_steps(states, device)
        for state, view in zip(states, self.steps.unbind(), strict=True):
            state["step"] = view
        self._states = states
        self._held = {key: [state[key] for state in states] for key in ("step", *keys)}
        self._tensors = [tensor for row in rows for tensor in row.tensors()]
        moments = [state[key] for state in states for key in keys]
        shared = [moment for moment in moments if getattr(moment, "rows_per_block", 1) > 1]
        self._shared = [(moment, moment.scale) for moment in shared]  # a slice of one gives it other scales
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._seen: list[int] | None = None  # ids of the values of the optimizer's state when last looked through
        columns = [row.columns() for row in rows]
        table = torch.tensor(columns, dtype=torch.int64, device="cpu")
        self.table = torch.empty_like(table, device=device)
        upload(self.table, table)
        programs = _program_map(work)
        self.programs = torch.empty_like(programs, device=device)
        upload(self.programs, programs)
        self.scalars = torch.empty(len(rows), N_SCALARS.value, dtype=torch.int32, device=device)
        self.pointers = torch.empty(len(rows), 2, dtype=torch.int64, device=device)
        self.uploaded: list[int] = []  # what `pointers` holds: address of parameter, of gradient, of the next ...
        self.pinned: Tensor | None = None  # for a capture, during which none can be allocated
        if group["capturable"] and device.type == "cuda":
            self.pinned = torch.empty(len(rows), 2, dtype=torch.int64, device="cpu", pin_memory=True)

    def suits(self, group: dict[str, Any], grads: list[Tensor] | None = None) -> bool:
        """Whether the options, the dtypes of the parameters and (if given) of the gradients are the plan's.

        So must be what the kernel would read and write too much or in the wrong order of, were `.data` another view.
        """
        parts = list(map(local, self.params)) if self.sharded else self.params
        return (
            _options(group) == self._options
            and [param.dtype for param in self.params] == self._dtypes
            and list(map(Tensor.numel, parts)) == self._sizes
            and list(map(Tensor.is_contiguous, parts)) == self._contiguous
            and (grads is None or [grad.dtype for grad in grads] == self.grad_dtypes)
        )

    def has_forms(self) -> bool:
        """Whether the parameters have the dtypes, shapes and strides that they had when the plan was made."""
        return [_form(local(param)) for param in self.params] == self._forms

    def is_current(self, all_states: Mapping[Tensor, Any]) -> bool:
        """Whether the optimizer's state is still what the table points to."""
        seen = list(map(id, all_states.values()))
        if seen != self._seen:
            if any(all_states.get(param) is not state for param, state in zip(self.params, self._states, strict=True)):
                return False
            self._seen = seen
        try:
            for key, tensors in self._held.items():
                if not all(map(operator.is_, map(operator.itemgetter(key), self._states), tensors)):
                    return False
        except KeyError:
            return False
        if any(moment.scale is not scale for moment, scale in self._shared):
            return False
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses
