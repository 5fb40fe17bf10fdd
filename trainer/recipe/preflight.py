"""Checks that this machine has everything that the phases of a run need, before the first of them starts.

Invariants:
- Everything that is missing is reported at once. Each missing thing has one line, which says what to do.
- Nothing is left behind: a sandbox that is started for a check is stopped, and no file is written.
- Each check is printed before it starts. A check that waits for another machine has a time limit (`*_TIMEOUT_S`).

Four things are not checked, since only the phases themselves can find out:
- whether vLLM starts;
- whether the rows of a data set on the hub are problems with valid environments and options;
- how long the prompts are, and which problems are dropped for it (`prepare`, before any engine starts);
- whether other machines see the run folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from sandbox.machine import memory_available
from trainer.config import TINY_MODEL, ConfigError, ModelShape, RunConfig, expand_urls, needs_bitsandbytes
from trainer.data.rows import DataError
from trainer.data.sources import check_source, is_generated, is_on_hub, iter_problems
from trainer.engines.engine import EngineError
from trainer.engines.vllm_servers import (
    CHECK_MODEL_CODE,
    CHECK_OPTIONS_CODE,
    WORKER_EXTENSION,
    VllmServers,
    option_words,
)
from trainer.environments.connection import SandboxUnavailable, open_sandbox
from trainer.environments.own_reward import check_reward, try_reward
from trainer.environments.registry import check_problem
from trainer.episodes.episode import Problem
from trainer.episodes.reward import VerifyOutcome
from trainer.json_files import RecordError, read_json
from trainer.recipe.phases import DISTRIBUTED_PHASES, Phase, RecipeRun
from trainer.recipe.resource_plan import (
    GB,
    LESS_MEMORY_ADVICE,
    disk_bytes,
    known_shape,
    misfits,
    resource_plan,
)
from trainer.recipe.runner import NotReady

SAMPLING_PHASES = ("filter", "collect", "grpo", "eval", "rollout")
"""The phases that need engines and the sandbox."""
ENGINE_TIMEOUT_S = 10.0
"""Seconds within which a vLLM server must answer a request."""
HUB_TIMEOUT_S = 20.0
"""Seconds within which a hub must describe a data set, or deliver a tokenizer. The hub's own client would try for a
minute."""
REPORT_TIMEOUT_S = 60.0
"""Seconds within which a slow report must come. There are two: a Python that may import vLLM runs a short program, and
a vLLM server describes its settings and its machine."""
TRIED_RESPONSES = ("", "\\boxed{1}")
"""The responses of the model with which the preflight tries `reward.function`."""
MAX_PROBLEM_ERRORS = 5
"""Maximum number of lines about the problems of one source."""
Check = Callable[[], list[str]]
"""Returns a line for each thing that is missing."""
FIND_VLLM_CODE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def require(run: RecipeRun, phases: Sequence[Phase]) -> None:
    """Raise `NotReady` with everything that `phases` need and that is missing."""
    lines = missing(run, phases)
    if len(lines) == 1:
        raise NotReady(lines[0])
    if lines:
        raise NotReady("\n  ".join([f"{len(lines)} things are missing", *lines]))


def missing(run: RecipeRun, phases: Sequence[Phase]) -> list[str]:
    """Return a line for each thing that `phases` need and that is missing, with what to do."""
    config, commands = run.config, {phase.command for phase in phases}
    needs_weights = commands != {"prepare"} and config.engines.kind != "openai"
    lines = [*_check_sources_and_model(config, phases, needs_weights=needs_weights), *_check_problems(config, phases)]
    lines += _check_reward(config)
    try:
        shape = known_shape(config)
    except ConfigError:  # reported by `_check_model`
        shape = None
    if shape:
        _log("disk and memory")
        lines += [*_check_disk(run, phases, shape), *_check_memory(config, phases, shape)]
    if commands & {*DISTRIBUTED_PHASES, "eval"}:
        lines += [
            f"tracking.trackers: {package} is not installed; pip install {package}, or leave it out"
            for package in config.tracking.trackers
            if not find_spec(package)
        ]
    if commands & {*DISTRIBUTED_PHASES}:
        lines += [*_check_packages(config), *_check_adapter_and_grpo_options(config, phases)]
    if commands & {*SAMPLING_PHASES}:
        _log("engines and the sandbox")
        lines += [*_check_own_engines(config), *_check_local_device(config), *asyncio.run(_check_servers(config))]
    return [" ".join(line.split()) for line in lines]  # an error of a library may have several lines


def _log(text: str) -> None:
    print(f"preflight: checks {text}", file=sys.stderr, flush=True)


def _problem_sources(config: RunConfig) -> dict[str, Sequence[str]]:
    """Return, for each setting that names sources of problems, its sources."""
    stages = {f"stages.{name}.data": stage.data for name, stage in config.stages.items()}
    return {"data.train": config.data.train, **stages, "eval.data": config.eval.data}


def _check_sources_and_model(config: RunConfig, phases: Sequence[Phase], *, needs_weights: bool) -> Iterator[str]:
    """Check that all sources and the model exist. Those on a hub are all checked at the same time, within
    `HUB_TIMEOUT_S`. A source that several settings name is reported under the first of them."""
    commands, sources = {phase.command for phase in phases}, dict[str, Sequence[str]]()
    if "prepare" in commands:
        sources = {**_problem_sources(config), "data.decontaminate_against": config.data.decontaminate_against}
    if "sft" in commands:
        sources["sft.data"] = config.sft.data
    local, remote, setting_of = dict[str, Check](), dict[str, Check](), dict[str, str]()
    for setting, names in sources.items():
        for source in names:
            setting_of.setdefault(source, setting)
    for source, setting in setting_of.items():
        checks = remote if is_on_hub(source) else local
        checks[f"{setting}: {source}"] = partial(_source_errors, setting, source)
    if (model := config.model.path) != TINY_MODEL:
        checks = local if Path(model).exists() else remote
        checks[f"model.path: {model}"] = partial(_check_model, config, needs_weights=needs_weights)
    for title, check in local.items():
        _log(title)
        yield from check()
    if remote:
        yield from _within_limit(remote)


def _within_limit(checks: Mapping[str, Check]) -> Iterator[str]:
    """Run the checks that ask a hub, all at the same time, and yield the lines of each. A check that has not ended
    after `HUB_TIMEOUT_S` gets one line that says so. Its thread ends with the process, since nothing can interrupt the
    hub's client."""
    import datasets  # noqa: F401  imported before the time limit starts, since the imports take seconds
    import transformers  # noqa: F401

    def work(check: Check, result: Future[list[str]]) -> None:
        try:
            result.set_result(check())
        except BaseException as error:
            result.set_exception(error)

    results: dict[str, Future[list[str]]] = {title: Future() for title in checks}
    for title, result in results.items():
        _log(f"{title} (at most {HUB_TIMEOUT_S:g} s)")
        threading.Thread(target=work, args=[checks[title], result], daemon=True).start()
    wait(results.values(), HUB_TIMEOUT_S)
    late = f"the hub gave no answer within {HUB_TIMEOUT_S:g} s; repair the network, or name a file or a folder here"
    for title, result in results.items():
        yield from result.result() if result.done() else [f"{title}: {late}"]


