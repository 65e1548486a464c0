"""What qsub refuses: the cases of docs/refused.md, which this writes.

    python tests/refusals.py > docs/refused.md

A case is a line of CASES: what the user does, the code, and what has to be there before it. The page shows the code and
the message that it raises; tests/test_refusals.py compares the page with what is raised.
"""

import contextlib
import io
import math
import os
import pathlib
import re
import shlex
import tempfile
import textwrap
import warnings
from typing import Any, NamedTuple

import peft
import safetensors.torch
import torch
import transformers
from hf_models import tiny_llama
from torch import nn

import qsub
from qsub.cli.app import run

HEAD = """# What is refused, and what to do instead

Each of these stops with an error that names the rule and what to do. `python tests/refusals.py` runs them all and
writes this page, and a test compares the two.

In the code `weight` is an `Int8RowwiseTensor` of shape (6, 10), `x` a float tensor (3, 10), `layer` an int8
`nn.Linear(10, 6)`, `model` an `nn.Sequential` of two `nn.Linear`, float where nothing else is said, and `opt` an
`AdamW8bit` that has taken a step, with the `state` of a parameter of shape (64, 128). `llama` is a float model of
transformers, which is in the folder "llama", too; "llama-int8" is the same with int8 weights, and `load` is
`AutoModelForCausalLM.from_pretrained`.
"""


class Case(NamedTuple):
    """One refusal.

    Attributes:
        what: what the user does; a heading of the page.
        code: that raises, or a command line of `qsub`.
        before: code that isn't shown.
    """

    what: str
    code: str
    before: str = ""


STATE = "state = opt.state[opt.param_groups[0]['params'][0]]"  # of a parameter of shape (64, 128)

