"""Runs a recipe: its phases in order, each as a child process, resumed where an earlier run stopped.

    prepare        problems, conversations and, if generated, the tiny model
    sft, eval      the first model
    filter         optional: drops the problems that the current model always solves
    grpo, eval     one RL stage; filter, grpo and eval repeat for each stage

Each phase is a child process for three reasons: its end frees all memory, GPU memory included; torchrun can start its
command on many ranks; and a kill leaves the same files, whether the recipe or only the command of the phase is killed.

Invariants:
- A phase that is done never runs again. A killed phase continues, with the same result as an uninterrupted one.
- Nothing starts before `trainer.recipe.preflight` has found all that the phases need. The run folder gets its
  configuration only then, so a configuration that cannot run here may still be changed.
- Only one recipe works on a run folder at a time. Its children hold the lock as well. So if the recipe is killed, the
  next one waits until the children have ended.
- A run folder keeps one configuration, except for `CHANGEABLE_SETTINGS`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, RunConfig
from trainer.config_loading import ENV_PREFIX, load_config
from trainer.json_files import check_same_settings
from trainer.recipe.phases import DISTRIBUTED_PHASES, Phase, RecipeRun

STOP_TIMEOUT_S = 60.0
"""Seconds that a child has to stop its own children after SIGTERM."""
CHANGEABLE_SETTINGS = (
    *("run_dir", "rl.*", "tracking.*", "storage.*", "hardware.*", "sandbox.endpoints", "engines.endpoints"),
    *("engines.count", "engines.vllm_python", "engines.turn_timeout_s", "engines.max_num_seqs"),
    *("engines.gpu_memory_utilization", "engines.tensor_parallel_size", "engines.weight_sync"),
    *("engines.sync_check", "engines.probe_tolerance"),
    *("engines.max_down_s", "eval.every_steps"),
    *("collect.executor", "collect.ray_address", "collect.episodes_per_worker", "collect.deadline_s", "collect.max_*"),
    *("reward.timeout_s", "reward.max_concurrent", "stages.*.max_unavailable_share"),
)
"""The settings that may change when a run continues, since they do not change its results; a * stands for any text.
`[rl]` may change because each stage has its own copy of these settings, and the copies are compared."""
EXIT_MISUSE = 2
"""Exit code of a child that reports a wrong setting."""
NO_PREFLIGHT = "--no-preflight"
PR_SET_PDEATHSIG = 1  # prctl(2)


class PhaseFailed(Exception):
    """A child failed. It has printed the reason itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code
        """Exit code of the child. If a signal ended the child, 128 plus the number of the signal, as in a shell."""


class NotReady(ConfigError):
    """Something that a run needs is missing, and nothing was started."""


RunPhase = Callable[[Phase, Sequence[str], int], int]
"""Runs the command line of a phase and returns its exit code. The third argument is the descriptor of the lock, which
the child inherits."""


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_recipe(
    config: RunConfig,
    *,
    run_phase: RunPhase | None = None,
    log: Callable[[str], None] = _log,
    has_preflight: bool = True,
) -> RecipeRun:
    """Run every phase that is not done.

    Raises `RecordError` if the folder has a run with other settings, `NotReady`, and `PhaseFailed`.
    """
    run, run_phase = RecipeRun(config), run_phase or run_child
    with _locked(run.dir, log) as lock_fd:
        saved = check_settings(run)
        phases = run.phases()
        if has_preflight and not all(map(run.result, phases)):
            log("preflight: checking what the run needs")
            _preflight(config, run_phase, lock_fd)
        run.run_folder.bind_config(asdict(config), saved, changeable=CHANGEABLE_SETTINGS)
        log(f"recipe: writes to {run.dir}; `rstar-train show {run.dir}` shows the run at any time")
        for number, phase in enumerate(phases, 1):
            if not run.result(phase):
                log(f"[{number}/{len(phases)}] {phase}{_time_left(run)}")
                _run_logged(phase, phase_command(phase, config), run_phase, lock_fd, log, run)
            run.run_folder.write_summary(run.summary())
    return run


