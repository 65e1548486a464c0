"""The scalars of the Adam step that differ from parameter to parameter, formed on the device before the launch.

`prepare_kernel` counts the step of each parameter, so that a step which a GradScaler skips counts none, and writes a
row of scalars for each. The programs of `adam_kernel` read theirs with `load_scalars`.
"""

# What Triton's functions take and return is the compiler's matter, not that of a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

import os

import triton
import triton.language as tl

from qsub.optim import step as definition
from qsub.optim.codes_kernel import mix

# Columns of the scalars of a parameter, int32; the bits of an fp32 up to DECAY.
STEP_SIZE = tl.constexpr(0)  # lr / (1 - beta1**step)
ROOT_CORRECTION = tl.constexpr(1)  # (1 - beta2**step)**-0.5
BETA1 = tl.constexpr(2)
BETA2 = tl.constexpr(3)
RATE1 = tl.constexpr(4)  # (1 - beta1) * f, where f is the factor of the gradient
RATE2 = tl.constexpr(5)  # (1 - beta2) * f**2
EPS = tl.constexpr(6)
DECAY = tl.constexpr(7)  # 1 - lr * weight_decay (AdamW), or weight_decay / f (Adam)
SALT = tl.constexpr(8)  # of the random bits, as ADVANCE
ADVANCE = tl.constexpr(9)
ACTIVE = tl.constexpr(10)
N_SCALARS = tl.constexpr(12)

_LR = tl.constexpr(definition.LR)
_BETA1 = tl.constexpr(definition.BETA1)
_BETA2 = tl.constexpr(definition.BETA2)
_ONE_MINUS_BETA1 = tl.constexpr(definition.ONE_MINUS_BETA1)
_ONE_MINUS_BETA2 = tl.constexpr(definition.ONE_MINUS_BETA2)
_LOG_BETA1 = tl.constexpr(definition.LOG_BETA1)
_LOG_BETA2 = tl.constexpr(definition.LOG_BETA2)
_EPS = tl.constexpr(definition.EPS)
_WEIGHT_DECAY = tl.constexpr(definition.WEIGHT_DECAY)
_GRAD_FACTOR = tl.constexpr(definition.GRAD_FACTOR)
_SKIP = tl.constexpr(definition.SKIP)
WINDOW = tl.constexpr(5)
GOLDEN = tl.constexpr(0x9E3779B9 - (1 << 32))
# Parts of a chunk of unaligned rows, one after the other. Triton's interpreter takes long for each.
PARTS_OF_RAGGED = tl.constexpr(1 if os.environ.get("TRITON_INTERPRET") == "1" else 8)


