"""The work of `rstar-train collect`: opens store, executor and problems, and runs the collection.

Invariants:
- Names of environments and their options are checked before anything starts.
- All episodes of a store have the same values of the settings that decide what an episode contains
  (`_store_settings`). The other settings may change from one run to the next: the executor, its size, budgets and
  `samples_per_problem`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trainer.collection.cluster_collector import ClusterCollector, require_weights
from trainer.collection.driver import Collection, CollectionStatus
from trainer.collection.host import EpisodeHost
from trainer.collection.local import LocalExecutor
from trainer.collection.ray_executor import RayExecutor, connect, num_nodes
from trainer.collection.store import EpisodeStore
from trainer.collection.work import EpisodeExecutor, RunEpisode
from trainer.config import TINY_MODEL, CollectConfig, ConfigError, RunConfig, SamplingConfig, StageConfig, expand_urls
from trainer.data.rows import DataError
from trainer.data.sources import iter_problems
from trainer.engines.pool import ALL_DOWN_TIMEOUT_S, EnginePool
from trainer.environments.own_reward import check_reward
from trainer.environments.registry import check_problem, needs_sandbox, open_environment
from trainer.environments.services import open_services
from trainer.episodes.episode import Problem
from trainer.json_files import read_json, write_json
from trainer.progress_bar import progress_bar
from trainer.recipe.phases import INITIAL_STAGE, RecipeRun
from trainer.recipe.rollout_session import (
    chat_formats,
    connect_sandbox,
    create_pool,
    endpoint_settings,
    open_engine_pool,
    open_openai_pool,
    prompt_settings,
    vllm_clients,
)
from trainer.rollout.episode_runner import EpisodeRunner
from trainer.rollout.loop_thread import LoopThread
from trainer.rollout.runtime import RolloutRuntime
from trainer.sync.probe import ExpectedLogprobs, SyncProbe
from trainer.training.context import model_errors_as_config_errors

STATUS_FILE = "status.json"
SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingConfig))


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a process needs in order to run episodes. It is sent to the nodes of a cluster."""

    config: RunConfig
    model: Path
    run_dir: Path
    needs_sandbox: bool
    share: float | None = None
    """The part of each server's capacity that this process may use, if several processes share the servers. Such
    servers have their weights already. With None, this process opens engines of its own."""
    expected_logprobs: ExpectedLogprobs | None = None
    """What a server with the right weights computes. A server that restarts is used again only if it computes the same.
    With None, servers are not compared, for example because their weights change while the episodes run."""


def store_dir(run: RecipeRun) -> Path:
    return Path(run.config.collect.store) if run.config.collect.store else run.dir / "collection"


def collect(run: RecipeRun, model: Path) -> CollectionStatus:
    """Collect episodes of `model` into the store, as `[collect]` describes it.

    Raises `ConfigError`, `DataError`, `RecordError` or `CollectionError`.
    """
    config = run.config.collect
    run.config.check_model_len("collect", config)
    check_reward(run.config, is_collection=True)
    num_problems, any_needs_sandbox = _count_problems(run.config)
    spec = HostSpec(run.config, model, run.dir.resolve(), any_needs_sandbox)
    with (
        EpisodeStore(store_dir(run), _store_settings(run, model)) as store,
        progress_bar("episodes", num_problems * config.samples_per_problem) as advance,
    ):
        report = _StatusReport(store.path / STATUS_FILE, advance)
        with report:
            return asyncio.run(_collect(store, spec, num_problems, report.update))


@contextmanager
def open_cluster_rollout(run: RecipeRun, stage: StageConfig, model: Path) -> Iterator[RolloutRuntime]:
    """Open vLLM servers, which get the weights of `model`, and the nodes of a Ray cluster, on which episodes run."""
    config = replace(run.config, collect=stage_settings(run.config, stage))
    collect = config.collect
    connect(collect.ray_address)
    # The collector gets the problems later, in each step. So it is not known here whether one needs a sandbox.
    spec = HostSpec(config, model, run.dir.resolve(), needs_sandbox=True, share=1 / num_nodes())
    with LoopThread() as loop_thread:
        engines = loop_thread.enter(open_engine_pool(config, model, run.dir))
        executor = loop_thread.enter(RayExecutor(partial(open_host, spec), collect.episodes_per_worker))
        steps_dir, max_down_s = run.stage_dir(stage.name) / "steps", _max_down_s(config)
        collector = ClusterCollector(executor, engines, collect, steps_dir, max_down_s=max_down_s)
        yield RolloutRuntime(loop_thread, collector=collector, pool=collector)  # it also syncs the weights


