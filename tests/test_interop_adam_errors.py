"""State dicts of 8-bit Adam that can't be exchanged with bitsandbytes or torchao: which words name what is wrong."""

import re

import pytest
import torch
from adam_exchange import READ, WRITE, ao, bnb, make_params, our_optimizer, their_optimizer
from adam_runs import round_trip, train
from expecttest import assert_expected_inline
from torch import nn

from qsub.interop.bitsandbytes import optimizer_from_bitsandbytes
from qsub.interop.torchao import optimizer_from_torchao
from qsub.optim import Adam8bit, AdamW8bit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:bitsandbytes"),
    pytest.mark.usefixtures("their_steps_are_eager"),
]


def first_sentence(caught):
    return re.split(r"[.;] ", str(caught.value))[0]


def test_what_they_have_no_place_for():
    params = make_params()
    texts = []
    for library, cls, options in (
        ("bitsandbytes", AdamW8bit, {"amsgrad": True}),
        ("bitsandbytes", AdamW8bit, {"maximize": True}),
        ("bitsandbytes", Adam8bit, {}),  # its second group decays
        ("torchao", AdamW8bit, {"maximize": True}),
    ):
        with pytest.raises(ValueError) as caught:
            WRITE[library](our_optimizer(params, cls, **options).state_dict())
        texts.append(first_sentence(caught))
    with pytest.raises(ValueError) as caught:
        WRITE["torchao"](torch.optim.SGD(params).state_dict())
    texts.append(first_sentence(caught))
    assert_expected_inline(
        "\n".join(texts),
        """\
group 0 has amsgrad=True, which bitsandbytes' 8-bit Adam doesn't have
group 0 has maximize=True, which the other library's 8-bit Adam doesn't have
group 1 has weight_decay=0.1 added to the gradient, as Adam does: bitsandbytes only has AdamW's
group 0 has maximize=True, which the other library's 8-bit Adam doesn't have
group 0 lacks ['betas', 'amsgrad', 'decoupled_weight_decay']: not a state dict of qsub.optim""",
    )


# ---- Damaged dicts ----


def entry_of(saved, index):
    entry = saved["state"][index]
    return entry.get("__bnb_optimizer_quant_state__", entry)


def damage(library, saved, what):
    saved = round_trip(saved)
    entry = entry_of(saved, 0)
    if library == "torchao":
        moment = entry["exp_avg"]
        state8 = type(moment)
        if what == "table":
            entry["exp_avg"] = state8(moment.codes, moment.scale, torch.linspace(-1, 1, 256), True)
        elif what == "scale":
            moment.scale[3] = float("nan")
        elif what == "truncated":
            entry["exp_avg"] = state8(moment.codes, moment.scale[:-1], moment.qmap, True)
        elif what == "missing":
            del entry["exp_avg_sq"]
        elif what == "kind":
            entry["exp_avg"] = torch.zeros(64, 256, dtype=torch.uint8)
        elif what == "sign":
            entry["exp_avg"] = state8(moment.codes, moment.scale, moment.qmap, False)
    elif what == "table":
        entry["qmap1"] = torch.linspace(-1, 1, 256)
    elif what == "scale":
        entry["absmax1"][3] = float("nan")
    elif what == "truncated":
        entry["absmax1"] = entry["absmax1"][:-1]
    elif what == "missing":
        del entry["state2"]
    elif what == "kind":
        entry["state1"] = entry["state1"].short()
    elif what == "sign":
        entry["qmap1"] = entry["qmap2"]
    if what == "no state":
        del saved["state"]
    return saved


DAMAGES = ["table", "scale", "truncated", "missing", "kind", "sign", "no state"]


def test_damaged_dicts_are_named():
    texts = []
    for library in READ:
        params = make_params()
        theirs = their_optimizer(library, params)
        train(theirs, params, 0, 1)
        for what in DAMAGES:
            with pytest.raises(ValueError) as caught:
                READ[library](damage(library, theirs.state_dict(), what))
            texts.append(first_sentence(caught))
    assert_expected_inline(
        "\n".join(texts),
        """\
state1 of parameter 0: its table of values is not the signed dynamic map of 256 values
state1 of parameter 0: a scale is negative, not finite or over 1e38
state1 of parameter 0: 16384 codes in blocks of 256 have 64 scales, got (63,)
state of parameter 0 lacks ['state2']: not a state of bitsandbytes' Adam or AdamW
state1 of parameter 0, codes, must be a tensor of torch.uint8, got torch.int16
state1 of parameter 0: its table of values is not the signed dynamic map of 256 values
expected the state dict of bitsandbytes' 8-bit Adam or AdamW, with 'state' and 'param_groups', got ['param_groups']
exp_avg of parameter 0: its table of values is not the signed dynamic map of 256 values
exp_avg of parameter 0: a scale is negative, not finite or over 1e38
exp_avg of parameter 0: 16384 codes in blocks of 260 have 64 scales, got (63,)
state of parameter 0 lacks ['exp_avg_sq']: not a state of torchao's Adam or AdamW
exp_avg of parameter 0 must be an OptimState8bit of torchao or a plain float tensor, got torch.uint8
exp_avg of parameter 0 must be signed, got signed=False
expected the state dict of torchao's Adam8bit or AdamW8bit, with 'state' and 'param_groups', got ['param_groups']""",
    )


@pytest.mark.parametrize("library", READ)
def test_a_dict_that_was_not_converted_names_what_converts_it(library):
    params = make_params()
    theirs = their_optimizer(library, params)
    train(theirs, params, 0, 1)
    with pytest.raises(ValueError, match=rf"qsub\.interop\.{library}\.optimizer_from_{library} first"):
        our_optimizer(params).load_state_dict(theirs.state_dict())


def test_optimizers_that_are_not_adam_and_layouts_that_are_ambiguous():
    param = nn.Parameter(torch.randn(64, 256))
    lion = bnb.optim.Lion8bit([param])
    train(lion, [param], 0, 1)
    with pytest.raises(ValueError, match=r"parameter 0 lacks \['state2'\]: not a state of bitsandbytes' Adam"):
        optimizer_from_bitsandbytes(lion.state_dict())
    mixed = bnb.optim.AdEMAMix8bit([param])
    with pytest.raises(ValueError, match="has two betas, got"):
        optimizer_from_bitsandbytes(mixed.state_dict())
    four = ao.AdamW4bit([param])
    train(four, [param], 0, 1)
    with pytest.raises(ValueError, match="parameter 0"):
        optimizer_from_torchao(four.state_dict())
    image = nn.Parameter(torch.randn(16, 16, 4, 4).to(memory_format=torch.channels_last))
    theirs = bnb.optim.AdamW8bit([image])
    train(theirs, [image], 0, 1)
    with pytest.raises(ValueError, match="state1 of parameter 0.* must be contiguous"):
        optimizer_from_bitsandbytes(theirs.state_dict())
