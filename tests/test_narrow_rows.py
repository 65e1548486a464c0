"""State of parameters with rows shorter than half a block (LoRA's B, splats, tables of scalars): rows share blocks."""

import subprocess
import sys

import pytest
import torch
from adam_runs import assert_same, round_trip
from torch import nn

from qsub import Blockwise8bitTensor, load_file, save_file
from qsub.optim import AdamW8bit
from qsub.tensors.blocks import fitting_rows

MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = [(4800, 1), (1601, 3), (1200, 2, 2), (600, 8), (353, 14), (150, 32)]


def run(shape, steps, param=None, optimizer=None, **options):
    """A parameter and its optimizer after steps on gradients that depend on their number alone."""
    if optimizer is None:
        param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(7)))
        optimizer = AdamW8bit([param], **{"backend": "eager", **options})
    for step in steps:
        param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * torch.linspace(
            1e-3, 1, param.numel()
        ).view(shape)
        optimizer.step()
    return param, optimizer


def moments(param, optimizer):
    return [optimizer.state[param][key] for key in MOMENTS]


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_a_parameter(shape):
    """2 bytes of codes, and 4 bytes of scales for blocks that are at least two thirds full."""
    for moment in moments(*run(shape, [0])):
        assert moment.rows_per_block == fitting_rows(shape, 64) > 1
        assert moment.nbytes <= 1.06 * moment.numel()


def test_rows_longer_than_half_a_block_have_their_own():
    assert moments(*run((130, 33), [0]))[0].rows_per_block == 1
    assert fitting_rows((5, 0), 64) == fitting_rows((70,), 64) == fitting_rows((), 64) == 1
    assert moments(*run((130, 33), [0], block_size=128))[0].rows_per_block == 3


