"""Tests of what the phases of a training check before they train: ranks and checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from tests.trainer.recipe.small_runs import small_config  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, model_folder  # noqa: E402
from trainer.config import ConfigError  # noqa: E402
from trainer.json_files import read_json, write_json  # noqa: E402
from trainer.recipe import sft_phase  # noqa: E402
from trainer.recipe.phases import Phase, RecipeRun, TrainResult  # noqa: E402
from trainer.recipe.runner import NO_PREFLIGHT  # noqa: E402
from trainer.training.context import COMPLETE_MARK  # noqa: E402

pytestmark = QUIET_LIBRARIES


def test_a_checkpoint_of_another_model_is_refused_before_a_training_loads_it(tmp_path: Path) -> None:
    model, run = model_folder(tmp_path / "model"), RecipeRun(small_config(tmp_path, "sft.data=generated:4"))
    run.write_result(Phase("prepare"), TrainResult(str(model), 0))
    checkpoint = run.stage_dir("sft") / "checkpoints/checkpoint-1"
    content = read_json(model / "config.json") or {}
    size, heads = content["intermediate_size"], content["num_key_value_heads"]
    write_json(checkpoint / "config.json", {**content, "intermediate_size": size + 1, "num_key_value_heads": 1})
    (checkpoint / COMPLETE_MARK).touch()
    message = f"intermediate_size is {size + 1} and not {size}, num_key_value_heads is 1 and not {heads}"
    with pytest.raises(ConfigError, match=rf"^{checkpoint}: expected a checkpoint of {model}, got .* \({message}\)"):
        sft_phase.sft(run, Phase("sft", "sft"))


@pytest.mark.slow
def test_ranks_with_different_settings_end_with_a_line_that_names_them(tmp_path: Path) -> None:
    small_config(tmp_path)
    program = "import os, sys; os.environ['RSTAR_TRAIN_SEED'] = os.environ['RANK']; from trainer.cli import main; "
    (tmp_path / "rank.py").write_text(f"{program} sys.exit(main(sys.argv[1:]))\n", encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["sft", tmp_path / "run.toml", "--run-dir", tmp_path / "run", "--set=hardware.nodes=2", NO_PREFLIGHT]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, tmp_path / "rank.py", *arguments]
    ranks = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ranks.returncode
    for rank in (0, 1):
        assert f"rstar-train: rank {rank}: the ranks have different settings (seed); start all of them" in ranks.stderr
