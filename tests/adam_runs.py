"""What the tests of the optimizers' state share: runs that can be repeated, and bit-exact comparison."""

import io

import torch
from torch import nn

from qsub import Blockwise8bitTensor
from qsub.optim import AdamW8bit


def new_params(dtype=torch.float32):
    """One of each kind: 8-bit state, 8-bit state with short blocks, fp32 state; the same values in each call."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(80, 64), (70, 65), (9,)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def new_optimizer(params, cls=AdamW8bit, **options):
    return cls([{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.1}], **options)


def train(optimizer, params, first, last):
    """Steps `first` to `last` on gradients that depend on the number of the step alone."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def plain(value):
    """Inner tensors of a state entry, and all others as they are."""
    return [value.codes, value.scale] if isinstance(value, Blockwise8bitTensor) else [value]


def assert_same(left, right):
    """State dicts or their parts, bit for bit, types included."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert all(torch.equal(a, b) for a, b in zip(plain(left), plain(right), strict=True))
    else:
        assert left == right


def storages(tree):
    """Storage addresses of all tensors in a nested structure."""
    if isinstance(tree, dict):
        return set().union(*map(storages, tree.values())) if tree else set()
    if isinstance(tree, (list, tuple)):
        return set().union(*map(storages, tree)) if tree else set()
    return {t.untyped_storage().data_ptr() for t in plain(tree)} if isinstance(tree, torch.Tensor) else set()


def round_trip(value, **options):
    """Through torch.save and torch.load with its default, weights_only=True."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)
