"""What the 8-bit optimizers refuse, with which words, and what they do where torch.compile can't build."""

import subprocess
import sys
import textwrap

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from qsub.optim import Adam8bit, AdamW8bit


def refusal(call):
    """Class and text of what `call` raises."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_sparse_gradients_are_refused_before_anything_changes():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
    opt = AdamW8bit([first, second], backend="eager")
    first.grad, second.grad = torch.ones(3), torch.ones(3, 2).to_sparse()
    assert_expected_inline(
        refusal(opt.step),
        """RuntimeError: AdamW8bit does not support sparse gradients, please consider SparseAdam instead""",
    )
    assert torch.equal(first, torch.ones(3)) and not opt.state


PARAM = nn.Parameter(torch.ones(3))


def test_parameters_that_are_not_real_floats_are_refused():
    assert_expected_inline(
        refusal(lambda: AdamW8bit([nn.Parameter(torch.ones(3, dtype=torch.complex64))])),
        """TypeError: AdamW8bit takes parameters of 16, 32 or 64 bit floats, got torch.complex64 of shape (3,). Leave it out, or give it to an optimizer of torch.optim.""",  # noqa: E501
    )
    for dtype in (torch.int64, torch.float8_e4m3fn):
        assert str(dtype) in refusal(lambda dtype=dtype: Adam8bit([torch.ones(3).to(dtype)]))
    assert "empty parameter list" in refusal(lambda: AdamW8bit([]))
    assert "params argument" in refusal(lambda: AdamW8bit(PARAM))
    opt = AdamW8bit([PARAM])
    refusal(lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.complex64))]}))
    refusal(lambda: opt.add_param_group({"params": [PARAM]}))  # twice
    refusal(lambda: opt.add_param_group({"params": {nn.Parameter(torch.ones(3))}}))  # a set has no order
    with pytest.raises(KeyError, match="params"):
        opt.add_param_group({"lr": 1e-3})
    assert len(opt.param_groups) == 1


REFUSED = {
    "lr": -1.0,
    "eps": -1e-8,
    "weight_decay": float("nan"),
    "betas": (0.9, 1.0),
    "foreach": True,
    "differentiable": True,
    "block_size": 48,
    "min_8bit_size": -1,
    "state_bits": 4,
    "state_code": "nf4",
    "backend": "cuda",
    "seed": 1.5,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("cls", [Adam8bit, AdamW8bit])
def test_options_out_of_range_are_refused_by_name_and_value(cls, name):
    text = refusal(lambda: cls([PARAM], **{name: REFUSED[name]}))
    assert name in text
    if name != "backend":  # a group can't have one of its own
        opt = cls([PARAM])
        group = {"params": [nn.Parameter(torch.ones(2))], name: REFUSED[name]}
        assert refusal(lambda: opt.add_param_group(group)) == text
        assert len(opt.param_groups) == 1


def test_texts_of_refused_options():
    named = {name: value for name, value in REFUSED.items() if name not in ("backend", "state_code")}  # lists that grow
    assert_expected_inline(
        "\n".join(refusal(lambda n=n, v=v: AdamW8bit([PARAM], **{n: v})) for n, v in named.items()),
        """\
