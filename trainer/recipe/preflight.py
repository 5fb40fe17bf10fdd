"""What the units of a run need of this machine, looked for before the first of them starts.

Invariants:
- Everything that is missing is named at once, each in one line that says what to do.
- Nothing is left behind: a sandbox service that is started here has ended, and no file is written.

Not looked for is what only the work itself shows: whether vLLM starts, whether the rows of a data set are good, and
whether other machines see the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from trainer.config import ConfigError, RunConfig, Shape, urls
from trainer.data.problems import DataError, check
from trainer.environments.connection import SandboxUnavailable, open_sandbox
from trainer.episodes.reward import VerifyOutcome
from trainer.recipe.resource_plan import GB, disk_bytes, known_shape, plan
from trainer.recipe.runner import LAUNCHED, NotReady, Run, Unit

SAMPLING = ("filter", "grpo", "eval", "rollout")
"""The commands that need engines and tools."""
TINY = "tiny"
ENGINE_S = 10.0
"""Seconds for an engine's answer."""
PYTHON_S = 60.0
"""Seconds for an interpreter to say whether it has a package."""
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
LESS = "lower micro_batch or set is_checkpointing (rstar-train recipe --dry-run shows the sum)"


def require(run: Run, units: Sequence[Unit]) -> None:
    """Raises `NotReady`, with all that `units` need and that is not there."""
    lines = missing(run, units)
    if len(lines) == 1:
        raise NotReady(lines[0])
    if lines:
        raise NotReady("\n  ".join([f"{len(lines)} things are missing", *lines]))


def missing(run: Run, units: Sequence[Unit]) -> list[str]:
    """A line for each thing that `units` need and that is not there, with what to do."""
    config, commands = run.config, {unit.command for unit in units}
    lines = [*_files(config, units), *_model(config, has_weights=commands != {"prepare"})]
    try:
        shape = known_shape(config)
    except ConfigError:  # `_model` has said it
        shape = None
    if shape:
        lines += [*_disk(run, units, shape), *_memory(config, units, shape)]
    if commands & {*LAUNCHED}:
        lines += _training(config)
    if commands & {*SAMPLING}:
        lines += [*_engines_here(config), *asyncio.run(_services(config))]
    return [" ".join(line.split()) for line in lines]


def _files(config: RunConfig, units: Sequence[Unit]) -> Iterator[str]:
    sources: dict[str, Sequence[str]] = {}
    if any(unit.command == "prepare" for unit in units):
        sources |= {"data.train": config.data.train, "data.against": config.data.against}
        sources |= {f"stages.{name}.data": stage.data for name, stage in config.stages.items()}
        sources |= {"evaluate.data": config.evaluate.data}
    if any(unit.command == "sft" for unit in units):
        sources |= {"sft.data": config.sft.data}
    first = {source: setting for setting, named in reversed(sources.items()) for source in reversed(named)}
    with ThreadPoolExecutor() as pool:  # a hub that cannot be reached is tried for half a minute
        yield from filter(None, pool.map(_file, reversed(first.values()), reversed(first)))


def _file(setting: str, source: str) -> str:
    try:
        check(source, of_conversations=setting == "sft.data")
    except (DataError, OSError) as why:
        return f"{setting}: {why}; name another source, or put the file there"
    return ""


def _model(config: RunConfig, *, has_weights: bool) -> Iterator[str]:
    """The model's folder or hub name: its tokenizer, its template and, where units load them, sizes and weights."""
    path = Path(config.model.path)
    if config.model.path == TINY:
        return
    if has_weights and path.is_dir():
        wanted = {"config.json": ("config.json",), "weights": ("*.safetensors", "*.bin")}
        lacks = [what for what, names in wanted.items() if not any(file for name in names for file in path.glob(name))]
        if lacks:
            yield f"model {path}: has no {' and no '.join(lacks)}; put them there, or name another in model.path"
    from trainer.recipe import phase_work

    try:
        phase_work._chat(config, path)
        known_shape(config)
    except ConfigError as why:
        yield f"{why}; see model.path, model.chat and model.preamble"


def _disk(run: Run, units: Sequence[Unit], shape: Shape) -> Iterator[str]:
    trainings = sum(unit.command in LAUNCHED for unit in units)
    if not trainings:
        return
    there = next(folder for folder in (run.folder.absolute(), *run.folder.absolute().parents) if folder.is_dir())
    files = (file for file in run.folder.glob("stages/*/checkpoints/**/*") if file.is_file())
    needed = disk_bytes(run.config, shape, trainings) - sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(there).free
    if free < needed:
        yield (
            f"disk: {run.folder}: models and checkpoints need {needed / GB:.1f} GB, but {free / GB:.1f} GB are free; "
            "free some, or give a --run-dir on another disk"
        )


