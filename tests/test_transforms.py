"""torch.func, higher derivatives, saved-tensor hooks, training tools and process boundaries."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qsub
from qsub import Int8RowwiseTensor


def model(trainable=False, dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 4, dtype=dtype))
    return qsub.quantize_(layers, trainable=trainable)


def twin(quantized):
    return qsub.dequantize_(copy.deepcopy(quantized))


X = torch.linspace(-1, 1, 5 * 16, dtype=torch.float64).view(5, 16)


@pytest.mark.parametrize(
    "transform",
    [
        lambda m: functional_call(m, dict(m.named_parameters()), (X,)),
        lambda m: grad(lambda x: m(x).pow(2).sum())(X),
        lambda m: vmap(m)(X),
        lambda m: vmap(grad(lambda x: m(x).pow(2).sum()))(X),
        lambda m: jacrev(m)(X[0]),
        lambda m: jvp(m, (X,), (torch.ones_like(X),))[1],
        lambda m: vmap(lambda x: x @ m[0].weight.t())(X),
    ],
)
def test_torch_func_equals_the_dequantized_twin(transform):
    m = model()
    torch.testing.assert_close(transform(m), transform(twin(m)), rtol=1e-12, atol=1e-13)


def test_torch_func_gradient_of_trainable_weights_is_plain():
    m = model(trainable=True)
    params = {name: p.detach() for name, p in m.named_parameters()}
    grads = grad(lambda p: functional_call(m, p, (X,)).pow(2).sum())(params)
    t = twin(m)
    wanted = grad(lambda p: functional_call(t, p, (X,)).pow(2).sum())(dict(t.named_parameters()))
    for name, value in grads.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-12, atol=1e-13)


def test_finite_differences_first_and_second_order():
    m = model()
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(m, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(m, (x,))


def test_forward_mode():
    m = model()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(m(forward_ad.make_dual(X, torch.ones_like(X)))).tangent
    torch.testing.assert_close(tangent, jvp(twin(m), (X,), (torch.ones_like(X),))[1], rtol=1e-12, atol=1e-13)


def test_save_on_cpu():
    m, x = model(), X.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = m(x)
    y.pow(2).sum().backward()
    t = twin(m)
    torch.testing.assert_close(x.grad, grad(lambda v: t(v).pow(2).sum())(X), rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [False, True])
def test_activation_checkpointing_under_compile(trainable):
    m = model(trainable, torch.float32)
    run = torch.compile(
        lambda x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    grads = []
    for f in (run, m):
        m.zero_grad()
        x = X.float().requires_grad_()
        f(x).pow(2).sum().backward()
        grads.append([x.grad, *(p.grad for p in m.parameters() if p.grad is not None)])
    assert len(grads[0]) == len(grads[1]) == (5 if trainable else 3)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # of torch.export's own code
def test_aot_inductor_runs_the_exported_model(tmp_path):
    m = model(dtype=torch.float32)
    program = torch.export.export(m, (X.float(),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for rows in (2, 5):
        torch.testing.assert_close(loaded(X[:rows].float()), m(X[:rows].float()), rtol=1e-5, atol=1e-6)


# ---- Training tools ----


def step(m, optimizer, batches=1):
    optimizer.zero_grad()
    for _ in range(batches):
        (m(X.float()).pow(2).mean() / batches).backward()
    optimizer.step()


def test_gradient_clipping_and_accumulation():
    m = model(trainable=True, dtype=torch.float32)
    m(X.float()).pow(2).sum().backward()
    t = twin(m)
    for p in t.parameters():
        p.requires_grad_()
    t(X.float()).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(t.parameters(), 0.5), rtol=1e-5, atol=0)
    first = m[0].weight.grad.clone()
    m.zero_grad()
    for _ in range(2):
        (m(X.float()).pow(2).sum() / 2).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    torch.testing.assert_close(m[0].weight.grad, first)


def test_averaged_model():
    m = model(trainable=True, dtype=torch.float32)
    average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(m)
    before = average.module[0].weight.dequantize()
    with torch.no_grad():
        m[0].weight.copy_(m[0].weight.dequantize() + 1)
    average.update_parameters(m)
    moved = (average.module[0].weight.dequantize() - before).mean()
    assert abs(moved.item() - 0.5) < 0.02  # a code is about .01


def test_an_average_in_float_follows_int8_weights_and_one_in_int8_does_not():
    """As docs/integrations.md says: a thousandth of the way is far under half a code."""
    m = model(trainable=True, dtype=torch.float32)
    start = m[0].weight.detach().dequantize()
    copies = [twin(m), copy.deepcopy(m).requires_grad_(False)]
    in_float, in_int8 = (AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.999)) for each in copies)
    for average in (in_float, in_int8):
        average.update_parameters(m)  # the first one copies
    with torch.no_grad():
        m[0].weight.add_(torch.randn_like(m[0].weight) * 0.1)
    expected = start.clone()
    for _ in range(300):
        in_float.update_parameters(m)
        with pytest.warns(UserWarning, match="keep averages of weights in float"):
            in_int8.update_parameters(m)
        expected.lerp_(m[0].weight.detach().dequantize(), 0.001)
    torch.testing.assert_close(in_float.module[0].weight.detach(), expected)
    assert (in_int8.module[0].weight.dequantize() - expected).norm() > 0.5 * (expected - start).norm()


def test_hooks_and_requires_grad():
    m = model(trainable=True, dtype=torch.float32)
    seen = []
    m[0].weight.register_hook(lambda g: seen.append(type(g)))
    m(X.float()).sum().backward()
    assert seen == [torch.Tensor]
    m.requires_grad_(False)
    assert not m[0].weight.requires_grad
    m[0].weight.requires_grad_(True)
    assert m[0].weight.requires_grad and isinstance(m[0].weight, Int8RowwiseTensor)


def test_parametrizations():
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    m = model(dtype=torch.float32)
    expected = F.linear(X.float(), m[0].weight.dequantize() * 2, m[0].bias)
    nn.utils.parametrize.register_parametrization(m[0], "weight", Double())
    torch.testing.assert_close(m[0](X.float()), expected)


def test_init_functions():
    weight = Int8RowwiseTensor.from_float(torch.zeros(64, 64))
    nn.init.normal_(weight, std=0.5)
    assert abs(weight.std().item() - 0.5) < 0.05
    nn.init.uniform_(weight, -1, 1)
    assert 0.9 < weight.abs().max() <= 1
    nn.init.zeros_(weight)
    assert not weight.dequantize().any()
    nn.init.kaiming_uniform_(weight)
    assert weight.abs().max() <= (6 / 64) ** 0.5 * 1.01


# ---- .data, swap, shared memory ----


def test_data_takes_effect():
    m = model(dtype=torch.float32)
    value = Int8RowwiseTensor.from_float(torch.randn(8, 16))
    m[0].weight.data = value
    assert m[0].weight.int_data.data_ptr() == value.int_data.data_ptr()
    m[0].weight.data = torch.full((8, 16), 2.0)
    assert torch.equal(m[0].weight.dequantize(), torch.full((8, 16), 2.0))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(8, 17), "must keep its shape"),
        (torch.full((8, 16), torch.nan), "row 0 has NaN"),
        (Int8RowwiseTensor.from_float(torch.zeros(8, 16)).half(), "must keep its dtype"),
    ],
)
def test_data_refuses_what_does_not_fit(value, text):
    weight = model(dtype=torch.float32)[0].weight
    before = weight.dequantize()
    with pytest.raises(ValueError, match=text):
        weight.data = value
    assert torch.equal(weight.dequantize(), before)


def test_swap_tensors():
    a, b = (nn.Parameter(Int8RowwiseTensor.from_float(torch.full((2, 2), v)), False) for v in (1.0, 2.0))
    torch.utils.swap_tensors(a, b)
    assert a.dequantize()[0, 0] == 2 and b.dequantize()[0, 0] == 1


def _halve(weight, queue):
    import qsub  # noqa: F401

    weight.int_data.zero_()
    queue.put(float(weight.dequantize().abs().sum()))


@pytest.mark.slow
def test_share_memory_works_across_processes():
    weight = Int8RowwiseTensor.from_float(torch.ones(4, 4))
    assert not weight.is_shared()
    assert weight.share_memory_() is weight and weight.is_shared()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_halve, args=(weight, queue))
    process.start()
    assert queue.get(timeout=120) == 0.0
    process.join()
    assert not weight.dequantize().any()  # the other process wrote into the same memory


def test_memory_is_told_as_it_is():
    weight = Int8RowwiseTensor.from_float(torch.zeros(8, 16))
    assert weight.nbytes == 8 * 16 + 8 * 2
    assert weight.element_size() == weight.itemsize == 1
