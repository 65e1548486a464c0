"""Optimizers around the optimizer (SAM, Lookahead), averages, schedulers and groups with keys of the user's own."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from qsub.optim import AdamW8bit

SHAPES = [(80, 64), (33,)]
BACKENDS = ["eager", pytest.param("compile", marks=pytest.mark.slow)]


def new_params():
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def loss_of(params, step):
    targets = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in params]
    return sum((param - target).square().sum() for param, target in zip(params, targets, strict=True))


def both(run, **options):
    """`run(cls, **options)` with fp32 state and with torch's; asserts that parameters are equal up to roundings."""
    ours = run(AdamW8bit, state_bits=32, **options)
    theirs = run(torch.optim.AdamW)
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)  # an update is 1e-3 or more
    assert all(torch.isfinite(param).all() for param in run(AdamW8bit, **options))


# ---- Wrappers ----


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (arXiv 2010.01412) as its packages do it: they share the groups of the base."""

    def __init__(self, params, base, rho=0.05, share_state=False, **options):
        super().__init__(params, dict(rho=rho, adaptive=False, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)
        if share_state:
            self.state = self.base.state

    @torch.no_grad()
    def step(self, closure=None):
        params = [(group, param) for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for _, param in params]).norm()
        for group, param in params:
            self.state[param]["old_p"] = param.data.clone()
            param.add_(param.grad * (group["rho"] / norm))
        self.zero_grad()
        with torch.enable_grad():
            closure().backward()
        for _, param in params:
            param.data = self.state[param]["old_p"]
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside the fast ones (arXiv 1907.08610), as in timm: it shares state and groups with the base."""

    def __init__(self, base, alpha=0.5, k=3):
        self.base = base
        self.alpha, self.k = alpha, k
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        for group in self.param_groups:
            group.setdefault("lookahead_alpha", alpha)
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for param in group["params"]:
                slow = self.base.state[param].setdefault("slow", param.detach().clone())
                if group["lookahead_step"] % self.k == 0:
                    slow.add_(param - slow, alpha=group["lookahead_alpha"])
                    param.copy_(slow)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share_state", [False, True])
