"""The recipe's units at work, each in a process of its own: data, models, engines and tools brought together.

Invariants:
- What a unit does follows from the configuration, its seed, and what the units before it left.
- Its `DONE` file is written last.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from trainer import data
from trainer.recipe import START, Run, Unit
from trainer.record import write_json

TINY = "tiny"


def prepare(run: Run) -> None:
    """Bring problems into the run's folder, apart from what is evaluated on, and the tiny model if it is asked for."""
    config, began = run.config, perf_counter()
    folder = run.folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    against = [*config.data.against, *config.evaluate.data]
    sources = {"train": config.data.train} | {stage.name: stage.data for stage in config.stages if stage.data}
    reports = {}
    for name, wanted in sources.items():
        problems, reports[name] = data.prepare(
            wanted, against=against, is_integer_only=config.data.is_integer_only, seed=config.seed
        )
        data.write(problems, folder / f"{name}.jsonl")
    problems, reports["evaluate"] = data.prepare(
        config.evaluate.data, is_integer_only=False, seed=config.seed, fresh=True
    )
    data.write(problems, folder / "evaluate.jsonl")
    write_json(folder / "report.json", {name: report.to_dict() for name, report in reports.items()})
    model = config.model.path
    if model == TINY:
        from trainer import tiny

        tiny.make(run.stage(START) / "model", config.seed)
        model = _relative(run, run.stage(START) / "model")
    run.finish(Unit("prepare"), {"model": model, "step": 0, "seconds": perf_counter() - began})


def _relative(run: Run, path: Path) -> str:
    """As it is written down, since a run's folder may be moved."""
    return str(path.relative_to(run.folder))
