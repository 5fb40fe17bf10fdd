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
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import data
from trainer.config import ConfigError, RunConfig, StageConfig, urls
from trainer.recipe import SFT, START, Run, Unit
from trainer.record import RunFolder, write_json
from trainer.rollout import EpisodeLimits
from trainer.track import tracking
from trainer.trajectory import Problem

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
    config, folder, model = run.config, run.folder / "data", run.config.model.path
    folder.mkdir(parents=True, exist_ok=True)
    if model == TINY:
        from trainer import tiny

        tiny.make(run.stage(START) / "model", config.seed)
        model = _relative(run, run.stage(START) / "model")
    chat = _chat(config, _model(run, model))
    reports = {}

    def bring(name: str, sources: Sequence[str], tokens: int, **how: Any) -> None:
        problems, report = data.prepare(
            sources,
            **how,
            seed=config.seed,
            length=lambda text: len(chat.prompt(text)),
            room=config.engines.max_length - tokens,
        )
        data.write(problems, folder / f"{name}.jsonl")
        reports[name] = report.to_dict()
        for source, counts in report.counts.items():
            print(f"{name}: {source}: {', '.join(f'{n} {what}' for what, n in counts.items())}", file=sys.stderr)

    kept = {"against": [*config.data.against, *config.evaluate.data], "is_integer_only": config.data.is_integer_only}
    shared = [stage.max_tokens for stage in config.stages.values() if not stage.data]
    bring("train", config.data.train, max(shared, default=0), **kept)
    for name, stage in config.stages.items():
        if stage.data:
            bring(name, stage.data, stage.max_tokens, **kept)
    bring("evaluate", config.evaluate.data, _evaluation(config)["limits"].max_tokens, is_integer_only=False, fresh=True)
    write_json(folder / "report.json", reports)
    run.finish(Unit("prepare"), {"model": model, "step": 0})


def sft(run: Run) -> None:
    """Train the first model on conversations."""
    from trainer.progress import ranks, steps_of
    from trainer.sft import train_sft

    config, before = run.config, run.before(SFT)
    model = _model(run, before["model"])
    conversations = [chat for source in config.sft.data for chat in data.read_conversations(source, seed=config.seed)]
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
        step = before["step"] + steps_of(trained.checkpoint)
        run.finish(Unit("sft", SFT), {"model": _relative(run, trained.model), "step": step})


def grpo(run: Run, name: str) -> None:
    """Train one stage."""
    from trainer.grpo import train_stage
    from trainer.progress import ranks

    config, stage, before = run.config, run.config.stage(name), run.before(name)
    if stage.drop_solved:
        run.needed(Unit("filter", name))
    model, checkpoint, is_first = _model(run, before["model"]), before.get("checkpoint"), ranks().is_main_process
    with (
        _recording(run, name, before["step"], stage.steps) as record,
        sampling(run, model) if is_first else nullcontext() as rollouts,
    ):
        trained = train_stage(
            stage,
            model=model,
            problems=data.read(str(run.problems(stage))),
            out=run.stage(name),
            record=record,
            rollouts=rollouts,
            seed=_seed(config, name),
            first_step=before["step"],
            keep_optimizer=run.folder / checkpoint if checkpoint and not stage.reset_optimizer else None,
            dtype=config.model.dtype,
            is_sharded=config.hardware.sharding == "full",
        )
    if is_first:
        found = {"model": _relative(run, trained.model), "checkpoint": _relative(run, trained.checkpoint)}
        run.finish(Unit("grpo", name), {**found, "step": before["step"] + stage.steps})


def drop_solved(run: Run, name: str) -> None:
    """Evaluate the model before a stage on the stage's problems, and keep those that were not solved every time."""
    from trainer.evaluate import outcomes_of

    stage, samples, out = run.config.stage(name), run.config.stage(name).drop_solved, run.stage(name) / "filter"
    problems, seed = data.read(str(run.source(stage))), _seed(run.config, f"filter {name}")
    measure(run, run.before(name)["model"], problems, out, samples=samples, seed=seed, **_how(stage))
    outcomes = outcomes_of(RunFolder(out))
    kept = [
        problem for problem in problems if any(outcomes[problem.id, sample].reward != 1 for sample in range(samples))
    ]
    if len(kept) < stage.prompts:
        raise ConfigError(
            f"stages.{name}: {len(kept)} of {len(problems)} problems are not solved {samples} times of {samples}: "
            f"expected at least prompts={stage.prompts}; give it more data, or lower prompts"
        )
    data.write(kept, run.problems(stage))
    run.finish(Unit("filter", name), {"problems": len(problems), "kept": len(kept)})


