"""What the trainings pass to TRL: arguments for the configured GPUs, and few private names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import TrainingArguments  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES  # noqa: E402
from tests.trainer.training.stage_run import ROWS_PER_STEP, SEED, STAGE  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training import adapters, context, grpo, sft  # noqa: E402
from trainer.training.context import TrainingContext  # noqa: E402

pytestmark = QUIET_LIBRARIES


@pytest.mark.parametrize(
    ("module", "expected"),
    [(grpo, {"_last_loaded_step"}), (context, {"_keys_to_ignore_on_save"}), (sft, set()), (adapters, set())],
)
def test_only_listed_private_names_of_libraries_are_used(module: Any, expected: set[str]) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = [node for node in attributes if ast.unparse(node.value) in ("self", "training_rows.TrainingRow")]
    names = {node.attr for node in attributes if node not in own}
    assert {name for name in names if name.startswith("_") and not name.endswith("__")} == expected


def test_visible_gpus_train_only_if_they_are_configured(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    training_context = TrainingContext(model, tmp_path, RunFolder(tmp_path), seed=SEED)
    arguments = training_context.trl_arguments(STAGE, rows=ROWS_PER_STEP)
    assert arguments["use_cpu"] and not arguments["dataloader_pin_memory"]


@pytest.mark.parametrize("arguments", [grpo._GrpoArguments, sft._SftArguments])
def test_a_single_process_trains_on_one_of_its_visible_gpus(
    arguments: type[TrainingArguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    trl_arguments = arguments.__mro__[2]  # after our class and SingleGpuArguments
    theirs, ours = (kind(str(tmp_path), bf16=False) for kind in (trl_arguments, arguments))
    assert theirs.n_gpu == 8, "TRL refuses this, and transformers would split each batch over the GPUs"
    assert ours.n_gpu == 1
    assert ours.train_batch_size == ours.per_device_train_batch_size
