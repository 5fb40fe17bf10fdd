"""The recipe's units at work, each in a process of its own: data, models, engines and tools brought together.

Invariants:
- What a unit does follows from the configuration, its seed, and what the units before it left.
- Its `DONE` file is written last, by the first rank.
- Only the first rank meets engines, tools and the run's records.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.config import ConfigError, RunConfig, SamplingConfig, SandboxConfig, urls
from trainer.data import problems as data
from trainer.data import tiny_model
from trainer.engines.engine_health import ALL_DOWN_TIMEOUT_S
from trainer.engines.local import LocalEngine
from trainer.engines.pool import EnginePool
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers
from trainer.engines.weight_sync import FileWeightStore, NcclTransfer, SyncProbe, load_in_process
from trainer.environments.connection import SandboxConnection, open_sandbox
from trainer.environments.python_tool import TOOL_SCHEMA
from trainer.episodes.chat_format import ChatFormat, rstar2_format, tokenizer_format
from trainer.episodes.episode import Problem
from trainer.episodes.reward import VerifyOutcome
from trainer.json_files import write_json
from trainer.progress_bar import bar
from trainer.recipe import evaluation as evaluation
from trainer.recipe.runner import SFT, START, Run, Unit
from trainer.rollout.collector import EpisodeCollector
from trainer.rollout.loop_thread import LoopThread
from trainer.runs.run_folder import RunFolder
from trainer.runs.trackers import tracking
from trainer.scheduling.scheduler import POLICIES, Scheduler
from trainer.training.context import Training, ranks, steps_of, usable, wait_for_ranks
from trainer.training.grpo import Outage, Rollouts, train_stage
from trainer.training.sft import train_sft

TINY = "tiny"
FRESH = "evaluate"
"""The problems that are evaluated on, among those that are prepared."""
SHOWN = ("reward", "tool_error_ratio", "loss")
"""Metrics that stand before a progress bar."""


def prepare(run: Run, unit: Unit) -> None:
    """Bring problems into the run's folder, apart from what is evaluated on, and the tiny model if it is asked for."""
    config, folder, model = run.config, run.folder / "data", run.config.model.path
    folder.mkdir(parents=True, exist_ok=True)
    if model == TINY:
        tiny_model.make(run.stage(START) / "model", config.seed)
        model = _relative(run, run.stage(START) / "model")
    chat, stages = _chat(config, _model(run, model)), config.stages.values()
    own = {stage.name: stage.data for stage in stages if stage.data}
    reports = {}
    for name, sources in {"train": config.data.train, FRESH: config.evaluate.data, **own}.items():
        file = folder / f"{name}.jsonl"
        users = [config.evaluate] if name == FRESH else [stage for stage in stages if run.source(stage) == file]
        longest = max((user.max_tokens for user in users), default=0)
        problems, report = _problems(config, name, sources, chat, longest)
        data.write(problems, file)
        reports[name] = asdict(report)
    write_json(folder / "report.json", reports)
    run.finish(unit, {"model": model, "step": 0})


def _problems(
    config: RunConfig, name: str, sources: Sequence[str], chat: ChatFormat, max_tokens: int
) -> tuple[list[Problem], data.Report]:
    """Those of `sources` that can be solved: in the room that there is, by some answer. What became of all is said."""
    is_fresh = name == FRESH
    with bar(name) as advance:
        problems, report = data.prepare(
            sources,
            against=() if is_fresh else (*config.data.against, *config.evaluate.data),
            is_integer_only=config.data.is_integer_only and not is_fresh,
            seed=config.seed,
            fresh=is_fresh,
            length=lambda text: len(chat.encode_prompt(text)),
            room=config.engines.max_length - max_tokens,
            unreadable=partial(_unreadable, config),
            advance=advance,
        )
    for source, counts in report.counts.items():
        print(f"{name}: {source}: {', '.join(f'{n} {what}' for what, n in counts.items())}", file=sys.stderr)
    return problems, report


def _unreadable(config: RunConfig, answers: Sequence[str]) -> Collection[str]:
    """Those that the checker does not find equivalent to themselves: a model's failure would be ours."""
    with LoopThread() as loop_thread:
        sandbox = _open_sandbox(loop_thread, config.sandbox)
        verdicts = loop_thread.run(sandbox.answer_checker.verify, [(answer, answer) for answer in answers])
    if VerifyOutcome.UNAVAILABLE in verdicts:
        raise Outage(
            f"{verdicts.count(VerifyOutcome.UNAVAILABLE)} of {len(answers)} right answers could not be checked"
        )
    return {
        answer for answer, verdict in zip(answers, verdicts, strict=True) if verdict is not VerifyOutcome.EQUIVALENT
    }


def sft(run: Run, unit: Unit) -> None:
    """Train the first model on conversations."""
    config = run.config
    conversations = [chat for source in config.sft.data for chat in data.read_conversations(source, seed=config.seed)]
    with _training(run, unit, round(config.sft.epochs * len(conversations) / config.sft.batch)) as training:
        chat = _chat(config, training.model)
        trained = train_sft(config.sft, training, conversations=conversations, chat=chat)
    if ranks(config.hardware).is_main_process:
        step = training.first_step + steps_of(trained.checkpoint)
        run.finish(unit, {"model": _relative(run, trained.model), "step": step})


