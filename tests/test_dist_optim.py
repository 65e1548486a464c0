"""The 8-bit optimizers under fully_shard: the trajectory of one process, bit for bit."""

import pytest
import torch
from dist_optim import Bag, assert_same_run, differs, new_optimizer, sharded_bag, train
from ranks import on_ranks

from qsub.optim import Adam8bit

pytestmark = pytest.mark.dist

OPTIONS = {
    "AdamW": {},
    "Adam, amsgrad": {"cls": Adam8bit, "amsgrad": True, "weight_decay": 0.1},
    "capturable, maximize, small blocks": {"capturable": True, "maximize": True, "block_size": 16, "seed": 7},
    "fp32 state": {"state_bits": 32},
    "dynamic code": {"state_code": "dynamic", "block_size": 256},
    "compiled": {"backend": "compile"},
}


def _same_run(rank, dtype, options):
    options = {"stochastic_round": dtype == torch.bfloat16, **options}
    model, twin = sharded_bag(dtype=dtype), Bag(dtype)
    optimizer, reference = new_optimizer(model, **options), new_optimizer(twin, **options)
    train(model, optimizer, 0, 4), train(twin, reference, 0, 4)
    assert_same_run(model, optimizer, twin, reference)
    # Negative control: random bits of other places, as each rank would draw for its shard on its own.
    other = Bag(dtype)
    train(other, new_optimizer(other, **{**options, "seed": 1}), 0, 4)
    return differs(model, other)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_trajectory_equals_the_single_process_run(world_size, dtype, options):
    random = dtype == torch.bfloat16 or options not in ("fp32 state", "dynamic code")
    assert on_ranks(_same_run, world_size, dtype, OPTIONS[options]) == [random] * world_size