def _check_problems(config: RunConfig, phases: Sequence[Phase]) -> Iterator[str]:
    """Check the environments and options of all problems in files. Refuse a source of training problems if all its
    problems are also evaluation problems."""
    if all(phase.command != "prepare" for phase in phases):
        return
    evaluated: set[str] = set()
    # `eval.data` is the last setting. It comes first here, since the others are compared with its problems.
    for setting, names in reversed(_problem_sources(config).items()):
        is_eval = setting == "eval.data"
        for source in names:
            if is_generated(source):
                continue
            lines, texts = _problem_errors(source, accepts_malformed=not is_eval)
            yield from (f"{setting}: {source}: {line}" for line in lines)
            if is_eval:
                evaluated |= {source, *texts}
            elif source in evaluated or (texts and texts <= evaluated):
                yield f"{setting}: {source}: all its problems are also in eval.data; train or evaluate on others"


def _problem_errors(source: str, *, accepts_malformed: bool) -> tuple[list[str], set[str]]:
    """Return the errors in a file's rows, environments and options, and the texts of its problems.

    Problems with equal environments and options give one line. A row that is no problem is an error unless
    `accepts_malformed` is true and other rows are problems. Both results are empty for a source on the hub, which is
    not read. They are also empty for a source that cannot be read: `_source_errors` reports that.
    """
    if is_on_hub(source):
        return [], set()
    _log(f"the problems of {source}")
    lines: dict[str, str] = {}
    texts: set[str] = set()
    malformed = list[str]()
    try:
        for problem in iter_problems(source, lambda _, number, error: malformed.append(f"row {number}: {error}")):
            texts.add(problem.text)
            kind = f"{problem.environment} {problem.options} {problem.reward}"
            if kind not in lines:
                lines[kind] = ""
                try:
                    check_problem(problem)
                except ConfigError as error:
                    lines[kind] = str(error)
    except (DataError, OSError):
        return [], set()
    if malformed and not (texts and accepts_malformed):
        count = "no row is a problem" if not texts else f"{len(malformed)} rows are no problems"
        lines["malformed"] = f"{count}: {malformed[0]}; mend or remove them"
    found = [line for line in lines.values() if line]
    more = [f"{len(found) - MAX_PROBLEM_ERRORS} more like these"] if len(found) > MAX_PROBLEM_ERRORS else []
    return [*found[:MAX_PROBLEM_ERRORS], *more], texts


