"""torch.save and torch.load, and state dicts between float, quantized and meta models."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn

import qsub
from qsub import Int8RowwiseTensor


def save_and_load(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


X = torch.linspace(-1, 1, 5 * 64).view(5, 64)


def test_state_dict_round_trip_is_exact_with_weights_only():
    source = qsub.quantize_(model())
    state = save_and_load(source.state_dict(), weights_only=True)
    assert type(state["0.weight"]) is Int8RowwiseTensor
    target = qsub.quantize_(model(1))
    assert target.load_state_dict(state) == ([], [])
    assert torch.equal(target(X), source(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_keeps_its_fields(dtype):
    weight = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(4, 6, dtype=dtype)), requires_grad=True)
    for value in (weight, weight.detach(), weight.t()):
        again = save_and_load(value)
        assert type(again) is type(value) and again.dtype == dtype and again.shape == value.shape
        assert torch.equal(again.dequantize(), value.dequantize())
    assert save_and_load(weight).requires_grad and isinstance(save_and_load(weight), nn.Parameter)


def test_whole_module():
    source = qsub.quantize_(model())
    assert torch.equal(save_and_load(source, weights_only=False)(X), source(X))


def test_file_is_under_half_of_the_float_file():
    sizes = []
    for module in (model(), qsub.quantize_(model())):
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        sizes.append(buffer.tell())
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["float", "int8"])
@pytest.mark.parametrize("target", ["float", "int8", "meta", "int8 meta"])
def test_loads_between_models(source, target, assign, after_forward):
    """Without assign the target keeps its kind; with assign the source's tensors take their place."""
    origin = model() if source == "float" else qsub.quantize_(model())
    into = model(1)
    if "int8" in target:
        qsub.quantize_(into)
    if "meta" in target:
        if not assign:
            pytest.skip("copying into meta parameters is a no-op in torch, with its own warning")
        into = into.to("meta")
    if after_forward:
        origin(X)
        if "meta" not in target:
            into(X)
    into.load_state_dict(origin.state_dict(), assign=assign)
    weight = into[0].weight
    if assign:
        assert type(weight.data) is type(origin[0].weight.data)
        assert torch.equal(into(X), origin(X))
    elif target == "int8":
        assert isinstance(weight, Int8RowwiseTensor)
        assert torch.equal(into(X), (qsub.quantize_(copy.deepcopy(origin)))(X))
    else:
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, origin[0].weight.dequantize() if source == "int8" else origin[0].weight)


def test_loading_its_own_state_dict_changes_nothing():
    module = qsub.quantize_(model())
    before = module(X)
    module.load_state_dict(module.state_dict())
    assert torch.equal(module(X), before)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("0.weight", torch.zeros(3, 64), "size mismatch for 0.weight"),
        ("0.bias", torch.zeros(3), "size mismatch for 0.bias"),
        ("2.weight", torch.full((32, 128), torch.nan), "2.weight: row 0 has NaN"),
        ("2.weight", torch.full((32, 128), 7e4), "2.weight: row 0 has NaN, Inf or a magnitude over 65504"),
        ("2.weight", torch.zeros(32, 128, dtype=torch.int8), "2.weight: an int8 weight takes a float tensor"),
        ("2.weight", None, "2.weight: expected a tensor, got NoneType"),
    ],
)
def test_a_bad_entry_is_named_and_leaves_the_whole_model_as_it_was(key, value, text):
    module = qsub.quantize_(model())
    state = {**model(1).state_dict(), key: value}
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(RuntimeError) as caught:
        module.load_state_dict(state)
    assert text in str(caught.value)
    for name, p in module.named_parameters():
        inner = (p.int_data, p.scale) if isinstance(p, Int8RowwiseTensor) else (p,)
        kept = (before[name].int_data, before[name].scale) if len(inner) == 2 else (before[name],)
        assert all(torch.equal(a, b) for a, b in zip(inner, kept, strict=True))


