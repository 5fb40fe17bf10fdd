"""Prepares the training of a phase: opens the trackers and a progress bar, and checks that all ranks have the same
settings, and that a checkpoint is one of the trained model."""

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
    """Yield the context of a training, and a function that sends a row of metrics to the trackers.

    The caller needs the function only for rows of evaluations. The metrics of each training step go to the trackers and
    to a progress bar without it.
    """
    config, stage, run_folder = run.config, phase.stage, run.run_folder
    previous = run.trained_model(stage, of_previous_stage=True)
    if checkpoint := latest_checkpoint(run.stage_dir(stage) / "checkpoints"):
        _check_same_model(run.model_path(previous.model), checkpoint)
    track: LogMetrics = lambda row: None  # noqa: E731
    with ExitStack() as stack:
        if distributed_state(config.hardware).is_main_process:
            track = stack.enter_context(open_run_trackers(run))
            advance = stack.enter_context(progress_bar(stage, steps))

            def on_metrics(row: Mapping[str, Any]) -> None:
                track(row)
                shown = [f"{name} {row[name]:.3g}" for name in PROGRESS_METRICS if row.get(name) is not None]
                advance(row["step"] - previous.step, "  ".join(shown))

            run_folder = replace(run_folder, on_metrics=on_metrics)
        context = TrainingContext(
            run.model_path(previous.model),
            run.stage_dir(stage),
            run_folder,
            seed=run.seed(stage),
            first_step=previous.step,
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
    if group is not None:  # there are several ranks
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
        expected, found = (AutoConfig.from_pretrained(path).get_text_config() for path in (model, checkpoint))
    sizes = [field.name for field in fields(ModelShape) if field.name != "tie_word_embeddings"]  # the others are sizes
    values = {name: (getattr(found, name, None), getattr(expected, name, None)) for name in ("model_type", *sizes)}
    if differing := [f"{name} is {value} and not {right}" for name, (value, right) in values.items() if value != right]:
        raise ConfigError(
            f"{checkpoint}: expected a checkpoint of {model}, got another model's ({', '.join(differing)}); delete "
            "the checkpoints of this stage, or give another --run-dir"
        )
