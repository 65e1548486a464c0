"""quantize_ and dequantize_: which weights, ties, all or nothing, memory."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qsub
from qsub import Int8RowwiseTensor
from qsub.linear import int8_linear


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.body.weight
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.again(self.body(self.embedding(ids))))


def int8_names(model):
    return [name for name, p in model.named_parameters() if isinstance(p, Int8RowwiseTensor)]


def test_every_linear_is_quantized_and_frozen_and_nothing_else_changes():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Conv1d(16, 4, 1), nn.Sequential(nn.Linear(4, 2)))
    others = {name: p for name, p in model.named_parameters() if name not in ("0.weight", "3.0.weight")}
    assert qsub.quantize_(model) is model
    assert int8_names(model) == ["0.weight", "3.0.weight"]
    for name, p in model.named_parameters():
        assert p.requires_grad == (name not in ("0.weight", "3.0.weight"))
        if name in others:
            assert p is others[name]


def test_trainable_keeps_requires_grad_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.requires_grad_(False)
    qsub.quantize_(model, trainable=True)
    assert model[0].weight.requires_grad and not model[1].weight.requires_grad


def test_filter_gets_name_and_module():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    seen = []
    qsub.quantize_(model, filter_fn=lambda name, module: seen.append((name, module)) or "head" not in name)
    assert int8_names(model) == ["body.weight"]
    assert seen == [("body", model["body"]), ("head", model["head"])]


def test_a_single_linear():
    assert isinstance(qsub.quantize_(nn.Linear(4, 4)).weight, Int8RowwiseTensor)


def test_ties():
    model = Tied()
    reference = copy.deepcopy(model)
    qsub.quantize_(model)
    assert model.head.weight is model.embedding.weight and type(model.head.weight) is nn.Parameter
    assert model.again.weight is model.body.weight and isinstance(model.body.weight, Int8RowwiseTensor)
    ids = torch.arange(20)
    torch.testing.assert_close(model(ids), reference(ids), rtol=0.05, atol=0.05)
    qsub.dequantize_(model)
    assert model.again.weight is model.body.weight and type(model.body.weight) is nn.Parameter


def test_a_tie_that_the_filter_would_tear_is_left():
    model = nn.Sequential(Tied(), nn.Linear(4, 4))
    qsub.quantize_(model, filter_fn=lambda name, module: name != "0.again")
    assert int8_names(model) == ["1.weight"] and model[0].again.weight is model[0].body.weight


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
def test_a_bad_weight_is_named_and_the_model_left_as_it_was(value):
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"deep": nn.Linear(4, 4)}))
    with torch.no_grad():
        model[1]["deep"].weight[2, 1] = value
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"1\.deep\.weight: row 2 has NaN, Inf or a magnitude over 65504"):
        qsub.quantize_(model)
    assert all(p is before[name] for name, p in model.named_parameters())


def test_lazy_modules_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^0\.weight is not initialized"):
        qsub.quantize_(nn.Sequential(nn.LazyLinear(4)))


@pytest.mark.parametrize(
    "options",
    [
        {"activations": "int8"},
        {"activations": "int8", "outlier_threshold": 6.0},
        {"backward": "int8"},
        {"activations": "int8", "outlier_threshold": 2.0, "backward": "int8"},
    ],
)
def test_modes_are_those_of_the_linear_on_plain_tensors(options):
    layer = qsub.quantize_(nn.Linear(64, 48), **options)
    weight = layer.weight
    assert all(text in repr(weight) for text in map(repr, options.values()))
    grads = []
    for run in (
        layer,
        lambda x: int8_linear(x, weight.int_data, weight.scale, layer.bias, **options),
        lambda x: x @ weight.t() + layer.bias,  # through autograd's mm
    ):
        x = torch.linspace(-3, 3, 5 * 64).view(5, 64).requires_grad_()
        y = run(x)
        y.pow(2).sum().backward()
        grads.append((y.detach(), x.grad))
    for y, grad in grads[1:]:
        torch.testing.assert_close(y, grads[0][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, grads[0][1], rtol=1e-5, atol=1e-4)
    plain = qsub.quantize_(copy.deepcopy(qsub.dequantize_(copy.deepcopy(layer))))
    y = plain(torch.linspace(-3, 3, 5 * 64).view(5, 64))
    assert torch.equal(y, grads[0][0]) == ("activations" not in options)  # a mode makes a difference


def test_modes_survive_copies_moves_and_files(tmp_path):
    layer = qsub.quantize_(nn.Linear(64, 48), activations="int8", outlier_threshold=6.0, backward="int8")
    qsub.save_file(layer.state_dict(), tmp_path / "x.safetensors")
    torch.save(layer.state_dict(), tmp_path / "x.pt")
    x = torch.randn(3, 64)
    for state in (qsub.load_file(tmp_path / "x.safetensors"), torch.load(tmp_path / "x.pt")):
        other = nn.Linear(64, 48)
        other.load_state_dict(state, assign=True)
        assert torch.equal(other(x), layer(x))
    for twin in (copy.deepcopy(layer), copy.deepcopy(layer).bfloat16().float()):
        assert twin.weight.fields() == layer.weight.fields()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activations": "int4"}, "activations must be None or \"int8\", got 'int4'"),
        ({"backward": "fp8"}, "backward_mode must be None"),
        ({"outlier_threshold": 6.0}, "comes with activations"),
        ({"activations": "int8", "outlier_threshold": 0.0}, "must be positive"),
    ],
)
def test_modes_that_do_not_fit(options, text):
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=text):
        qsub.quantize_(model, **options)
    assert not int8_names(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_gives_back_plain_parameters(dtype):
    model = qsub.quantize_(nn.Linear(16, 8, dtype=dtype))
    value = model.weight.dequantize()
    assert qsub.dequantize_(model) is model
    assert type(model.weight) is nn.Parameter and model.weight.dtype == dtype and torch.equal(model.weight, value)
    assert not model.weight.requires_grad  # what quantize_ froze stays frozen


def test_hooks_and_parametrizations_survive():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    qsub.quantize_(model)
    assert int8_names(model) == ["1.weight"]  # a parametrized weight is no parameter of its Linear
    model(torch.randn(2, 4)).sum()
    assert calls == [1]


def test_progress_shows_a_bar(capsys):
    qsub.quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), progress=True)
    assert "2/2" in capsys.readouterr().err


class LivePeak(TorchDispatchMode):
    """Peak bytes of all storages that were made under this mode and are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor:
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_peak_memory_is_the_float_model_and_one_layer():
    layers, size = 8, 1024
    with LivePeak() as memory:
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
        layer = size * size * 4
        assert memory.peak >= layers * layer  # the tracker sees the float model
        qsub.quantize_(model)
    assert memory.peak <= (layers + 1) * layer
    held = sum(size for ref, size in memory.alive.values() if not ref.expired())
    assert held < 0.3 * layers * layer


class Experts(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight = nn.Parameter(torch.randn(2, 4, 4))


@pytest.mark.parametrize(
    "odd",
    [
        Experts,
        lambda: nn.Linear(4, 4).to(torch.float8_e4m3fn),
        lambda: _with_weight(torch.eye(4).to_sparse()),
        lambda: _with_weight(torch.eye(4).to_sparse_csr()),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
def test_a_weight_of_another_kind_is_named_and_the_model_left_as_it_was(odd):
    layers = nn.Sequential(nn.Linear(4, 4), odd(), nn.Linear(4, 4))
    before = list(layers.parameters())
    with pytest.raises(ValueError, match=r"1\.weight must be \(out_features, in_features\), dense"):
        qsub.quantize_(layers)
    assert all(p is q for p, q in zip(layers.parameters(), before, strict=True))
    qsub.quantize_(layers, filter_fn=lambda name, module: name != "1")
    assert isinstance(layers[2].weight, Int8RowwiseTensor) and layers[1].weight is before[2]


def _with_weight(weight):
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
