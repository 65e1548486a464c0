"""Runs of a sharded optimizer beside one that holds the whole parameters, and their comparison bit for bit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qsub import Blockwise8bitTensor
from qsub.optim import Adam8bit, AdamW8bit

# Uneven on 2 and on 3 ranks, with short blocks; even; fewer rows than ranks; three dimensions; fp32 state; narrow rows
# that share blocks, 8 each, of which none lies on two ranks.
SHAPES = [(65, 80), (66, 64), (1, 4160), (2, 45, 50), (7, 9), (33,), (768, 8)]


class Bag(nn.Module):
    """A module of parameters alone; the same values in each call."""

    def __init__(self, dtype=torch.float32, shapes=SHAPES, device="cpu"):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        self.values = nn.ParameterList(nn.Parameter(value) for value in values)


def sharded_bag(device="cpu", **options):
    """A Bag whose parameters are sharded over all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = Bag(device=device, **options)
    fully_shard(model, mesh=mesh)
    return model


def new_optimizer(model, cls=AdamW8bit, **options):
    """Two groups; backend "eager" unless told otherwise."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "weight_decay": 0.1}]
    return cls(groups, **({"backend": "eager", **options} if issubclass(cls, Adam8bit) else options))


def like(value, param):
    """A whole tensor placed as `param` is."""
    value = value.to(param.device, param.dtype)
    return distribute_tensor(value, param.device_mesh, param.placements) if isinstance(param, DTensor) else value


def train(model, optimizer, first, last):
    """Steps `first` to `last` on gradients that depend on the number of the step and the parameter alone."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = like(torch.randn(param.shape, generator=generator), param)
        optimizer.step()


def whole(value):
    """Inner tensors of a parameter or a moment, gathered from all ranks where it is a DTensor: a scale for each row."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return [value.codes, value.row_scales()] if isinstance(value, Blockwise8bitTensor) else [value.detach()]


def assert_equal(left, right, where=""):
    for a, b in zip(whole(left), whole(right), strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), where
        assert torch.equal(a, b), where


def assert_same_run(model, optimizer, other, other_optimizer):
    """Parameters and states of both, bit for bit. Collective."""
    assert_same_states(optimizer.state_dict(), other_optimizer.state_dict())
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_equal(param, twin, name)


def assert_same_states(left, right):
    """The state of two state dicts, of which either may hold DTensors. Collective."""
    left, right = left["state"], right["state"]
    assert left.keys() == right.keys() and left
    for key in left:
        assert left[key].keys() == right[key].keys()
        for name in left[key]:
            assert_equal(left[key][name], right[key][name], f"{key}.{name}")


def differs(model, other):
    """Whether any parameter differs: what the negative controls ask. Collective."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    unequal = [not torch.equal(whole(a)[0], whole(b)[0]) for a, b in pairs]  # all of them, on all ranks
    return any(unequal)