@triton.jit
def prepare_kernel(
    addresses,
    steps,
    scalars,
    hyper,
    seed,
    count,
    fresh,
    lr,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    weight_decay,
    grad_factor,
    skip,
    LANES: tl.constexpr,
    DECOUPLED: tl.constexpr,
):
    """Count the step of each parameter that has a gradient, unless the step is skipped, and form its scalars.

    Args:
        addresses: (count, 2) int64, of the parameter and of its gradient; 0 stands for no gradient.
        steps: (count,) fp32, in place.
        scalars: (count, N_SCALARS) int32, output.
        hyper: (N_HYPER,) fp32; output if `fresh`, else input.
        seed: 0-dim int32.
        count: number of parameters.
        fresh: not 0.0 if the values that follow, in the order of `hyper`, are to be used and written there.
        lr: see `qsub.optim.hyper`, as for the others.
        beta1: of exp_avg.
        beta2: of exp_avg_sq.
        one_minus_beta1: 1 - beta1.
        one_minus_beta2: 1 - beta2.
        log_beta1: natural logarithm.
        log_beta2: natural logarithm.
        eps: see torch.optim.Adam.
        weight_decay: see torch.optim.Adam.
        grad_factor: of the gradient, with the sign of `maximize`.
        skip: not 0.0 where a GradScaler found Inf.
        LANES: parameters per program.
        DECOUPLED: AdamW rather than Adam.
    """
    index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = index < count
    # Other programs may be writing `hyper` when `fresh` is set: what is loaded then isn't used.
    lr = _fresh_or_load(hyper + _LR, lr, fresh)
    beta1 = _fresh_or_load(hyper + _BETA1, beta1, fresh)
    beta2 = _fresh_or_load(hyper + _BETA2, beta2, fresh)
    one_minus_beta1 = _fresh_or_load(hyper + _ONE_MINUS_BETA1, one_minus_beta1, fresh)
    one_minus_beta2 = _fresh_or_load(hyper + _ONE_MINUS_BETA2, one_minus_beta2, fresh)
    log_beta1 = _fresh_or_load(hyper + _LOG_BETA1, log_beta1, fresh)
    log_beta2 = _fresh_or_load(hyper + _LOG_BETA2, log_beta2, fresh)
    eps = _fresh_or_load(hyper + _EPS, eps, fresh)
    weight_decay = _fresh_or_load(hyper + _WEIGHT_DECAY, weight_decay, fresh)
    factor = _fresh_or_load(hyper + _GRAD_FACTOR, grad_factor, fresh)
    skip = _fresh_or_load(hyper + _SKIP, skip, fresh)
    if (tl.program_id(0) == 0) & (fresh != 0.0):
        tl.store(hyper + _LR, lr)
        tl.store(hyper + _BETA1, beta1)
        tl.store(hyper + _BETA2, beta2)
        tl.store(hyper + _ONE_MINUS_BETA1, one_minus_beta1)
        tl.store(hyper + _ONE_MINUS_BETA2, one_minus_beta2)
        tl.store(hyper + _LOG_BETA1, log_beta1)
        tl.store(hyper + _LOG_BETA2, log_beta2)
        tl.store(hyper + _EPS, eps)
        tl.store(hyper + _WEIGHT_DECAY, weight_decay)
        tl.store(hyper + _GRAD_FACTOR, factor)
        tl.store(hyper + _SKIP, skip)
    has_grad = tl.load(addresses + 2 * index + 1, mask=inside, other=0) != 0
    active = has_grad.to(tl.float32) * tl.where(skip == 0.0, 1.0, 0.0)
    step = tl.load(steps + index, mask=inside, other=0.0) + active
    tl.store(steps + index, step, mask=inside)
    # fp64, because fp32 would cancel: beta2**step is .999 at first
    taken = tl.maximum(step, 1.0)
    correction1 = 1.0 - tl.exp((taken * log_beta1).to(tl.float64))
    correction2 = 1.0 - tl.exp((taken * log_beta2).to(tl.float64))
    decay = 1.0 - lr * weight_decay if DECOUPLED else weight_decay / factor
    row = scalars + index * N_SCALARS
    _store_scalar(row + STEP_SIZE, (lr / correction1).to(tl.float32), inside)
    _store_scalar(row + ROOT_CORRECTION, (1.0 / tl.sqrt(correction2)).to(tl.float32), inside)
    _store_scalar(row + BETA1, beta1, inside)
    _store_scalar(row + BETA2, beta2, inside)
    _store_scalar(row + RATE1, one_minus_beta1 * factor, inside)
    _store_scalar(row + RATE2, one_minus_beta2 * factor * factor, inside)
    _store_scalar(row + EPS, eps, inside)
    _store_scalar(row + DECAY, decay, inside)
    count = step.to(tl.int32)
    tl.store(row + SALT, mix(tl.load(seed) ^ mix(count >> WINDOW)), mask=inside)
    tl.store(row + ADVANCE, count * GOLDEN, mask=inside)
    tl.store(row + ACTIVE, active.to(tl.int32), mask=inside)


@triton.jit
def _fresh_or_load(address, value, fresh):
    return tl.where(fresh != 0.0, value, tl.load(address))


@triton.jit
def _store_scalar(address, value, mask):
    tl.store(address, value.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _load_scalar(address):
    return tl.load(address).to(tl.float32, bitcast=True)


@triton.jit
def load_scalars(row):
    """The scalars of a parameter, loaded before its data to wait for both at once."""
    return (
        _load_scalar(row + STEP_SIZE),
        _load_scalar(row + ROOT_CORRECTION),
        _load_scalar(row + BETA1),
        _load_scalar(row + BETA2),
        _load_scalar(row + RATE1),
        _load_scalar(row + RATE2),
        _load_scalar(row + EPS),
        _load_scalar(row + DECAY),
        tl.load(row + SALT),
        tl.load(row + ADVANCE),
    )


@triton.jit
def load_pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table in device memory; aligned ones are multiples of 16 bytes."""
    pointer = tl.load(address).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
