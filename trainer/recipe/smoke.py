"""The smallest version of a run: every phase with the smallest sizes, to see that all of them work together.

The smoke run has a folder of its own, beside the folder of the run, and begins anew each time. Two things are done once
for all phases, since each phase would need seconds for each of them: a sandbox is started, unless the run names one,
and the libraries are imported. A phase is still a process of its own.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import ConfigError, RunConfig, SamplingConfig
from trainer.config_loading import ENV_PREFIX
from trainer.data.problems import write_problems
from trainer.data.sources import is_generated, iter_problems, read_conversations
from trainer.json_files import write_rows
from trainer.recipe.phases import Phase, RecipeRun
from trainer.recipe.rollout_session import connect_sandbox
from trainer.recipe.runner import CHANGEABLE_SETTINGS, STOP_TIMEOUT_S, RunPhase, run_child, run_recipe
from trainer.rollout.loop_thread import LoopThread
from trainer.runs.run_folder import RunFolder

LOCK_FILE = "lock"
"""The file that every run folder has (`trainer.recipe.runner`)."""
NUM_ROWS = 8
"""Problems or conversations of each source, if few ranks train. Some problems may be dropped, for example because their
answers are no integers."""
MAX_RESPONSE_TOKENS = 64
MAX_TURNS = 2
SamplingT = TypeVar("SamplingT", bound=SamplingConfig)


def run_smoke(config: RunConfig, *, has_preflight: bool) -> RecipeRun:
    """Run the smallest version of a run. Raises as `run_recipe` does, and `SandboxUnavailable`."""
    config = smoke_config(config)
    with phase_server() as run_phase, LoopThread() as loop_thread:
        if config.sandbox.endpoints:
            return run_recipe(config, run_phase=run_phase, has_preflight=has_preflight)
        sandbox = loop_thread.enter(connect_sandbox(config.sandbox))
        shared = replace(config, sandbox=replace(config.sandbox, endpoints=sandbox.endpoints))
        try:
            return run_recipe(shared, run_phase=run_phase, has_preflight=has_preflight)
        finally:
            folder = RunFolder(Path(config.run_dir))
            if folder.read_config():  # later commands read these settings, and the shared sandbox ends now
                folder.bind_config(asdict(config), changeable=CHANGEABLE_SETTINGS)


@contextmanager
def phase_server() -> Iterator[RunPhase]:
    """Yield a function that runs phases as forks of one process, which has imported the libraries. A running phase is
    stopped at the end of the block, and if this process is killed. The preflight, and any command that does not begin
    with `python -m trainer`, such as that of a launcher, are ordinary child processes."""
    context, started = get_context("forkserver"), list[Any]()
    context.set_forkserver_preload(["trainer.recipe.phase_work"])

    def run_phase(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
        if phase.command == "preflight" or command[:3] != [sys.executable, "-m", "trainer"]:
            return run_child(phase, command, lock_fd)
        process = context.Process(target=_run_command, args=[command[3:]])
        started.append(process)
        process.start()
        process.join()
        return int(process.exitcode or 0)

    try:
        yield run_phase
    finally:
        for process in (process for process in started if process.pid):  # an interrupt may come before the start
            process.terminate()  # no effect on a process that has ended
            process.join(STOP_TIMEOUT_S)
            process.kill()


def _run_command(arguments: Sequence[str]) -> None:
    """Run a command of `rstar-train`. If the process of the recipe is killed, this one gets SIGTERM."""
    threading.Thread(target=_end_with_recipe, daemon=True).start()
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]  # the phase reads the configuration in the run folder
    sys.argv = ["rstar-train", *arguments]
    runpy.run_module("trainer", run_name="__main__")


def _end_with_recipe() -> None:
    recipe = parent_process()
    assert recipe, "the forkserver gives its forks a parent"
    recipe.join()
    os.kill(os.getpid(), signal.SIGTERM)


def smoke_config(config: RunConfig) -> RunConfig:
    """Write the data of the smoke run, and return its settings. Raises `DataError` and `ConfigError`."""
    folder = Path(f"{config.run_dir.rstrip('/')}-smoke")
    if folder.exists():
        if not (folder / LOCK_FILE).exists():
            raise ConfigError(f"{folder}: expected the folder of an earlier smoke run, or none; remove it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / LOCK_FILE).touch()
    # A training step has at least one row per rank.
    ranks = config.hardware.nodes * max(1, config.hardware.gpus_per_node)

    # A source that several settings name has one file.
    first_rows = cache(partial(_first_rows, max(NUM_ROWS, 2 * ranks), folder / "smoke", config.seed))

    def problems(sources: Sequence[str]) -> tuple[str, ...]:
        return tuple(first_rows(source, is_conversations=False) for source in sources)

    stages = {
        name: replace(
            _short(stage),
            steps=1,
            data=problems(stage.data),
            problems_per_step=max(2, ranks),
            samples_per_problem=2,
            kept_per_problem=2,
            difficulty_filter_samples=min(stage.difficulty_filter_samples, 2),
            dynamic_sampling_rounds=min(stage.dynamic_sampling_rounds, 1),
            warmup_steps=0,
        )
        for name, stage in config.stages.items()
    }
    return replace(
        config,
        run_dir=str(folder),
        data=replace(config.data, train=problems(config.data.train), decontaminate_against=()),
        sft=replace(
            config.sft,
            data=tuple(first_rows(source, is_conversations=True) for source in config.sft.data),
            epochs=1.0,
            batch_size=4 * ranks,
            micro_batch_size=4,
        ),
        stages=stages,
        eval=replace(_short(config.eval), data=problems(config.eval.data), samples_per_problem=1, every_steps=0),
        collect=replace(_short(config.collect), data=problems(config.collect.data), samples_per_problem=2),
        tracking=replace(config.tracking, trackers=()),
    )


def _short(sampling: SamplingT) -> SamplingT:
    return replace(
        sampling,
        max_response_tokens=min(sampling.max_response_tokens, MAX_RESPONSE_TOKENS),
        max_turns=min(sampling.max_turns, MAX_TURNS),
    )


def _first_rows(count: int, folder: Path, seed: int, source: str, *, is_conversations: bool) -> str:
    """Return a source with the first `count` rows of `source`, in a file of `folder` unless they are generated. An
    invalid source is returned unchanged, since the preflight reports it."""
    if is_generated(source):
        name, _, number = source.partition(":")
        return f"{name}:{min(int(number), count)}" if number.isdecimal() and number.isascii() else source
    file = folder / f"rows-{len([*folder.glob('*')])}.jsonl"
    if is_conversations:
        write_rows(file, ({"messages": messages} for messages in read_conversations(source, seed=seed)[:count]))
    else:
        write_problems(islice(iter_problems(source, lambda *_: None, seed=seed), count), file)
    return str(file)
