"""The whole recipe: SFT, stages of reinforcement learning, filters and evaluations between them; resumed where it was.

A recipe is a list of units, each a command of `rstar-train` that could be typed, run as a child process:

    prepare    problems, conversations and the tiny model into the run's folder
    sft        the first model
    filter     what the current model solves every time is taken out, before a stage that asks for it
    grpo       a stage
    eval       the same fresh problems, after SFT and after each stage

Why a child each: its end frees all memory, a GPU's too, which two trainers in one process never quite do; one command
is what torchrun can start on many ranks; and a kill at any point leaves what a kill of that command leaves.

Invariants:
- A unit is over once its `DONE` file is there, which appears whole and last. Nothing that is over runs again.
- A unit that was killed goes on from what it left, and comes to what it would have come to.
- Nothing starts before all that the units need is there: `trainer.recipe.preflight`, in a child as well. A folder
gets its
  configuration only after that, so that one which cannot run here may still be changed.
- One recipe works on a run's folder at a time: children hold the lock too, so that none is overtaken by its successor.
- A run's folder keeps one configuration.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from trainer.config import ENV_PREFIX, ConfigError, RunConfig, StageConfig, load
from trainer.json_files import read_json, write_json
from trainer.runs.run_folder import RunFolder

SFT = "sft"
START = "start"
LAUNCHED = ("sft", "grpo")
"""The units that run on every rank."""
STOP_S = 60.0
"""For a child to end what it started, once it was asked to."""
MAY_DIFFER = (
    *("run_dir", "rl.", "track.", "hardware.", "sandbox.endpoints", "engines.endpoints", "engines.count"),
    *("engines.python", "engines.timeout_s", "engines.slots", "engines.gpu_memory", "engines.tensor_parallel"),
    *("engines.sync", "engines.policy", "engines.max_down_s"),
)
"""Settings of the place where a run goes on, not of the run. What `[rl]` said is in its stages."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


MISUSE = 2
"""The exit code of a child that was told something wrong."""
NO_PREFLIGHT = "--no-preflight"


class UnitFailed(Exception):
    """A child ended badly; what went wrong it has said itself."""


class NotReady(ConfigError):
    """Something that a run needs is not there, and nothing was started."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One child's work: a command, for a stage or for what comes before them."""

    command: str
    stage: str = START

    @property
    def named(self) -> list[str]:
        """The stage, where the command alone does not say it."""
        return [] if self.stage in (START, self.command) else [self.stage]

    def __str__(self) -> str:
        return " ".join([self.command, *self.named])


class Run:
    """A run's folder as the recipe sees it: where each unit leaves what, and what is over."""

    def __init__(self, config: RunConfig) -> None:
        self.began, self.config = perf_counter(), config
        self.folder = Path(config.run_dir)
        self.record = RunFolder(self.folder, save_logprobs=config.track.has_logprobs)

    def units(self) -> list[Unit]:
        """All of them, in order."""
        units = [Unit("prepare")]
        if self.config.sft.data:
            units += [Unit("sft", SFT), Unit("eval", SFT)]
        for stage in self.config.stages.values():
            filtering = [Unit("filter", stage.name)] if stage.drop_solved else []
            units += [*filtering, Unit("grpo", stage.name), Unit("eval", stage.name)]
        return units

    def done_file(self, unit: Unit) -> Path:
        """What says that a unit is over, and what it found."""
        name = {"prepare": "prepared", "filter": "filtered", "eval": "evaluated"}.get(unit.command, "done")
        return self.stage(unit.stage) / f"{name}.json"

    def done(self, unit: Unit) -> dict[str, Any] | None:
        return read_json(self.done_file(unit))

    def finish(self, unit: Unit, found: Mapping[str, Any]) -> None:
        """Say that a unit is over: what it found, and the seconds since it has this object.

        Of all checkpoints the last one of the last training stays: the next stage may take its optimiser from there.
        """
        write_json(self.done_file(unit), {"seconds": perf_counter() - self.began, **found})
        if unit.command in LAUNCHED:
            for folder in self.folder.glob("stages/*/checkpoints/checkpoint-*"):
                if folder != self.folder / found.get("checkpoint", ""):
                    shutil.rmtree(folder)

    def stage(self, name: str) -> Path:
        return self.folder / "stages" / name

    def trained(self, name: str, *, before: bool = False) -> dict[str, Any]:
        """What the training of `name`, or the one before it, left: `model`, `checkpoint`, `step`.

        Raises `ConfigError` where that is not over.
        """
        units = [unit for unit in self.units() if unit.command in ("prepare", *LAUNCHED)]
        names = [unit.stage for unit in units]
        if name not in names:
            self.config.stage(name)
        return self.needed(units[names.index(name) - before])

    def needed(self, unit: Unit) -> dict[str, Any]:
        """What a unit found. Raises `ConfigError` if it is not over."""
        found = self.done(unit)
        if found is None:
            raise ConfigError(f"{self.folder}: `rstar-train {unit}` comes first, or `rstar-train recipe` for all")
        return found

    def problems(self, stage: StageConfig) -> Path:
        """The problems that a stage trains on."""
        return self.stage(stage.name) / "problems.jsonl" if stage.drop_solved else self.source(stage)

    def source(self, stage: StageConfig) -> Path:
        """The problems of which `drop_solved` leaves a stage's."""
        return self.folder / "data" / f"{stage.name if stage.data else 'train'}.jsonl"

    def summary(self) -> dict[str, Any]:
        """What came out so far, a row for SFT and each stage that is evaluated."""
        rows = []
        for unit in self.units():
            found = self.done(unit) if unit.command == "eval" else None
            if found:
                parts = [done for part in self.units() if part.stage == unit.stage and (done := self.done(part))]
                rows.append({"name": unit.stage, **found["scores"], "seconds": sum(part["seconds"] for part in parts)})
        return {"stages": rows}