class OldFormat(nn.Module):
    """Brings entries of an older format into form by a hook of its own, as modules of libraries do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 3))
        self.register_load_state_dict_pre_hook(self.reshape)

    @staticmethod
    def reshape(module, state, prefix, *_):
        state[f"{prefix}table"] = state[f"{prefix}table"].view(2, 3)


def test_entries_that_torch_or_a_hook_bring_into_form_load():
    module = nn.ModuleDict({"old": OldFormat(), "linear": nn.Linear(4, 4)})
    module.register_parameter("factor", nn.Parameter(torch.tensor(1.0)))
    qsub.quantize_(module)
    state = {**module.state_dict(), "old.table": torch.ones(6), "factor": torch.full((1,), 3.0)}
    module.load_state_dict(state)
    assert torch.equal(module["old"].table, torch.ones(2, 3)) and module.factor.item() == 3.0


def test_missing_and_unexpected_keys_are_reported_by_torch():
    module = qsub.quantize_(model())
    state = model(1).state_dict()
    state["other"] = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight[\s\S]*Unexpected key.*other"):
        module.load_state_dict(state)
    assert module.load_state_dict(state, strict=False) == (["0.weight"], ["other"])


def test_the_check_goes_with_the_model_and_away_with_dequantize():
    module = copy.deepcopy(qsub.quantize_(qsub.quantize_(model())))
    assert len(module._load_state_dict_pre_hooks) == 1
    assert len(save_and_load(module, weights_only=False)._load_state_dict_pre_hooks) == 1
    outer = nn.ModuleDict({"inner": module})
    state = {f"inner.{key}": value for key, value in model(1).state_dict().items()}
    state["inner.2.weight"][0, 0] = torch.inf
    with pytest.raises(RuntimeError, match=r"inner\.2\.weight: row 0"):
        outer.load_state_dict(state)
    assert not qsub.dequantize_(outer)["inner"]._load_state_dict_pre_hooks


class Parent(nn.Module):
    """`first` and `late` are loaded before and after the part that is quantized; it has tensors of its own, too."""

    def __init__(self, part):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.zeros(1))
        self.first = nn.Linear(8, 8)
        self.part = part
        self.late = nn.Linear(8, 8)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_load_of_what_holds_a_quantized_part_changes_nothing(depth, late):
    """Quantized before or after it became a part, at any depth; loaded by state dicts or by torch's own helper."""
    part = model()
    outer = nn.ModuleList([part]) if depth == 2 else part
    parent = Parent(outer) if late else Parent(qsub.quantize_(part) if depth < 2 else outer)
    qsub.quantize_(part)
    root = nn.ModuleDict({"a": nn.Linear(2, 2), "b": parent}) if depth else parent
    before = {name: value.clone() for name, value in root.state_dict().items()}
    state = {name: torch.as_tensor(value * 1.0) + 1 for name, value in root.state_dict().items()}
    bad = next(name for name in state if name.endswith("2.weight"))
    state[bad][0, 0] = torch.nan
    for assign in (False, True):
        given = {**state, bad: state[bad][:1]} if assign else state  # assigned, a NaN is a float weight as any other
        with pytest.raises(RuntimeError, match=r"which is left as it was:\n\t.*2\.weight"):
            root.load_state_dict(given, assign=assign)
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(before[n])) for n, v in root.state_dict().items())
    state[bad][0, 0] = 1.0
    assert not any(root.load_state_dict(state))
    assert not torch.equal(root.state_dict()[next(iter(before))], before[next(iter(before))])


def test_float_modules_load_as_ever_once_something_is_quantized():
    qsub.quantize_(model())
    module = model()
    state = {**model(1).state_dict(), "2.weight": torch.zeros(1, 1)}
    with pytest.raises(RuntimeError, match="size mismatch for 2.weight: copying a param"):
        module.load_state_dict(state)
    assert not module._load_state_dict_pre_hooks and torch.equal(module[0].weight, state["0.weight"])  # as torch does


def test_state_dict_is_detached_and_keeps_ties():
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    module[1].weight = module[0].weight
    qsub.quantize_(module, trainable=True)
    state = module.state_dict()
    assert not state["0.weight"].requires_grad
    loaded = save_and_load(state)
    assert loaded["0.weight"].int_data.data_ptr() == loaded["1.weight"].int_data.data_ptr()


def test_other_writers_of_safetensors_are_told_what_to_do(tmp_path):
    """safetensors itself, and by it accelerate's save_model and PEFT's save_pretrained."""
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(RuntimeError, match="use qsub.save_file or torch.save"):
        safetensors.save_file({"w": Int8RowwiseTensor.from_float(torch.ones(2, 2))}, tmp_path / "w.safetensors")


def test_a_fresh_process_loads_the_file(tmp_path):
    source = qsub.quantize_(model())
    torch.save(source.state_dict(), tmp_path / "model.pt")
    torch.save(source(X), tmp_path / "output.pt")
    script = (
        "import sys, torch, qsub; from torch import nn\n"
        "with torch.device('meta'): m = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))\n"
        "m.load_state_dict(torch.load(sys.argv[1] + '/model.pt'), assign=True)\n"
        "x = torch.linspace(-1, 1, 320).view(5, 64)\n"
        "assert torch.equal(m(x), torch.load(sys.argv[1] + '/output.pt'))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "where", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage, "meta"]
)
@pytest.mark.parametrize("kind", ["weight", "state"])
def test_every_map_location_of_torch_load(tmp_path, kind, where):
    if kind == "weight":
        saved = nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(4, 8), activations="int8"), requires_grad=True)
    else:
        saved = qsub.Blockwise8bitTensor.from_float(torch.randn(4, 80), 64, "float8_signed")
    torch.save({"x": saved}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location=where)["x"]
    assert type(loaded) is type(saved) and isinstance(loaded, nn.Parameter) == isinstance(saved, nn.Parameter)
    assert loaded.requires_grad == saved.requires_grad
    assert loaded.__tensor_flatten__() == saved.__tensor_flatten__()
    for name in loaded.__tensor_flatten__()[0]:
        part = getattr(loaded, name)
        assert part.device.type == loaded.device.type == ("meta" if where == "meta" else "cpu")
        assert where == "meta" or torch.equal(part, getattr(saved, name))
