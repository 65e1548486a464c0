"""Backend "triton": the step of all parameters of a group on one device in one launch.

What rarely changes is in a `Plan`, which is checked at each step and made anew when the state was replaced. The
addresses of parameters and gradients are compared with those of the last step and uploaded if one changed. Nothing
here waits for the device.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from qsub.kernel_launch import cdiv, launch
from qsub.optim.adam_kernel import adam_kernel
from qsub.optim.edits import has_form
from qsub.optim.hyper import HyperTensor, is_capturing, upload
from qsub.optim.plan import PROGRAMS, Plan, takes
from qsub.optim.requantize_kernel import requantize
from qsub.optim.scalars_kernel import prepare_kernel
from qsub.optim.sharding import local
from qsub.optim.step import LEAST_ROOT, N_HYPER
from qsub.tensors.rowwise import Int8RowwiseTensor

__all__ = ["OneLaunch", "check_device", "takes"]

_LANES = 128  # parameters per program of prepare_kernel
_ELEMENTS_PER_WARP = 512
# 96 registers let 21 programs run on a multiprocessor; left alone ptxas takes up to 128 (3% slower on an H200), and
# with 80 it has no room to load ahead (10% slower).
_OPTIONS: dict[str, Any] = {"maxnreg": 96}

_STAGED = 1 << 27  # elements of int8 weights that are float at a time: 512 MiB
_NOWHERE = 16  # address of a gradient without elements: it is there, but never read


def check_device(device: torch.device) -> None:
    """ValueError unless Triton's kernels run on `device`."""
    if device.type != "cuda" and type(adam_kernel).__name__ != "InterpretedFunction":
        raise ValueError(
            f"backend='triton' needs CUDA parameters, got one on {device}. Leave backend None, or set "
            "TRITON_INTERPRET=1 before qsub is imported to run the kernel in Triton's interpreter."
        )


class OneLaunch:
    """The plans of an optimizer, and their launches."""

    def __init__(self) -> None:
        self._plans: dict[int, dict[torch.device, Plan]] = {}  # of each group
        self._unaligned: set[int] = set()
        self._captured: list[Any] = []  # what CUDA graphs read at each replay, kept alive

    def repeated(
        self, index: int, group: dict[str, Any], all_states: Any, params: list[Tensor], grads: list[Tensor]
    ) -> Plan | None:
        """The plan of the group's last step, if that was for all of these parameters and still holds."""
        plans = self._plans.get(index)
        if not plans or len(plans) > 1:
            return None
        plan = next(iter(plans.values()))
        same = plan.covers_group and list(map(id, params)) == plan.ids and plan.suits(group, grads)
        return plan if same and plan.is_current(all_states) else None

    def plan(
        self,
        key: tuple[int, torch.device],
        group: dict[str, Any],
        all_states: Any,
        params: list[Tensor],
        grads: list[Tensor],
    ) -> Plan:
        """The plan for these parameters, made anew if need be.

        Args:
            key: index of the group, and device of the parameters.
            group: the group's options.
            all_states: the optimizer's state.
            params: parameters that `takes` takes, with a state.
            grads: their gradients.
        """
        index, device = key
        plan = self._plans.setdefault(index, {}).get(device)
        dtypes = {id(param): grad.dtype for param, grad in zip(params, grads, strict=True)}
        kept: list[Tensor] = []
        if plan is not None:
            known = dict(zip(plan.ids, plan.grad_dtypes, strict=True))
            same = all(known.get(ident) == dtype for ident, dtype in dtypes.items())
            same = same and (len(dtypes) < len(known) or list(dtypes) == plan.ids)  # all of them only in its order
            if same and plan.suits(group) and plan.is_current(all_states):
                return plan
            # Keep those that have no gradient this time: gradients that come and go need no new plan.
            here = {id(param) for param in group["params"] if local(param).device == device}
            others = [p for p in plan.params if id(p) not in dtypes and id(p) in here]
            kept = [p for p in others if has_form(p, group, all_states.get(p))]
            dtypes.update({id(p): known[id(p)] for p in kept})
        return self._make(key, group, all_states, [*params, *kept], list(dtypes.values()))

    def _make(
        self,
        key: tuple[int, torch.device],
        group: dict[str, Any],
        all_states: Any,
        params: list[Tensor],
        dtypes: list[torch.dtype],
    ) -> Plan:
        index, device = key
        if is_capturing(device):
            raise RuntimeError(
                "the tables of this step must exist before a CUDA graph is captured: take at least one step with the "
                "same parameters, gradients and state outside of the capture first"
            )
        with torch.inference_mode(False):  # the plan outlives a step that is taken in that mode
            plan = Plan(params, dtypes, [all_states[p] for p in params], group, index, self._unaligned)
        self._plans[index][device] = plan
        return plan

    def launch(
        self,
        plan: Plan,
        group: dict[str, Any],
        all_states: Any,
        params: list[Tensor],
        grads: list[Tensor],
        hyper: HyperTensor,
    ) -> None:
        """Step `params`, all of them or some of the plan's, with `grads`.

        Int8 weights are float for the launch. If there are many, several launches keep that memory bounded.

        Args:
            plan: of these parameters.
            group: the group's options.
            all_states: the optimizer's state.
            params: parameters that have a gradient.
            grads: their local gradients.
            hyper: the group's hyper-parameters on that device.

        Raises:
            RuntimeError: a CUDA graph is being captured and there was no step like this one before.
        """
        if not all(map(Tensor.is_contiguous, grads)):
            grads = [grad.contiguous() for grad in grads]
        for some in self._waves(plan, params):
            plan = self._launch_some(plan, group, all_states, params[some], grads[some], hyper)

    @staticmethod
    def _waves(plan: Plan, params: list[Tensor]) -> list[slice]:
        """Ranges of parameters of a launch each: all of them, unless copies of them would take much memory."""
        staged = {plan.ids[slot] for slot in plan.staged}
        if not staged or is_capturing(plan.device):
            return [slice(0, len(params))]
        waves, start, elements = [], 0, 0
        for place, param in enumerate(params):
            size = local(param).numel() if id(param) in staged else 0
            if elements and elements + size > _STAGED:
                waves.append(slice(start, place))
                start, elements = place, 0
            elements += size
        return [*waves, slice(start, len(params))]

    def _launch_some(
        self,
        plan: Plan,
        group: dict[str, Any],
        all_states: Any,
        params: list[Tensor],
        grads: list[Tensor],
        hyper: HyperTensor,
    ) -> Plan:
        """One launch; returns the plan, made anew if the addresses no longer suit it."""
        values = _values(plan, params)
        pointers = _pointers(plan, params, grads, values)
        table = plan.pointers
        if pointers != plan.uploaded or is_capturing(plan.device):
            if not all(pointers[1::2]) and any(map(Tensor._is_zerotensor, grads)):  # zeros that are not in memory
                grads = [grad.clone() if grad._is_zerotensor() else grad for grad in grads]
                pointers = _pointers(plan, params, grads, values)
            if not self._fits(plan, pointers):
                covers = plan.covers_group
                plan = self._make((plan.index, plan.device), group, all_states, plan.params, plan.grad_dtypes)
                plan.covers_group = covers
                values = _values(plan, params)
                pointers = _pointers(plan, params, grads, values)
            table = self._upload(plan, pointers, hyper)
        other = plan.device.type == "cuda" and plan.device.index != torch.cuda.current_device()
        with torch.cuda.device(plan.device) if other else contextlib.nullcontext():
            _launch(plan, table, group, hyper)
            for slot, value in values.items():
                part = local(plan.params[slot])
                if isinstance(part, Int8RowwiseTensor):
                    requantize(part, value, plan.steps[slot], hyper, plan.first_rows[slot])
                else:
                    part.copy_(value)
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

    def _upload(self, plan: Plan, pointers: list[int], hyper: HyperTensor) -> Tensor:
        values = torch.tensor(pointers, dtype=torch.int64, device="cpu").view(-1, 2)
        if not is_capturing(plan.device):
            upload(plan.pointers, values)
            plan.uploaded = pointers
            return plan.pointers
        # The graph copies its table from pinned memory at each replay: both are its own, and stay as they are.
        pinned, plan.pinned = plan.pinned, None
        if pinned is None:
            pinned = torch.empty_like(values, pin_memory=True)
        pinned.copy_(values)
        table = torch.empty_like(plan.pointers)
        table.copy_(pinned, non_blocking=True)
        self._captured.append((pinned, table, plan, hyper))
        return table