def grpo(run: Run, unit: Unit) -> None:
    """Train one stage."""
    stage, is_first = run.config.stage(unit.stage), ranks(run.config.hardware).is_main_process
    before = run.trained(unit.stage, before=True).get("checkpoint")
    keep = run.folder / before if before and not stage.reset_optimizer else None
    if stage.drop_solved:
        run.needed(Unit("filter", unit.stage))
    problems = data.read(str(run.problems(stage)))
    with (
        _training(run, unit, stage.steps) as training,
        sampling(run, training.model) if is_first else nullcontext() as rollouts,
    ):
        wait_for_ranks(run.config.hardware)  # engines may take minutes to start
        trained = train_stage(stage, training, problems=problems, rollouts=rollouts, keep_optimizer=keep)
    if is_first:
        found = {"model": _relative(run, trained.model), "checkpoint": _relative(run, trained.checkpoint)}
        run.finish(unit, {**found, "step": training.first_step + stage.steps})


def drop_solved(run: Run, unit: Unit) -> None:
    """Evaluate the model before a stage on the stage's problems, and keep those that were not solved every time."""
    stage, model = run.config.stage(unit.stage), run.trained(unit.stage, before=True)["model"]
    problems, out = data.read(str(run.source(stage))), run.stage(unit.stage) / "filter"
    measure(run, model, problems, out, stage, stage.drop_solved, seed=str(unit), is_brief=True)
    unsolved = {problem for (problem, _), outcome in evaluation.outcomes_of(out).items() if outcome.reward != 1}
    kept = [problem for problem in problems if problem.id in unsolved]
    if len(kept) < stage.prompts:
        raise ConfigError(
            f"stages.{stage.name}: {len(kept)} of {len(problems)} problems are not always solved: "
            f"expected at least prompts={stage.prompts}; give it more data, or lower prompts"
        )
    data.write(kept, run.problems(stage))
    run.finish(unit, {"problems": len(problems), "kept": len(kept)})


WORK = {"prepare": prepare, "sft": sft, "filter": drop_solved, "grpo": grpo}
"""What units do, but for evaluation, of which there is something to show."""


def evaluate(run: Run, unit: Unit) -> dict[str, evaluation.Report]:
    """Measure the model that SFT or a stage left, on the run's fresh problems."""
    model, how = run.trained(unit.stage)["model"], run.config.evaluate
    problems = data.read(str(run.folder / "data" / f"{FRESH}.jsonl"))
    reports = measure(run, model, problems, run.stage(unit.stage) / "evaluation", how, how.samples)
    written = {source: asdict(report) for source, report in reports.items()}
    run.finish(unit, {"scores": evaluation.scores(reports), "reports": written})
    return reports


def evaluate_model(run: Run, model: str, out: Path | None = None) -> dict[str, evaluation.Report]:
    """Measure any model, as the run's are; `out` is by default a folder that no other model has."""
    config, how, place = run.config, run.config.evaluate, _model(run, model)
    if place.is_dir():  # which has one name, however it was called
        place, ours = place.resolve(), run.folder.resolve()
        model = str(place.relative_to(ours) if place.is_relative_to(ours) else place)
    files = [(file.name, file.stat()) for file in sorted(place.glob("*.safetensors"))]
    weights = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    out = out or run.folder / "evaluation" / quote(model, safe="")
    if not (file := out / "problems.jsonl").exists():
        problems, _ = _problems(config, FRESH, how.data, _chat(config, place), how.max_tokens)
        out.mkdir(parents=True, exist_ok=True)
        data.write(problems, file)
    return measure(run, model, data.read(str(file)), out, how, how.samples, weights=weights, data=how.data)


def measure(
    run: Run,
    model: str,
    problems: Sequence[Problem],
    out: Path,
    how: SamplingConfig,
    samples: int,
    *,
    seed: str = "eval",
    is_brief: bool = False,
    **more: Any,
) -> dict[str, evaluation.Report]:
    """Reports by source, and over `ALL`. What is in `out` is not run again, and of `more` or other settings refused.

    Raises `RecordError` where it is, `Outage` where nothing could be measured.
    """
    number, record = _seed(run.config, seed), RunFolder(out)
    limits = {name: getattr(how, name) for name in ("max_tokens", "max_turns", "tool_chars")}
    sampled = {"samples": samples, "temperature": how.temperature, "top_p": how.top_p, "seed": number, "model": model}
    record.bind_config({"limits": limits, **sampled, **more})
    if missing := evaluation.unfinished(problems, samples, out):
        before = len(problems) - len(missing)
        with sampling(run, _model(run, model)) as rollouts, bar(out.name, len(problems)) as advance:
            rollouts.loop_thread.run(
                evaluation.sample,
                missing,
                samples,
                partial(rollouts.collector.collect, limits=how, seed=number),
                record=record,
                is_brief=is_brief,
                advance=lambda done: advance(before + done),
            )
    reports = evaluation.reports_of(problems, samples, out)
    if not reports[evaluation.ALL].episodes:
        raise Outage(f"none of {len(problems)} problems has an episode with a verdict; {out} says what failed")
    return reports


