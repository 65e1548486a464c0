"""The 8-bit optimizers under fully_shard: the trajectory of one process, bit for bit."""

import pytest
import torch
from dist_optim import Bag, assert_same_run, differs, like, new_optimizer, sharded_bag, train, whole
from ranks import on_ranks
from torch.distributed.tensor.debug import CommDebugMode

from qsub.optim import Adam8bit, AdamW8bit

pytestmark = pytest.mark.dist

OPTIONS = {
    "AdamW": {},
    "Adam, amsgrad": {"cls": Adam8bit, "amsgrad": True, "weight_decay": 0.1},
    "capturable, maximize, small blocks": {"capturable": True, "maximize": True, "block_size": 16, "seed": 7},
    "fp32 state": {"state_bits": 32},
    "dynamic code": {"state_code": "dynamic"},
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


def _edited(rank, form):
    model, twin = sharded_bag(), Bag()
    optimizer, reference = new_optimizer(model), new_optimizer(twin)
    train(model, optimizer, 0, 2), train(twin, reference, 0, 2)
    for param, whole_param in zip(model.parameters(), twin.parameters(), strict=True):
        value = reference.state[whole_param]["exp_avg"] * 0.5
        mine = {"whole": lambda v, p: v.clone(), "DTensor": like, "local": lambda v, p: like(v, p).to_local()}[form]
        optimizer.state[param].update(exp_avg=mine(value, param), exp_avg_sq=torch.ones_like(param), step=5)
        reference.state[whole_param].update(exp_avg=value, exp_avg_sq=torch.ones_like(whole_param), step=5)
    train(model, optimizer, 2, 4), train(twin, reference, 2, 4)
    assert_same_run(model, optimizer, twin, reference)


@pytest.mark.parametrize("form", ["whole", "DTensor", "local"])
def test_edits_of_a_sharded_state_are_those_of_the_whole(form):
    """A moment may be assigned as a DTensor, which zeros_like of a parameter is, as the part of a rank, or whole."""
    on_ranks(_edited, 2, form)


def _collectives(rank):
    model = sharded_bag()
    optimizer = new_optimizer(model)
    train(model, optimizer, 0, 1)
    with CommDebugMode() as step:
        optimizer.step()
    with CommDebugMode() as gathering:  # negative control
        optimizer.state_dict()["state"][0]["exp_avg"].full_tensor()
    return step.get_total_counts(), gathering.get_total_counts()


def test_a_step_calls_no_collective():
    """Which also makes it safe to raise in: no other rank waits."""
    for step, gathering in on_ranks(_collectives, 2):
        assert step == 0 < gathering


def _refused(rank):
    model = sharded_bag()
    errors = []
    for options in ({"block_size": 48}, {"lr": -1.0}, {"state_code": "nf4"}):
        with pytest.raises(ValueError) as caught:
            AdamW8bit(model.parameters(), **options)
        errors.append(str(caught.value))
    optimizer = new_optimizer(model)
    train(model, optimizer, 0, 1)
    param = model.values[0]
    param.grad = None
    before = [whole(entry)[0].clone() for entry in model.parameters()]
    sparse = torch.nn.Parameter(torch.zeros(4, 4))
    sparse.grad = torch.eye(4).to_sparse()
    optimizer.add_param_group({"params": [sparse]})
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    errors.append(str(caught.value))
    assert all(torch.equal(whole(a)[0], b) for a, b in zip(model.parameters(), before, strict=True))
    return errors


def test_errors_are_those_of_all_ranks():
    """Nothing is stepped, and no rank is left behind."""
    first, second = on_ranks(_refused, 2)
    assert first == second and len(first) == 4
    assert first[3] == "AdamW8bit does not support sparse gradients, please consider SparseAdam instead"