def _check_reward(config: RunConfig) -> Iterator[str]:
    try:
        check_reward(config)
    except ConfigError as error:
        yield f"{error}; see reward.function, whose module is in a directory of PYTHONPATH"
        return
    if not config.reward.function:
        return
    _log(f"reward.function on the responses {', '.join(map(repr, TRIED_RESPONSES))}")
    problem = next(_first_problems(config), Problem("p", "1 + 1?", "2", "preflight"))
    tried = replace(problem, reward=config.reward.function)
    if failure := asyncio.run(try_reward(tried, TRIED_RESPONSES, config.reward)):
        yield f"{failure} for problem {problem.id}; mend the function, or start anyway with --no-preflight"


def _first_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the first problem of each source that is not on the hub and can be read."""
    for source in (source for sources in _problem_sources(config).values() for source in sources):
        with suppress(DataError, OSError):
            yield from [] if is_on_hub(source) else islice(iter_problems(source, lambda *_: None), 1)


def _source_errors(setting: str, source: str) -> list[str]:
    try:
        check_source(source, has_conversations=setting == "sft.data")
    except (DataError, OSError) as error:
        return [f"{setting}: {error}; name another source, or put the file there"]
    return []


def _check_model(config: RunConfig, *, needs_weights: bool) -> list[str]:
    """Check the tokenizer, the chat template and the sizes. With `needs_weights`, check that the model's folder has
    weights and a config.json."""
    path, lines = Path(config.model.path), list[str]()
    if needs_weights and path.is_dir():
        patterns = {"config.json": ("config.json",), "weights": ("*.safetensors", "*.bin")}
        absent = [part for part, names in patterns.items() if not any(f for name in names for f in path.glob(name))]
        if absent:
            lines.append(
                f"model {path}: has no {' and no '.join(absent)}; put them there, or name another in model.path"
            )
    from trainer.recipe.rollout_session import load_chat_format

    try:
        load_chat_format(config, path)
        known_shape(config)
    except ConfigError as error:
        lines.append(f"{error}; see model.path, model.chat_format, model.chat_template and model.system_prompt")
    return lines


def _check_disk(run: RecipeRun, phases: Sequence[Phase], shape: ModelShape) -> Iterator[str]:
    trainings = sum(phase.command in DISTRIBUTED_PHASES for phase in phases)
    if not trainings:
        return
    existing = next(path for path in (run.dir.absolute(), *run.dir.absolute().parents) if path.is_dir())
    files = (file for file in run.dir.glob("stages/*/checkpoints/**/*") if file.is_file())
    needed = disk_bytes(run.config, shape, trainings) - sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(existing).free
    if free < needed:
        yield (
            f"disk: {run.dir}: models and checkpoints need {needed / GB:.1f} GB, but {free / GB:.1f} GB are free; "
            "free some, or give a --run-dir on another disk"
        )


def _check_memory(config: RunConfig, phases: Sequence[Phase], shape: ModelShape) -> Iterator[str]:
    hardware, available = config.hardware, memory_available()
    if hardware.gpus_per_node or config.local_device != "cpu":
        import torch

        if torch.cuda.is_available():
            gpu_gb = torch.cuda.get_device_properties(0).total_memory / GB
            stated_gb = hardware.gpu_memory_gb or gpu_gb
            config = replace(config, hardware=replace(hardware, gpu_memory_gb=min(stated_gb, gpu_gb)))
    plan = resource_plan(config, shape, available)
    plans, lines = plan.phases(), misfits(config, plan)
    engine_is_here = config.engines.kind == "local" and config.local_device == "cpu"
    for phase in phases:
        if phase.command not in DISTRIBUTED_PHASES:
            continue
        name = "sft" if phase.command == "sft" else phase.stage
        yield from lines[name]
        needed = 0 if hardware.gpus_per_node else plans[name].train_bytes
        if engine_is_here and phase.command != "sft":
            needed += plan.engine_gpu_bytes
        if needed > available:
            where = name if name == "sft" else f"stages.{name}"
            yield (
                f"memory: {where}: needs {needed / GB:.1f} GB, but {available / GB:.1f} GB are available here; "
                f"{LESS_MEMORY_ADVICE} (rstar-train recipe --dry-run shows the sum)"
            )


def _check_packages(config: RunConfig) -> Iterator[str]:
    hardware, launcher = config.hardware, config.hardware.launcher
    ranks = hardware.nodes * max(1, hardware.gpus_per_node)
    if launcher and not shutil.which(launcher[0]):
        yield f"hardware.launcher: {launcher[0]}: no such command on PATH; install it, or name another"
    if not launcher and ranks > 1 and os.environ.get("WORLD_SIZE") != str(ranks):  # torchrun has started this process
        yield f"hardware.launcher: expected a command for {ranks} processes, got none; set it, for example to torchrun"
    for table, settings in config.trainings().items():
        if needs_bitsandbytes(settings.optim) and not find_spec("bitsandbytes"):
            yield f"{table}: optim={settings.optim}: bitsandbytes is not installed; pip install it, or change optim"


def _check_adapter_and_grpo_options(config: RunConfig, phases: Sequence[Phase]) -> Iterator[str]:
    """Check the tables that are passed on to peft (`[model.peft]`) and to TRL (`[stages.NAME.grpo]`). If the model's
    folder is on this machine, the adapter is tried on an empty model of its sizes."""
    stages = [config.stages[phase.stage] for phase in phases if phase.command == "grpo"]
    if not (config.model.peft or any(stage.grpo for stage in stages)):
        return
    from trainer.training.adapters import peft_config  # loads torch, TRL and transformers
    from trainer.training.grpo import check_grpo_options

    path = config.model.path if Path(config.model.path, "config.json").exists() else None
    for check in (partial(peft_config, config.model.peft, path), *(partial(check_grpo_options, s) for s in stages)):
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _check_local_device(config: RunConfig) -> Iterator[str]:
    """Check that a local engine's device exists, unless it is a GPU that also trains (see `_check_own_engines`)."""
    if config.engines.kind != "local" or not (config.engines.device or config.hardware.engine_gpus):
        return
    from trainer.recipe.rollout_session import find_device

    try:
        find_device(config)
    except ConfigError as error:
        yield str(error)