def stage_settings(config: RunConfig, stage: StageConfig) -> CollectConfig:
    """Return [collect] with the limits and the number of samples of a stage."""
    limits = {name: getattr(stage, name) for name in SAMPLING_FIELDS}
    return replace(config.collect, samples_per_problem=stage.samples_per_problem, **limits)


async def _collect(
    store: EpisodeStore, spec: HostSpec, num_problems: int, on_status: Callable[[CollectionStatus], None]
) -> CollectionStatus:
    config = spec.config
    async with _open_executor(spec) as executor:
        return await Collection(
            store, executor, _problems(config), config.collect, num_problems=num_problems, on_status=on_status
        ).run()


@asynccontextmanager
async def _open_executor(spec: HostSpec) -> AsyncIterator[EpisodeExecutor]:
    config = spec.config.collect
    async with AsyncExitStack() as stack:
        if config.executor == "ray":
            connect(config.ray_address)
            if spec.config.engines.kind == "vllm":
                spec = await _share_vllm_servers(spec)
            elif spec.config.engines.kind == "openai":
                spec = replace(spec, share=1 / num_nodes())
            open_worker = partial(open_host, spec)
            yield await stack.enter_async_context(RayExecutor(open_worker, config.episodes_per_worker))
        else:
            run_episode = await stack.enter_async_context(open_host(spec))
            max_episodes = 1 if config.executor == "sequential" else config.episodes_per_worker
            yield await stack.enter_async_context(LocalExecutor(run_episode, max_episodes))


def _max_down_s(config: RunConfig) -> float:
    """Return the seconds to wait for an engine that lacks the weights. The wait is useful only if weights are stored in
    files. Without files, an engine can get them only in the next sync."""
    return config.engines.max_down_s if config.engines.weight_sync == "file" else 0.0


async def _share_vllm_servers(spec: HostSpec) -> HostSpec:
    """Give the servers their weights before the workers start, and return the settings of the workers."""
    async with open_engine_pool(spec.config, spec.model, spec.run_dir) as pool:
        await require_weights(pool, _max_down_s(spec.config))
        return replace(spec, share=1 / num_nodes(), expected_logprobs=pool.expected)


@asynccontextmanager
async def open_host(spec: HostSpec) -> AsyncIterator[RunEpisode]:
    """Open engines, sandbox and environments, and yield the function that runs an episode with them."""
    config, limits = spec.config, spec.config.collect
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(connect_sandbox(config.sandbox)) if spec.needs_sandbox else None
        services = await stack.enter_async_context(open_services(sandbox, config.reward))
        pool = await stack.enter_async_context(_open_pool(spec))
        create = partial(open_environment, services=services)
        formats = chat_formats(config, spec.model)
        yield EpisodeHost(EpisodeRunner(pool, formats, create, limits, config.seed, limits.deadline_s)).run


@asynccontextmanager
async def _open_pool(spec: HostSpec) -> AsyncIterator[EnginePool]:
    engines = spec.config.engines
    if spec.share is None:
        async with open_engine_pool(spec.config, spec.model, spec.run_dir) as pool:
            yield pool
        return
    if engines.kind == "openai":
        async with open_openai_pool(spec.config, spec.model, spec.share) as pool:
            yield pool
        return
    with model_errors_as_config_errors(spec.model):
        vocab_size = AutoConfig.from_pretrained(spec.model).vocab_size
    clients = vllm_clients(engines, expand_urls(engines.endpoints), vocab_size, spec.share)
    max_down_s = engines.max_down_s or ALL_DOWN_TIMEOUT_S  # with 0, episodes would fail before the engines are up
    probe = None
    if spec.expected_logprobs:
        probe = SyncProbe(spec.model, spec.config.model.dtype, tolerance=engines.probe_tolerance)
    pool = create_pool(engines, clients, probe=probe, all_down_timeout_s=max_down_s)
    pool.expected = spec.expected_logprobs
    async with pool:
        yield pool


