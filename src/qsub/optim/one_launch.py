"""Backend "triton": the step of all parameters of a group on one device in one launch.

What rarely changes is in a `Plan`, which is checked at each step and made anew when the state was replaced. The
addresses of parameters and gradients are compared with those of the last step and uploaded if one changed. Nothing
here waits for the device.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from qsub.optim import adam_kernel as kernel
from qsub.optim import state_dict as states
from qsub.optim.hyper import HyperTensor, upload
from qsub.optim.plan import PROGRAMS, Plan
from qsub.tensors.rowwise import Int8RowwiseTensor

_LANES = 128  # parameters per program of prepare_kernel
_ELEMENTS_PER_WARP = 512

WriteBack = Callable[[Tensor, Tensor, Tensor, HyperTensor], None]


def check_device(device: torch.device) -> None:
    """ValueError unless Triton's kernels run on `device`."""
    if device.type != "cuda" and type(kernel.adam_kernel).__name__ != "InterpretedFunction":
        raise ValueError(
            f"backend='triton' needs CUDA parameters, got one on {device}. Leave backend None, or set "
            "TRITON_INTERPRET=1 before qsub is imported to run the kernel in Triton's interpreter."
        )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class OneLaunch:
    """The plans of an optimizer, and their launches."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, torch.device], Plan] = {}
        self._unaligned: set[int] = set()
        self._pinned: dict[tuple[int, torch.device], Tensor] = {}  # for the next capture
        self._captured: list[Any] = []  # what CUDA graphs read at each replay, kept alive

    def step(
        self,
        key: tuple[int, torch.device],
        group: dict[str, Any],
        all_states: Any,
        params: list[Tensor],
        grads: list[Tensor],
        hyper: HyperTensor,
        write_back: WriteBack,
    ) -> None:
        """Step `params`, which `plan.takes` takes and which have a state, with `grads`.

        Args:
            key: index of the group, and device of the parameters.
            group: the group's options.
            all_states: the optimizer's state.
            params: parameters of the group on that device that have a gradient.
            grads: their gradients.
            hyper: the group's hyper-parameters on that device.
            write_back: called with an int8 weight, its new value, its step and `hyper` after the launch.

        Raises:
            RuntimeError: a CUDA graph is being captured and there was no step like this one before.
        """
        grads = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
        plan = self._plan(key, group, all_states, params, grads)
        values = {slot: _value(plan.params[slot]) for slot in plan.staged}
        pointers = _pointers(plan, params, grads, values)
        table = plan.pointers
        if pointers != plan.uploaded or _capturing(key[1]):
            if not self._fits(plan, pointers):
                plan = self._make(key, group, all_states, plan.params, plan.grad_dtypes)
                values = {slot: _value(plan.params[slot]) for slot in plan.staged}
                pointers = _pointers(plan, params, grads, values)
            table = self._upload(key, plan, pointers, hyper)
        device = key[1]
        other = device.type == "cuda" and device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if other else contextlib.nullcontext():
            _launch(plan, table, group, hyper)
        for slot, value in values.items():
            param = plan.params[slot]
            if not pointers[2 * slot + 1]:
                continue
            if isinstance(param, Int8RowwiseTensor):
                write_back(param, value, plan.steps[slot], hyper)
            else:
                param.copy_(value)

    def _plan(
        self, key: tuple[int, torch.device], group: dict[str, Any], all_states: Any, params: list[Tensor], grads: Any
    ) -> Plan:
        plan = self._plans.get(key)
        ids = [id(param) for param in params]
        dtypes = [grad.dtype for grad in grads]
        if plan is not None and plan.options == (states.moment_keys(group), group["block_size"]):
            if ids == plan.ids:
                same = dtypes == plan.grad_dtypes
            else:
                slots = [plan.slots.get(ident, -1) for ident in ids]
                same = min(slots) >= 0 and all(
                    plan.grad_dtypes[s] == dtype for s, dtype in zip(slots, dtypes, strict=True)
                )
            if same and plan.is_current(all_states):
                return plan
        elif plan is None:
            return self._make(key, group, all_states, params, dtypes)
        # Keep those that have no gradient this time, so that gradients that come and go need no new plan.
        known = dict(zip(ids, dtypes, strict=True))
        kept = [] if plan is None else [p for p in plan.params if id(p) not in known and all_states.get(p)]
        here = {id(param) for param in group["params"] if param.device == key[1]}
        kept = [p for p in kept if id(p) in here]
        before = {} if plan is None else dict(zip(plan.ids, plan.grad_dtypes, strict=True))
        return self._make(key, group, all_states, [*params, *kept], [*dtypes, *(before[id(p)] for p in kept)])

    def _make(
        self,
        key: tuple[int, torch.device],
        group: dict[str, Any],
        all_states: Any,
        params: list[Tensor],
        dtypes: list[torch.dtype],
    ) -> Plan:
        if _capturing(key[1]):
            raise RuntimeError(
                "the tables of this step must exist before a CUDA graph is captured: take at least one step with the "
                "same parameters, gradients and state outside of the capture first"
            )
        moments = states.moment_keys(group)
        plan = Plan(params, dtypes, [all_states[p] for p in params], moments, group["block_size"], self._unaligned)
        self._plans[key] = plan
        if group["capturable"] and key[1].type == "cuda":
            self._pinned[key] = torch.empty(len(params), 2, dtype=torch.int64, pin_memory=True)
        return plan

    def _fits(self, plan: Plan, pointers: list[int]) -> bool:
        """Whether new addresses suit the plan: parameters of the same dtype and layout, aligned where it says so."""
        if pointers[::2] != plan.uploaded[::2] and not plan.has_forms():
            return False
        bad = {
            ident
            for slot, ident in enumerate(plan.ids)
            if plan.aligned[slot] and (pointers[2 * slot] | pointers[2 * slot + 1]) & 15
        }
        self._unaligned |= bad
        return not bad

    def _upload(self, key: tuple[int, torch.device], plan: Plan, pointers: list[int], hyper: HyperTensor) -> Tensor:
        values = torch.tensor(pointers, dtype=torch.int64).view(-1, 2)
        if not _capturing(key[1]):
            upload(plan.pointers, values)
            plan.uploaded = pointers
            return plan.pointers
        # The graph copies its table from pinned memory at each replay: both are its own, and stay as they are.
        pinned = self._pinned.pop(key, None)
        if pinned is None or pinned.shape != values.shape:
            pinned = torch.empty_like(values, pin_memory=True)
        pinned.copy_(values)
        table = torch.empty_like(plan.pointers)
        table.copy_(pinned, non_blocking=True)
        self._captured.append((pinned, table, plan, hyper))
        return table


def _value(param: Tensor) -> Tensor:
    """Contiguous float copy of a parameter that the kernel can't write in place."""
    if isinstance(param, Int8RowwiseTensor):
        return param.dequantize(torch.float32)
    return param.detach().contiguous()


