"""A run whose model has learnt to guess, for the tests of the phases after SFT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.errors import NodeError
from sandbox.runtime.build import default_python
from tests.trainer.recipe.small_runs import guessing_config, in_this_process
from trainer.environments.connection import open_sandbox
from trainer.recipe.phases import EvalResult, Phase, RecipeRun
from trainer.recipe.runner import run_recipe
from trainer.rollout.loop_thread import LoopThread


@pytest.fixture(scope="session")
def run_after_sft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecipeRun]:
    """A run whose SFT has ended, with a sandbox."""
    try:
        default_python()
    except NodeError as error:
        pytest.skip(f"needs the guest runtime: {error}")
    with LoopThread() as loop_thread:
        sandbox = loop_thread.enter(open_sandbox("local", arguments=["--slots", "8", "--zygote-pools", "1"]))
        run = RecipeRun(guessing_config(tmp_path_factory.mktemp("tuned_run"), sandbox.endpoints))
        with _one_torch_thread():
            run_recipe(run.config, run_phase=in_this_process("sft"))
        run.write_result(Phase("eval", "sft"), EvalResult())
        yield run


@pytest.fixture(scope="module")
def tuned_run(run_after_sft: RecipeRun) -> Iterator[RecipeRun]:
    """`run_after_sft`, in a process in which torch has one thread."""
    with _one_torch_thread():
        yield run_after_sft


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Give torch one thread, as in child processes, since floating-point sums depend on the number of threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
