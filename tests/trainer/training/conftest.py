"""Fixtures of the tests of training: a model, an event loop, and torch on one CPU thread.

The fixtures import torch themselves, so that these tests can be skipped on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.rollout.loop_thread import LoopThread


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model. Tests only read it."""
    from tests.trainer.sampling import model_folder

    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread() as loop_thread:
        yield loop_thread


@pytest.fixture(autouse=True)
def _on_one_cpu_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make sums independent of the machine: no GPU, and one thread, so that they are added in one order."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
