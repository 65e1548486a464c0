"""Int8 weights on two GPUs with NCCL: under fully_shard, offloaded to pinned memory, under DDP, and checkpoints."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_weights import batch, differing, loss_of, parts, quantized, shard
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from qsub.optim import AdamW8bit

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
pytestmark = [pytest.mark.dist, pytest.mark.gpu, TWO_GPUS]

SHARDING = {
    "gathered for each use": {},
    "weights stay gathered": {"reshard_after_forward": False},
    "offloaded to pinned memory": {"offload_policy": CPUOffloadPolicy()},
}


def _model(trainable=True):
    return quantized(trainable, device="cuda")


def _train(model, optimizer, steps, rank=0):
    for step in range(steps):
        loss = loss_of(model, batch(step, rank, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _sharded(rank, sharding, trainable):
    model, twin = shard(_model(trainable), **SHARDING[sharding]), _model(trainable)
    start = [tensor.cpu().clone() for tensor in parts(twin.layers[0].linear.weight)]
    optimizers = [AdamW8bit([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, twin)]
    x = batch(9, device="cuda")
    assert torch.equal(model(x), twin(x))
    losses = [_train(m, optimizer, 3) for m, optimizer in zip((model, twin), optimizers, strict=True)]
    # The gradients of both are equal but for the kernels' order of summation, which the last loss shows, if at all.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
    after = [tensor.cpu() for tensor in parts(model.layers[0].linear.weight)]
    assert all(map(torch.equal, after, start)) != trainable


@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("trainable", [False, True])
def test_fully_sharded(sharding, trainable):
    on_ranks(_sharded, 2, sharding, trainable, backend="cpu:gloo,cuda:nccl")


def _replicated(rank):
    model = _model()
    with torch.no_grad():
        model.layers[0].linear.weight.mul_(0.3 + rank)
    before = [tensor.clone() for tensor in parts(model.layers[0].linear.weight)]
    replica = DistributedDataParallel(model, device_ids=[rank])
    after = parts(model.layers[0].linear.weight)
    assert all(map(torch.equal, before, after)) == (rank == 0)
    torch.manual_seed(rank)
    _train(replica, torch.optim.AdamW(model.parameters(), lr=1e-2), 3, rank)
    return [tensor.float().tolist() for param in model.parameters() for tensor in parts(param)]


def test_replicas_start_and_stay_equal():
    first, second = on_ranks(_replicated, 2, backend="nccl")
    assert first == second


def _save(rank, path):
    model = shard(_model())
    _train(model, AdamW8bit(model.parameters(), lr=1e-2), 2)
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    return [tensor.float().tolist() for param in model.parameters() for tensor in parts(param)]


def _load(rank, path):
    model = _model()
    content = get_model_state_dict(model)
    dcp.load(content, checkpoint_id=path)
    set_model_state_dict(model, content)
    assert differing(model, _model())  # negative control
    return [tensor.float().tolist() for param in model.parameters() for tensor in parts(param)]


def test_saved_on_two_gpus_and_loaded_on_one(tmp_path):
    saved = on_ranks(_save, 2, str(tmp_path), backend="nccl")
    assert saved[0] == saved[1] == on_ranks(_load, 1, str(tmp_path), backend="nccl")[0]
