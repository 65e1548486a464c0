"""Every registered operator is exercised: the plain ones by their schema, the others by the table of operators.

Together with the tests of values this is the mutation check: a handler that is broken or useless makes a test fail.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_table import TABLE
from test_operator_table import evaluate, operands

from qsub import Int8RowwiseTensor
from qsub.tensors import collectives, rowwise_arithmetic
from qsub.tensors.rowwise import OPS

aten = torch.ops.aten
PLAIN = {op: h for op, h in OPS.handlers.items() if h is rowwise_arithmetic._plain_result}
# Registered for callers that the table can't show: checked by the tests named here.
ELSEWHERE = {
    aten.linear.default: "test_rowwise_linear: inference_mode",
    aten.addmm.default: "test_rowwise_linear: matmul family (with beta and alpha)",
    aten._fused_adam_.default: "test_rowwise_linear: fused optimizers",
    aten._fused_adamw_.default: "test_rowwise_linear: fused optimizers",
    aten._fused_sgd_.default: "test_rowwise_linear: fused optimizers",
    aten._pin_memory.default: "a GPU test: pinning needs one",
    aten.is_pinned.default: "test below",
    aten.empty_like.default: "test_rowwise: new tensors from a weight",
    aten.rand_like.default: "test below",
    aten.randn_like.default: "test below",
    aten.new_empty.default: "test below",
    aten.alias.default: "the same handler as detach",
    aten._unsafe_view.default: "the same handler as view",
    aten.reshape.default: "the same handler as view",
    aten._weight_norm_interface.default: "test_no_memory: parametrized weights",
    aten._weight_norm_interface_backward.default: "test_no_memory: parametrized weights",
    aten._native_multi_head_attention.default: "test_no_memory: attention in eval mode",
    aten._transformer_encoder_layer_fwd.default: "test_no_memory: encoders in eval mode",
    **dict.fromkeys(collectives.COLLECTIVES, "test_dist_weights: full tensors, test_dist_weights_state"),
}


def sample(op):
    """Arguments for an operator by its schema, with "w" for the weight; None where it takes no such thing."""
    arguments = []
    seen = False
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and seen):
            break
        if kind == "Tensor" and argument.name in ("condition", "mask"):
            arguments.append(torch.ones(6, 10) > 0)
        elif kind == "Tensor":
            arguments.append("f" if seen else "w")
            seen = True
        elif kind in ("number", "Scalar", "float", "Optional[number]", "Optional[float]"):
            arguments.append(2.0)
        elif kind in ("List[int]", "Optional[List[int]]"):
            arguments.append([1])
        elif kind in ("int", "Optional[int]"):
            arguments.append(1)
        elif kind == "Optional[Tensor]":
            arguments.append("f")
        elif kind == "bool":
            arguments.append(False)
        else:
            return None
    return arguments if seen else None


SAMPLES = {op: sample(op) for op in PLAIN}
CALLED = [op for op, arguments in SAMPLES.items() if arguments is not None]


def outcome(op, w, f):
    values = {"w": w, "f": f}
    arguments = [values[a] if isinstance(a, str) else a for a in SAMPLES[op]]
    try:
        return op(*arguments)
    except (RuntimeError, IndexError, TypeError) as error:  # the same for a plain tensor
        return type(error)


def test_nearly_every_plain_operator_has_a_sample():
    left = [str(op) for op, arguments in SAMPLES.items() if arguments is None]
    assert len(CALLED) > 100 and len(left) < 0.2 * len(PLAIN), left


@pytest.mark.parametrize("op", CALLED, ids=str)
def test_plain_operators_equal_their_twin(op):
    torch.manual_seed(0)
    w = Int8RowwiseTensor.from_float(torch.rand(6, 10) + 0.5)
    f = torch.rand(6, 10) + 0.5
    if SAMPLES[op].count("f") == 0 and "dot" in str(op):
        pytest.fail("dot takes two operands")
    if "dot" in str(op):
        w, f = w[0], f[0]
    result, expected = outcome(op, w, f), outcome(op, w.dequantize(), f)
    if isinstance(expected, type):
        assert result is expected
        return
    for a, b in zip(*[x if isinstance(x, tuple) else (x,) for x in (result, expected)], strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_every_other_operator_is_in_the_table(monkeypatch):
    hit = set()
    for op, handler in list(OPS.handlers.items()):

        def record(func, *args, _handler=handler, **kwargs):
            hit.add(func)
            return _handler(func, *args, **kwargs)

        monkeypatch.setitem(OPS.handlers, op, record)
    for row in TABLE:
        for trainable in (False, True):
            names = operands(torch.float32, True)
            names["w"].requires_grad_(trainable)
            try:
                with torch.no_grad():
                    evaluate(row.expression, names)
            except NotImplementedError:
                assert row.kind == "refused"
    handlers = {OPS.handlers[op] for op in hit}
    missing = [
        str(op)
        for op, handler in OPS.handlers.items()
        if op not in hit and op not in PLAIN and op not in ELSEWHERE and not _variant(op, hit)
    ]
    assert not missing and handlers


def _variant(op, hit):
    """Another overload of an operator in the table, or one of the in-place and foreach families."""
    name = str(op).split(".")[1]
    family = name.startswith("_foreach_") or (name.endswith("_") and op._schema.is_mutable)
    return family or any(str(other).split(".")[1] == name for other in hit)


def test_tensors_without_given_values():
    weight = Int8RowwiseTensor.from_float(torch.ones(4, 4, dtype=torch.float16))
    for made in (torch.rand_like(weight), torch.randn_like(weight), weight.new_empty(4, 3)):
        assert type(made) is torch.Tensor and made.dtype == torch.float16 and made.shape[0] == 4
    assert type(weight.new_empty(3, 4)) is Int8RowwiseTensor


def test_is_pinned():
    assert not Int8RowwiseTensor.from_float(torch.ones(2, 2)).is_pinned()


# ---- Random sequences of operators against a twin ----

STEPS = {
    "rows": lambda t, k: t[k % t.shape[0] :] if t.shape[0] > 1 else t,
    "strided": lambda t, k: t[:: 1 + k % 2],
    "turn twice": lambda t, k: t.t().t(),
    "clone": lambda t, k: t.clone(),
    "double": lambda t, k: t.mul_(2.0),
    "halve": lambda t, k: t.mul_(0.5),
    "negate": lambda t, k: t.neg_(),
    "cat": lambda t, k: torch.cat([t, t]) if t.shape[0] < 12 else t,
    "select": lambda t, k: t[torch.tensor([k % t.shape[0], 0])],
    "batch": lambda t, k: t.unsqueeze(0).squeeze(0),
    "zero a row": lambda t, k: (t[k % t.shape[0]].zero_(), t)[1],
    "dtype": lambda t, k: t.to(torch.float64).to(torch.float32),
}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), max_size=10), st.integers(0, 2**16))
def test_any_sequence_of_exact_operators_equals_that_on_a_plain_tensor(steps, seed):
    """Powers of two, signs, views and copies are exact in the row code: bit for bit, after any sequence."""
    value = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
    weight = Int8RowwiseTensor.from_float(value)
    twin = weight.dequantize()
    for name, number in steps:
        weight, twin = STEPS[name](weight, number), STEPS[name](twin, number)
    assert isinstance(weight, Int8RowwiseTensor) and torch.equal(weight.dequantize(), twin + 0.0)
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed + 1))
    torch.testing.assert_close(x @ weight.t(), x @ twin.t(), rtol=1e-5, atol=1e-4)
