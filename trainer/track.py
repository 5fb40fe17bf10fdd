"""Trackers by name: each row of metrics, told to trackio, wandb or tensorboard as well.

The run folder stays the record; a tracker only mirrors it. A run is known by its folder's name, so that one that is
resumed goes on where it was. Only the package that is named is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

Log = Callable[[Mapping[str, Any]], None]
"""Takes a row of metrics: `step` and numbers."""

PACKAGES = {"none": None, "trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboard"}

_NAMES = ("version", "step", "stage")


class TrackError(Exception):
    """The tracker that was asked for is not there."""


@contextmanager
def tracking(name: str, run: Path, config: Mapping[str, Any], *, project: str = "rstar") -> Iterator[Log]:
    """A function that tells the tracker `name` of each row, until the block ends.

    trackio writes to this machine ($TRACKIO_DIR, else where Hugging Face caches), tensorboard to the run's own
    `tensorboard/`, wandb to its service or, with WANDB_MODE=offline, into the run folder.

    Raises TrackError when the package is missing, or none has that name.
    """
    if name not in PACKAGES:
        raise TrackError(f"track: expected one of {', '.join(PACKAGES)}, got {name!r}")
    if name == "none":
        yield lambda row: None
    elif name == "tensorboard":
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run / "tensorboard")) as writer:

            def log(row: Mapping[str, Any]) -> None:
                for key, value in _numbers(row).items():
                    writer.add_scalar(key, value, row["step"])
                writer.flush()

            yield log
    else:
        package = _package(name)
        extra = {"id": run.name, "dir": str(run)} if name == "wandb" else {}
        # Both greet on stdout, which is for results.
        with redirect_stdout(sys.stderr):
            package.init(project=project, name=run.name, config=dict(config), resume="allow", **extra)
        try:
            yield lambda row: package.log(_numbers(row), step=row["step"])
        finally:
            with redirect_stdout(sys.stderr):
                package.finish()


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as why:
        raise TrackError(f"track={name!r} needs {name}: pip install {name}, or track with 'none' ({why})") from why


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in _NAMES and isinstance(value, (int, float))}
