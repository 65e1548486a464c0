"""The definition of the Adam step: fp32 math on plain tensors, used by every backend.

The formulas are those of arXiv 1412.6980 (Adam, algorithm 1), arXiv 1711.05101 (decoupled weight decay) and
torch.optim's amsgrad and maximize. State is either fp32 or in the block codes of `qsub.tensors.state_codes` or of
`qsub.tensors.dynamic_codes`.
"""

import torch
from torch import Tensor

from qsub.tensors.dynamic_codes import decode_signed, decode_unsigned, encode_signed, encode_unsigned
from qsub.tensors.state_codes import (
    decode_exp_avg,
    decode_exp_avg_sq,
    encode_exp_avg,
    encode_exp_avg_sq,
    exponent_range,
    noise_of,
    random_bits,
)

# Places in the vector of hyper-parameters, one fp32 tensor per group and device that `qsub.optim.hyper` fills.
# GRAD_FACTOR multiplies gradients: -1 to maximize, over the scale of a GradScaler. SKIP is its found_inf: unless 0,
# the step changes nothing.
LR, BETA1, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2, LOG_BETA1, LOG_BETA2, EPS = range(8)
WEIGHT_DECAY, GRAD_FACTOR, SKIP = range(8, 11)
N_HYPER = 11
# The root of the least normal fp32, and the least that an update is divided by. Smaller second moments count as 0 on a
# GPU: with an eps of 0 the update would be infinite there, and 0 / 0 where there never was a gradient.
LEAST_ROOT = 2.0**-63
# The rounding of the parameter draws from the state's bits times this: a Weyl sequence of another stride.
_OTHER = 747796405
_FLOAT_MAX = torch.finfo(torch.float32).max


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    hyper: Tensor,
    decoupled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One step of Adam (`decoupled=False`) or AdamW (`decoupled=True`) in fp32.

    Args:
        param: any shape, fp32; or fp64, which keeps its precision.
        grad: gradient, fp32, of the same shape as the three tensors that follow.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        max_exp_avg_sq: largest second moment so far (amsgrad), or None.
        step: 0-dim fp32, the number of this step, from 1.
        hyper: (N_HYPER,) fp32, see `qsub.optim.hyper`.
        decoupled: weight decay scales the parameter (AdamW) rather than adding to the gradient (Adam).

    Returns:
        New param, exp_avg, exp_avg_sq and max_exp_avg_sq; nothing is changed in place.
    """
    grad = grad * hyper[GRAD_FACTOR]
    if decoupled:
        param = param * (1.0 - (hyper[LR] * hyper[WEIGHT_DECAY]).to(param.dtype))
    else:
        grad = grad + hyper[WEIGHT_DECAY] * param.float()
    exp_avg = hyper[BETA1] * exp_avg + hyper[ONE_MINUS_BETA1] * grad  # not a lerp, which beta1 = 0 makes inexact
    exp_avg_sq = hyper[BETA2] * exp_avg_sq + (hyper[ONE_MINUS_BETA2] * grad) * grad
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        max_exp_avg_sq = second = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    step_size = hyper[LR] / -torch.expm1(step * hyper[LOG_BETA1])
    root_correction = torch.rsqrt(-torch.expm1(step * hyper[LOG_BETA2]))
    root = (torch.sqrt(second) * root_correction + hyper[EPS]).clamp(min=LEAST_ROOT)
    param = param - step_size * (exp_avg / root)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq


def _wide(param: Tensor) -> Tensor:
    """The parameter in the dtype that its update is added in: at least fp32."""
    return param if param.dtype == torch.float64 else param.float()


def _store(target: Tensor, value: Tensor, hyper: Tensor) -> None:
    """Write `value` to `target` in its dtype, unless the step is skipped."""
    # Codes are chosen as int32: inductor's vector code for the CPU has no choice between bytes.
    wide = torch.int32 if target.dtype == torch.uint8 else target.dtype
    target.copy_(torch.where(hyper[SKIP] != 0, target.to(wide), value.to(wide)).to(target.dtype))


def _store_pair(target: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor], hyper: Tensor) -> None:
    for inner, new in zip(target, value, strict=True):
        _store(inner, new, hyper)


def _store_param(param: Tensor, value: Tensor, bits: Tensor | None, hyper: Tensor) -> None:
    """Write fp32 `value` to `param` in its dtype; with random bits to bf16 stochastically, NaN and Inf kept."""
    if bits is not None:
        noise = ((bits * _OTHER) >> 16) & 0xFFFF
        rounded = ((value.view(torch.int32) + noise) & -0x10000).view(torch.float32)
        value = torch.where(value.abs() <= _FLOAT_MAX, rounded, value)
    _store(param, value.to(param.dtype), hyper)


def step_float32(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    hyper: Tensor,
    seed: Tensor,
    first_block: Tensor,
    decoupled: bool,
    stochastic_round: bool,
) -> None:
    """One step in place with fp32 state.

    Args:
        param: (blocks, block_size), any float dtype, as `grad`.
        grad: gradient.
        exp_avg: fp32 state of the same shape, as the next two.
        exp_avg_sq: see `adam_step`.
        max_exp_avg_sq: see `adam_step`.
        step: 0-dim fp32, from 1.
        hyper: (N_HYPER,) fp32.
        seed: 0-dim int32.
        first_block: 0-dim int64, see `state_codes.random_bits`.
        decoupled: AdamW rather than Adam.
        stochastic_round: round a bf16 parameter stochastically.
    """
    value, first, second, largest = adam_step(
        _wide(param), grad.float(), exp_avg, exp_avg_sq, max_exp_avg_sq, step, hyper, decoupled
    )
    bits = random_bits(seed, step.to(torch.int32), first_block, *param.shape) if stochastic_round else None
    _store_param(param, value, bits, hyper)
    _store(exp_avg, first, hyper)
    _store(exp_avg_sq, second, hyper)
    if max_exp_avg_sq is not None and largest is not None:
        _store(max_exp_avg_sq, largest, hyper)


def _decode_second(moment: Tensor | tuple[Tensor, Tensor], tables: Tensor | None) -> Tensor:
    if isinstance(moment, Tensor):
        return moment
    return decode_exp_avg_sq(*moment) if tables is None else decode_unsigned(*moment, tables)


def step_8bit(
    param: Tensor,
    grad: Tensor,
    exp_avg: tuple[Tensor, Tensor],
    exp_avg_sq: Tensor | tuple[Tensor, Tensor],
    max_exp_avg_sq: tuple[Tensor, Tensor] | None,
    step: Tensor,
    hyper: Tensor,
    seed: Tensor,
    first_block: Tensor,
    decoupled: bool,
    stochastic_round: bool,
    tables: Tensor | None = None,
) -> None:
    """One step in place with 8-bit state: decode, step in fp32, encode.

    The parameter takes the step from m and v in fp32, before they are encoded. An element whose v is not finite
    (its gradient was not, or overflows when squared) restarts from zero state and stays out of its block's range.

    Args:
        param: (blocks, block_size), any float dtype, as `grad`.
        grad: gradient.
        exp_avg: uint8 codes (blocks, block_size) and scale, (blocks, 2) uint8 or with `tables` (blocks,) fp32; as the
            next two.
        exp_avg_sq: see `adam_step`. With amsgrad in the block float code it is fp32 (blocks, block_size): the maximum
            would keep the upward errors of stochastic rounding.
        max_exp_avg_sq: see `adam_step`.
        step: 0-dim fp32, from 1.
        hyper: (N_HYPER,) fp32.
        seed: 0-dim int32.
        first_block: 0-dim int64, see `state_codes.random_bits`.
        decoupled: AdamW rather than Adam.
        stochastic_round: round a bf16 parameter stochastically.
        tables: `dynamic_codes.dynamic_tables` for state in the dynamic code, which is rounded to nearest; None for
            state in the block float code, which is rounded stochastically.
    """
    value, first, second, largest = adam_step(
        _wide(param),
        grad.float(),
        decode_exp_avg(*exp_avg) if tables is None else decode_signed(*exp_avg, tables),
        _decode_second(exp_avg_sq, tables),
        None if max_exp_avg_sq is None else _decode_second(max_exp_avg_sq, tables),
        step,
        hyper,
        decoupled,
    )
    bits = None
    if stochastic_round or tables is None:
        bits = random_bits(seed, step.to(torch.int32), first_block, *param.shape)
    _store_param(param, value, bits if stochastic_round else None, hyper)
    finite = second <= _FLOAT_MAX
    first, second = torch.where(finite, first, 0.0), torch.where(finite, second, 0.0)
    if largest is not None:
        largest = torch.where(finite, largest, 0.0)
    if tables is None and bits is not None:
        low, high = exponent_range(second)
        _store_pair(exp_avg, encode_exp_avg(first, low, noise_of(bits, 0)), hyper)
        if isinstance(exp_avg_sq, Tensor):
            _store(exp_avg_sq, second, hyper)
        else:
            _store_pair(exp_avg_sq, encode_exp_avg_sq(second, low, high, noise_of(bits, 1)), hyper)
    elif not isinstance(exp_avg_sq, Tensor):
        _store_pair(exp_avg, encode_signed(first), hyper)
        _store_pair(exp_avg_sq, encode_unsigned(second), hyper)
    if max_exp_avg_sq is not None and largest is not None:  # to nearest: random rounding would only push a maximum up
        if tables is None:
            _store_pair(max_exp_avg_sq, encode_exp_avg_sq(largest, *exponent_range(largest)), hyper)
        else:
            _store_pair(max_exp_avg_sq, encode_unsigned(largest), hyper)
