"""The phases of a recipe and the files through which they hand results on.

Invariants:
- A phase is done once its result file exists. The file is written last, and as a whole.
- Results name paths relative to the run folder, so that a run folder can be moved.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from trainer.config import ConfigError, RunConfig, StageConfig
from trainer.json_files import read_json, write_json
from trainer.runs.run_folder import RunFolder

SFT = "sft"
INITIAL_STAGE = "initial"
"""The stage of the model before any training."""
EVAL_SET = "eval"
"""Name of the file with the problems of the evaluation, without its suffix."""
DISTRIBUTED_PHASES = ("sft", "grpo")
"""The phases that run on every rank."""
RESULT_FILES = {"sft": "train", "grpo": "train"}
"""The names of result files, for commands whose result file is not named like the command."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A command of `rstar-train`, for a stage or for the initial model."""

    command: str
    stage: str = INITIAL_STAGE

    @property
    def stage_arguments(self) -> list[str]:
        """The value of `--stage`; empty if the command implies the stage."""
        return [] if self.stage in (INITIAL_STAGE, self.command) else [self.stage]

    def __str__(self) -> str:
        return " ".join([self.command, *self.stage_arguments])


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of `prepare`, `sft` and `grpo`: a model."""

    model: str
    """A path in the run folder, or the hub name or path of a model that the run did not write."""
    step: int
    """The number of the run's training steps that are in the model."""
    checkpoint: str = ""
    """The checkpoint from which the next stage may take its optimizer states. Empty if there is none."""
    best: Mapping[str, Any] = field(default_factory=dict)
    """Step and accuracy of the best evaluation inside the stage. The model of this step is in the stage's folder
    `best`. Empty if there was no evaluation inside the stage."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FilterResult:
    """The numbers of problems before and after the difficulty filter."""

    problems: int
    kept: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The numbers of stored episodes, and of those that failed for good."""

    episodes: int
    failed: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of `eval`: the scores in the summary, and all reports by source (`trainer.recipe.evaluation`)."""

    scores: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


PhaseResult: TypeAlias = TrainResult | FilterResult | CollectResult | EvalResult
_RESULT_TYPES: dict[str, type[PhaseResult]] = {"filter": FilterResult, "collect": CollectResult, "eval": EvalResult}


class RecipeRun:
    """A run: its configuration, its folder, the results of its phases, and the paths of its models and problems."""

    def __init__(self, config: RunConfig) -> None:
        self.started_at, self.config = perf_counter(), config
        self.dir = Path(config.run_dir)
        self.run_folder = RunFolder(
            self.dir, save_logprobs=config.storage.save_logprobs, save_entropies=config.storage.save_entropies
        )

    def phases(self) -> list[Phase]:
        """Return all phases in order."""
        phases = [Phase("prepare")]
        if self.config.sft.data:
            phases += [Phase("sft", SFT), Phase("eval", SFT)]
        for stage in self.config.stages.values():
            filtering = [Phase("filter", stage.name)] if stage.difficulty_filter_samples else []
            collecting = [Phase("collect", stage.name)] if stage.episodes == "collected" else []
            phases += [*filtering, *collecting, Phase("grpo", stage.name), Phase("eval", stage.name)]
        return phases

    def result_path(self, phase: Phase) -> Path:
        return self.stage_dir(phase.stage) / f"{RESULT_FILES.get(phase.command, phase.command)}.json"

    def result(self, phase: Phase) -> PhaseResult | None:
        """Return the result of a phase; None if it is not done."""
        content = read_json(self.result_path(phase))
        return None if content is None else _RESULT_TYPES.get(phase.command, TrainResult)(**content)

    def write_result(self, phase: Phase, result: PhaseResult) -> None:
        """Mark a phase as done. `seconds` is set to the time since this object was created.

        After a training, all checkpoints are deleted but the one in `result`, which the next stage can use, and the
        newest `storage.keep_checkpoints` of SFT and of each stage.
        """
        write_json(self.result_path(phase), {**asdict(result), "seconds": perf_counter() - self.started_at})
        if isinstance(result, TrainResult) and phase.command in DISTRIBUTED_PHASES:
            for folder in self.dir.glob("stages/*/checkpoints"):
                steps = [int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")]
                for step in sorted(steps, reverse=True)[self.config.storage.keep_checkpoints :]:
                    checkpoint = folder / f"checkpoint-{step}"
                    if checkpoint != self.dir / result.checkpoint:
                        shutil.rmtree(checkpoint)

    def require_result(self, phase: Phase) -> PhaseResult:
        """Return the result of a phase. Raises `ConfigError` if it is not done."""
        result = self.result(phase)
        if result is None:
            raise ConfigError(f"{self.dir}: run `rstar-train {phase}` first, or `rstar-train recipe` for all phases")
        return result

    def trained_model(self, stage: str, *, of_previous_stage: bool = False) -> TrainResult:
        """Return the model of a stage, or the model that the stage starts from. Raises `ConfigError` if it does not
        exist yet."""
        phases = [phase for phase in self.phases() if phase.command in ("prepare", *DISTRIBUTED_PHASES)]
        stages = [phase.stage for phase in phases]
        if stage not in stages:
            self.config.stage_config(stage)
        index = stages.index(stage)
        result = self.require_result(phases[index - 1 if of_previous_stage else index])
        assert isinstance(result, TrainResult)
        return result

    def seed(self, name: str) -> int:
        """Return the seed of the phase or stage `name`. Different names give different seeds, so that two stages do not
        have the same order of problems."""
        return random.Random(f"{self.config.seed} {name}").getrandbits(31)

    def stage_dir(self, stage: str) -> Path:
        return self.dir / "stages" / stage

    def collection_dir(self, stage: StageConfig) -> Path:
        """Return the store of the episodes that a stage with `episodes = "collected"` trains on."""
        return self.stage_dir(stage.name) / "collection"

    def eval_problems_path(self) -> Path:
        return self.dir / "data" / f"{EVAL_SET}.jsonl"

    def problems_path(self, stage: StageConfig) -> Path:
        """Return the file with the problems that a stage trains on."""
        is_filtered = stage.difficulty_filter_samples > 0
        return self.stage_dir(stage.name) / "problems.jsonl" if is_filtered else self.unfiltered_path(stage)

    def unfiltered_path(self, stage: StageConfig) -> Path:
        """Return the file with a stage's problems before the difficulty filter."""
        return self.dir / "data" / f"{stage.name if stage.data else 'train'}.jsonl"

    def relative(self, path: Path) -> str:
        """Return a path in the run folder relative to it, as results name it."""
        return str(path.relative_to(self.dir))

    def model_path(self, name: str) -> Path:
        """Return the folder of a model that a result names, or its hub name."""
        path = self.dir / name
        return path if path.is_dir() else Path(name)

    def summary(self) -> dict[str, Any]:
        """Return the results so far: a row for SFT and for each stage that has been evaluated."""
        rows = []
        for phase in self.phases():
            result = self.result(phase) if phase.command == "eval" else None
            if isinstance(result, EvalResult):
                parts = [self.result(part) for part in self.phases() if part.stage == phase.stage]
                seconds = sum(part.seconds for part in parts if part)
                rows.append({"name": phase.stage, **result.scores, "seconds": seconds})
        return {"stages": rows}