ValueError: lr must be at least 0, got -1.0
ValueError: eps must be at least 0, got -1e-08
ValueError: weight_decay must be at least 0, got nan
ValueError: betas[1] must be in [0, 1), got 1.0
ValueError: foreach=True is not supported: leave it None and choose with backend='compile' or 'eager'
ValueError: differentiable=True is not supported: 8-bit state has no gradient; use torch.optim.Adam(W)
ValueError: block_size must be a power of two from 16 to 4096, got 48
ValueError: min_8bit_size must be a whole number of elements, got -1
ValueError: state_bits must be 8 or 32, got 4
TypeError: seed must be an int, got float""",
    )
    assert_expected_inline(
        refusal(lambda: AdamW8bit([PARAM], fused=True, backend="eager")),
        """ValueError: fused=True contradicts backend='eager': drop one of them""",
    )
    assert_expected_inline(
        refusal(lambda: AdamW8bit([PARAM], lr=torch.ones(2))),
        """ValueError: lr as a tensor must have 1 element, got shape (2,)""",
    )
    assert_expected_inline(
        refusal(lambda: AdamW8bit([PARAM], betas=0.9)), """ValueError: betas must be a pair, got 0.9"""
    )


NOT_NUMBERS = {"lr": "1e-3", "eps": "1e-8", "weight_decay": None, "betas": (None, 0.999)}  # YAML reads 1e-3 as text
NOT_FLAGS = {"amsgrad": "false", "maximize": None, "capturable": "no", "stochastic_round": "no", "fused": "auto"}


@pytest.mark.parametrize("name", [*NOT_NUMBERS, *NOT_FLAGS])
def test_text_and_none_are_no_numbers_and_no_flags(name):
    value = {**NOT_NUMBERS, **NOT_FLAGS}[name]
    text = refusal(lambda: AdamW8bit([PARAM], **{name: value}))
    rule = "must be a number, got " if name in NOT_NUMBERS else "must be True or False, got "
    assert text.startswith(f"TypeError: {name}") and rule in text


def test_an_unknown_argument_is_refused_as_by_torch():
    assert "momentum" in refusal(lambda: AdamW8bit([PARAM], momentum=0.9))


MISSPELT = {
    "blocksize": "block_size",
    "block-size": "block_size",
    "Block_Size": "block_size",
    "min_8bit_sizes": "min_8bit_size",
    "state_bit": "state_bits",
    "statebits": "state_bits",
    "states_code": "state_code",
    "stochastic_rounding": "stochastic_round",
    "bf16_stochastic_round": "stochastic_round",  # torchao's
}


@pytest.mark.parametrize("key", MISSPELT)
def test_a_misspelt_option_in_a_group_is_refused(key):
    text = refusal(lambda: AdamW8bit([{"params": [PARAM], key: 1}]))
    assert text.startswith(f"TypeError: a parameter group has {key!r}, which no step reads: write {MISSPELT[key]!r}")


def test_the_backend_is_no_option_of_a_group():
    assert_expected_inline(
        refusal(lambda: AdamW8bit([{"params": [PARAM], "backend": "eager"}], backend="triton")),
        """TypeError: backend is an option of the optimizer, not of a parameter group: pass it as an argument""",
    )


WRITTEN = {
    "lr": ("1e-3", "TypeError: lr must be a number, got '1e-3' of type str"),
    "eps": (None, "TypeError: eps must be a number, got None of type NoneType"),
    "weight_decay": (torch.ones(2), "ValueError: weight_decay as a tensor must have 1 element, got shape (2,)"),
    "betas": (("0.9", 0.99), "TypeError: betas[0] must be a number, got '0.9' of type str"),
    "differentiable": (True, "ValueError: differentiable=True is not supported"),
    "foreach": (True, "ValueError: foreach=True is not supported"),
    "maximize": ("false", "TypeError: maximize must be True or False, got 'false'"),
    "stochastic_round": (None, "TypeError: stochastic_round must be True or False, got None"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_to_a_group_later_is_checked(name):
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    opt = AdamW8bit([param], backend="eager")
    value, text = WRITTEN[name]
    opt.param_groups[0][name] = value
    assert refusal(opt.step).startswith(text)
    assert torch.equal(param, torch.ones(3)) and not opt.state


def test_stochastic_rounding_of_fp16_is_refused():
    """Where it is asked for, and where parameters become fp16 later; others in the group need no rounding."""
    half, full = nn.Parameter(torch.ones(3, dtype=torch.float16)), nn.Parameter(torch.ones(3))
    assert_expected_inline(
        refusal(lambda: AdamW8bit([half], stochastic_round=True)),
        """ValueError: stochastic_round=True rounds bf16 parameters, got one of fp16 of shape (3,). Keep it in bf16 or fp32, or put it in a group with stochastic_round=False.""",  # noqa: E501
    )
    opt = AdamW8bit([{"params": [full]}, {"params": [half], "stochastic_round": False}], stochastic_round=True)
    assert len(opt.param_groups) == 2
    full.data, full.grad = full.data.half(), None
    assert "got one of fp16" in refusal(opt.step)


# ---- Where torch.compile can't build ----


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ("os.environ.update(CXX='/nonexistent/g++', PATH='/nonexistent')", "/nonexistent/g++"),
        ("sysconfig.get_path = lambda *_: '/nonexistent'", "Python.h is missing from /nonexistent"),
    ],
    ids=["no compiler", "no headers"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="headers are looked for on Linux alone")
def test_the_step_is_eager_with_one_warning(prepare, reason):
    script = f"""
        import os, sysconfig, warnings, torch, qsub
        {prepare}
        def run(**options):
            torch.manual_seed(0)
            param = torch.nn.Parameter(torch.randn(80, 64))
            opt = qsub.optim.AdamW8bit([param], **options)
            for _ in range(3):
                param.grad = torch.randn(80, 64)
                opt.step()
            return param
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            a, b = run(), run()
        texts = [str(w.message) for w in caught if "qsub" in str(w.message)]
        assert len(texts) == 1 and {reason!r} in texts[0] and "backend='eager'" in texts[0], texts
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            c = run(backend="eager")
        assert torch.equal(a, c)
        print("as expected")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "as expected", done.stderr
