"""Tests of a stage that two processes (ranks) train together, with and without sharding of the model.
`tests/trainer/two_ranks.py` is the program of these processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from tests.trainer.sampling import QUIET_LIBRARIES
from tests.trainer.training.stage_run import are_equal, load_weights
from trainer.runs.run_folder import RunFolder

pytestmark = QUIET_LIBRARIES

ROOT = Path(__file__).parents[3]


@dataclass
class TwoRanks:
    """The results of the two processes."""

    path: Path
    """The run folder."""
    sharding: str
    ranks: list[dict[str, Any]]
    """The records of each rank. The end of `two_ranks.main` describes them."""


@pytest.fixture(scope="module", params=["none", "full"])
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> TwoRanks:
    path = tmp_path_factory.mktemp(request.param)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun, "tests/trainer/two_ranks.py", model, path, request.param]
    subprocess.run(command, cwd=ROOT, env=environ, timeout=380, check=True)
    return TwoRanks(path, request.param, [json.loads((path / f"rank{rank}.json").read_text()) for rank in (0, 1)])


def test_two_ranks_share_the_rows_of_a_step_and_end_with_the_same_weights(two_ranks: TwoRanks) -> None:
    first, second = two_ranks.ranks
    assert first["weights"] == second["weights"]
    for step in (1, 2):
        # Every row of a step is on exactly one rank.
        trained = [ids for rank in two_ranks.ranks for ids in rank["batches"][step - 1]]
        assert sorted(trained) == sorted(row["response_ids"] for row in RunFolder(two_ranks.path).read_episodes(step))


def test_ranks_wait_for_rollouts_on_a_gloo_group_that_outlasts_the_default_group(two_ranks: TwoRanks) -> None:
    for rank in two_ranks.ranks:
        calls = [call for call, _ in rank["waits"]]
        # The barriers are after the evaluation, and at the end.
        assert calls == [*["scatter_object_list: own, gloo"] * 2, *["barrier: own, gloo"] * 2]
    second = two_ranks.ranks[1]
    _, wait_s = second["waits"][1]  # this wait is for the slow rollouts of the second step
    assert wait_s > second["default_timeout_s"]


def test_sharded_gradients_are_reduced_after_every_pass_and_all_ranks_run_equally_many_passes(
    two_ranks: TwoRanks,
) -> None:
    first, second = (rank["reduced"] for rank in two_ranks.ranks)
    # A pass has one row. Three modules are sharded: each of the two layers, and the embeddings together with the output
    # layer.
    rows = [row for step in (1, 2) for row in RunFolder(two_ranks.path).read_episodes(step)]
    passes = len(first) // 3
    assert first == second == [True] * 3 * passes
    assert passes > 2 or two_ranks.sharding == "none", "a step has more than one pass"
    assert passes <= len(rows) // 2


def test_the_first_rank_saves_the_whole_model(two_ranks: TwoRanks, model: Path) -> None:
    saved, initial = load_weights(two_ranks.path / "stages/rl1/model"), load_weights(model)
    assert saved.keys() == initial.keys()
    assert not are_equal(saved, initial)


def test_the_first_rank_evaluates_and_keeps_the_whole_model(two_ranks: TwoRanks) -> None:
    assert [rank["evaluations"] for rank in two_ranks.ranks] == [[2], []]
    stage_dir = two_ranks.path / "stages/rl1"
    assert are_equal(load_weights(stage_dir / "best"), load_weights(stage_dir / "model"))
