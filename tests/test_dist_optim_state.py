"""State of the 8-bit optimizers through torch.distributed.checkpoint: full, sharded, and on another number of ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_optim import (
    SHAPES,
    Bag,
    assert_equal,
    assert_same_run,
    assert_same_states,
    differs,
    new_optimizer,
    sharded_bag,
    train,
    whole,
)
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from qsub import Blockwise8bitTensor

pytestmark = pytest.mark.dist
FULL = StateDictOptions(full_state_dict=True)


def _trained(model, steps=3, **options):
    optimizer = new_optimizer(model, **options)
    train(model, optimizer, 0, steps)
    return optimizer


# ---- get_optimizer_state_dict and set_optimizer_state_dict ----


def _full_state_dict(rank, steps):
    model, twin = sharded_bag(), Bag()
    optimizer, reference = _trained(model, steps), _trained(twin, steps)
    wanted = get_optimizer_state_dict(twin, reference)
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert_same_states(full, wanted)
    assert isinstance(full["state"]["values.0"]["exp_avg"], Blockwise8bitTensor)
    assert [g["params"] for g in full["param_groups"]] == [g["params"] for g in wanted["param_groups"]]
    only_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    offloaded = get_optimizer_state_dict(model, optimizer, options=only_first)
    if rank == 0:
        assert_same_states(offloaded, wanted)
    else:
        assert not offloaded
    # Into a sharded optimizer and into one that is not, of other options: those of the dict hold.
    for other in (sharded_bag(), Bag()):
        loaded = new_optimizer(other, lr=0.5, seed=5)
        set_optimizer_state_dict(other, loaded, copy.deepcopy(full), options=FULL)
        assert_same_states(loaded.state_dict(), optimizer.state_dict())
    # and straight through the optimizer's own method, which cuts out the part of this rank
    other = sharded_bag()
    loaded = new_optimizer(other)
    loaded.load_state_dict(reference.state_dict())
    assert_same_states(loaded.state_dict(), reference.state_dict())


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_state_dict_equals_that_of_one_process(world_size, steps):
    """With 0 steps torch takes one with zero gradients and lr 0 to make the state."""
    on_ranks(_full_state_dict, world_size, steps)


def _from_first_rank(rank, sharded):
    model = sharded_bag() if sharded else Bag()
    optimizer = _trained(model)
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    before = copy.deepcopy(full)
    other = sharded_bag() if sharded else Bag()
    loaded = new_optimizer(other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, full if rank == 0 else {}, options=options)
    assert_same_states(full, before)
    train(other, loaded, 3, 5)
    inner = []
    for number, entry in loaded.state_dict()["state"].items():
        assert entry["step"] == 5
        for key in ("exp_avg", "exp_avg_sq"):
            inner += whole(entry[key])
            new, old = (
                x.full_tensor() if sharded else x for x in (entry[key], optimizer.state_dict()["state"][number][key])
            )
            assert type(new) is type(old)
    return [x.tolist() for x in inner]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_broadcast_from_the_first_rank_leaves_all_with_the_same_state(sharded):
    """The others receive floats, which are encoded anew: on the first rank as well, or replicas would part."""
    first, second = on_ranks(_from_first_rank, 2, sharded)
    assert first == second


# ---- torch.distributed.checkpoint on other numbers of ranks ----


def _save(rank, path, how, options):
    model = sharded_bag()
    optimizer = _trained(model, **options)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    if how != "saved":
        # a writer given stages by itself, in another way; a group of its own, as the steps below have collectives too
        writer = dcp.FileSystemWriter(path) if how == "staged by the writer" else None
        group = dist.new_group(backend="gloo")
        saving = dcp.async_save(content, checkpoint_id=path, storage_writer=writer, process_group=group)
        train(model, optimizer, 3, 5)  # what is written must not change under way
        saving.result()
    else:
        dcp.save(content, checkpoint_id=path)


def _load(rank, path, sharded, options):
    model = sharded_bag() if sharded else Bag()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = new_optimizer(model, **options)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    twin = Bag()
    reference = _trained(twin, **options)
    assert_same_run(model, optimizer, twin, reference)
    train(model, optimizer, 3, 5), train(twin, reference, 3, 5)
    assert_same_run(model, optimizer, twin, reference)
    # Negative control: resumed without the state the run goes elsewhere.
    other = Bag()
    _trained(other, **options)
    train(other, new_optimizer(other, **options), 3, 5)
    return differs(model, other)


@pytest.mark.parametrize(
    "how, options",
    [
        ("saved", {}),
        ("saved", {"state_code": "dynamic"}),
        ("in the background", {"amsgrad": True}),
        ("staged by the writer", {}),
    ],
)
def test_saved_on_two_ranks_and_loaded_on_other_numbers(tmp_path, how, options):
    on_ranks(_save, 2, str(tmp_path), how, options)
    for world_size, sharded in ((1, False), (1, True), (2, True), (3, True)):
        assert on_ranks(_load, world_size, str(tmp_path), sharded, options) == [True] * world_size


def _flat(rank, path):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model = sharded_bag()
    optimizer = _trained(model)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    assert isinstance(saved["state.values.0.exp_avg"], DTensor)
    dcp.save(saved, checkpoint_id=path)
    other = sharded_bag()
    loaded = new_optimizer(other, lr=0.5)
    target = get_optimizer_state_dict(other, loaded, options=flat)
    dcp.load(target, checkpoint_id=path)
    set_optimizer_state_dict(other, loaded, target, options=flat)
    assert_same_states(loaded.state_dict(), optimizer.state_dict())
    assert [g["lr"] for g in loaded.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_flattened_state_dicts(tmp_path):
    on_ranks(_flat, 2, str(tmp_path))


# ---- torch.optim ----


def _from_torch(rank):
    model, twin = sharded_bag(), Bag()
    theirs, reference = _trained(model, cls=torch.optim.AdamW), _trained(twin, cls=torch.optim.AdamW)
    ours, ours_whole = new_optimizer(model), new_optimizer(twin)
    ours.load_state_dict(theirs.state_dict())
    ours_whole.load_state_dict(reference.state_dict())
    assert_same_run(model, ours, twin, ours_whole)
    exported = ours.to_torch_state_dict()
    assert_same_states(exported, ours_whole.to_torch_state_dict())
    theirs.load_state_dict(exported)
    train(model, theirs, 3, 4)


def test_torch_state_loads_and_goes_back():
    on_ranks(_from_torch, 2)


def _save_torch(rank, path):
    model = sharded_bag(shapes=SHAPES[:6])  # no narrow rows: a part of those is encoded by rows
    theirs = _trained(model, cls=torch.optim.AdamW)
    dcp.save({"optimizer": get_optimizer_state_dict(model, theirs)}, checkpoint_id=path)


def _load_torch(rank, path):
    model, twin = sharded_bag(shapes=SHAPES[:6]), Bag(shapes=SHAPES[:6])
    ours, reference = new_optimizer(model), _trained(twin, cls=torch.optim.AdamW)
    content = {"optimizer": get_optimizer_state_dict(model, ours)}
    dcp.load(content, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, ours, content["optimizer"])
    for entry, wanted in zip(
        ours.state_dict()["state"].values(), reference.state_dict()["state"].values(), strict=True
    ):
        assert entry["step"] == wanted["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            moment = entry[key].full_tensor()
            if isinstance(moment, Blockwise8bitTensor):
                nearest = Blockwise8bitTensor.from_float(wanted[key], moment.block_size, moment.code)
                assert_equal(moment, nearest)
            else:
                assert torch.equal(moment, wanted[key])


def test_a_checkpoint_of_torch_loads_on_another_number_of_ranks(tmp_path):
    on_ranks(_save_torch, 2, str(tmp_path))
    on_ranks(_load_torch, 3, str(tmp_path))


# ---- Narrow rows whose blocks would lie on two ranks ----

NARROW = [(1603, 3)]  # 16 rows to a block; 802 and 801 rows, or 535, 535 and 533


def _values(model, optimizer):
    """Moments of all ranks, and how many rows share a block of this one's."""
    state = get_optimizer_state_dict(model, optimizer)["state"]["values.0"]
    moments = [state[key] for key in ("exp_avg", "exp_avg_sq")]
    rows = [getattr(moment, "_local_tensor", moment).rows_per_block for moment in moments]
    whole_moments = [m.full_tensor() if isinstance(m, DTensor) else m for m in moments]
    return [m.dequantize().tolist() for m in whole_moments], rows


