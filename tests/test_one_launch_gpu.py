"""What only a GPU shows of backend "triton": no sync, CUDA graphs, GradScaler, streams of steps, 2**31 elements."""

import copy

import pytest
import torch

pytest.importorskip("triton")
from one_launch_helpers import align, compare, inner, make_params, set_grads, twins

from qsub.optim import AdamW8bit
from qsub.optim import step as definition

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_sync_check_notices_a_sync(no_sync):
    """Negative control of the tests below."""
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones((), device="cuda").item()


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_no_step_waits_for_the_device(backend):
    """The first step, a schedule of floats, tensors as hyper-parameters, loaded state and a GradScaler's tensors."""
    params = make_params([torch.float32, torch.bfloat16], "cuda")
    lr, scale = torch.tensor(1e-3, device="cuda"), torch.tensor(2.0, device="cuda")
    betas = (torch.tensor(0.8, device="cuda"), torch.tensor(0.9, device="cuda"))
    optimizers = [
        AdamW8bit(params, backend=backend, min_8bit_size=64),
        AdamW8bit(params, lr=lr, backend=backend, min_8bit_size=64),
    ]
    set_grads(params, params, torch.Generator().manual_seed(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in range(3):
            optimizers[0].param_groups[0]["lr"] = 1e-3 / (turn + 1)
            lr.mul_(0.5)
            for optimizer in optimizers:
                optimizer.step()
        optimizers[1].param_groups[0]["betas"] = betas
        optimizers[1].grad_scale, optimizers[1].found_inf = scale, torch.zeros((), device="cuda")
        optimizers[1].step()
        params[0].grad = None
        optimizers[0].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tensor_betas_equal_floats():
    params = make_params([torch.float32], "cuda")
    others = twins(params)
    betas = (
        torch.tensor(0.8, device="cuda", dtype=torch.float64),
        torch.tensor(0.99, device="cuda", dtype=torch.float64),
    )
    ours = AdamW8bit(params, betas=betas, min_8bit_size=64)
    reference = AdamW8bit(others, betas=(0.8, 0.99), min_8bit_size=64)
    set_grads(params, others, torch.Generator().manual_seed(0))
    ours.step()
    reference.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_cuda_graph_replays_with_another_lr(backend):
    """A captured step equals eager ones, takes a new lr from its tensor, and leaves later eager steps right."""
    params = make_params([torch.float32], "cuda")
    others = twins(params)
    lr = torch.tensor(1e-2, device="cuda")
    ours = AdamW8bit(params, lr=lr, capturable=True, min_8bit_size=64, backend=backend)
    reference = AdamW8bit(others, lr=1e-2, min_8bit_size=64, backend=backend)
    generator = torch.Generator().manual_seed(0)
    set_grads(params, others, generator)
    ours.step()
    reference.step()
    statics = [p.grad.clone() for p in params]
    for p, static in zip(params, statics, strict=True):
        p.grad = static
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before = copy.deepcopy([p.detach() for p in params])
    with torch.cuda.graph(graph):
        ours.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))  # captured, not run
    for turn in range(4):
        lr.fill_(1e-2 / (turn + 1))
        reference.param_groups[0]["lr"] = 1e-2 / (turn + 1)
        set_grads(params, others, generator)
        for p, static in zip(params, statics, strict=True):
            static.copy_(p.grad)
        if turn == 2:
            ours.step()  # an eager one between replays, with gradients elsewhere
        else:
            graph.replay()
        reference.step()
        torch.cuda.synchronize()
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True)), turn
        assert all(float(ours.state[p]["step"]) == turn + 2 for p in params)


def test_capture_without_a_step_before_is_refused():
    params = make_params([torch.float32], "cuda", [(64, 64)])
    params[0].grad = torch.ones_like(params[0])
    for options, text in (({"capturable": True}, "one step outside"), ({}, "Pass capturable=True")):
        optimizer = AdamW8bit(params, **options)
        with pytest.raises(RuntimeError, match=text), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


@pytest.mark.parametrize(("backend", "fused"), [("triton", None), ("triton", True), ("eager", None)])
def test_grad_scaler(backend, fused):
    """torch.amp.GradScaler skips the overflowing step, with fused=True without a sync, and halves its scale."""
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = AdamW8bit(model.parameters(), backend=backend, min_8bit_size=64, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=1000)
    x = torch.randn(8, 64, device="cuda")
    for turn in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean() * (float("inf") if turn == 1 else 1.0)
        scaler.scale(loss).backward()
        before = model.weight.detach().clone()
        if turn and fused:
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
        assert torch.equal(before, model.weight) == (turn == 1)
    assert float(optimizer.state[model.weight]["step"]) == 3
    assert scaler.get_scale() == 2.0**15


def test_several_groups_and_a_long_run():
    """Two groups with options of their own; 20 steps stay with the eager backend within bf16 rounding noise."""
    params = make_params([torch.float32], "cuda")
    others = twins(params)
    optimizers = []
    for backend, given in (("triton", params), ("eager", others)):
        groups = [{"params": given[:4], "lr": 1e-2}, {"params": given[4:], "state_bits": 32, "weight_decay": 0.0}]
        optimizers.append(AdamW8bit(groups, min_8bit_size=64, backend=backend))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        set_grads(params, others, generator)
        for optimizer in optimizers:
            optimizer.step()
        compare(*optimizers, params, others, 1e-2)
        align(*optimizers, params, others)


def test_compiled_backend_equals_the_definition():
    params = make_params([torch.float32], "cuda")
    others = twins(params)
    ours = AdamW8bit(params, min_8bit_size=64, backend="compile")
    reference = AdamW8bit(others, min_8bit_size=64, backend="eager")
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        set_grads(params, others, generator)
        ours.step()
        reference.step()
        compare(ours, reference, params, others, 1e-3)
        align(ours, reference, params, others)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    """The last rows of a bf16 parameter of 2**31 + 2**20 elements equal the definition at their place."""
    rows, width, last = 2**11 + 1, 2**20, 1
    with torch.device("cuda"):
        param = torch.nn.Parameter(torch.randn(rows, width, dtype=torch.bfloat16))
        param.grad = torch.randn(rows, width, dtype=torch.bfloat16)
    expected = [param.detach()[-last:].clone().view(-1, 64), param.grad[-last:].clone().view(-1, 64)]
    optimizer = AdamW8bit([param], lr=1e-2, stochastic_round=True)
    optimizer.step()
    hyper = next(iter(optimizer._hyper.values()))
    states = []
    for _ in range(2):
        blocks = expected[0].shape[0]
        states.append(tuple(torch.zeros(blocks, n, dtype=torch.uint8, device="cuda") for n in (64, 2)))
    place = torch.tensor((rows - last) * width // 64, device="cuda")
    one = torch.ones((), device="cuda")
    definition.step_8bit(*expected, *states, None, one, hyper.tensor, hyper.seed, place, True, True)
    state = optimizer.state[param]
    for key, (code, scale) in zip(("exp_avg", "exp_avg_sq"), states, strict=True):
        ours, our_scale = inner(state[key])
        assert int((ours[-last:].view(-1, 64) != code).sum()) <= 1e-3 * code.numel()
        assert int((our_scale[-last:].view(-1, 2) != scale).sum()) <= 1e-3 * scale.numel()
    different = (param.detach()[-last:].view(-1, 64) != expected[0]).sum()
    assert int(different) <= 1e-3 * width
