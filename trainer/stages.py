"""The recipe's units at work, each in a process of its own: data, models, engines and tools brought together.

Invariants:
- What a unit does follows from the configuration, its seed, and what the units before it left.
- Its `DONE` file is written last, by the first rank.
- Only the first rank meets engines, tools and the run's records.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from trainer import data
from trainer.config import ConfigError, RunConfig, StageConfig, urls
from trainer.recipe import SFT, START, Run, Unit
from trainer.record import RunFolder, append_rows, read_rows, write_json
from trainer.rollout import EpisodeLimits
from trainer.track import tracking
from trainer.trajectory import Episode, Problem

if TYPE_CHECKING:
    from rich.progress import Progress

    from trainer.chat import Chat
    from trainer.evaluate import Report
    from trainer.grpo import Rollouts
    from trainer.pool import Pool

ALL = "all"
TINY = "tiny"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""How far an engine's log-probabilities may be from the trainer's, by what it computes in."""
SHOWN = ("reward", "tool_error_ratio", "loss")
"""Metrics that stand before a progress bar."""


class Outage(Exception):
    """Something of ours failed for so long that there is nothing to report."""


def prepare(run: Run) -> None:
    """Bring problems into the run's folder, apart from what is evaluated on, and the tiny model if it is asked for."""
    config, began = run.config, perf_counter()
    folder = run.folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    against = [*config.data.against, *config.evaluate.data]
    sources = {"train": config.data.train} | {name: stage.data for name, stage in config.stages.items() if stage.data}
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


def sft(run: Run) -> None:
    """Train the first model on conversations."""
    from trainer.progress import ranks, steps_of
    from trainer.sft import train_sft

    config, before, began = run.config, run.before(SFT), perf_counter()
    model = _model(run, before)
    conversations = [
        conversation for source in config.sft.data for conversation in data.read_conversations(source, seed=config.seed)
    ]
    steps = round(config.sft.epochs * len(conversations) / config.sft.batch)
    with _recording(run, SFT, before["step"], steps) as record:
        trained = train_sft(
            config.sft,
            model=model,
            conversations=conversations,
            chat=_chat(config, model),
            out=run.stage(SFT),
            record=record,
            seed=_seed(config, SFT),
            first_step=before["step"],
            dtype=config.model.dtype,
            is_sharded=config.hardware.sharding == "full",
        )
    if ranks().is_main_process:
        found = {"model": _relative(run, trained.model), "step": before["step"] + steps_of(trained.checkpoint)}
        run.finish(Unit("sft", SFT), {**found, "seconds": perf_counter() - began})


def grpo(run: Run, name: str) -> None:
    """Train one stage."""
    from trainer.grpo import train_stage
    from trainer.progress import ranks

    config, stage, before, began = run.config, run.config.stage(name), run.before(name), perf_counter()
    if stage.drop_solved:
        run.needed(Unit("filter", name))
    model, checkpoint = _model(run, before), before.get("checkpoint")
    arguments: dict[str, Any] = {
        "model": model,
        "problems": data.read(str(run.problems(stage))),
        "out": run.stage(name),
        "seed": _seed(config, name),
        "first_step": before["step"],
        "keep_optimizer": run.folder / checkpoint if checkpoint and not stage.reset_optimizer else None,
        "dtype": config.model.dtype,
        "is_sharded": config.hardware.sharding == "full",
    }
    with _recording(run, name, before["step"], stage.steps) as record:
        if ranks().is_main_process:
            with sampling(run, model) as rollouts:
                trained = train_stage(stage, record=record, rollouts=rollouts, **arguments)
            found = {"model": _relative(run, trained.model), "checkpoint": _relative(run, trained.checkpoint)}
            step = before["step"] + stage.steps
            run.finish(Unit("grpo", name), {**found, "step": step, "seconds": perf_counter() - began})
        else:
            train_stage(stage, record=record, rollouts=None, **arguments)