def _save_narrow(rank, path):
    model = sharded_bag(shapes=NARROW)
    optimizer = _trained(model)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    values, rows = _values(model, optimizer)
    assert rows == [1, 1]
    return values


def _load_narrow(rank, path, sharded):
    model = sharded_bag(shapes=NARROW) if sharded else Bag(shapes=NARROW)
    optimizer = new_optimizer(model)
    content = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(content, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, content["optimizer"])
    values = _values(model, optimizer)[0]
    train(model, optimizer, 3, 5)  # and goes on, in the form of this number of ranks
    return values, _values(model, optimizer)[1]


@pytest.mark.parametrize("world_size, sharded, rows", [(3, True, [1, 1]), (1, False, [16, 16])])
def test_narrow_rows_load_exactly_on_any_number_of_ranks(tmp_path, world_size, sharded, rows):
    saved = on_ranks(_save_narrow, 2, str(tmp_path))[0]
    for values, kept in on_ranks(_load_narrow, world_size, str(tmp_path), sharded):
        assert values == saved and kept == rows


# ---- Errors ----


def _load_damaged(rank, where):
    model = sharded_bag()
    optimizer = _trained(model)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    saved = optimizer.to_torch_state_dict()
    moment = saved["state"][0]["exp_avg"]
    if where == "one rank":
        if rank == 1:
            moment.to_local()[0, 0] = float("nan")
    elif where == "shape":
        saved["state"][0]["exp_avg"] = torch.zeros(3, 3)
    else:
        saved["param_groups"][0]["block_size"] = 3
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(saved)
    dist.barrier()  # every rank gets here
    assert_same_states({"state": before}, optimizer.state_dict())
    return str(caught.value)


def test_what_one_rank_cannot_load_no_rank_loads():
    first, second = on_ranks(_load_damaged, 2, "one rank")
    assert first.startswith("another rank could not load its part of the state")
    assert second.startswith("state of parameter 0, exp_avg: cannot encode NaN")
    for where, text in (("shape", "shape (3, 3)"), ("options", "block_size must be a power of two")):
        assert all(text in message for message in on_ranks(_load_damaged, 2, where))


def _elsewhere(rank):
    model, twin = sharded_bag(), Bag()
    saved = _trained(model).state_dict()
    reference = new_optimizer(twin)
    with pytest.raises(ValueError, match="placed as .* not distributed. Load it with torch.distributed.checkpoint"):
        reference.load_state_dict(saved)


def test_shards_do_not_load_into_whole_parameters():
    on_ranks(_elsewhere, 2)