def _count_problems(config: RunConfig) -> tuple[int, bool]:
    """Read and check all problems. Return their number and whether one needs a sandbox.

    Raises `DataError` for a bad row or an id that occurs twice, and `ConfigError` for an unknown environment.
    """
    ids, any_needs_sandbox = set[str](), False
    for problem in _problems(config):
        if problem.id in ids:
            raise DataError(f"problem {problem.id}: expected ids that occur once; rename it in its source")
        ids.add(problem.id)
        check_problem(problem)
        any_needs_sandbox = any_needs_sandbox or needs_sandbox(problem)
    if not ids:
        raise DataError("collect.data: expected problems, got none")
    return len(ids), any_needs_sandbox


def _problems(config: RunConfig) -> Iterator[Problem]:
    def refuse(source: str, number: int, error: Exception) -> None:
        raise DataError(f"{source}, row {number}: {error}") from error

    for source in config.collect.data or config.data.train:
        for problem in iter_problems(source, refuse, seed=config.seed):
            yield problem.with_default_reward(config.reward.function)


def model_of(run: RecipeRun, stage: str) -> Path:
    """Return the model of a stage. If `stage` is empty, return the model in `[model] path`.

    If this path is `TINY_MODEL`, the model is the one that the run has generated.
    """
    if not stage and run.config.model.path != TINY_MODEL:
        return Path(run.config.model.path)
    return run.model_path(run.trained_model(stage or INITIAL_STAGE).model)


def _store_settings(run: RecipeRun, model: Path) -> dict[str, Any]:
    """Return the settings that all episodes of a store share. If the model is in the run folder, its path is relative
    to the store, so that the folder can be moved."""
    config, store = run.config, store_dir(run)
    limits = {name: getattr(config.collect, name) for name in SAMPLING_FIELDS}
    is_in_run = model.resolve().is_relative_to(run.dir.resolve())
    return {
        "model": os.path.relpath(model.resolve(), store.resolve()) if is_in_run else str(model),
        **prompt_settings(config.model),
        "seed": config.seed,
        "data": list(config.collect.data or config.data.train),
        **limits,
        "answer_check": config.sandbox.answer_check,
        "answer_rounding": config.sandbox.answer_rounding,
        **config.reward.recorded(),
        **endpoint_settings(config.engines),
    }


class _StatusReport:
    """Shows the status of a collection on stderr, and writes it to a file for `--status`."""

    def __init__(self, path: Path, advance: Callable[..., None]) -> None:
        self._path, self._advance = path, advance
        self._status = CollectionStatus()

    def __enter__(self) -> None:
        self._write("starting")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._write("complete" if error is None else "interrupted" if not isinstance(error, Exception) else "failed")

    def update(self, status: CollectionStatus) -> None:
        self._status = status
        self._write("running")
        text = f"running {status.running}, failed {status.failed}, timed out {status.timed_out}"
        if status.done:
            seconds = {"engine wait": status.wait_s, "model": status.generate_s, "tools": status.tool_s}
            text += "; seconds per episode: " + ", ".join(
                f"{name} {value / status.done:.1f}" for name, value in seconds.items()
            )
        self._advance(status.stored_before + status.done, text)

    def _write(self, state: str) -> None:
        status = asdict(self._status) | {"queued": self._status.queued}
        write_json(self._path, {"state": state, "pid": os.getpid(), "updated_at": time.time(), **status})


def read_status(path: Path) -> dict[str, Any]:
    """Return the last status of the collection in the store `path`. Raises `ConfigError` if there is none."""
    status = read_json(path / STATUS_FILE)
    if status is None:
        raise ConfigError(f"{path}: expected a store of episodes with a {STATUS_FILE}, got none; run `collect` first")
    if status["state"] in ("starting", "running") and not Path(f"/proc/{status['pid']}").exists():
        status["state"] = "killed"  # any other end writes a state before the process ends
    return status


def status_rows(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a table that shows a status. Seconds are means over the episodes that the collecting process
    has finished."""
    names = (
        "state",
        "total",
        "stored_before",
        "queued",
        "running",
        "retrying",
        "done",
        "timed_out",
        "failed",
        "refills",
    )
    rows = {name: status[name] for name in names if name in status}
    rows |= {f"failed tries, {kind}": number for kind, number in status["failed_tries"].items()}
    times = {"engine wait": "wait_s", "model": "generate_s", "tools": "tool_s", "all": "duration_s"}
    done = status["done"]
    return rows | {f"seconds per episode, {label}": status[name] / done for label, name in times.items() if done}
