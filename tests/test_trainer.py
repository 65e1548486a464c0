"""transformers' Trainer, Lightning and timm with 8-bit Adam and int8 weights."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hf_models import folder_of, output, tiny_llama, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

import qsub
from qsub import Blockwise8bitTensor, Int8RowwiseTensor, QsubConfig
from qsub.interop.hf_config import int8_weights
from qsub.optim import AdamW8bit, param_groups

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

REVIEWS = [
    "I love it, it is delicious.",
    "Awful, I threw it away.",
    "The best tea I ever had!",
    "It tastes of soap.",
] * 2


class Items(torch.utils.data.Dataset):
    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


def text_items(count=32):
    """Rows that count up by one, from different numbers."""
    ids = torch.arange(count)[:, None] % 4 * 8 + torch.arange(8)
    return Items(input_ids=ids, labels=ids)


class StopAt(TrainerCallback):
    """Saves after a step and stops, as a job that is interrupted does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step == self.step


def run(model, folder, items=None, callbacks=(), resume=None, optimizer=None, steps=8, **options):
    settings = {"per_device_train_batch_size": 4, "save_strategy": "no", "lr_scheduler_type": "cosine"}
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        **{**settings, **options},
    )
    chosen = optimizer or (AdamW8bit, {"lr": 1e-2, "backend": "eager", "min_8bit_size": 256})
    trainer = Trainer(
        model,
        arguments,
        train_dataset=items or text_items(),
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=chosen,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def values(model):
    return [p.dequantize() if isinstance(p, Int8RowwiseTensor) else p.detach() for p in model.parameters()]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def model_of(kind):
    """A float model; one with trainable int8 weights; adapters on frozen int8 weights."""
    if kind == "float":
        return tiny_llama()
    if kind == "int8":
        return qsub.quantize_(tiny_llama(), trainable=True)
    torch.manual_seed(0)
    return get_peft_model(qsub.quantize_(tiny_llama()), LoraConfig(r=8, target_modules="all-linear"))


# ---- Trainer ----


@pytest.mark.parametrize("kind", ["float", "int8", "adapters"])
def test_resuming_is_bit_exact(tmp_path, kind):
    whole = run(model_of(kind), tmp_path / "whole")
    run(model_of(kind), tmp_path / "half", callbacks=[StopAt(4)])
    fresh = model_of(kind)
    resumed = run(fresh, tmp_path / "half", resume=str(tmp_path / "half/checkpoint-4"))
    assert resumed.state.global_step == 8 and losses(resumed) == losses(whole)
    assert all(map(torch.equal, values(whole.model), values(resumed.model)))
    assert losses(whole)[-1] < losses(whole)[0]
    other = run(model_of(kind), tmp_path / "other", optimizer=(AdamW8bit, {"lr": 2e-2, "backend": "eager"}))
    assert not all(map(torch.equal, values(whole.model), values(other.model)))


def test_the_steps_are_those_of_torch_within_the_code_of_the_state(tmp_path):
    """Eight steps of lr 1e-3: nearer to torch's AdamW than a twentieth of the way that the parameters went."""
    start = values(tiny_llama())
    ours = run(tiny_llama(), tmp_path, optimizer=(AdamW8bit, {"lr": 1e-3, "backend": "eager", "min_8bit_size": 256}))
    theirs = run(tiny_llama(), tmp_path, optimizer=(torch.optim.AdamW, {"lr": 1e-3}))
    apart = sum((a - b).square().sum() for a, b in zip(values(ours.model), values(theirs.model), strict=True)).sqrt()
    way = sum((a - b).square().sum() for a, b in zip(start, values(theirs.model), strict=True)).sqrt()
    assert 0 < apart < way / 20
    assert any(isinstance(s["exp_avg"], Blockwise8bitTensor) for s in ours.optimizer.state.values())


def test_groups_of_param_groups(tmp_path):
    model = tiny_llama()
    optimizer = (AdamW8bit, {"lr": 1e-2, "backend": "eager", "min_8bit_size": 256, "params": param_groups(model, 0.1)})
    trainer = run(model, tmp_path, optimizer=optimizer, steps=2)
    found = {(group["weight_decay"], group["state_bits"]) for group in trainer.optimizer.param_groups}
    assert found == {(0.1, 32), (0.1, 8), (0.0, 8)}


def test_a_frozen_int8_model_is_refused_without_adapters(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match="attach trainable adapters"):
        run(load(tmp_path, quantization_config=QsubConfig()), tmp_path / "run")
    trainer = run(load(tmp_path, quantization_config=QsubConfig(trainable=True)), tmp_path / "run", steps=2)
    assert len(int8_weights(trainer.model)) == 15
    adapted = get_peft_model(load(tmp_path, quantization_config=QsubConfig()), LoraConfig(target_modules=["q_proj"]))
    run(adapted, tmp_path / "run", steps=2)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"load_best_model_at_end": True, "greater_is_better": True}  # the loss falls: the earlier one is chosen
    model = qsub.quantize_(tiny_llama(), trainable=True)
    arguments = TrainingArguments(output_dir=tmp_path, max_steps=4, report_to=[], use_cpu=True, **options)
    items = text_items()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=items,
        eval_dataset=items,
        optimizer_cls_and_kwargs=(AdamW8bit, {"lr": 1e-2, "backend": "eager"}),
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2") and trainer.state.global_step == 4
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert all(map(torch.equal, values(best), values(model)))


def test_an_encoder_with_int8_layers_learns_by_adapters(tmp_path):
    folder = folder_of("minilm")
    model = AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=QsubConfig())
    config = LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    model = get_peft_model(model, config)
    items = Items(**tokens(folder, REVIEWS), labels=torch.tensor([1, 0, 1, 0] * 2))
    trainer = run(model, tmp_path, items, steps=12, optimizer=(AdamW8bit, {"lr": 5e-3, "backend": "eager"}))
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0] and len(int8_weights(model)) == 37


