"""Sends the metrics of each training step, and the results of evaluations, to trackio, wandb or tensorboard.

The run folder remains the complete record of a run. Two of its files are for trackers:

    tracker_run_name     its name in trackers, and its id in wandb: the name of the folder and a random suffix
    tracker_steps.json   for each tracker, the last step of which it has metrics, and the last of which it has an
                         evaluation

A resumed run finds these files and continues the tracker's run. It repeats the steps after its last checkpoint, and
does not send them again, since a tracker cannot replace them. A new run in another folder of equal name gets another
suffix. Only the packages of the given trackers are imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

from trainer.json_files import read_json, write_json

LogMetrics = Callable[[Mapping[str, Any]], None]
"""Takes a row: `step` and numbers. A row of a training step also has `stage`. A row without it is an evaluation."""


@contextmanager
def open_trackers(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], *, project: str
) -> Iterator[LogMetrics]:
    """Yield a function that sends a row to all trackers.

    trackio writes to this machine ($TRACKIO_DIR, or Hugging Face's cache), tensorboard to `tensorboard/` in the run
    folder, wandb to its service or, with WANDB_MODE=offline, into the run folder. Each needs its package.
    """
    with ExitStack() as stack:
        trackers = {name: stack.enter_context(_open_tracker(name, run_dir, config, project)) for name in names}
        steps_path = run_dir / "tracker_steps.json"
        last_steps: dict[str, dict[str, int]] = read_json(steps_path) or {}

        def log(row: Mapping[str, Any]) -> None:
            numbers = {name: x for name, x in row.items() if name != "step" and isinstance(x, int | float)}
            kind = "metrics" if "stage" in row else "eval"
            for name, log_numbers in trackers.items():
                last = last_steps.setdefault(name, {})
                if row["step"] > last.get(kind, 0):
                    log_numbers(numbers, row["step"])
                    last[kind] = row["step"]
                    write_json(steps_path, last_steps)

        yield log


@contextmanager
def _open_tracker(
    name: str, run_dir: Path, config: Mapping[str, Any], project: str
) -> Iterator[Callable[[Mapping[str, float], int], object]]:
    # If the package is missing, this raises ModuleNotFoundError before anything is written, for tensorboard too.
    package = import_module(name)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run_dir / name)) as writer:

            def add_scalars(numbers: Mapping[str, float], step: int) -> None:
                for metric, value in numbers.items():
                    writer.add_scalar(metric, value, step)
                writer.flush()  # a killed run must not lose a step that `tracker_steps.json` has

            yield add_scalars
        return
    run_name = _tracker_run_name(run_dir)
    extra = {"id": run_name, "dir": str(run_dir)} if name == "wandb" else {}
    with redirect_stdout(sys.stderr):  # stdout is for results
        package.init(project=project, name=run_name, config=dict(config), resume="allow", **extra)
    try:
        if name == "wandb":  # its own steps only grow, so an evaluation could not follow the metrics of its step
            package.define_metric("*", step_metric="step")
            yield lambda numbers, step: package.log({**numbers, "step": step})
        else:
            yield lambda numbers, step: package.log(numbers, step=step)
    finally:
        with redirect_stdout(sys.stderr):
            package.finish()


def _tracker_run_name(run_dir: Path) -> str:
    """Return the run's name in trackers. The first call chooses it."""
    path = run_dir / "tracker_run_name"
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "-", run_dir.resolve().name)  # an id in wandb has no other characters
        path.write_text(f"{name}-{token_hex(4)}\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
