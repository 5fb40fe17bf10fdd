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


@contextmanager
def tracking(names: Sequence[str], run: Path, config: Mapping[str, Any], *, project: str = "rstar") -> Iterator[Log]:
    """A function that tells the trackers of each row, until the block ends.

    trackio writes to this machine ($TRACKIO_DIR, else where Hugging Face caches), tensorboard to the run's own
    `tensorboard/`, wandb to its service or, with WANDB_MODE=offline, into the run folder. Each needs its package.
    """
    with ExitStack() as stack:
        trackers = [stack.enter_context(_tracker(name, run, config, project)) for name in names]

        def log(row: Mapping[str, Any]) -> None:
            numbers = {name: x for name, x in row.items() if name != "step" and isinstance(x, int | float)}
            for tell in trackers:
                tell(numbers, row["step"])

        yield log


@contextmanager
def _tracker(name: str, run: Path, config: Mapping[str, Any], project: str) -> Iterator[Callable[..., object]]:
    package = import_module(name)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run / name), flush_secs=10) as writer:
            yield lambda numbers, step: [writer.add_scalar(name, value, step) for name, value in numbers.items()]
        return
    known_as = _name(run)
    extra = {"id": known_as, "dir": str(run)} if name == "wandb" else {}
    with redirect_stdout(sys.stderr):  # they greet there, and it is for results
        package.init(project=project, name=known_as, config=dict(config), resume="allow", **extra)
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