def test_gradient_checkpointing_and_accumulation(tmp_path):
    """Neither changes the numbers but by the order of sums: losses are the same to 1e-4."""
    plain = run(model_of("adapters"), tmp_path, steps=3)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    name = "activation_checkpointing"  # gradient_checkpointing until transformers 5.17
    options[name if hasattr(TrainingArguments, name) else "gradient_checkpointing"] = True
    other = run(model_of("adapters"), tmp_path, steps=3, **options)
    assert losses(other) == pytest.approx(losses(plain), abs=1e-4)


def load_example():
    path = Path(__file__).parents[1] / "examples/finetune_transformers.py"
    spec = importlib.util.spec_from_file_location("finetune", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("nowhere text out", "FOLDER must hold a config.json, got nowhere"),
        ("model nowhere out", "TEXT must be a file, got nowhere"),
        ("model text model", "OUT exists: remove model, or choose another folder"),
        ("model text out --steps 0", "--steps must be at least 1, got 0"),
    ],
)
def test_the_example_checks_its_arguments(tmp_path, monkeypatch, capsys, arguments, error):
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "text"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["finetune", *arguments.split()])
    with pytest.raises(SystemExit):
        load_example().main()
    assert capsys.readouterr().err.endswith(f"error: {error}\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_example(tmp_path, dtype):
    """What it trains and merges, on a GPU if there is one; what it saved is compared on the CPU in fp32."""
    folder, example = folder_of("smollm2"), load_example()
    text = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20
    found = example.finetune(folder, text, tmp_path, steps=4, length=32, dtype=dtype)
    assert len(found) == 4 and found[-1] < found[0]
    batch = tokens(folder, [text[:80]])
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QsubConfig(), dtype=dtype)
    before = output(base, batch)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == dtype and len(int8_weights(adapted)) == 210
    for name, module in adapted.named_modules():
        if hasattr(module, "lora_A"):
            saved = merged.get_parameter(f"{name.removeprefix('base_model.model.')}.weight").float()
            assert is_merged(saved, module, dtype) and not is_merged(saved, module, dtype, adapters=0)
    if dtype == torch.float32:  # sums in another order through 30 layers, against what the training changed
        after = output(adapted, batch)
        assert (output(merged, batch) - after).norm() < 1e-3 * (before - after).norm()


def is_merged(saved, module, dtype, adapters=1):
    """Whether a weight is the int8 one and B A, each rounded to dtype, as their sum is; B A has 8 terms in fp32."""
    weight = module.base_layer.weight.dequantize(torch.float32)
    b, a = (getattr(module, name)["default"].weight.detach().float() for name in ("lora_B", "lora_A"))
    delta = adapters * b @ a * module.scaling["default"]
    rounding = torch.finfo(dtype).eps / 2
    bound = 2 * rounding * (1 + rounding) * (weight.abs() + delta.abs()) + 8 * 2**-24 * b.abs() @ a.abs()
    return bool(((saved - weight - delta).abs() <= bound).all())


# ---- Schedules ----


def slope(optimizer, schedule, steps):
    """The learning rates of a schedule, and how far a parameter of constant gradient goes in each step."""
    (param,) = optimizer.param_groups[0]["params"]
    rates, ways = [], []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        before = param.detach().clone()
        param.grad = torch.ones_like(param)
        optimizer.step()
        ways.append((before - param).abs().max().item())
        schedule(step)
    return rates, ways


@pytest.mark.parametrize("name", ["transformers", "timm"])
def test_each_step_goes_as_far_as_the_schedule_says(name):
    """With a constant gradient Adam goes lr in each step; 8 bits of state are off by 1/32 for m, 1/32 for v at most."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW8bit([param], lr=1e-2, weight_decay=0, backend="eager")
    if name == "transformers":
        scheduler = get_cosine_schedule_with_warmup(optimizer, 4, 12)
        rates, ways = slope(optimizer, lambda _: scheduler.step(), 10)
    else:
        if importlib.util.find_spec("timm") is None:
            pytest.skip("timm is not installed")
        from timm.scheduler import CosineLRScheduler

        scheduler = CosineLRScheduler(optimizer, t_initial=8, warmup_t=4, warmup_lr_init=0.0, warmup_prefix=True)
        rates, ways = slope(optimizer, lambda step: scheduler.step(step + 1), 10)
    cosine = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(6)]
    assert rates == pytest.approx([1e-2 * share for share in (0, 0.25, 0.5, 0.75, *cosine)])
    assert all(abs(way - rate) <= 0.05 * rate + 1e-9 for way, rate in zip(ways, rates, strict=True))


# ---- Lightning ----


@pytest.fixture
def lightning():
    return pytest.importorskip("pytorch_lightning")


def lightning_module(lightning, int8):
    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
            if int8:
                qsub.quantize_(self.net, trainable=True)

        def training_step(self, batch, index):
            torch.manual_seed(index)  # int8 weights are rounded stochastically, by torch's generator
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = AdamW8bit(param_groups(self), lr=1e-2, min_8bit_size=256, backend="eager")
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=16)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Classifier()


@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("int8", [False, True])
def test_lightning_resumes_exactly(lightning, tmp_path, int8):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 32, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))

    def fit(epochs, checkpoint=None):
        module = lightning_module(lightning, int8)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, 16), ckpt_path=checkpoint)
        return module, trainer

    whole, _ = fit(4)
    half, trainer = fit(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(4, tmp_path / "half.ckpt")
    assert all(map(torch.equal, values(whole), values(resumed)))
    assert not all(map(torch.equal, values(whole), values(half)))