CASES: dict[str, list[Case]] = {
    "quantize_": [
        Case("No layer is found", "qsub.quantize_(nn.Conv2d(3, 8, 3))"),
        Case("The filter leaves nothing", "qsub.quantize_(model, filter_fn=lambda name, module: False)"),
        Case(
            "All weights are of another kind",
            "qsub.quantize_(gpt2)",
            "gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, "
            "bos_token_id=0, eos_token_id=0))",
        ),
        Case("A weight is broken", "qsub.quantize_(model)", "model[0].weight.data[3, 0] = math.nan"),
        Case("A weight is quantized in another way", "qsub.quantize_(model.to(torch.float8_e4m3fn))"),
        Case("A layer isn't initialized", "qsub.quantize_(nn.Sequential(nn.LazyLinear(4)))"),
        Case("Options that don't fit together", "qsub.quantize_(model, outlier_threshold=6.0)"),
        Case("Options that don't exist", 'qsub.quantize_(model, activations="int4")'),
    ],
    "int8 weights": [
        Case("An operator that isn't implemented", "weight.cumsum(0)"),
        Case("The product of two int8 weights", "weight @ weight.t()"),
        Case("A batched product with several matrices", "torch.matmul(x, weight.t().expand(2, 10, 6))"),
        Case("Columns of several weights side by side", "torch.cat([weight, weight * 1], dim=1)"),
        Case("Columns changed in place", "weight[:, :3].mul_(2)"),
        Case("Rows that are broken up", "weight.view(10, 6)"),
        Case("Indexing by columns", "weight[:, torch.tensor([1, 2])]"),
        Case("An integer dtype", "weight.to(torch.int32)"),
        Case("A value of another shape", "weight.copy_(torch.ones(10))"),
        Case("Integers as a value", "weight.copy_(torch.ones(6, 10, dtype=torch.int64))"),
        Case("A broken value", "weight.copy_(torch.full((6, 10), math.inf))"),
        Case("`.data` of another dtype", "layer.weight.data = layer.weight.data.to(torch.bfloat16)"),
        Case("`.data` of another shape", "layer.weight.data = torch.ones(12, 10)"),
        Case("NumPy", "weight.numpy()"),
        Case("DLPack", "torch.from_dlpack(weight)"),
        Case("The storage", "weight.storage()"),
        Case("The storage of others", "weight.untyped_storage()"),
        Case("Memory of another tensor", "weight.set_(torch.ones(6, 10))"),
        Case("Another size in place", "weight.resize_(3, 10)"),
        Case("A Python function on each element", "weight.apply_(abs)"),
        Case("torch.jit.trace", "torch.jit.trace(layer, x)"),
        Case("torch.jit.script", "torch.jit.script(layer)"),
        Case("orthogonal", "nn.utils.parametrizations.orthogonal(layer)"),
        Case("A float8 dtype", "weight.to(torch.float8_e4m3fn)"),
        Case("Quantizing twice", "qsub.Int8RowwiseTensor.from_float(weight)"),
        Case("Codes of another dtype", "qsub.Int8RowwiseTensor(torch.ones(6, 10), torch.ones(6))"),
    ],
    "Files": [
        Case("Safetensors by others", 'safetensors.torch.save_file({"w": weight}, "w.safetensors")'),
        Case("What is no tensor", 'qsub.save_file({"step": 3}, "w.safetensors")'),
        Case("A model without data", 'qsub.save_file(layer.to("meta").state_dict(), "w.safetensors")'),
        Case(
            "A damaged file", 'qsub.load_file("w.safetensors")', 'pathlib.Path("w.safetensors").write_bytes(bytes(20))'
        ),
        Case("A missing file", 'qsub.load_file("nowhere.safetensors")'),
        Case("A state dict of other shapes", "layer.load_state_dict(nn.Linear(12, 6).state_dict())"),
        Case(
            "A float state dict that is broken",
            "layer.load_state_dict(other.state_dict())",
            "other = nn.Linear(10, 6); other.weight.data[2, 2] = math.nan",
        ),
        Case(
            "Half of an int8 weight",
            "layer.load_state_dict(state)",
            'state = {"weight.int_data": weight.int_data, "bias": layer.bias}',
        ),
    ],
    "Optimizers": [
        Case(
            "torch's fused optimizers on int8 weights",
            "torch.optim.AdamW([weight], fused=True).step()",
            "weight = nn.Parameter(weight); weight.grad = torch.ones(6, 10)",
        ),
        Case("foreach", "qsub.optim.AdamW8bit(layer.parameters(), foreach=True)"),
        Case("differentiable", "qsub.optim.AdamW8bit(layer.parameters(), differentiable=True)"),
        Case(
            "Options that contradict each other",
            'qsub.optim.AdamW8bit(layer.parameters(), fused=True, backend="eager")',
        ),
        Case("A learning rate that is text", 'qsub.optim.AdamW8bit(layer.parameters(), lr="1e-3")'),
        Case("A block size that isn't a power of two", "qsub.optim.AdamW8bit(layer.parameters(), block_size=100)"),
        Case(
            "A backend without its device",
            'opt = qsub.optim.AdamW8bit(model.parameters(), backend="triton")\nopt.step()',
            "model(x).sum().backward()",
        ),
        Case("Complex parameters", "qsub.optim.AdamW8bit([torch.ones(8, 8, dtype=torch.complex64)])"),
        Case(
            "Sparse gradients",
            "qsub.optim.AdamW8bit(table.parameters()).step()",
            "table = nn.Embedding(99, 64, sparse=True); table(torch.tensor([1])).sum().backward()",
        ),
        Case(
            "Nothing to train",
            "qsub.optim.param_groups(model)",
            "model = qsub.quantize_(nn.Sequential(nn.Linear(4, 4, bias=False)))",
        ),
        Case("Another block size in the middle", 'opt.param_groups[0]["block_size"] = 128\nopt.step()'),
        Case("An option that is misspelt", 'qsub.optim.AdamW8bit([{"params": [x], "blocksize": 128}])'),
        Case("A learning rate that becomes text", 'opt.param_groups[0]["lr"] = "1e-3"\nopt.step()'),
        Case(
            "fp16 parameters rounded stochastically",
            "qsub.optim.AdamW8bit(layer.half().parameters(), stochastic_round=True)",
            "layer = nn.Linear(10, 6)",
        ),
        Case(
            "State of another optimizer",
            "opt.load_state_dict(sgd.state_dict())",
            "sgd = torch.optim.SGD(opt.param_groups[0]['params'], momentum=0.9); sgd.step()",
        ),
        Case(
            "State of other shapes",
            "opt.load_state_dict(other.state_dict())",
            "other = stepped(96)",
        ),
        Case("State cut without its parameter", 'state["exp_avg"] = state["exp_avg"][:32]\nopt.step()', STATE),
        Case("State of integers", 'state["exp_avg"] = torch.zeros(64, 128, dtype=torch.int64)\nopt.step()', STATE),
        Case("State that is broken", 'state["exp_avg_sq"] = torch.full((64, 128), math.nan)\nopt.step()', STATE),
        Case("Columns of state as a view", 'state["exp_avg"][:, 3]', STATE),
        Case("The memory of state", 'state["exp_avg"].numpy()', STATE),
        Case(
            "FullyShardedDataParallel (FSDP1)",
            "opt.step()",
            "param = opt.param_groups[0]['params'][0]; param._fsdp_flattened = True",
        ),
    ],
    "transformers and PEFT": [
        Case("skip names no layer", 'load("llama", quantization_config=qsub.QsubConfig(skip=["mlp.w3"]))'),
        Case("skip is text", 'qsub.QsubConfig(skip="lm_head")'),
        Case(
            "A model without nn.Linear",
            'load("gpt2", quantization_config=qsub.QsubConfig())',
            "transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, "
            'bos_token_id=0, eos_token_id=0)).save_pretrained("gpt2")',
        ),
        Case(
            "Offloading to disk",
            'load("llama", quantization_config=qsub.QsubConfig(), device_map={"": "disk"}, offload_folder="off")',
        ),
        Case(
            "Layers of different modes in one folder",
            'qsub.quantize_(llama, activations="int8", filter_fn=lambda name, _: "mlp" in name)\n'
            'llama.save_pretrained("mixed")',
            "qsub.quantize_(llama)",
        ),
        Case(
            "prepare_model_for_kbit_training of 16-bit weights",
            "peft.prepare_model_for_kbit_training(qsub.quantize_(llama.to(torch.bfloat16)))",
        ),
        Case(
            "The names of the original checkpoint",
            'llama.save_pretrained("names", save_original_format=True)',
            "qsub.quantize_(llama)",
        ),
        Case(
            "A state_dict that doesn't fit",
            'llama.save_pretrained("other", state_dict={"lm_head.weight": torch.ones(3)})',
            "qsub.quantize_(llama)",
        ),
        Case(
            "Layers chosen anew for an int8 folder",
            'load("llama-int8", quantization_config=qsub.QsubConfig(skip=["lm_head"]))',
        ),
        Case("Merging what is no PeftModel", "qsub.interop.peft.merge_and_unload(layer)", "import qsub.interop.peft"),
    ],
    "Command line": [
        Case("DST exists", "qsub quantize llama llama-int8"),
        Case("DST in no folder", "qsub quantize llama nowhere/llama"),
        Case("SRC is missing", "qsub quantize nowhere llama-8"),
        Case("A pattern fits nothing", 'qsub quantize llama llama-8 --only "*.w3"'),
        Case("Nothing is left to quantize", 'qsub quantize llama llama-8 --skip "*"'),
        Case("Nothing to dequantize", "qsub dequantize llama llama-float"),
        Case("A folder that is int8 already", "qsub quantize llama-int8 llama-8"),
        Case(
            "A folder of another method",
            "qsub quantize llama-fp8 llama-8",
            'import json, shutil; shutil.copytree("llama", "llama-fp8", dirs_exist_ok=True); '
            'config = json.loads(pathlib.Path("llama-fp8/config.json").read_text()); '
            'config["quantization_config"] = {"quant_method": "fp8"}; '
            'pathlib.Path("llama-fp8/config.json").write_text(json.dumps(config))',
        ),
    ],
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 4))


