"""Cases from public reports on other libraries, with the right outcome, that no other test names.

bitsandbytes#1927, #2034, #804, #67, #28, #165: test_rowwise_linear. #411, #80, #535, PR #159, transformers#25011:
test_serialization. #1634, #173, #219, pytorch/ao#624, #346: test_quantize. pytorch/ao#456, #890: test_operator_table.
#1790, #875: test_compile, test_transforms. #2376: test_linear_numerics. #534: test_rowwise_linear.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsub
from qsub import Int8RowwiseTensor


def test_deepcopy_then_train_one():
    """bitsandbytes PR #1231."""
    model = qsub.quantize_(nn.Linear(16, 8), trainable=True)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 16)
    assert torch.equal(twin(x), model(x)) and twin.weight.requires_grad
    before = twin.weight.dequantize().detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(twin.weight.dequantize().detach(), before)
    assert not torch.equal(model.weight.dequantize().detach(), before) and twin.weight.grad is None


def test_merge_and_unmerge_of_an_adapter():
    """peft#444, #638: a merge errs by half a code step, an unmerge by half a step more."""
    torch.manual_seed(0)
    weight = Int8RowwiseTensor.from_float(torch.randn(32, 64))
    delta = 0.05 * torch.randn(32, 4) @ torch.randn(4, 64)
    original = weight.dequantize()
    weight.add_(delta)
    half = weight.scale.float().unsqueeze(1) / 254 * (1 + 2**-9)  # and the fp16 rounding of the scale
    assert ((weight.dequantize() - (original + delta)).abs() <= half).all()
    other_half = half.clone()
    weight.sub_(delta)
    half = weight.scale.float().unsqueeze(1) / 254 * (1 + 2**-9)
    assert ((weight.dequantize() - original).abs() <= half + other_half).all()


def test_safe_merge_takes_effect():
    """PEFT's merge(safe_merge=True): a copy is updated, checked, and assigned to weight.data."""
    layer = qsub.quantize_(nn.Linear(16, 8))
    delta = torch.full((8, 16), 0.5)
    merged = layer.weight.data.clone()
    merged += delta
    assert torch.isfinite(merged).all()
    expected = layer.weight.dequantize() + delta
    layer.weight.data = merged
    assert (layer.weight.dequantize() - expected).abs().max() <= merged.scale.max().float() / 254 * 1.01


@pytest.mark.parametrize("threshold", [None, 2.0])
def test_the_gradient_passes_int8_activations_to_the_layers_below(threshold):
    """pytorch/ao#4376: an adapter around a frozen int8 layer with quantized activations."""
    torch.manual_seed(0)
    below = nn.Linear(32, 64)
    frozen = qsub.quantize_(nn.Linear(64, 48), activations="int8", outlier_threshold=threshold)
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 48, bias=False)
    x, grad = torch.randn(8, 32), torch.randn(8, 48)

    def run(linear):
        for module in (below, down, up):
            module.zero_grad()
        h = below(x)
        (linear(h) + up(down(h))).backward(grad)
        return [p.grad.clone() for module in (below, down, up) for p in module.parameters()]

    exact = run(lambda h: F.linear(h, frozen.weight.dequantize(), frozen.bias))
    for a, b in zip(run(frozen), exact, strict=True):  # straight through: the gradient is that of the float product
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_moves_keep_data_and_scales():
    """transformers#23336, #38717: cpu to cuda to cpu to bf16."""
    layer = qsub.quantize_(nn.Linear(64, 48), activations="int8")
    state = {name: getattr(layer.weight, name).clone() for name in ("int_data", "scale")}
    fields = layer.weight.fields()
    for move in (
        lambda m: m.cuda(),
        lambda m: m.cpu(),
        lambda m: m.to("cuda", torch.bfloat16),
        lambda m: m.cpu().float(),
    ):
        move(layer)
        for name, value in state.items():
            inner = getattr(layer.weight, name)
            assert inner.device == layer.weight.device == layer.bias.device and torch.equal(inner.cpu(), value)
    assert layer.weight.fields() == fields
    pinned = layer.weight.pin_memory()
    assert isinstance(pinned, Int8RowwiseTensor) and pinned.is_pinned()
