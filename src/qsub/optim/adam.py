"""Adam8bit and AdamW8bit: drop-in replacements of torch.optim.Adam and AdamW with 8-bit state."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from qsub.optim import fused_cpu
from qsub.optim import state_dict as states
from qsub.optim.compiled import resolve_backend, untraced
from qsub.optim.edits import take_edits
from qsub.optim.hyper import HyperTensor, check_capture, is_capturing
from qsub.optim.options import check_group, check_keys, check_options, check_param, check_rounding, checked_grad
from qsub.optim.per_parameter import step_parameter
from qsub.optim.sharding import local, local_grad


class Adam8bit(torch.optim.Optimizer):
    """torch.optim.Adam with 8-bit state.

    The step is torch.optim.Adam's (arXiv 1412.6980) in fp32; between steps the two moments are kept in 8 bits an
    element and two bytes for each block. See `qsub.optim.step` and `qsub.tensors.state_codes`.

    Parameters may be DTensors (`fully_shard`, tensor parallel): a step works on what this rank holds of them and calls
    no collective, and `state_dict` shows the moments as DTensors too.

    Args:
        params: parameters or parameter groups, as in torch.optim. A group may set any of the options below.
        lr: learning rate, a float or a 1-element tensor.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment; their sum counts as 2**-63 at least, so that 0 divides by 0 never.
        weight_decay: L2 penalty, added to the gradient (decoupled with `decoupled_weight_decay`).
        amsgrad: use the largest second moment so far (arXiv 1904.09237). It is kept in 8 bits, the second moment in
            fp32: 6.06 bytes a parameter. (state_code="dynamic" keeps all three in 8 bits.)
        foreach: only None or False; choose with `backend`.
        maximize: ascend rather than descend.
        capturable: the step may be captured in a CUDA graph (after one step outside of it).
        differentiable: only False.
        fused: None, False or True; every backend but "eager" is fused. As in torch.optim, True leaves the unscaling of
            gradients and the skipping of a step to the step itself, where a `torch.amp.GradScaler` is used: no wait for
            the device, but gradients can't be clipped between the two. None and False let the scaler do both.
        decoupled_weight_decay: AdamW's weight decay.
        block_size: elements that share a scale. A power of two from 16 to 4096.
        min_8bit_size: a parameter of fewer elements keeps fp32 state, whatever its dtype.
        state_bits: 8, or 32 for plain fp32 state (of a parameter group, say).
        state_code: "block_float8", or "dynamic", that of bitsandbytes and torchao (they use block_size=256), with an
            fp32 scale a block: for their checkpoints. Backend "triton" steps it one by one, compiled.
        stochastic_round: round bf16 parameters stochastically, so that updates under half an ulp count. Parameters of
            32 and 64 bits, in the same group or not, need no such rounding; those of fp16 are refused with it. Int8
            weights are rounded stochastically in any case.
        seed: of the random bits, which are a pure function of it, the step and the element's place.
        backend: "triton" (all parameters of a group in one launch), "compile", "eager", or None for the fastest that
            works on the device of the parameter.

    A group may have keys of the user's own beside the options, as in torch.optim. What looks like a misspelt option of
    qsub is refused.

    Raises:
        ValueError: an option out of its range, or an fp16 parameter with stochastic_round.
        TypeError: a parameter that is not a real floating point tensor, or a misspelt option in a group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        block_size: int = 64,
        min_8bit_size: int = 4096,
        state_bits: int = 8,
        state_code: str = "block_float8",
        stochastic_round: bool = False,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "block_size": block_size,
            "min_8bit_size": min_8bit_size,
            "state_bits": state_bits,
            "state_code": state_code,
            "stochastic_round": stochastic_round,
            "seed": seed,
        }
        check_options(defaults, backend)
        self.backend = backend
        self._hyper: dict[tuple[int, torch.device], HyperTensor] = {}
        self._launches: Any = None
        self._restored_forms: list[dict[str, Any]] = []  # options of each group that the last load restored
        super().__init__(params, defaults)
        self._announce_scaling()

    def _announce_scaling(self) -> None:
        """Tell torch.amp.GradScaler to leave unscaling and skipping to the step, where the user asked for fused=True.

        The attribute is there only then, as in torch.optim: Lightning and Fabric refuse to clip where they find it.
        """
        if self.defaults["fused"]:
            self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle keep; device tensors of hyper-parameters are rebuilt at the next step."""
        return {**super().__getstate__(), "backend": self.backend}  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`; torch.optim's load_state_dict calls it too."""
        super().__setstate__(state)
        self._hyper, self._launches, self._restored_forms = {}, None, []
        self._announce_scaling()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's, which keeps the dict as the group; what is refused leaves the optimizer as it was."""
        if isinstance(param_group, dict):
            # ZeroRedundancyOptimizer hands all keyword arguments on in each group, too.
            if "backend" in param_group and param_group["backend"] == self.backend:
                param_group = {key: value for key, value in param_group.items() if key != "backend"}
            params = param_group["params"]
            if not isinstance(params, (Tensor, set)):  # torch.optim refuses sets
                params = param_group["params"] = list(params)
            for entry in [params] if isinstance(params, Tensor) else params:
                check_param(entry[1] if isinstance(entry, tuple) else entry, type(self).__name__)
            check_keys(param_group)
            options = {**self.defaults, **param_group}
            check_options(options, self.backend)
            check_rounding(options, [params] if isinstance(params, Tensor) else params)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: called once with gradients enabled before the step; re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse.
            ValueError: an option out of range, or a state of another shape, was written.
            TypeError: an option that is not a number.
            NotImplementedError: a parameter is one that FSDP1 flattened, and would have 8-bit state.
                No parameter has been changed then.
        """
        if torch.compiler.is_dynamo_compiling():  # what is worth it is compiled already, once for all shapes
            return untraced(self._step, closure)
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work, owner = [], type(self).__name__
        for index, group in enumerate(self.param_groups):
            check_group(group)
            params: list[Tensor] = group["params"]
            grads = [grad for p in params if (grad := p.grad) is not None]
            if len(grads) < len(params):
                params = [p for p in params if p.grad is not None]
            if {grad.layout for grad in grads} - {torch.strided}:
                raise RuntimeError(f"{owner} does not support sparse gradients, please consider SparseAdam instead")
            work.append((index, group, params, grads, self._plan_of(index, group, params, grads)))
        # What is edited is encoded before anything is stepped: what can't be leaves all parameters as they were.
        take_edits(self.state, [(group, params) for _, group, params, _, plan in work if plan is None], owner)
        for index, group, params, grads, plan in work:
            if plan is not None:
                self._step_again(plan, group, params, grads)
            elif params:
                self._step_group(index, group, list(zip(params, grads, strict=True)))
            # Kernels and the row code write past autograd, which must tell a backward through the old values.
            torch.autograd.graph.increment_version(params)
        return loss

    def _plan_of(self, index: int, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> Any:
        """The plan of the group's last step by one launch, if all is as it was then; or None."""
        plan = self._launches and self._launches.repeated(index, group, self.state, params, grads)
        return plan if plan and params and not any(map(Tensor.is_neg, grads)) else None

    def _step_again(self, plan: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Step by one launch that is planned; this is what most steps are."""
        check_capture(group, plan.device, type(self).__name__)
        if plan.sharded:
            grads = [local_grad(param, grad) for param, grad in zip(params, grads, strict=True)]
        hyper = self._refresh_hyper(plan.index, group, plan.device, by_kernel=True)
        self._launches.launch(plan, group, self.state, params, grads, hyper)

    def _step_group(self, index: int, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Step a group: with backend "triton" what it takes of each device together, the rest one by one.

        From here on gradients are local: on the device, and of the shape, of what this rank holds of a parameter.
        """
        pairs = [(param, checked_grad(local(param), local_grad(param, grad))) for param, grad in pairs]
        devices = list(dict.fromkeys(local(param).device for param, _ in pairs))
        for device in devices:
            here = [pair for pair in pairs if local(pair[0]).device == device]
            check_capture(group, device, type(self).__name__)
            taken = []
            if resolve_backend(self.backend, device) == "triton":
                from qsub.optim import one_launch  # needs Triton, which not every platform has

                one_launch.check_device(device)
                # A parameter that is listed twice steps twice, which a launch can't: all at once.
                once = {id(pair[0]): pair for pair in here if one_launch.takes(*pair, group)}
                taken = list(once.values())
                here = [pair for pair in here if once.get(id(pair[0])) is not pair]
            if taken:
                for param, _ in taken:
                    states.init(self.state[param], group, param)
                self._launches = self._launches or one_launch.OneLaunch()
                params, grads = map(list, zip(*taken, strict=True))
                plan = self._launches.plan((index, device), group, self.state, params, grads)
                plan.covers_group = len(devices) == 1 and not here
                hyper = self._refresh_hyper(index, group, device, by_kernel=True)
                self._launches.launch(plan, group, self.state, params, grads, hyper)
            if resolve_backend(self.backend, device) == "compile" and device.type == "cpu":
                here = self._step_fused(group, here)
            for param, grad in here:
                self._step_param(index, group, param, grad)

    def _step_fused(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Step what torch's fused kernel for the CPU takes; returns the others."""
        taken = [pair for pair in pairs if fused_cpu.takes(*pair, group)]
        if taken:
            states_ = [states.init(self.state[param], group, param) for param, _ in taken]
            params, grads = map(list, zip(*taken, strict=True))
            scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            fused_cpu.step(group, params, grads, states_, *scaling)
        return [pair for pair in pairs if not fused_cpu.takes(*pair, group)]

    def _refresh_hyper(
        self, index: int, group: dict[str, Any], device: torch.device, by_kernel: bool = False
    ) -> HyperTensor:
        """The group's hyper-parameters on `device`, refreshed in place (`by_kernel`: by the launch)."""
        if (index, device) not in self._hyper:
            self._hyper[index, device] = HyperTensor(device)
        hyper = self._hyper[index, device]
        # torch.amp.GradScaler sets these two for an optimizer with `_step_supports_amp_scaling`
        by_kernel = by_kernel and not is_capturing(device)
        hyper.refresh(group, getattr(self, "grad_scale", None), getattr(self, "found_inf", None), by_kernel)
        return hyper

    def _step_param(self, index: int, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        """One parameter with backend "eager" or "compile"."""
        state = states.init(self.state[param], group, param)
        found_inf = getattr(self, "found_inf", None)
        count = state["step"]
        count += 1 if found_inf is None else 1 - found_inf.to(count.device).reshape(())
        part = local(param)
        if part.numel() == 0:
            return
        backend = resolve_backend(self.backend, part.device)
        if backend == "triton":  # a dtype or a code that the launch doesn't take
            backend = "compile"
        step_parameter(backend, group, param, grad, state, self._refresh_hyper(index, group, part.device))

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's; moments of parameters that are DTensors are DTensors, placed as these are."""
        return states.shown(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of torch.optim.Adam(W), whose fp32 moments are encoded.

        State is copied, never shared with `state_dict`. Each moment takes the form that this optimizer's options
        ask for (the options of a qsub state dict are restored first, as torch.optim does with its own).

        Warns:
            UserWarning: the state dict restores another form of state (state_bits, block_size, state_code,
                min_8bit_size, stochastic_round) than was asked for.

        Raises:
            ValueError: shapes, keys or group sizes differ, or it is another optimizer's; all is left as it was.
        """
        states.load(self, state_dict, super().load_state_dict)

    def to_torch_state_dict(self) -> dict[str, Any]:
        """A state dict that torch.optim.Adam(W) loads: fp32 moments, without the options of 8-bit state."""
        return states.to_torch(self.state_dict())


class AdamW8bit(Adam8bit):
    """torch.optim.AdamW (arXiv 1711.05101) with 8-bit state. Arguments are those of `Adam8bit`.

    `weight_decay` (default 1e-2) scales the parameter rather than adding to the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        block_size: int = 64,
        min_8bit_size: int = 4096,
        state_bits: int = 8,
        state_code: str = "block_float8",
        stochastic_round: bool = False,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            block_size=block_size,
            min_8bit_size=min_8bit_size,
            state_bits=state_bits,
            state_code=state_code,
            stochastic_round=stochastic_round,
            seed=seed,
            backend=backend,
        )
