"""Fixtures of all tests."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    """GPU tests are skipped where there is no GPU, whichever way pytest was called."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def their_steps_are_eager():
    """torchao compiles a graph for each shape: its step as it stands is the same and takes no time to start."""
    with torch.compiler.set_stance("force_eager"):
        yield
