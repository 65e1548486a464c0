"""Write the files under tests/fixtures: what this version saves, to be loaded by every later one.

python tests/make_fixtures.py     # refuses to replace a file: a format that changes gets a new name
"""

import pathlib

import torch
from torch import nn

import qsub

FOLDER = pathlib.Path(__file__).parent / "fixtures"


def model():
    torch.manual_seed(0)
    return qsub.quantize_(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4, bias=False)))


def optimizer_state(**options):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(32, 130)), nn.Parameter(torch.randn(5))]
    optimizer = qsub.optim.AdamW8bit(params, lr=1e-2, amsgrad=True, backend="eager", **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer.state_dict(), [param.detach() for param in params]


def plain_moments(saved):
    return {
        f"{index}.{key}": value.dequantize() if hasattr(value, "scale") else value
        for index, entry in saved["state"].items()
        for key, value in entry.items()
    }


def main():
    FOLDER.mkdir(exist_ok=True)
    state = model().state_dict()
    expected = {name: value.dequantize() if hasattr(value, "scale") else value for name, value in state.items()}
    opt_state, params = optimizer_state()
    moments = plain_moments(opt_state)
    dynamic, _ = optimizer_state(state_code="dynamic", block_size=256)
    writers = {
        "model-v1.pt": lambda path: torch.save(state, path),
        "model-v1.safetensors": lambda path: qsub.save_file(state, path),
        "optimizer-v1.pt": lambda path: torch.save({"optimizer": opt_state, "params": params}, path),
        "optimizer-dynamic-v1.pt": lambda path: torch.save(
            {"optimizer": dynamic, "params": params, "moments": plain_moments(dynamic)}, path
        ),
        "expected-v1.pt": lambda path: torch.save({"weights": expected, "moments": moments}, path),
    }
    for name, write in writers.items():
        if (FOLDER / name).exists():
            print(f"{name} is there already: a format that changes gets a new name")
        else:
            write(FOLDER / name)


if __name__ == "__main__":
    main()