def evaluate(run: Run, name: str) -> dict[str, Report]:
    """Measure the model that SFT or a stage left, on the run's fresh problems."""
    model = run.needed(Unit("sft" if name == SFT else "grpo", name))["model"]
    problems = data.read(str(run.folder / "data" / "evaluate.jsonl"))
    reports = measure(run, model, problems, run.stage(name) / "evaluation", **_evaluation(run.config))
    run.finish(Unit("eval", name), {"scores": reports[ALL].scores()})
    return reports


def evaluate_model(run: Run, model: str, out: Path) -> dict[str, Report]:
    """Measure any model, as the run's are."""
    config = run.config
    problems, _ = data.prepare(config.evaluate.data, is_integer_only=False, seed=config.seed, fresh=True)
    return measure(run, model, problems, out, **_evaluation(config))


def measure(
    run: Run, model: str, problems: Sequence[Problem], out: Path, samples: int, **how: Any
) -> dict[str, Report]:
    """Reports by source, and over `ALL`; `how` is how episodes are collected. What is in `out` is not run again."""
    from trainer import evaluate

    with sampling(run, _model(run, model)) as rollouts, _progress() as bars:
        task = bars.add_task(out.name, total=len(problems))
        reports = rollouts.background.run(
            evaluate.evaluate,
            problems,
            samples,
            partial(rollouts.collector.collect, **how),
            record=RunFolder(out),
            settings={**how, "limits": asdict(how["limits"]), "model": model},
            at_once=max(stage.prompts * stage.samples for stage in _stages(run.config)),  # as a step has
            advance=lambda: bars.advance(task),
        )
    if reports[ALL].accuracy is None:
        raise Outage(f"none of {len(problems)} problems has an episode with a verdict; {out} says what failed")
    return reports


def rollout(run: Run, name: str, *, problems: int, samples: int, out: Path) -> None:
    """Sample episodes of the run's first training problems into a folder that `show` opens."""
    config = run.config
    model = run.needed(Unit({START: "prepare", SFT: "sft"}.get(name, "grpo"), "" if name == START else name))["model"]
    stage = _stages(config)[0] if name in (START, SFT) else config.stage(name)
    some, seed = data.read(str(run.problems(stage)))[:problems], _seed(config, "rollout")
    with sampling(run, _model(run, model)) as rollouts:
        groups = rollouts.background.run(rollouts.collector.collect, some, samples, seed=seed, **_how(stage))
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
        about: dict[str, Any] = {"timeout_s": sandbox.timeout_s, "memory_mb": sandbox.memory_mb}
        most = max(stage.tool_chars for stage in _stages(config))
        tools = background.enter(service(urls(sandbox.endpoints) or "local", **about, max_chars=most))
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
        carry = ByNccl(gpus_per_engine=engines.tensor_parallel) if is_nccl else ByFile(run.folder / "weights", dtype)
        pool = await stack.enter_async_context(Pool(served, **about, carry=carry, reference=reference))
        # They may have those of the unit before, or of another run.
        await pool.sync(AutoModelForCausalLM.from_pretrained(model, dtype=dtype).state_dict(), 0)
        yield pool


def _stages(config: RunConfig) -> list[StageConfig]:
    """Those of a run; of one that has none, what they would be."""
    return [*config.stages.values()] or [config.rl]


def _how(stage: StageConfig) -> dict[str, Any]:
    """How a stage's episodes are sampled."""
    limits = EpisodeLimits(stage.max_tokens, stage.max_turns, stage.tool_chars)
    return {"limits": limits, "temperature": stage.temperature, "top_p": stage.top_p}


def _evaluation(config: RunConfig) -> dict[str, Any]:
    """How models are evaluated."""
    wanted, stages = config.evaluate, _stages(config)
    limits = EpisodeLimits(
        wanted.max_tokens or max(stage.max_tokens for stage in stages),
        wanted.max_turns or max(stage.max_turns for stage in stages),
        max(stage.tool_chars for stage in stages),
    )
    how = {"temperature": wanted.temperature, "top_p": wanted.top_p, "seed": _seed(config, "eval")}
    return {"samples": wanted.samples, "limits": limits, **how}


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


def _model(run: Run, name: str) -> Path:
    """The folder of a model that a unit left, or the hub's name of the first one."""
    ours = run.folder / name
    return ours if ours.is_dir() else Path(name)


def _seed(config: RunConfig, name: str) -> int:
    """A unit's own seed: stages must not repeat each other's order of problems."""
    return random.Random(f"{config.seed} {name}").getrandbits(31)


def _relative(run: Run, path: Path) -> str:
    """As it is written down, since a run's folder may be moved."""
    return str(path.relative_to(run.folder))
