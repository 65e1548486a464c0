"""The 8-bit optimizers on parameters of a tensor parallel module, on replicas and on meshes of two dimensions."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_optim import (
    SHAPES,
    Bag,
    assert_same_run,
    assert_same_states,
    differs,
    like,
    new_optimizer,
    sharded_bag,
    train,
    whole,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qsub import Blockwise8bitTensor, Int8RowwiseTensor
from qsub.optim import AdamW8bit
from qsub.optim.sharding import as_dtensor

pytestmark = pytest.mark.dist
WIDE = [(20, 256), (16, 4, 128), (7, 18)]  # halves of dim 1: 128, 2 * 128, and 9 with fp32 state
FULL = StateDictOptions(full_state_dict=True)


def _placed(placement, shapes, dtype=torch.float32, world_size=2):
    mesh = init_device_mesh("cpu", (world_size,))
    model = Bag(dtype, shapes)
    model.values = nn.ParameterList(
        nn.Parameter(distribute_tensor(value.detach(), mesh, [placement])) for value in model.values
    )
    return model


def _run(model, steps=4, **options):
    optimizer = new_optimizer(model, **options)
    train(model, optimizer, 0, steps)
    return optimizer


def _trajectory(rank, placement, options):
    model, twin = _placed(placement, WIDE, torch.bfloat16), Bag(torch.bfloat16, WIDE)
    optimizer, reference = _run(model, **options), _run(twin, **options)
    assert_same_run(model, optimizer, twin, reference)
    _run(twin, 1, **options)
    assert differs(model, twin)  # negative control


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_rows_and_replicas_follow_the_single_process_run(placement):
    on_ranks(_trajectory, 2, placement, {"stochastic_round": True})


@pytest.mark.parametrize(
    "options", [{"state_bits": 32}, {"state_code": "dynamic"}, {"backend": "compile", "state_bits": 32}]
)
def test_shards_of_whole_blocks_of_dim_1_have_the_blocks_of_the_whole(options):
    """Without random bits, which are those of other places there, the run is that of one process."""
    on_ranks(_trajectory, 2, Shard(1), options)


def _columns(rank, path):
    """Blocks along the local trailing dimensions, short ones at the end of each shard: 80 = 64 + 16."""
    shapes = [(40, 160), (30, 2, 200)]
    model = _placed(Shard(1), shapes, torch.bfloat16)
    optimizer = _run(model)
    again = _placed(Shard(1), shapes, torch.bfloat16)
    repeated = new_optimizer(again)
    train(again, repeated, 0, 2)
    content = get_state_dict(again, repeated)
    dcp.save({"model": content[0], "optimizer": content[1]}, checkpoint_id=path)
    resumed = _placed(Shard(1), shapes, torch.bfloat16)
    loaded = new_optimizer(resumed, seed=4)
    content = get_state_dict(resumed, loaded)
    target = {"model": content[0], "optimizer": content[1]}
    dcp.load(target, checkpoint_id=path)
    set_optimizer_state_dict(resumed, loaded, target["optimizer"])
    train(again, repeated, 2, 4), train(resumed, loaded, 2, 4)
    for run, state in ((again, repeated), (resumed, loaded)):
        assert not differs(model, run)
        for old, new in zip(optimizer.state.values(), state.state.values(), strict=True):
            assert old.keys() == new.keys() and torch.equal(old["exp_avg"].codes, new["exp_avg"].codes)
    # 80 is no whole number of blocks: the whole state can't be put together of these, but its floats can
    with pytest.raises(NotImplementedError, match="not whole blocks of 64"):
        get_optimizer_state_dict(model, optimizer, options=FULL)
    floats = optimizer.to_torch_state_dict()["state"][0]["exp_avg"].full_tensor()
    assert torch.equal(floats.chunk(2, 1)[rank], optimizer.state[model.values[0]]["exp_avg"].dequantize())
    return [x.float().tolist() for x in whole(optimizer.param_groups[0]["params"][0])]


def test_shards_of_dim_1_that_cut_blocks(tmp_path):
    first, second = on_ranks(_columns, 2, str(tmp_path))
    assert first == second


def _save_columns(rank, path):
    model = _placed(Shard(1), WIDE)
    dcp.save({"optimizer": get_optimizer_state_dict(model, _run(model))}, checkpoint_id=path)
    full = get_optimizer_state_dict(model, _run(model), options=FULL)
    other = _placed(Shard(1), WIDE)
    loaded = new_optimizer(other)
    set_optimizer_state_dict(other, loaded, full, options=FULL)
    assert_same_states(get_optimizer_state_dict(other, loaded), full)
    return [x.tolist() for entry in full["state"].values() for x in whole(entry["exp_avg_sq"])]


def _load_whole(rank, path):
    model = Bag(shapes=WIDE)
    optimizer = new_optimizer(model)
    target = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(target, checkpoint_id=path)
    return [x.tolist() for entry in target["optimizer"]["state"].values() for x in whole(entry["exp_avg_sq"])]


def test_whole_blocks_of_dim_1_reshard(tmp_path):
    saved = on_ranks(_save_columns, 2, str(tmp_path))
    assert saved[0] == saved[1] == on_ranks(_load_whole, 1, str(tmp_path))[0]


def _sums(rank):
    """A gradient that autograd left to be summed, as of a norm in a sequence parallel region."""
    model, twin = _placed(Replicate(), [(80, 64)]), Bag(shapes=[(80, 64)])
    optimizer, reference = new_optimizer(model), new_optimizer(twin)
    param, other = model.values[0], twin.values[0]
    parts = [torch.randn(80, 64, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    param.grad = DTensor.from_local(parts[rank], param.device_mesh, [Partial()])
    other.grad = parts[0] + parts[1]
    optimizer.step(), reference.step()
    assert_same_run(model, optimizer, twin, reference)


def test_gradients_that_are_not_summed_yet():
    on_ranks(_sums, 2)


def _missing(rank):
    model, twin = sharded_bag(), Bag()
    optimizer, reference = new_optimizer(model), new_optimizer(twin)
    for step in range(3):
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in twin.parameters()]
        present = step != 1 or rank == 0  # rank 1 has no gradients in the second step
        for run, state in ((model, optimizer), (twin, reference)):
            for param, grad in zip(run.parameters(), grads, strict=True):
                placed = like(grad, param)  # on all ranks: it is collective
                param.grad = placed if present else None
            state.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        parts = [*other.chunk(2), other[:0]]  # (1, 4160) has one
        assert torch.equal(param.to_local(), parts[rank])
    return [int(entry["step"]) for entry in optimizer.state.values()]


def test_no_step_waits_for_another_rank():
    """One of them has no gradient: the others go on, and so does it, as one process would that has its gradients."""
    assert on_ranks(_missing, 2) == [[3] * len(SHAPES), [2] * len(SHAPES)]


def _one_dimension(rank, world_size):
    shapes = [(6000,), (64, 64)]
    model, twin = sharded_bag(shapes=shapes), Bag(shapes=shapes)
    optimizer = _run(model)
    _run(twin, cls=torch.optim.AdamW, foreach=False)
    state = optimizer.state[next(model.parameters())]
    assert state["exp_avg"].dtype == torch.float32 and not isinstance(state["exp_avg"], Blockwise8bitTensor)
    torch.testing.assert_close(whole(next(model.parameters())), whole(next(twin.parameters())), rtol=1e-5, atol=1e-6)
    # a state dict of one process has 8 bits there: it is decoded
    eight = _run(Bag(shapes=shapes))
    saved = eight.state_dict()
    assert isinstance(saved["state"][0]["exp_avg"], Blockwise8bitTensor)
    optimizer.load_state_dict(copy.deepcopy(saved))
    loaded = optimizer.state_dict()["state"][0]["exp_avg"].full_tensor()
    assert torch.equal(loaded, saved["state"][0]["exp_avg"].dequantize())


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_of_one_dimension_keep_fp32_state(world_size):
    on_ranks(_one_dimension, world_size, world_size)


NORM = [(4096,)]


def _save_norm(rank, path, sharded):
    model = sharded_bag(shapes=NORM) if sharded else Bag(shapes=NORM)
    state = get_optimizer_state_dict(model, _run(model))
    dcp.save({"optimizer": state}, checkpoint_id=path)
    return [x.tolist() for x in whole(state["state"]["values.0"]["exp_avg_sq"])]


def _load_norm(rank, path, sharded):
    model = sharded_bag(shapes=NORM) if sharded else Bag(shapes=NORM)
    optimizer = new_optimizer(model)
    target = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(target, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, target["optimizer"])
    return [x.tolist() for x in whole(optimizer.state_dict()["state"][0]["exp_avg_sq"])]


def test_state_of_one_dimension_goes_from_shards_to_one_process_and_back(tmp_path):
    """fp32 in shards, 8 bits in one process: encoded to nearest, and decoded."""
    code = (64, "float8_unsigned")
    values = on_ranks(_save_norm, 2, str(tmp_path / "shards"), True)[0]
    codes, scale = on_ranks(_load_norm, 1, str(tmp_path / "shards"), False)[0]
    wanted = Blockwise8bitTensor.from_float(torch.tensor(values[0]), *code)
    assert (wanted.codes.tolist(), wanted.scale.tolist()) == (codes, scale)
    codes, scale = (
        torch.tensor(x, dtype=torch.uint8) for x in on_ranks(_save_norm, 1, str(tmp_path / "one"), False)[0]
    )
    loaded = on_ranks(_load_norm, 2, str(tmp_path / "one"), True)[0]
    assert torch.equal(torch.tensor(loaded[0]), Blockwise8bitTensor(codes, scale, *code).dequantize())


def _of_two_ranks(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    param = nn.Parameter(distribute_tensor(torch.zeros(80, 64), mesh, [Shard(0)]))
    optimizer = AdamW8bit([param], lr=1e-2, backend="eager")
    for _ in range(2):
        param.grad = distribute_tensor(torch.ones(80, 64), mesh, [Shard(0)])
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    part = param.to_local().detach()
    return tuple(part.shape), int(optimizer.state[param]["step"]), bool((part < -0.015).all())


def test_a_rank_outside_of_the_mesh_has_nothing_to_step():
    assert on_ranks(_of_two_ranks, 3) == [((40, 64), 2, True)] * 2 + [((0,), 2, True)]


def _int8_rows(rank):
    """A trainable int8 weight whose rows are shared out: each draws the random bits of its row in the whole."""
    twin = Bag(shapes=[(65, 80)])
    placed = sharded_bag(shapes=[(65, 80)]).values[0]
    local = Int8RowwiseTensor.from_float(placed.to_local().detach())
    model = nn.Module()
    model.weight = nn.Parameter(as_dtensor(placed, local))
    twin.values[0] = nn.Parameter(Int8RowwiseTensor.from_float(twin.values[0].detach()), requires_grad=True)
    for run in (model, twin):
        optimizer = AdamW8bit(run.parameters(), lr=1e-2, backend="eager")
        for step in range(3):
            grad = torch.randn(65, 80, generator=torch.Generator().manual_seed(step))
            for param in run.parameters():
                param.grad = as_dtensor(placed, like(grad, placed).to_local()) if run is model else grad
            optimizer.step()
    whole_weight = twin.values[0]
    rows = slice(0, 33) if rank == 0 else slice(33, 65)
    assert torch.equal(local.int_data, whole_weight.int_data[rows])
    assert torch.equal(local.scale, whole_weight.scale[rows])


def test_rows_of_a_trainable_int8_weight():
    on_ranks(_int8_rows, 2)


# ---- Two mesh dimensions ----


class _Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def _two_dimensions(rank, names, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    def make():
        model = _Mlp()
        if "tp" in names:
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            return fully_shard(model, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh)  # replicas of shards

    def run(model, optimizer, first, last):
        for step in range(first, last):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, twin = make(), _Mlp()
    optimizer, reference = AdamW8bit(model.parameters(), backend="eager"), AdamW8bit(twin.parameters(), backend="eager")
    run(model, optimizer, 0, 3), run(twin, reference, 0, 3)
    # Sums over ranks are rounded otherwise, and the bits of the shards of dim 1 are others: a small part of 3 lr.
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (param.full_tensor() - other).abs().mean() < 0.05 * 3e-3
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    sharded = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": sharded}, checkpoint_id=path)
    ends = [x.tolist() for param in model.parameters() for x in whole(param)]
    for source in ("full", "file"):
        other = make()
        loaded = AdamW8bit(other.parameters(), backend="eager", seed=3)
        if source == "full":
            set_optimizer_state_dict(other, loaded, copy.deepcopy(full), options=FULL)
        else:
            target = {"optimizer": get_optimizer_state_dict(other, loaded)}
            dcp.load(target, checkpoint_id=path)
            set_optimizer_state_dict(other, loaded, target["optimizer"])
        for old, new in zip(optimizer.state.values(), loaded.state.values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(old[key].codes, new[key].codes) or (source, names[0]) == ("full", "replicas")
                assert torch.equal(old[key].scale, new[key].scale) or (source, names[0]) == ("full", "replicas")
        run(other, loaded, 3, 5)
        ends += [x.tolist() for param in other.parameters() for x in whole(param)]
    return ends


@pytest.mark.parametrize("names", [("replicas", "shards"), ("dp", "tp")])
def test_meshes_of_two_dimensions(tmp_path, names):
    """A full state dict reaches replicas as floats, which all of them encode anew alike."""
    results = on_ranks(_two_dimensions, 4, names, str(tmp_path))
    assert all(result == results[0] for result in results)