def test_sam(share_state, backend):
    def run(cls, **options):
        params = new_params()
        # What SAM keeps in the state before the first step of the base stops torch's AdamW with a KeyError.
        share = share_state and cls is AdamW8bit
        opt = Sam([{"params": params, "layer_id": 3}], cls, lr=1e-2, share_state=share, **options)
        for step in range(5):
            opt.zero_grad()
            loss_of(params, step).backward()
            opt.step(lambda step=step: loss_of(params, step))
        assert opt.base.param_groups[0]["rho"] == 0.05 and opt.param_groups[0]["layer_id"] == 3
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3))], "rho": 0.1})
        assert len(opt.base.param_groups) == 2
        return params

    both(run, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lookahead_and_its_state_dict(backend):
    def run(cls, **options):
        params = new_params()
        opt = Lookahead(cls(params, lr=1e-2, **options))
        for step in range(7):
            opt.zero_grad()
            loss_of(params, step).backward()
            opt.step()
            if step == 4:  # what it keeps in state and groups comes back
                saved = copy.deepcopy(opt.base.state_dict())
                opt = Lookahead(cls(params, lr=1e-2, **options))
                opt.base.load_state_dict(saved)
                opt.param_groups, opt.state = opt.base.param_groups, opt.base.state
                assert opt.param_groups[0]["lookahead_step"] == 5 and "slow" in opt.state[params[0]]
        return params

    both(run, backend=backend)


def test_groups_may_be_replaced():
    """By a list of the same groups, or of others, as wrappers do that split or merge them."""

    def run(cls, **options):
        params = new_params()
        opt = cls(params, lr=1e-2, **options)
        for step in range(6):
            opt.zero_grad()
            loss_of(params, step).backward()
            opt.step()
            if step == 1:
                opt.param_groups = [dict(opt.param_groups[0])]
            elif step == 3:
                whole = opt.param_groups[0]
                opt.param_groups = [{**whole, "params": [param], "lr": 1e-3} for param in params]
        return params

    both(run, backend="eager")


def test_averages_follow():
    def run(cls, **options):
        model = nn.Linear(80, 64)
        nn.init.constant_(model.weight, 0.1), nn.init.zeros_(model.bias)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        opt = cls(model.parameters(), lr=1e-2, **options)
        scheduler = SWALR(opt, swa_lr=0.05, anneal_epochs=3)
        for step in range(5):
            opt.zero_grad()
            loss_of(list(model.parameters()), step).backward()
            opt.step()
            scheduler.step()
            average.update_parameters(model)
        return list(average.module.parameters())

    both(run, backend="eager")


# ---- Copies ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_whole_goes_on_by_itself(copied, backend):
    """Model and optimizer in one object, as DeepSpeed-like engines and hyper-parameter searches copy them."""
    params = new_params()
    opt = AdamW8bit([{"params": params, "lr_mult": 0.5}], backend=backend, fused=True if backend == "compile" else None)
    opt.register_step_post_hook(print) if copied is copy.deepcopy else None  # hooks are not copied, as torch's are not
    for step in range(2):
        opt.zero_grad()
        loss_of(params, step).backward()
        opt.step()
    twins, other = copied((params, opt))
    assert other.param_groups[0]["params"][0] is twins[0] and other.param_groups[0]["lr_mult"] == 0.5
    before = [param.detach().clone() for param in params]
    for step in range(2, 4):
        other.zero_grad()
        loss_of(twins, step).backward()
        other.step()
    assert all(map(torch.equal, params, before))
    for step in range(2, 4):
        opt.zero_grad(set_to_none=False)
        loss_of(params, step).backward()
        opt.step()
    assert all(map(torch.equal, params, twins))


# ---- Keys of the user's own ----

FOREIGN = {
    "lr_mult": 0.1,
    "wd_mult": 0.0,
    "decay_mult": 1.0,
    "weight_decay_mult": 0.5,
    "lr_scale": 0.5,
    "layer_id": 3,
    "name": "head",
    "initial_lr": 1e-3,
    "is_expert_parallel": False,
    "moe": True,
    "no_weight_decay": True,
    "rank": 4,
    "block": 7,
    "block_id": 2,
    "block_idx": 2,
    "bits": 4,
    "state": "warm",
    "step": 5,
    "min_size": 10,
    "min_lr": 0.0,
    "momentum": 0.9,
    "betas_schedule": None,
    "rounding": "none",
    "random_seed": 3,
    "tags": ["a"],
    ("a", "tuple"): 1,
}


def test_keys_of_the_users_own_are_kept_as_in_torch():
    (param, _) = new_params()
    for cls in (torch.optim.AdamW, AdamW8bit):
        opt = cls([{"params": [param], **FOREIGN}])
        saved = copy.deepcopy(opt.state_dict())
        assert {key: opt.param_groups[0][key] for key in FOREIGN} == FOREIGN
        again = cls([{"params": [param]}])
        again.load_state_dict(saved)
        assert {key: again.param_groups[0][key] for key in FOREIGN} == FOREIGN
        third = cls(again.param_groups)  # groups are made of groups
        assert {key: third.param_groups[0][key] for key in FOREIGN} == FOREIGN


# ---- What schedulers write ----

WRITTEN = {
    "int": lambda x: int(x + 1),
    "numpy": np.float64,
    "numpy fp32": np.float32,
    "0-dim": torch.tensor,
    "1-element": lambda x: torch.tensor([x]),
    "fp64": lambda x: torch.tensor(x, dtype=torch.float64),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WRITTEN)
def test_any_number_that_a_scheduler_writes_is_honoured(kind, backend):
    """For each option that is one; betas as a list, too."""
    write = WRITTEN[kind]
    results = []
    for made in (write, lambda x: float(write(x))):
        params = new_params()
        opt = AdamW8bit(params, backend=backend)
        for step in range(4):
            opt.zero_grad()
            loss_of(params, step).backward()
            group = opt.param_groups[0]
            group["lr"], group["weight_decay"], group["eps"] = made(0.01 * step), made(0.1), made(1e-3 * step)
            if kind != "int":
                group["betas"] = [made(0.8 + 0.01 * step), made(0.99)]
            opt.step()
        results.append(params)
    assert all(map(torch.equal, *results))


SCHEDULERS = {
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=8),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, base_lr=1e-3, max_lr=0.1, step_size_up=2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "LambdaLR of numpy": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: np.float32(1 / (step + 1))),
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch(name, tensor):
    def run(cls, **options):
        params = new_params()
        lr = torch.tensor(1e-2) if tensor else 1e-2
        opt = cls(params, lr=lr, **options, **({"foreach": False, "capturable": False} if tensor else {}))
        scheduler = SCHEDULERS[name](opt)
        for step in range(6):
            opt.zero_grad()
            loss_of(params, step).backward()
            opt.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return params

    both(run, backend="eager")
