"""Tests of what the trainings pass to TRL: the arguments for the configured GPUs, and the few private names of TRL that
they use."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import TrainingArguments  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES  # noqa: E402
from tests.trainer.training.stage_run import ROWS_PER_STEP, SEED, STAGE  # noqa: E402
from trainer.config import HardwareConfig  # noqa: E402
from trainer.json_files import read_json  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training import adapters, context, grpo, sft  # noqa: E402
from trainer.training.context import TrainingContext  # noqa: E402

pytestmark = QUIET_LIBRARIES


@pytest.mark.parametrize(
    ("module", "expected"),
    [(grpo, set()), (context, {"_keys_to_ignore_on_save"}), (sft, set()), (adapters, set())],
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


@pytest.mark.parametrize(("sharding", "device_map"), [("none", {"": 3}), ("full", None)])
def test_the_model_is_loaded_onto_the_device_of_its_rank_and_not_split_over_the_visible_gpus(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, sharding: Any, device_map: Any
) -> None:
    """A sharded model is loaded into the machine's memory, from which FSDP gives each rank its part."""
    loads: list[dict[str, Any]] = []
    state = SimpleNamespace(local_process_index=3, is_main_process=True)
    monkeypatch.setattr(context, "distributed_state", lambda hardware: state)
    monkeypatch.setattr(context.AutoModelForCausalLM, "from_pretrained", lambda *_, **options: loads.append(options))
    hardware = HardwareConfig(gpus_per_node=8, sharding=sharding)
    options = {"dtype": "bfloat16", "hardware": hardware, "attn_implementation": "sdpa"}
    TrainingContext(model, tmp_path, RunFolder(tmp_path), seed=SEED, **options).load_model()
    TrainingContext(model, tmp_path, RunFolder(tmp_path), seed=SEED, **options, peft={"r": 4}).load_model()
    common = {"device_map": device_map, "attn_implementation": "sdpa"}
    assert loads == [common | {"dtype": torch.float32}, common | {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("arguments", [grpo._GrpoArguments, sft._SftArguments])
def test_a_single_process_trains_on_one_of_its_visible_gpus(
    arguments: type[TrainingArguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    trl_arguments = arguments.__mro__[2]  # the class of TRL follows our class and RankArguments
    theirs, ours = (kind(str(tmp_path), bf16=False) for kind in (trl_arguments, arguments))
    assert theirs.n_gpu == 8, "TRL refuses this, and transformers would split each batch over the GPUs"
    assert ours.n_gpu == 1
    assert ours.train_batch_size == ours.per_device_train_batch_size


class Killed(BaseException):
    pass


@pytest.mark.parametrize("num_steps", range(6))
def test_a_kill_while_the_best_model_is_replaced_loses_neither(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """The process is killed after `num_steps` changes of folders. Some of the numbers are larger than the number of
    changes, so nothing is killed."""

    def save(trainer: Any, weights: Any, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(weights["accuracy"])

    def keep(accuracy: float) -> None:
        TrainingContext(model, tmp_path, RunFolder(tmp_path), seed=SEED).keep_if_best(
            trainer=None, weights={"accuracy": str(accuracy)}, step=1, accuracy=accuracy
        )

    def dying(change: Any) -> Any:
        def change_or_die(*args: Any, **options: Any) -> Any:
            if next(steps, None) is None:
                raise Killed
            return change(*args, **options)

        return change_or_die

    monkeypatch.setattr(context, "save_plain_model", save)
    keep(0.5)
    steps = iter(range(num_steps))
    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        patches.setattr(Path, "rename", dying(Path.rename))
        patches.setattr(context.shutil, "rmtree", dying(context.shutil.rmtree))
        keep(0.75)
    keep(0.25)
    best = (read_json(tmp_path / context.BEST_MARK) or {})["accuracy"]
    assert best in (0.5, 0.75), "the best model and the one before it are lost"
    assert (tmp_path / "best/weights").read_text() == str(best)


def test_a_process_that_leaves_its_ranks_has_no_process_group(tmp_path: Path) -> None:
    """If the process group stayed open, its threads could abort the process while it exits."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    context.waiting_group.cache_clear()
    assert context.waiting_group() is not None
    context.leave_ranks()
    assert not torch.distributed.is_initialized()
    assert context.waiting_group() is None
    context.waiting_group.cache_clear()