def drop_solved(run: Run, name: str) -> None:
    """Sample every problem of a stage with the model before it, and keep those that were not solved every time.

    Each problem's count is written as soon as it is known, and not sampled again.
    """
    config, stage, began = run.config, run.config.stage(name), perf_counter()
    model = _model(run, run.before(name))
    problems = data.read(str(run.folder / "data" / f"{name if stage.data else 'train'}.jsonl"))
    counts = run.stage(name) / "solved.jsonl"
    solved = {row["id"]: row["solved"] for row in read_rows(counts)}
    left = [problem for problem in problems if problem.id not in solved]
    with sampling(run, model) as rollouts, _progress() as progress:
        task = progress.add_task(f"filter {name}", total=len(problems), completed=len(solved))
        for start in range(0, len(left), stage.prompts):
            some = left[start : start + stage.prompts]
            groups = _collect(rollouts, stage, some, stage.drop_solved, _seed(config, f"filter {name}"))
            new = {
                problem.id: sum(episode.reward == 1 for episode in group)
                for problem, group in zip(some, groups, strict=True)
            }
            append_rows(counts, ({"id": id, "solved": count} for id, count in new.items()))
            solved |= new
            progress.advance(task, len(some))
    kept = [problem for problem in problems if solved[problem.id] < stage.drop_solved]
    if len(kept) < stage.prompts:
        raise ConfigError(
            f"stages.{name}: {len(kept)} of {len(problems)} problems are not solved {stage.drop_solved} times of "
            f"{stage.drop_solved}: expected at least prompts={stage.prompts}; give it more data, or lower prompts"
        )
    data.write(kept, run.problems(stage))
    found = {"problems": len(problems), "kept": len(kept), "seconds": perf_counter() - began}
    run.finish(Unit("filter", name), found)


def evaluate(run: Run, name: str) -> dict[str, Report]:
    """Measure the model that SFT or a stage left, on the run's fresh problems."""
    began = perf_counter()
    training = Unit("sft" if name == SFT else "grpo", name)
    problems = data.read(str(run.folder / "data" / "evaluate.jsonl"))
    reports = measure(run, _model(run, run.needed(training)), problems, run.stage(name) / "evaluation")
    run.finish(Unit("eval", name), {"scores": reports[ALL].scores(), "seconds": perf_counter() - began})
    return reports


def measure(run: Run, model: Path, problems: Sequence[Problem], out: Path) -> dict[str, Report]:
    """Evaluate a model's folder; what is in folder `out` is not run again. Reports by source, and over `ALL`."""
    from trainer import evaluate

    config, wanted = run.config, run.config.evaluate
    tokens = wanted.max_tokens or max((stage.max_tokens for stage in config.stages.values()), default=0)
    turns = wanted.max_turns or max((stage.max_turns for stage in config.stages.values()), default=0)
    if not tokens or not turns:
        raise ConfigError("evaluate: expected max_tokens and max_turns, as there is no stage to take them from")
    limits, seed = EpisodeLimits(tokens, turns), _seed(config, "eval")
    sampled: dict[str, Any] = {"temperature": wanted.temperature, "top_p": wanted.top_p, "seed": seed}
    with sampling(run, model) as rollouts, _progress() as bars:
        task = bars.add_task("eval", total=len(problems))
        reports = rollouts.background.run(
            evaluate.evaluate,
            problems,
            wanted.samples,
            partial(rollouts.collector.collect, limits=limits, **sampled),
            record=RunFolder(out),
            settings={**sampled, "limits": asdict(limits), "model": str(model)},
            advance=lambda: bars.advance(task),
        )
    if reports[ALL].accuracy is None:
        raise Outage(f"none of {len(problems)} problems has an episode with a verdict; {out} says what failed")
    return reports


def rollout(run: Run, name: str, *, problems: int, samples: int, out: Path) -> None:
    """Sample episodes of the run's first training problems into a folder that `show` opens."""
    config = run.config
    found = run.needed(Unit({START: "prepare", SFT: "sft"}.get(name, "grpo"), "" if name == START else name))
    stage = next(iter(config.stages.values())) if name in (START, SFT) else config.stage(name)
    some = data.read(str(run.problems(stage)))[:problems]
    with sampling(run, _model(run, found)) as rollouts:
        groups = _collect(rollouts, stage, some, samples, _seed(config, "rollout"))
    record = RunFolder(out, keep_logprobs=True)
    record.claim(asdict(config))
    record.rewind(0)
    record.write_episodes(1, name, groups, [range(samples)] * len(groups))


@contextmanager
def sampling(run: Run, model: Path) -> Iterator[Rollouts]:
    """Engines with the weights of `model`, tools, and what runs episodes on them."""
    from trainer.background import Background
    from trainer.grpo import Rollouts
    from trainer.rollout import Collector
    from trainer.tools import service

    config, sandbox = run.config, run.config.sandbox
    with Background() as background:
        tools = background.enter(
            service(urls(sandbox.endpoints) or "local", timeout_s=sandbox.timeout_s, memory_mb=sandbox.memory_mb)
        )
        pool = background.enter(_pool(run, model))
        yield Rollouts(background, Collector(pool, _chat(config, model), tools), pool)


