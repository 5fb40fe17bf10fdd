"""A test of the whole recipe on a pretrained model: SFT, a stage of RL that is killed and continued, and evaluations.

It takes minutes, and it is skipped without the packages that have the model (`bench.pretrained`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from trainer.config_loading import load_config  # noqa: E402
from trainer.recipe.phases import Phase, RecipeRun  # noqa: E402

RUN_TIMEOUT_S = 1200
"""The whole test takes four minutes on two cores, and 19 minutes beside 20 busy processes."""
SMALL_RUN = """
[model]
dtype = "float32"
chat_format = "tokenizer"
chat_template = "chatml-tools"
system_prompt = "Use Python."
[engines]
max_num_seqs = 8
max_model_len = 512
[data]
train = ["generated:16"]
[sft]
data = ["generated:8"]
epochs = 1
batch_size = 4
micro_batch_size = 4
max_conversation_tokens = 512
save_steps = 1
[rl]
problems_per_step = 2
samples_per_problem = 4
kept_per_problem = 2
micro_batch_tokens = 1024
max_response_tokens = 48
max_turns = 2
save_steps = 1
[stages.rl1]
steps = 2
[eval]
data = ["generated:4"]
max_response_tokens = 32
max_turns = 2
"""


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
@pytest.mark.usefixtures("needs_isolation", "guest_python")
def test_a_pretrained_model_goes_through_the_whole_recipe_with_a_kill(pretrained_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SMALL_RUN, encoding="utf-8")
    config = load_config(file, {}, [f"model.path={pretrained_model}", f"run_dir={tmp_path / 'run'}"])
    run = RecipeRun(config)
    command = [sys.executable, "-m", "trainer", "recipe", str(file)]
    command += ["--run-dir", config.run_dir, "--set", f"model.path={pretrained_model}"]
    _run_until_step(command, run, num_rows=2)
    assert run.result(Phase("grpo", "rl1")) is None, "the stage ended before the kill"
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S)

    assert [phase for phase in run.phases() if run.result(phase) is None] == []
    metrics = list(run.run_folder.read_metrics())
    assert [row["step"] for row in metrics] == [1, 2, 3], "one step of SFT and two of RL, none twice"
    assert [row["accuracy"] >= 0 for row in run.summary()["stages"]] == [True, True]
    # The folder of the trained model is one that other programs load.
    folder = run.model_path(run.trained_model("rl1").model)
    trained, pretrained = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, pretrained_model))
    before, after = pretrained.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before), "the training changed no weight"
    assert (
        AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(pretrained_model).get_vocab()
    )


def _run_until_step(command: list[str], run: RecipeRun, *, num_rows: int) -> None:
    """Start a run, and kill all its processes once it has written the metrics of so many steps."""
    with subprocess.Popen(command, start_new_session=True) as parent:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while len(list(run.run_folder.read_metrics())) < num_rows:
            assert parent.poll() is None, f"the run ended with {parent.returncode} before row {num_rows} of its metrics"
            assert time.monotonic() < deadline, f"no row {num_rows} of the metrics in {RUN_TIMEOUT_S} s"
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