def stepped(features: int) -> Any:
    opt = qsub.optim.AdamW8bit(nn.Linear(features, 64).parameters(), backend="eager")
    for param in opt.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    opt.step()
    return opt


def namespace() -> dict[str, Any]:
    """The names that the code of the cases uses; makes the folders "llama" and "llama-int8"."""
    torch.manual_seed(0)
    if not os.path.exists("llama"):
        tiny_llama().save_pretrained("llama")
        qsub.quantize_(tiny_llama()).save_pretrained("llama-int8")
    return {
        **{
            "math": math,
            "nn": nn,
            "pathlib": pathlib,
            "peft": peft,
            "qsub": qsub,
            "safetensors": safetensors,
            "torch": torch,
        },
        **{"transformers": transformers, "load": transformers.AutoModelForCausalLM.from_pretrained},
        **{"model": mlp(), "stepped": stepped, "llama": tiny_llama(), "opt": stepped(128)},
        "weight": qsub.Int8RowwiseTensor.from_float(torch.randn(6, 10)),
        "x": torch.randn(3, 10),
        "layer": qsub.quantize_(nn.Linear(10, 6)),
    }


def message(case: Case) -> str:
    """What the case raises, as "Type: text"; AssertionError if nothing."""
    if case.code.startswith("qsub "):
        return _message_of_command(case.code, case.before)
    names = namespace()
    exec(case.before, names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(case.code, names)
    except Exception as error:
        return normalized(f"{type(error).__name__}: {error}")
    raise AssertionError(f"{case.what}: {case.code!r} raises nothing")


def _message_of_command(line: str, before: str) -> str:
    exec(before, namespace())
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run(shlex.split(line)[1:])
    if code == 0:
        raise AssertionError(f"{line!r} succeeds")
    return normalized(f"{errors.getvalue().strip()}\n(exit code {code})")


def normalized(text: str) -> str:
    """Without what differs from machine to machine: the working directory, addresses."""
    text = text.replace(os.getcwd() + os.sep, "").replace(os.path.realpath(os.getcwd()) + os.sep, "")
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)


def entry(case: Case) -> str:
    """The case as it stands on the page."""
    kind = "sh" if case.code.startswith("qsub ") else "py"
    text = "\n".join(textwrap.fill(line, 118) for line in message(case).splitlines())
    return f"**{case.what}**\n\n```{kind}\n{case.code}\n```\n\n```text\n{text}\n```\n"


def page() -> str:
    """docs/refused.md. The cases write files to the working directory."""
    parts = [HEAD]
    for section, cases in CASES.items():
        parts += [f"## {section}\n", *map(entry, cases)]
    return "\n".join(parts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(page(), end="")