@asynccontextmanager
async def _pool(run: Run, model: Path) -> AsyncIterator[Pool]:
    """The engines of a run, with the weights of `model`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.engine import VllmEngine
    from trainer.local import LocalEngine
    from trainer.pool import Pool
    from trainer.sync import ByFile, ByNccl, Reference, direct
    from trainer.vllm_server import Servers

    engines, dtype = run.config.engines, run.config.model.dtype
    reference = Reference(model, tolerance=TOLERANCE[dtype])
    about: dict[str, Any] = {"policy": engines.policy, "most_tokens": engines.max_length, "turn_s": engines.timeout_s}
    if engines.kind == "local":
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        local = LocalEngine(loaded, slots=engines.slots, max_length=engines.max_length)
        async with Pool([local], **about, carry=direct, reference=reference) as pool:
            yield pool
        return
    async with AsyncExitStack() as stack:
        is_nccl = engines.sync == "nccl"
        servers = Servers(
            python=engines.python or sys.executable,
            model=model,
            max_length=engines.max_length,
            slots=engines.slots,
            dtype=dtype,
            gpus=engines.tensor_parallel if run.config.hardware.gpus else 0,
            first_gpu=run.config.hardware.gpus if run.config.hardware.engine_gpus else 0,
            gpu_memory=engines.gpu_memory,
            is_nccl=is_nccl,
        )
        endpoints: Sequence[str] = urls(engines.endpoints)
        if not endpoints:
            endpoints = await stack.enter_async_context(servers.serve(engines.count, run.folder / "engines"))
        size = {"vocabulary": AutoConfig.from_pretrained(model).vocab_size, "max_length": engines.max_length}
        served = [VllmEngine(url, **size, slots=engines.slots, timeout_s=engines.timeout_s) for url in endpoints]
        carry = ByNccl(gpus_per_engine=engines.tensor_parallel) if is_nccl else ByFile(run.folder / "weights")
        pool = await stack.enter_async_context(Pool(served, **about, carry=carry, reference=reference))
        # They may have those of the unit before, or of another run.
        await pool.sync(AutoModelForCausalLM.from_pretrained(model, dtype=dtype).state_dict(), 0)
        yield pool


def _collect(
    rollouts: Rollouts, stage: StageConfig, problems: Sequence[Problem], samples: int, seed: int
) -> list[list[Episode]]:
    return rollouts.background.run(
        rollouts.collector.collect,
        problems,
        samples,
        limits=EpisodeLimits(stage.max_tokens, stage.max_turns, stage.tool_chars),
        temperature=stage.temperature,
        top_p=stage.top_p,
        seed=seed,
    )


def _chat(config: RunConfig, model: Path) -> Chat:
    from transformers import AutoTokenizer

    from trainer import chat

    make = chat.rstar2 if config.model.chat == "rstar2" else chat.own_template
    return make(AutoTokenizer.from_pretrained(model), preamble=config.model.preamble)


@contextmanager
def _recording(run: Run, name: str, first_step: int, steps: int) -> Iterator[RunFolder]:
    """The run's folder; each row goes to the trackers, too, and moves a progress bar."""
    from trainer.progress import ranks

    config = run.config
    if not ranks().is_main_process:
        yield run.record
        return
    with (
        tracking(config.track.to, run.folder, asdict(config), project=config.track.project) as tell,
        _progress() as bars,
    ):
        task = bars.add_task(name, total=steps)

        def log(row: Mapping[str, Any]) -> None:
            tell(row)
            shown = [f"{metric} {row[metric]:.3g}" for metric in SHOWN if row.get(metric) is not None]
            bars.update(task, completed=row["step"] - first_step, description="  ".join([name, *shown]))

        yield RunFolder(run.folder, keep_logprobs=config.track.has_logprobs, log=log)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(TextColumn("{task.description}"), *counts, console=Console(stderr=True))


def _model(run: Run, before: Mapping[str, Any]) -> Path:
    """The folder of a model that a unit left, or the hub's name of the first one."""
    ours = run.folder / before["model"]
    return ours if ours.is_dir() else Path(before["model"])


def _seed(config: RunConfig, name: str) -> int:
    """A unit's own seed: stages must not repeat each other's order of problems."""
    return random.Random(f"{config.seed} {name}").getrandbits(31)


def _relative(run: Run, path: Path) -> str:
    """As it is written down, since a run's folder may be moved."""
    return str(path.relative_to(run.folder))