def _values(plan: Plan, params: list[Tensor]) -> dict[int, Tensor]:
    """Contiguous float copies, by slot, of those of `params` that the kernel can't write in place."""
    if not plan.staged:
        return {}
    here, values = set(map(id, params)), {}
    for slot in plan.staged:
        if plan.ids[slot] in here:
            part = local(plan.params[slot])
            int8 = isinstance(part, Int8RowwiseTensor)
            values[slot] = part.dequantize(torch.float32) if int8 else part.detach().contiguous()
    return values


def _pointers(plan: Plan, params: list[Tensor], grads: list[Tensor], values: dict[int, Tensor]) -> list[int]:
    """Address of each parameter of the plan and of its gradient (0: it has none), one after the other."""
    pointers = [0] * (2 * len(plan.ids))
    parts = map(local, params) if plan.sharded else params
    if len(params) == len(plan.ids):
        pointers[::2] = map(Tensor.data_ptr, parts)
        pointers[1::2] = map(Tensor.data_ptr, grads)
        for slot in plan.empty:
            pointers[2 * slot + 1] = _NOWHERE
    else:
        for param, part, grad in zip(params, parts, grads, strict=True):
            slot = plan.slots[id(param)]
            pointers[2 * slot] = part.data_ptr()
            pointers[2 * slot + 1] = grad.data_ptr() if part.numel() else _NOWHERE
    for slot, value in values.items():
        pointers[2 * slot] = value.data_ptr()
    return pointers


def _launch(plan: Plan, pointers: Tensor, group: dict[str, Any], hyper: HyperTensor) -> None:
    count, decoupled, block_size = len(plan.ids), group["decoupled_weight_decay"], group["block_size"]
    changed = hyper.take_changed()
    values = [0.0] * (1 + N_HYPER) if changed is None else [1.0, *changed]
    grid = (cdiv(count, _LANES), 1, 1)
    arguments = (pointers, plan.steps, plan.scalars, hyper.tensor, hyper.seed, count, *values)
    launch(prepare_kernel, grid, arguments, (_LANES, decoupled), warps=4, **_OPTIONS)
    if not plan.programs.shape[0]:  # shards without rows alone
        return
    constants = (
        plan.kinds,
        block_size,
        plan.blocks,
        PROGRAMS,
        decoupled,
        group["amsgrad"],
        group["stochastic_round"],
        float(group["eps"]) < LEAST_ROOT,
    )
    grid = (plan.programs.shape[0] * PROGRAMS, 1, 1)
    warps = max(1, plan.blocks * block_size // _ELEMENTS_PER_WARP)
    launch(adam_kernel, grid, (plan.programs, plan.table, pointers, plan.scalars), constants, warps, **_OPTIONS)