def _check_own_engines(config: RunConfig) -> Iterator[str]:
    """Check what the run's own engines need: enough GPUs, and vLLM."""
    engines, hardware = config.engines, config.hardware
    starts_servers = engines.kind == "vllm" and not engines.endpoints
    if hardware.gpus_per_node:
        import torch

        used = engines.count * engines.tensor_parallel_size if starts_servers else 0
        expected = hardware.gpus_per_node + used if hardware.engine_gpus else max(hardware.gpus_per_node, used)
        if (visible := torch.cuda.device_count()) < expected:
            yield (
                f"GPUs: expected {expected} here, got {visible}; lower hardware.gpus_per_node or engines.count, or "
                "make more GPUs visible"
            )
    if not starts_servers:
        return
    try:
        VllmServers("", Path(), 0, gpus_per_server=hardware.gpus_per_node, args=engines.args).command(0)
    except ConfigError as error:
        yield str(error)
    python = engines.vllm_python or sys.executable
    if _python_error(python, FIND_VLLM_CODE):
        yield (
            f"engines: {python} has no vLLM; name a Python that has it in engines.vllm_python, or set engines.endpoints"
        )
        return
    words = [word for name, value in engines.args.items() for word in option_words(name, value)]
    if words and (reason := _python_error(python, CHECK_OPTIONS_CODE, *words)):
        yield f"engines.args: {reason}"
    model: Mapping[str, Any] = {}
    with suppress(RecordError):  # reported by `_check_model`
        model = read_json(Path(config.model.path, "config.json")) or {}
    names = () if model.get("auto_map") else model.get("architectures", ())  # the model may bring code of its own
    if names and (reason := _python_error(python, CHECK_MODEL_CODE, *names)):
        yield f"model {config.model.path}: {reason}; name another model, or a Python with another vLLM"
    heads, size = model.get("num_attention_heads", 0), engines.tensor_parallel_size
    if heads % size:
        yield f"engines.tensor_parallel_size={size}: expected a divisor of the {heads} attention heads; change it"