def rollout(run: Run, name: str, *, problems: int, samples: int, out: Path) -> None:
    """Sample episodes of the run's first training problems into a folder that `show` opens."""
    stage = run.config.rl if name in (START, SFT) else run.config.stage(name)
    some = data.read(str(run.problems(stage)))[:problems]
    measure(run, run.trained(name)["model"], some, out, stage, samples, seed="rollout")


@contextmanager
def sampling(run: Run, model: Path) -> Iterator[Rollouts]:
    """Engines with the weights of `model`, tools, and what runs episodes on them."""
    config = run.config
    with LoopThread() as loop_thread:
        sandbox = _open_sandbox(loop_thread, config.sandbox)
        pool = loop_thread.enter(_pool(run, model))
        gc.freeze()  # what libraries are made of: to look for garbage in it takes a fifth of a second each time
        check = sandbox.answer_checker.verify
        collector = EpisodeCollector(pool, _chat(config, model), sandbox.python_tool, check)
        yield Rollouts(loop_thread, collector, pool)


def _open_sandbox(loop_thread: LoopThread, config: SandboxConfig) -> SandboxConnection:
    where = urls(config.endpoints) or "local"
    return loop_thread.enter(open_sandbox(where, timeout_s=config.timeout_s, memory_mb=config.memory_mb))


@asynccontextmanager
async def _pool(run: Run, model: Path) -> AsyncIterator[EnginePool]:
    """The engines of a run, with the weights of `model`."""
    engines, hardware, dtype = run.config.engines, run.config.hardware, run.config.model.dtype
    transfer: Any = load_in_process
    store: FileWeightStore | None = None
    async with AsyncExitStack() as stack:
        with usable(model):
            weights = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        if engines.kind == "local":
            with usable(model):
                served: list[Any] = [LocalEngine(weights, max_num_seqs=engines.slots, max_model_len=engines.max_length)]
        else:
            is_nccl = engines.sync == "nccl"
            servers = VllmServers(
                python=engines.python or sys.executable,
                model=model,
                max_model_len=engines.max_length,
                max_num_seqs=engines.slots,
                dtype=dtype,
                gpus_per_server=engines.tensor_parallel if hardware.gpus else 0,
                first_gpu=hardware.gpus if hardware.engine_gpus else 0,
                gpu_memory_utilization=engines.gpu_memory,
                uses_nccl=is_nccl,
            )
            endpoints: Sequence[str] = urls(engines.endpoints)
            if not endpoints:
                endpoints = await stack.enter_async_context(servers.serve(engines.count, run.folder / "engines"))
            size = {"vocab_size": weights.config.vocab_size, "max_model_len": engines.max_length}
            served = [
                VllmEngine(url, **size, max_num_seqs=engines.slots, timeout_s=engines.timeout_s) for url in endpoints
            ]
            if is_nccl:
                transfer = NcclTransfer(gpus_per_engine=engines.tensor_parallel)
            else:
                store = FileWeightStore(run.folder / "weights", dtype)
        pool = EnginePool(
            served,
            transfer=transfer,
            store=store,
            probe=SyncProbe(model, dtype),
            scheduler=Scheduler(engines.max_length, POLICIES[engines.policy]),
            turn_timeout_s=engines.timeout_s,
            all_down_timeout_s=engines.max_down_s
            if engines.kind == "vllm"
            else ALL_DOWN_TIMEOUT_S,  # only servers are started anew
        )
        await stack.enter_async_context(pool)
        await pool.sync_weights(weights.state_dict(), 0)  # servers may have those of the unit before, or of another run
        del weights  # engines have their own by now, and these may be 28 GB
        yield pool


def _chat(config: RunConfig, model: Path) -> ChatFormat:
    make = rstar2_format if config.model.chat == "rstar2" else tokenizer_format
    with usable(model):
        return make(AutoTokenizer.from_pretrained(model), tools=[TOOL_SCHEMA], system_prompt=config.model.preamble)


@contextmanager
def _training(run: Run, unit: Unit, steps: int) -> Iterator[Training]:
    """What a training is told. Each row of metrics goes to the trackers, too, and to a progress bar."""
    config, name, record = run.config, unit.stage, run.record
    before = run.trained(name, before=True)
    with ExitStack() as stack:
        if ranks(config.hardware).is_main_process:
            track = config.track
            tell = stack.enter_context(tracking(track.to, run.folder, asdict(config), project=track.project))
            advance = stack.enter_context(bar(name, steps))

            def log(row: Mapping[str, Any]) -> None:
                tell(row)
                shown = [f"{metric} {row[metric]:.3g}" for metric in SHOWN if row.get(metric) is not None]
                advance(row["step"] - before["step"], "  ".join(shown))

            record = replace(record, on_metrics=log)
        yield Training(
            _model(run, before["model"]),
            run.stage(name),
            record,
            seed=_seed(config, name),
            first_step=before["step"],
            dtype=config.model.dtype,
            hardware=config.hardware,
        )


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