def _pointers(plan: Plan, params: list[Tensor], grads: list[Tensor], values: dict[int, Tensor]) -> list[int]:
    """Address of each parameter of the plan and of its gradient (0: it has none), one after the other."""
    pointers = [0] * (2 * len(plan.ids))
    if len(params) == len(plan.ids) and [id(param) for param in params] == plan.ids:
        pointers[::2] = map(Tensor.data_ptr, params)
        pointers[1::2] = map(Tensor.data_ptr, grads)
    else:
        for param, grad in zip(params, grads, strict=True):
            slot = plan.slots[id(param)]
            pointers[2 * slot], pointers[2 * slot + 1] = param.data_ptr(), grad.data_ptr()
    for slot, value in values.items():
        pointers[2 * slot] = value.data_ptr()
    return pointers


def _launch(plan: Plan, pointers: Tensor, group: dict[str, Any], hyper: HyperTensor) -> None:
    count = len(plan.ids)
    kernel.prepare_kernel[(triton.cdiv(count, _LANES),)](
        pointers,
        plan.steps,
        plan.scalars,
        hyper.tensor,
        hyper.seed,
        count,
        LANES=_LANES,
        num_warps=4,
        enable_fp_fusion=True,
    )
    block_size: int = group["block_size"]
    kernel.adam_kernel[(plan.programs.shape[0] * PROGRAMS,)](
        plan.programs,
        plan.table,
        pointers,
        plan.scalars,
        hyper.tensor,
        KINDS=plan.kinds,
        BLOCK_SIZE=block_size,
        BLOCKS=plan.blocks,
        PROGRAMS=PROGRAMS,
        DECOUPLED=group["decoupled_weight_decay"],
        AMSGRAD=group["amsgrad"],
        STOCHASTIC=group["stochastic_round"],
        num_warps=max(1, plan.blocks * block_size // _ELEMENTS_PER_WARP),
        enable_fp_fusion=True,
    )