@pytest.mark.parametrize("backend", ["eager", "compile"])
@pytest.mark.parametrize("shape", [(4800, 1), (1200, 2, 2), (601, 8)])
def test_rows_that_fill_blocks_step_as_one_long_row(shape, backend):
    """Bit for bit, parameter and codes: 64 elements in a row are a block in both, and draw the same random bits."""
    param, optimizer = run(shape, range(3), backend=backend)
    flat = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(7)).flatten())
    other = AdamW8bit([flat], backend=backend)
    for step in range(3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        flat.grad = (grad * torch.linspace(1e-3, 1, flat.numel()).view(shape)).flatten()
        other.step()
    assert torch.equal(param.flatten(), flat)
    for mine, theirs in zip(moments(param, optimizer), moments(flat, other), strict=True):
        assert torch.equal(mine.codes.flatten(), theirs.codes)
        assert torch.equal(mine.scale.flatten(), theirs.scale.flatten())


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"state_code": "dynamic", "block_size": 256}])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_steps_equal_eager_ones(shape, options):
    """Up to last bits of the arithmetic, which move a value by one code (6% of it) at most, a few in a thousand."""
    param, optimizer = run(shape, range(3), **options)
    other, compiled = run(shape, range(3), **options, backend="compile")
    torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(moments(param, optimizer), moments(other, compiled), strict=True):
        if isinstance(mine, Blockwise8bitTensor):
            assert (mine.codes != theirs.codes).float().mean() < 5e-3
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp32_adam(shape):
    """30 steps: the distance from fp32 Adam is under 5% of the way, as for long rows (docs/optimizers.md)."""
    start = run(shape, [])[0]
    exact = run(shape, range(30), state_bits=32, weight_decay=0.0)[0]
    coded = run(shape, range(30), weight_decay=0.0)[0]
    assert (coded - exact).norm() < 0.05 * (exact - start).norm()
    param, optimizer = run(shape, [], weight_decay=0.0)
    for step in range(30):  # negative control: half of the bits of each code
        run(shape, [step], param, optimizer)
        for moment in moments(param, optimizer):
            moment.codes.copy_(moment.codes & 0xF0 | (moment.codes > 0))
    assert (param - exact).norm() > 0.05 * (exact - start).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_resume_is_exact(shape):
    param, optimizer = run(shape, range(3))
    saved = round_trip(optimizer.state_dict())
    twin = nn.Parameter(param.detach().clone())
    resumed = AdamW8bit([twin], backend="eager")
    resumed.load_state_dict(saved)
    run(shape, range(3, 6), param, optimizer)
    run(shape, range(3, 6), twin, resumed)
    assert torch.equal(param, twin)
    assert_same(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("shape", SHAPES)
def test_looking_at_slices_changes_no_bit(shape):
    """Slices give each row a scale of its own. The next step brings rows together again, at the same values."""
    param, optimizer = run(shape, range(3))
    other, watched = run(shape, range(3))
    whole = [moment.dequantize() for moment in moments(param, optimizer)]
    for moment, value in zip(moments(other, watched), whole, strict=True):
        alias = moment.detach()
        assert torch.equal(moment[3:11].dequantize(), value[3:11])
        assert torch.equal(moment[::7].dequantize(), value[::7])
        assert torch.equal(moment.split(100)[1].dequantize(), value[100:200])
        assert moment.rows_per_block == alias.rows_per_block == 1
        assert torch.equal(moment.dequantize(), value) and torch.equal(alias.dequantize(), value)
    run(shape, range(3, 5), param, optimizer)
    run(shape, range(3, 5), other, watched)
    assert torch.equal(param, other)
    assert_same(optimizer.state_dict(), watched.state_dict())
    assert moments(other, watched)[0].rows_per_block > 1


@pytest.mark.parametrize("shape", SHAPES)
def test_writing_through_slices_leaves_other_rows_alone(shape):
    param, optimizer = run(shape, range(3))
    for moment in moments(param, optimizer):
        before, alias = moment.dequantize(), moment.detach()
        first, second = moment[5:6], alias[7:100]
        first.zero_()
        second.mul_(0.5)
        after = moment.dequantize()
        kept = torch.ones(shape[0], dtype=torch.bool)
        kept[5], kept[7:100] = False, False
        assert torch.equal(after[kept], before[kept]) and not after[5].any()
        torch.testing.assert_close(after[7:100], before[7:100] / 2, rtol=0.2, atol=float(before.abs().max()) / 50)
        assert torch.equal(alias.dequantize(), after)


def test_a_slice_from_before_the_step_is_not_the_state_any_more():
    """The step makes a new tensor of rows that share blocks: what is written to the old one can't tear it."""
    shape = (4800, 1)
    param, optimizer = run(shape, range(2))
    old = moments(param, optimizer)[0][3:9]
    run(shape, [2], param, optimizer)
    before = moments(param, optimizer)[0].dequantize()
    old.fill_(1e3)
    assert torch.equal(moments(param, optimizer)[0].dequantize(), before)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_joined_and_reordered_keep_their_values(shape):
    """What splats do to their state: rows are appended, dropped and moved. The next step brings them into blocks."""
    param, optimizer = run(shape, range(3))
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))[: shape[0] * 9 // 10]
    state = optimizer.state[param]
    for key in MOMENTS:
        value = state[key].dequantize()
        state[key] = torch.cat([state[key].index_select(0, order), state[key][:77]])
        assert torch.equal(state[key].dequantize(), torch.cat([value[order], value[:77]]))
        padded = nn.functional.pad(state[key], [0, 0] * (len(shape) - 1) + [0, 3])
        assert torch.equal(padded[:-3].dequantize(), state[key].dequantize()) and not padded[-3:].dequantize().any()
    new = nn.Parameter(torch.cat([param.detach()[order], param.detach()[:77]]))
    optimizer.param_groups[0]["params"], optimizer.state[new] = [new], optimizer.state.pop(param)
    values = [moment.dequantize() for moment in moments(new, optimizer)]
    new.grad = torch.zeros_like(new)
    optimizer.step()
    for moment, value, beta in zip(moments(new, optimizer), values, (0.9, 0.999), strict=True):
        assert moment.rows_per_block == fitting_rows(shape, 64)
        # Encoded to nearest, then stochastically: two steps of a code of the block's range, of 12% at most here.
        torch.testing.assert_close(moment.dequantize(), value * beta, rtol=0.2, atol=float(value.abs().max()) / 60)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_with_a_scale_for_each_row_loads(shape):
    """As earlier versions wrote them: values are exact, and equal scales of a block come together without a change."""
    param, optimizer = run(shape, range(3))
    saved = round_trip(optimizer.state_dict())
    for key in MOMENTS:
        saved["state"][0][key].ungroup_()
        assert "rows_per_block" not in saved["state"][0][key].__tensor_flatten__()[1]
    twin = nn.Parameter(param.detach().clone())
    resumed = AdamW8bit([twin], backend="eager")
    resumed.load_state_dict(round_trip(saved))
    for mine, theirs in zip(moments(param, optimizer), moments(twin, resumed), strict=True):
        assert theirs.rows_per_block == 1 and torch.equal(mine.dequantize(), theirs.dequantize())
    run(shape, range(3, 5), param, optimizer)
    run(shape, range(3, 5), twin, resumed)
    assert torch.equal(param, twin)
    assert_same(optimizer.state_dict(), resumed.state_dict())


def test_safetensors_files_keep_the_blocks(tmp_path):
    param, optimizer = run((1601, 3), range(3))
    state = {key: optimizer.state[param][key] for key in MOMENTS}
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    assert all(value.rows_per_block == 16 for value in loaded.values())
    assert_same(dict(sorted(loaded.items())), state)


def test_rows_that_do_not_fit_into_a_block_are_refused():
    codes, scale = torch.zeros(30, 3, dtype=torch.uint8), torch.zeros(2, 1, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"22 rows of codes \(30, 3\) don't fit into a block of 64"):
        Blockwise8bitTensor(codes, scale, 64, "float8_signed", rows_per_block=22)
    with pytest.raises(ValueError, match=r"must have shape \(2, 1, 2\), got \(30, 1, 2\)"):
        Blockwise8bitTensor(codes, scale.new_zeros(30, 1, 2), 64, "float8_signed", rows_per_block=21)


_PEAK = """
import resource, torch, qsub
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def step(shape):
    param = torch.nn.Parameter(torch.zeros(shape)); param.grad = torch.ones(shape)
    optimizer = qsub.optim.AdamW8bit([param], backend="eager", min_8bit_size=64)
    optimizer.step(), optimizer.step()
    return param, optimizer
step((64, 64))
held = [step((1_500_000,))]
before = peak()
held.append(step(%s))
if %r:  # a row for each scale, as in older files
    for key in ("exp_avg", "exp_avg_sq"):
        held[-1][1].state[held[-1][0]][key].ungroup_()
    held[-1][1].step()
print(peak() - before)
"""


@pytest.mark.parametrize("ungrouped", [False, True])
@pytest.mark.parametrize("shape", ["(1_500_000, 1)", "(500_000, 3)"])
def test_no_large_temporaries(shape, ungrouped):
    """The process grows by parameter, gradient, state and its copy (24 MB at most) and by less than 64 MiB more."""
    result = subprocess.run([sys.executable, "-c", _PEAK % (shape, ungrouped)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 24 + 64
