"""The inputs of a training that its phase opens: the agreement of the ranks, trackers, the checks of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trainer.config import ConfigError, ModelShape, RunConfig
from trainer.json_files import differing_settings
from trainer.progress_bar import progress_bar
from trainer.recipe.phases import Phase, RecipeRun
from trainer.runs.trackers import LogMetrics, open_trackers
from trainer.training.context import (
    TrainingContext,
    distributed_state,
    latest_checkpoint,
    model_errors_as_config_errors,
    waiting_group,
)

PROGRESS_METRICS = ("reward", "tool_error_ratio", "loss")
"""Metrics shown beside a progress bar."""


@contextmanager
def training_context(run: RecipeRun, phase: Phase, steps: int) -> Iterator[tuple[TrainingContext, LogMetrics]]:
    """Yield the inputs of a training, and a function that sends its other metrics to the trackers.

    The metrics of each step go to the trackers and a progress bar as well.
    """
    config, stage, run_folder = run.config, phase.stage, run.run_folder
    before = run.trained_model(stage, of_previous_stage=True)
    if checkpoint := latest_checkpoint(run.stage_dir(stage) / "checkpoints"):
        _check_same_model(run.model_path(before.model), checkpoint)
    track: LogMetrics = lambda row: None  # noqa: E731
    with ExitStack() as stack:
        if distributed_state(config.hardware).is_main_process:
            track = stack.enter_context(open_run_trackers(run))
            advance = stack.enter_context(progress_bar(stage, steps))

            def on_metrics(row: Mapping[str, Any]) -> None:
                track(row)
                shown = [f"{name} {row[name]:.3g}" for name in PROGRESS_METRICS if row.get(name) is not None]
                advance(row["step"] - before.step, "  ".join(shown))

            run_folder = replace(run_folder, on_metrics=on_metrics)
        context = TrainingContext(
            run.model_path(before.model),
            run.stage_dir(stage),
            run_folder,
            seed=run.seed(stage),
            first_step=before.step,
            dtype=config.model.dtype,
            attn_implementation=config.model.attn_implementation,
            peft=config.model.peft,
            eval_steps=config.eval.every_steps,
            correct_above=config.reward.correct_above,
            hardware=config.hardware,
            keep_checkpoints=config.storage.keep_checkpoints,
            engines_sleep=config.engines.sleep_mode,
        )
        yield context, track


def open_run_trackers(run: RecipeRun) -> AbstractContextManager[LogMetrics]:
    tracking = run.config.tracking
    return open_trackers(tracking.trackers, run.dir, asdict(run.config), project=tracking.project)


def join_ranks(config: RunConfig) -> bool:
    """Wait for all ranks, and return whether this is the first one. Raises `ConfigError` on every rank if their
    settings differ."""
    state, group = distributed_state(config.hardware), waiting_group()
    if group is not None:
        settings: list[dict[str, Any]] = [{}] * state.num_processes
        torch.distributed.all_gather_object(settings, asdict(config), group=group)
        if names := sorted({name for other in settings for name in differing_settings(settings[0], other)}):
            raise ConfigError(
                f"rank {state.process_index}: the ranks have different settings ({', '.join(names[:5])}); start all of "
                "them with the same file, variables and --set"
            )
    return bool(state.is_main_process)


def _check_same_model(model: Path, checkpoint: Path) -> None:
    """Raise `ConfigError` if a checkpoint has another architecture or other sizes than the model that is trained. The
    checkpoint of an adapter has no config of a model, and is not compared."""
    if not (checkpoint / "config.json").exists():
        return
    with model_errors_as_config_errors(model):
        mine, theirs = (AutoConfig.from_pretrained(path).get_text_config() for path in (model, checkpoint))
    names = ["model_type", *(size.name for size in fields(ModelShape) if size.name != "tie_word_embeddings")]
    values = {name: [getattr(config, name, None) for config in (mine, theirs)] for name in names}
    if differing := [f"{name} is {new} and not {old}" for name, (old, new) in values.items() if old != new]:
        raise ConfigError(
            f"{checkpoint}: expected a checkpoint of {model}, got another model's ({', '.join(differing)}); delete "
            "the checkpoints of this stage, or give another --run-dir"
        )
