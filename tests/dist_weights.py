"""A model with int8 weights for the tests on several ranks, beside its twin of one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qsub
from qsub import Int8RowwiseTensor


class Adapted(nn.Module):
    """A Linear and a low-rank adapter beside it."""

    def __init__(self, rows, columns):
        super().__init__()
        self.linear = nn.Linear(columns, rows)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


class Net(nn.Module):
    """130 and 65 rows, which 2 and 3 ranks don't divide, one row, and 64; the same values in each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted(*size) for size in ((130, 72), (65, 130), (1, 65), (64, 1)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def quantized(trainable=False, device="cpu", dtype=torch.float32, **options):
    """A Net with int8 weights in `linear`; adapters and biases are trained, the int8 weights if `trainable`."""
    model = Net().to(dtype)
    qsub.quantize_(model, filter_fn=lambda name, _: name.endswith("linear"), trainable=trainable, **options)
    return model.to(device)


def shard(model, **options):
    """fully_shard of each layer and the rest, over all ranks."""
    options["mesh"] = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(step, rank=0, dtype=torch.float32, device="cpu"):
    """(8, 72) inputs that depend on step and rank."""
    return torch.randn(8, 72, generator=torch.Generator().manual_seed(100 * rank + step)).to(device, dtype)


def loss_of(model, x):
    """A scalar."""
    return model(x).float().square().mean()


def whole(param):
    """A parameter gathered from all ranks where it is a DTensor. Collective."""
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()


def parts(param):
    """The plain tensors of a whole parameter."""
    value = whole(param)
    return [value.int_data, value.scale] if isinstance(value, Int8RowwiseTensor) else [value]


def differing(model, twin):
    """Names of the parameters of which any bit differs. Collective."""
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    compared = {name: list(zip(parts(a), parts(b), strict=True)) for (name, a), b in pairs}
    return [name for name, tensors in compared.items() if not all(torch.equal(a, b) for a, b in tensors)]