def _memory(config: RunConfig, units: Sequence[Unit], shape: Shape) -> Iterator[str]:
    hardware, here = config.hardware, 0.0
    if hardware.gpus:
        import torch

        if torch.cuda.is_available():
            here = torch.cuda.get_device_properties(0).total_memory / GB
            stated = hardware.gpu_gb or here
            config = replace(config, hardware=replace(hardware, gpu_gb=min(stated, here)))
    else:
        here = _available_bytes() / GB
    needs, has_local = plan(config, shape), config.engines.kind == "local"
    for unit in units:
        if unit.command not in LAUNCHED:
            continue
        phase: dict[str, Any] = needs["sft"] if unit.command == "sft" else needs["stages"][unit.stage]
        name = "sft" if unit.command == "sft" else f"stages.{unit.stage}"
        if (phase["gpu_share"] or 0) > 1:
            yield (
                f"memory: {name}: training and the engine beside it take {phase['gpu_share']:.0%} of a GPU's "
                f"{config.hardware.gpu_gb:.0f} GB; {LESS}, or lower engines.gpu_memory"
            )
        beside = needs["engine_bytes"] if has_local and unit.command != "sft" else 0
        if not hardware.gpus and (total := (phase["train_bytes"] + beside) / GB) > here:
            yield f"memory: {name}: takes {total:.1f} GB, and {here:.1f} GB are available here; {LESS}"
        is_known = has_local or config.hardware.gpu_gb > 0
        if is_known and phase["rollouts_per_engine"] == 0:
            yield (
                f"memory: {name}: an engine's cache holds {needs['kv_tokens']} tokens, less than one rollout; raise "
                "engines.gpu_memory or engines.tensor_parallel, or lower max_tokens"
            )


def _available_bytes() -> int:
    """Of this machine's memory."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _training(config: RunConfig) -> Iterator[str]:
    launch = config.hardware.launch
    if launch and not shutil.which(launch[0]):
        yield f"hardware.launch: {launch[0]}: no such command on PATH; install it, or name another"
    for package in config.track.to:
        if not find_spec(package):
            yield f"track.to: {package} is not installed; pip install {package}, or leave it out"


def _engines_here(config: RunConfig) -> Iterator[str]:
    """What the run's own engines need, GPUs included: those of training are counted as well."""
    engines, hardware = config.engines, config.hardware
    is_own = engines.kind == "vllm" and not engines.endpoints
    if hardware.gpus:
        import torch

        own = engines.count * engines.tensor_parallel if is_own else 0
        wanted = hardware.gpus + own if hardware.engine_gpus else max(hardware.gpus, own)
        if (found := torch.cuda.device_count()) < wanted:
            yield f"GPUs: expected {wanted} here, got {found}; lower hardware.gpus or engines.count, or show it more"
    if is_own and not _has_vllm(python := engines.python or sys.executable):
        yield f"engines: {python} has no vLLM; name a Python that has it in engines.python, or set engines.endpoints"
    if engines.kind == "vllm" and engines.sync == "nccl" and not find_spec("vllm"):
        yield f"engines: sync=nccl needs vLLM in {sys.executable}, too; install it, or set engines.sync to file"


def _has_vllm(python: str) -> bool:
    try:
        return not subprocess.run([python, "-c", HAS_VLLM], capture_output=True, timeout=PYTHON_S).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


async def _services(config: RunConfig) -> list[str]:
    """The sandbox and the engines that are reached by address, all at once."""
    sandboxes = [_sandbox(config, where) for where in urls(config.sandbox.endpoints) or ("local",)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ENGINE_S)) as session:
        servers = urls(config.engines.endpoints) if config.engines.kind == "vllm" else ()
        engines = [_engine(config, session, url.rstrip("/")) for url in servers]
        return [line for line in await asyncio.gather(*sandboxes, *engines) if line]


async def _sandbox(config: RunConfig, where: str) -> str:
    """One call and one check of an answer; "local" is a service that is started for them, as units do."""
    do = (
        "start `rstar-sandbox serve` there, or mend sandbox.endpoints"
        if where != "local"
        else "see `rstar-sandbox doctor`"
    )
    try:
        async with open_sandbox(
            where, timeout_s=config.sandbox.timeout_s, memory_mb=config.sandbox.memory_mb
        ) as sandbox:
            (verdict,) = await sandbox.answer_checker.verify([("42", "42")])
    except SandboxUnavailable as why:
        return f"sandbox: {why}; {do}"
    if verdict is not VerifyOutcome.EQUIVALENT:
        return f"sandbox: {where} cannot compare answers: expected 42 to be equivalent to 42, got {verdict.value}; {do}"
    return ""


async def _engine(config: RunConfig, session: aiohttp.ClientSession, url: str) -> str:
    """Whether a vLLM server answers, takes contexts as long as the run's, and lets its weights be replaced."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            models = json.loads(await response.text())["data"]
        async with session.get(f"{url}/collective_rpc") as response:  # which takes a POST alone: 405 where it is
            has_routes = response.status != 404
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as why:
        got = f"{type(why).__name__}: {why}"
        return f"engines: {url}: expected a vLLM server's answer, got {got}; start it, or mend engines.endpoints"
    longest = min((model.get("max_model_len") or config.engines.max_length for model in models), default=0)
    if longest < config.engines.max_length:
        wanted = config.engines.max_length
        return f"engines: {url}: takes {longest} tokens, fewer than engines.max_length={wanted}; start it with more"
    if config.engines.sync == "file" and not has_routes:
        return f"engines: {url}: has no route to reload weights; start it with VLLM_SERVER_DEV_MODE=1"
    return ""