def _python_error(python: str, code: str, *words: str) -> str:
    """Run `code` with `python`. Return the last line on stderr if the exit code is not 0, else an empty text."""
    try:
        run = subprocess.run([python, "-c", code, *words], capture_output=True, text=True, timeout=REPORT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"expected {python} to run, got {type(error).__name__}: {error}"
    last_line = run.stderr.strip().rpartition("\n")[2]
    return (last_line or f"exit code {run.returncode}") if run.returncode else ""


async def _check_servers(config: RunConfig) -> list[str]:
    """Check all sandboxes and all servers of engines at the same time."""
    engines, model = config.engines, Path(config.model.path)
    sandboxes = [_check_sandbox(config, endpoint) for endpoint in expand_urls(config.sandbox.endpoints) or ("local",)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ENGINE_TIMEOUT_S)) as session:
        urls = expand_urls(engines.endpoints) if engines.kind == "vllm" else ()
        servers = [_check_engine(config, session, url.rstrip("/")) for url in urls]
        if engines.kind == "openai" and config.model.path != TINY_MODEL:
            servers.append(_check_openai_servers(config, model))
        return [line for line in await asyncio.gather(*sandboxes, *servers) if line]


async def _check_openai_servers(config: RunConfig, tokenizer_path: Path) -> str:
    """Check that one of the servers completes a text with the settings of the run."""
    from trainer.recipe.rollout_session import open_openai_pool

    try:
        async with open_openai_pool(config, tokenizer_path):
            return ""
    except (ConfigError, EngineError) as error:
        return f"{error}; see engines.endpoints"


async def _check_sandbox(config: RunConfig, endpoint: str) -> str:
    """Check a sandbox with one call and one answer check. The endpoint "local" starts a sandbox on this machine, as the
    phases do."""
    advice = (
        "start `rstar-sandbox serve` there, or change sandbox.endpoints"
        if endpoint != "local"
        else "see `rstar-sandbox doctor`"
    )
    try:
        async with open_sandbox(
            endpoint, timeout_s=config.sandbox.timeout_s, memory_mb=config.sandbox.memory_mb
        ) as connection:
            (outcome,) = await connection.answer_checker.verify([("42", "42")])
    except SandboxUnavailable as error:
        return f"sandbox: {error}; {advice}"
    if outcome is not VerifyOutcome.EQUIVALENT:
        return f"sandbox: {endpoint}: expected 42 to be equivalent to 42, got {outcome.value}; {advice}"
    return ""


async def _check_engine(config: RunConfig, session: aiohttp.ClientSession, url: str) -> str:
    """Check that a vLLM server answers, takes sequences of the run's length, and can reload weights."""
    max_model_len = config.engines.max_model_len
    try:
        async with session.get(f"{url}/v1/models") as response:
            models = json.loads(await response.text())["data"]
        # A server with this route answers 405, since it expects a POST.
        async with session.get(f"{url}/collective_rpc") as response:
            has_routes = response.status != 404
        lacks = await _missing_option(config, session, url) if has_routes else ""
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        return f"engines: {url}: expected a vLLM server's answer, got {got}; start it, or change engines.endpoints"
    served = min((model.get("max_model_len") or max_model_len for model in models), default=0)
    if served < max_model_len:
        return (
            f"engines: {url}: takes {served} tokens, fewer than engines.max_model_len={max_model_len}; start it with "
            "a larger --max-model-len"
        )
    if not has_routes:
        return f"engines: {url}: has no route to reload weights; start it with VLLM_SERVER_DEV_MODE=1"
    return f"engines: {url}: {lacks}" if lacks else ""


async def _missing_option(config: RunConfig, session: aiohttp.ClientSession, url: str) -> str:
    """Return which ability a server lacks because it was started without an option, and how to start it. Empty if the
    server has the options that the run needs for sleep mode, and for broadcasts and checksums of weights.

    The routes do not show this: a server without these options has them too, but they fail or do nothing.
    """
    sleep_mode, weight_sync = config.engines.sleep_mode, config.engines.weight_sync
    needs_extension = weight_sync != "file" or config.engines.sync_check == "checksum"
    if not sleep_mode and not needs_extension:
        return ""
    timeout = aiohttp.ClientTimeout(REPORT_TIMEOUT_S)
    async with session.get(f"{url}/server_info?config_format=json", timeout=timeout) as response:
        settings = json.loads(await response.text())["vllm_config"]
    if sleep_mode and not settings["model_config"]["enable_sleep_mode"]:
        return "has no sleep mode; start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    if needs_extension and settings["parallel_config"]["worker_extension_cls"] != WORKER_EXTENSION:
        option = f"--worker-extension-cls {WORKER_EXTENSION} (docs/mi300x.md)"
        return (
            f"cannot check weights by checksums or receive them by gloo or nccl; start it with {option}, or set "
            "engines.weight_sync to file and engines.sync_check to probe"
        )
    return ""
