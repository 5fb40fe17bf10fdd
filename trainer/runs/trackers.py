"""Mirrors each row of metrics to trackio, wandb or tensorboard.

The run folder remains the complete record of a run. Its file `tracker_run_name` has the name of the run in trackers:
the name of the folder and a random suffix. A resumed run finds this file and continues the tracker's run. A new run in
another folder of equal name gets another suffix. Only the packages of the given trackers are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

LogMetrics = Callable[[Mapping[str, Any]], None]
"""Takes a row of metrics: `step` and numbers."""


@contextmanager
def open_trackers(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], *, project: str
) -> Iterator[LogMetrics]:
    """Yield a function that sends a row to all trackers.

    trackio writes to this machine ($TRACKIO_DIR, or Hugging Face's cache), tensorboard to `tensorboard/` in the run
    folder, wandb to its service or, with WANDB_MODE=offline, into the run folder. Each needs its package.
    """
    with ExitStack() as stack:
        trackers = [stack.enter_context(_open_tracker(name, run_dir, config, project)) for name in names]

        def log(row: Mapping[str, Any]) -> None:
            numbers = {name: x for name, x in row.items() if name != "step" and isinstance(x, int | float)}
            for log_numbers in trackers:
                log_numbers(numbers, row["step"])

        yield log


@contextmanager
def _open_tracker(
    name: str, run_dir: Path, config: Mapping[str, Any], project: str
) -> Iterator[Callable[[Mapping[str, float], int], object]]:
    # If the package is missing, this raises ModuleNotFoundError before anything is written, for tensorboard too.
    package = import_module(name)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run_dir / name), flush_secs=10) as writer:

            def add_scalars(numbers: Mapping[str, float], step: int) -> None:
                for metric, value in numbers.items():
                    writer.add_scalar(metric, value, step)

            yield add_scalars
        return
    run_name = _tracker_run_name(run_dir)
    extra = {"id": run_name, "dir": str(run_dir)} if name == "wandb" else {}
    with redirect_stdout(sys.stderr):  # stdout is for results
        package.init(project=project, name=run_name, config=dict(config), resume="allow", **extra)
    try:
        yield lambda numbers, step: package.log(numbers, step=step)
    finally:
        with redirect_stdout(sys.stderr):
            package.finish()


def _tracker_run_name(run_dir: Path) -> str:
    """Return the run's name in trackers. The first call chooses it."""
    path = run_dir / "tracker_run_name"
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{run_dir.resolve().name}-{token_hex(4)}\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