Start = Callable[[Unit, Sequence[str], int], int]
"""Runs a unit's command, which inherits a descriptor, and returns its exit code."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def recipe(
    config: RunConfig,
    *,
    start: Start | None = None,
    say: Callable[[str], None] = _say,
    has_preflight: bool = True,
) -> Run:
    """Run every unit that is not over. Raises `RecordError` for another run's folder, `NotReady`, `UnitFailed`."""
    run, start = Run(config), start or start_child
    with _locked(run.folder, say) as lock:
        known = asdict(load(run.folder, {})) if run.record.read_config() else None  # with settings that came since
        if known:
            run.record.bind_config(asdict(config), known, changeable=MAY_DIFFER)
        units = run.units()
        if has_preflight and not all(map(run.done, units)):
            say("preflight")
            _preflight(config, start, lock)
        run.record.bind_config(asdict(config), known, changeable=MAY_DIFFER)
        for number, unit in enumerate(units, 1):
            if not run.done(unit):
                say(f"[{number}/{len(units)}] {unit}")
                if code := start(unit, argv(unit, config), lock):
                    raise UnitFailed(
                        f"{unit} ended with exit code {code}; what it did is kept, and the same command goes on"
                    )
            run.record.write_summary(run.summary())
    return run


def _preflight(config: RunConfig, start: Start, lock: int) -> None:
    """Look for what the units need, in a child: what it loads for that is gone afterwards."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
        json.dump(asdict(config), file)
        file.flush()
        unit = Unit("preflight")
        code = start(unit, [sys.executable, "-m", "trainer", unit.command, file.name], lock)
    if code == MISUSE:
        raise NotReady(f"nothing was started; mend what is named above, or give {NO_PREFLIGHT} to start all the same")
    if code:
        raise UnitFailed(f"{unit} ended with exit code {code}; nothing was started")


def argv(unit: Unit, config: RunConfig) -> list[str]:
    """The command of a unit."""
    launch = config.hardware.launch if unit.command in LAUNCHED else ()
    stage = [part for name in unit.named for part in ("--stage", name)]
    return [*(launch or [sys.executable]), "-m", "trainer", unit.command, config.run_dir, *stage, NO_PREFLIGHT]


def start_child(unit: Unit, command: Sequence[str], lock: int) -> int:
    """Its exit code. It ends when we do, by whatever way; on Ctrl-C, which reaches it too, it is given time."""
    # It reads what the run's folder says, not what a variable would add to that.
    environ = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    child = subprocess.Popen(command, env=environ, pass_fds=[lock], preexec_fn=die_with_parent)
    try:
        return child.wait()
    finally:
        child.terminate()  # which one that is over does not feel
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[int]:
    """The descriptor that holds the folder's lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as why:
        raise ConfigError(f"run_dir={folder}: expected a folder that can be written, or made: {why.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: another recipe works here; waiting for its end (Ctrl-C gives up)")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
