"""torch.amp.GradScaler, Lightning and Fabric: unscaling, clipping and skipped steps are those of torch.optim.AdamW."""

import copy
import pickle

import pytest
import torch
from adam_runs import assert_same
from torch import nn

from qsub.optim import AdamW8bit

FUSED = [None, False, True]
SHAPES = [(80, 64), (33,), (70, 65)]


def new_params():
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def backward(params, scaler, step, bad=False):
    loss = 0
    for place, param in enumerate(params):
        param.grad = None
        factor = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + place))
        loss = loss + (param * factor).sum()
    scaler.scale(loss).backward()
    if bad:
        params[2].grad[3, 4] = float("inf")


@pytest.mark.parametrize("fused", FUSED)
def test_the_attribute_is_there_where_fused_was_asked_for(fused):
    """As torch.optim.AdamW has it; who looks for it goes by its presence. A copy has it too."""
    opt, ref = AdamW8bit(new_params(), fused=fused), torch.optim.AdamW(new_params(), fused=fused)
    wanted = getattr(ref, "_step_supports_amp_scaling", None)
    for made in (opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert getattr(made, "_step_supports_amp_scaling", None) is wanted
        made.load_state_dict(made.state_dict())
        assert getattr(made, "_step_supports_amp_scaling", None) is wanted


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_steps_are_those_of_torch(clip, fused):
    """With fp32 state, up to roundings of six steps of 1e-3; a scale of 2**10 changes no bit of a gradient."""
    results, scales = [], []
    for cls, options in ((AdamW8bit, {"state_bits": 32}), (torch.optim.AdamW, {})):
        params = new_params()
        opt = cls(params, fused=fused, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            backward(params, scaler, step, bad=step == 3)
            if clip:
                scaler.unscale_(opt)
                if clip == "norm":
                    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
                    assert step == 3 or 50 < norm < 150  # unscaled: 97 is the root of the number of elements
                else:
                    torch.nn.utils.clip_grad_value_(params, 0.5)
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        assert all(float(opt.state[param]["step"]) == 5 for param in params)
        results.append(params)
    assert scales[:6] == scales[6:] and len(set(scales)) > 1
    for param, other in zip(*results, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", FUSED)
def test_a_skipped_step_changes_nothing(fused):
    params = new_params()
    opt = AdamW8bit(params, fused=fused)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    backward(params, scaler, 0)
    scaler.step(opt), scaler.update()
    before = copy.deepcopy((params, opt.state_dict()))
    backward(params, scaler, 1, bad=True)
    scaler.step(opt), scaler.update()
    assert all(map(torch.equal, params, before[0])) and scaler.get_scale() == 2.0**9
    assert_same(opt.state_dict(), before[1])
    assert len(calls) == (2 if fused else 1)  # the scaler skips the call, a fused step itself


# ---- Lightning and Fabric ----

LIGHTNING = ("ignore::UserWarning:pytorch_lightning", "ignore::UserWarning:lightning_fabric", "ignore:.*LeafSpec")


def module(lightning, made):
    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 1))
            self.norms = []

        def training_step(self, batch, _):
            return 1e3 * self.layers(batch[0]).square().mean()

        def on_before_optimizer_step(self, optimizer):
            grads = [param.grad.norm() for param in self.parameters()]
            self.norms.append(torch.stack(grads).norm().item())

        def configure_gradient_clipping(self, optimizer, **options):
            self.clip_gradients(optimizer, **options)
            self.norms[-1] = self.norms[-1], torch.stack([param.grad.norm() for param in self.parameters()]).norm()

        def configure_optimizers(self):
            return made(self.parameters())

    return Regression()


def fit(lightning, folder, made, precision, algorithm):
    data = torch.utils.data.TensorDataset(torch.randn(48, 64, generator=torch.Generator().manual_seed(2)))
    trained = module(lightning, made)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        gradient_clip_val=0.5,
        gradient_clip_algorithm=algorithm,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
    )
    trainer.fit(trained, torch.utils.data.DataLoader(data, 16))
    return trained


@pytest.mark.filterwarnings(*LIGHTNING)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true"])
def test_lightning_clips_as_with_torch(tmp_path, precision, algorithm):
    lightning = pytest.importorskip("pytorch_lightning")
    ours = fit(lightning, tmp_path, lambda p: AdamW8bit(p, lr=1e-3, state_bits=32), precision, algorithm)
    theirs = fit(lightning, tmp_path, lambda p: torch.optim.AdamW(p, lr=1e-3), precision, algorithm)
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-5)  # of three updates of 1e-3, in half precision
    assert all(after < before for before, after in ours.norms if before < float("inf"))
    if algorithm == "norm":
        assert all(after < 0.5 + 1e-3 for before, after in ours.norms if before < float("inf"))


@pytest.mark.filterwarnings(*LIGHTNING)
def test_lightning_refuses_to_clip_with_fused_as_it_does_with_torch(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    for cls in (AdamW8bit, torch.optim.AdamW):
        with pytest.raises(RuntimeError, match=f"optimizer, {cls.__name__}, does not allow for gradient clipping"):
            fit(lightning, tmp_path, lambda p, cls=cls: cls(p, fused=True), "16-mixed", "norm")


@pytest.mark.filterwarnings(*LIGHTNING)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_fabric_clips(precision):
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1, precision=precision)
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 1))
    model, opt = fabric.setup(model, AdamW8bit(model.parameters()))
    for _ in range(3):
        loss = 1e3 * model(torch.randn(16, 64)).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, opt, max_norm=0.5)
        norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
        assert 0.49 < norm < 0.501
        opt.step()
        opt.zero_grad()
    assert all(state["step"] == 3 for state in opt.optimizer.state.values())
