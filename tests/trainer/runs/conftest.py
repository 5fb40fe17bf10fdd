"""The run folder that the tests of `rstar-train show` share."""

from __future__ import annotations

import pytest

from tests.trainer.run_folders import write_run
from trainer.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run named "tiny" with three stages and three problems per step. Tests only read it."""
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", problems_per_step=3)
