"""Files written by earlier versions load, bit for bit (tests/make_fixtures.py wrote them)."""

import pathlib

import pytest
import torch
from torch import nn

import qsub
from qsub import Blockwise8bitTensor, Int8RowwiseTensor

FOLDER = pathlib.Path(__file__).parent / "fixtures"


def plain(value):
    return value.dequantize() if isinstance(value, (Int8RowwiseTensor, Blockwise8bitTensor)) else value


def test_weights():
    expected = torch.load(FOLDER / "expected-v1.pt")["weights"]
    for state in (torch.load(FOLDER / "model-v1.pt"), qsub.load_file(FOLDER / "model-v1.safetensors")):
        assert set(state) == set(expected)
        assert isinstance(state["0.weight"], Int8RowwiseTensor)
        assert all(torch.equal(plain(state[name]), expected[name]) for name in expected)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
        model.load_state_dict(state, assign=True)
        assert model(torch.ones(2, 16)).isfinite().all()


@pytest.mark.parametrize("name", ["optimizer-v1.pt", "optimizer-dynamic-v1.pt"])
def test_optimizer(name):
    saved = torch.load(FOLDER / name)
    expected = saved.get("moments") or torch.load(FOLDER / "expected-v1.pt")["moments"]
    params = [nn.Parameter(p.clone()) for p in saved["params"]]
    optimizer = qsub.optim.AdamW8bit(params, backend="eager")
    optimizer.load_state_dict(saved["optimizer"])
    for index, param in enumerate(params):
        for key, value in optimizer.state[param].items():
            assert torch.equal(plain(value), expected[f"{index}.{key}"])
        param.grad = torch.ones_like(param)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[0]["amsgrad"]
    optimizer.step()
    assert all(param.isfinite().all() for param in params)
