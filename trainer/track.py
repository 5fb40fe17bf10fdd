"""Trackers by name: each row of metrics, told to trackio, wandb or tensorboard as well.

The run folder stays the record; a tracker only mirrors it. The name by which trackers know a run is written into its
folder, so that a resumed run goes on where it was and a new one of the same folder name is another. Only the packages
that are named are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

Log = Callable[[Mapping[str, Any]], None]
"""Takes a row of metrics: `step` and numbers."""

TRACKERS = ("trackio", "wandb", "tensorboard")
"""Each is also the name of the package that it needs."""


class TrackError(ValueError):
    """The tracker that was asked for is not there."""


@contextmanager
def tracking(names: Sequence[str], run: Path, config: Mapping[str, Any], *, project: str = "rstar") -> Iterator[Log]:
    """A function that tells the trackers of each row, until the block ends.

    trackio writes to this machine ($TRACKIO_DIR, else where Hugging Face caches), tensorboard to the run's own
    `tensorboard/`, wandb to its service or, with WANDB_MODE=offline, into the run folder.

    Raises TrackError when a package is missing, or a name is not one of TRACKERS.
    """
    if unknown := [name for name in names if name not in TRACKERS]:
        raise TrackError(f"track: expected any of {', '.join(TRACKERS)}, got {unknown[0]!r}")
    with ExitStack() as stack:
        trackers = [stack.enter_context(_tracker(_package(name), run, config, project)) for name in names]

        def log(row: Mapping[str, Any]) -> None:
            numbers = {name: x for name, x in row.items() if name != "step" and isinstance(x, int | float)}
            for tell in trackers:
                tell(numbers, row["step"])

        yield log


@contextmanager
def _tracker(package: Any, run: Path, config: Mapping[str, Any], project: str) -> Iterator[Callable[..., object]]:
    if package.__name__ == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run / "tensorboard"), flush_secs=10) as writer:
            yield lambda numbers, step: [writer.add_scalar(name, value, step) for name, value in numbers.items()]
        return
    name = _name(run)
    extra = {"id": name, "dir": str(run)} if package.__name__ == "wandb" else {}
    with redirect_stdout(sys.stderr):  # they greet there, and it is for results
        package.init(project=project, name=name, config=dict(config), resume="allow", **extra)
    try:
        yield lambda numbers, step: package.log(numbers, step=step)
    finally:
        with redirect_stdout(sys.stderr):
            package.finish()


def _name(run: Path) -> str:
    """The run's name for trackers: the first to ask gives it."""
    path = run / "tracked_as"
    if not path.exists():
        run.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{run.resolve().name}-{token_hex(4)}\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as why:
        raise TrackError(f"tracking with {name} needs its package: pip install {name} ({why})") from why
