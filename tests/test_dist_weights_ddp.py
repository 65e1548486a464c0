"""Int8 weights under DistributedDataParallel: replicas that start and stay equal."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from dist_weights import batch, differing, loss_of, parts, quantized
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsub import Int8RowwiseTensor
from qsub.optim import AdamW8bit

pytestmark = pytest.mark.dist

OPTIONS = {
    "plain": {},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}
OPTIMIZERS = {
    "AdamW8bit": lambda params: AdamW8bit(params, lr=1e-2, backend="eager"),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False),
}


def _bits(model):
    """All parameters, to be compared between ranks."""
    return [tensor.float().tolist() for param in model.parameters() for tensor in parts(param)]


def _start(rank, dtype):
    model = quantized(True, dtype=dtype)
    with torch.no_grad():
        for layer in model.layers:
            layer.linear.weight.mul_(0.3 + rank)  # no row has its largest code any more, where that differs
    before = [[tensor.clone() for tensor in parts(param)] for param in model.parameters()]
    DistributedDataParallel(model)
    kept = all(
        torch.equal(a, b)
        for param, old in zip(model.parameters(), before, strict=True)
        for a, b in zip(parts(param), old, strict=True)
    )
    return kept, _bits(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_rank_s_codes_reach_all_ranks_as_they_are(dtype):
    (kept, first), (kept_too, second), (_, third) = on_ranks(_start, 3, dtype)
    assert first == second == third
    assert kept and not kept_too


class Branches(nn.Module):
    """Two branches, of which a rank uses one."""

    def __init__(self, trainable):
        super().__init__()
        self.net, self.other = quantized(trainable), quantized(trainable)

    def forward(self, x, unused=False):
        return self.net(x) if unused else self.net(x) + self.other(x)


def _train(rank, trainable, options, optimizer, world_size):
    torch.manual_seed(rank)  # torch's generator differs between the ranks, as that of dropout must
    module = Branches(trainable)
    start = Branches(trainable)
    model = DistributedDataParallel(module, **OPTIONS[options])
    trained = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        for micro in range(2):
            first = options == "static graph" and step == 0  # which torch wants to be synchronized, of any model
            with model.no_sync() if micro == 0 and not first else contextlib.nullcontext():
                x = batch(2 * step + micro, rank)
                loss = model(x, unused=options == "unused" and rank == 0).square().mean()
                loss.backward()
        trained.step()
        trained.zero_grad()
    changed = differing(module, start)
    assert ("net.layers.0.linear.weight" in changed) == trainable and "net.layers.0.linear.bias" in changed
    return _bits(module)


CASES = [("AdamW8bit", options) for options in OPTIONS] + [("AdamW", "plain"), ("SGD", "plain")]


@pytest.mark.parametrize(("optimizer", "options"), CASES)
@pytest.mark.parametrize("trainable", [False, True])
def test_replicas_stay_equal(trainable, optimizer, options):
    """With gradient accumulation (no_sync), biases, and data and generators that differ between the ranks."""
    first, second = on_ranks(_train, 2, trainable, options, optimizer, 2)
    assert first == second


def _gradients(rank):
    model, twin = DistributedDataParallel(quantized(True)), quantized(True)
    loss_of(model, batch(0, rank)).backward()
    whole = torch.cat([batch(0, other) for other in range(dist.get_world_size())])
    loss_of(twin, whole).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(param.grad) is torch.Tensor
        # Sums of 8 and of 16 rows in another order, relative to the largest gradient: measured 1e-7.
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-6 * float(other.grad.abs().max()))
    loss_of(twin, batch(0, 5)).backward()
    with pytest.raises(AssertionError):  # negative control
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-2, atol=0)


def test_gradients_are_the_mean_over_the_ranks():
    on_ranks(_gradients, 2)


def _broadcast(rank):
    torch.manual_seed(rank)
    weight = Int8RowwiseTensor.from_float(torch.randn(5, 8))
    weight.mul_(0.3)
    dist.broadcast(weight, src=0)
    return weight.int_data.tolist(), weight.scale.tolist()


def test_a_broadcast_leaves_all_ranks_with_the_same_weight():
    first, second = on_ranks(_broadcast, 2)
    assert first == second


def test_flat_views_hold_weights_together_and_do_nothing_else():
    weight = Int8RowwiseTensor.from_float(torch.randn(3, 4))
    plain = torch.randn(5)
    bucket = torch.cat([weight.view(-1), plain, weight[1:].view(-1)])
    assert bucket.shape == (25,) and bucket.dtype == torch.float32
    assert torch.equal(bucket[:12].view(3, 4).int_data, weight.int_data)
    assert torch.equal(bucket[12:17].view(5), plain)
    assert torch.equal(bucket.narrow(0, 17, 8).view(2, 4).scale, weight.scale[1:])
    assert "FlatRows" in repr(bucket)
    for refused in (lambda: bucket[1:5], lambda: bucket.view(5, 5), lambda: bucket + 1, lambda: bucket[:12].view(4, 3)):
        with pytest.raises(NotImplementedError, match="dequantize"):
            refused()


def test_quantized_copies_are_independent():
    """A bucket is a copy: what is received does not change the sender's pieces before it is copied back."""
    weight = Int8RowwiseTensor.from_float(torch.randn(3, 4))
    bucket = torch.cat([weight.view(-1), torch.zeros(2)])
    bucket[:12].view(3, 4).int_data.zero_()
    assert weight.int_data.any()