def check_settings(run: RecipeRun) -> dict[str, Any] | None:
    """Return the settings in the run folder, or None if it has none. Raises `RecordError` if one of them differs from
    the run's setting and is not one of `CHANGEABLE_SETTINGS`."""
    if run.run_folder.read_config() is None:
        return None
    # `load_config` fills in today's defaults for settings that are newer than the folder.
    mine, saved = json.loads(json.dumps([asdict(run.config), asdict(load_config(run.dir, {}))]))
    check_same_settings(run.dir, mine, saved, CHANGEABLE_SETTINGS)
    return dict(saved)


def _run_logged(
    phase: Phase, command: Sequence[str], run_phase: RunPhase, lock_fd: int, log: Callable[[str], None], run: RecipeRun
) -> None:
    try:
        exit_code = run_phase(phase, command, lock_fd)
    except KeyboardInterrupt:
        log(f"recipe: interrupted in {phase}; `rstar-train recipe {run.dir}` continues there")
        raise
    if exit_code:
        message = f"{phase} failed with exit code {exit_code}; `rstar-train recipe {run.dir}` continues there"
        raise PhaseFailed(message, exit_code)


def _time_left(run: RecipeRun) -> str:
    """Return a text with an estimate of the time left. It is empty if a command of an unfinished phase has never
    finished in this run, since its duration is then unknown."""
    results = {phase: run.result(phase) for phase in run.phases()}
    # For each command, the seconds of its last finished phase.
    seconds = {phase.command: result.seconds for phase, result in results.items() if result}
    try:
        left = sum(seconds[phase.command] for phase, result in results.items() if not result)
    except KeyError:
        return ""
    return f" (about {left / 60:.0f} min left)" if left >= 90 else f" (about {left:.0f} s left)"


def _preflight(config: RunConfig, run_phase: RunPhase, lock_fd: int) -> None:
    """Check what the phases need. The check runs in a child process, so that the memory of its libraries is freed."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
        json.dump(asdict(config), file)
        file.flush()
        phase = Phase("preflight")
        exit_code = run_phase(phase, [sys.executable, "-m", "trainer", phase.command, file.name], lock_fd)
    if exit_code == EXIT_MISUSE:
        raise NotReady(f"nothing was started; repair what is listed above, or start anyway with {NO_PREFLIGHT}")
    if exit_code:
        raise PhaseFailed(f"{phase} failed with exit code {exit_code}; nothing was started", exit_code)


def phase_command(phase: Phase, config: RunConfig) -> list[str]:
    """Return the command line of a phase."""
    launcher = config.hardware.launcher if phase.command in DISTRIBUTED_PHASES else ()
    stage = [part for name in phase.stage_arguments for part in ("--stage", name)]
    return [*(launcher or [sys.executable]), "-m", "trainer", phase.command, config.run_dir, *stage, NO_PREFLIGHT]


def run_child(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
    """Run a command and return its exit code."""
    with child_process(command, [lock_fd]) as child:
        return child.wait()


@contextmanager
def child_process(command: Sequence[str], fds: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that inherits `fds`. At the end of the block the child gets SIGTERM, and SIGKILL after
    `STOP_TIMEOUT_S`. If this process ends, the child gets SIGTERM."""
    # The child reads the configuration in the run folder, so no variable may change it again.
    environ = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(1)

    # Signals are blocked until `Popen` has returned. Otherwise Ctrl-C could raise after the start of the child but
    # before `child` is assigned, and nothing would stop the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        child = subprocess.Popen(command, env=environ, pass_fds=fds, preexec_fn=die_with_parent)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield child
    finally:
        child.terminate()  # no effect on a child that has exited
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def _locked(run_dir: Path, log: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock of the run folder, and yield its descriptor."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: expected a writable folder, got: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"{run_dir}: another recipe works here; waiting until it ends (Ctrl-C stops waiting)")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
