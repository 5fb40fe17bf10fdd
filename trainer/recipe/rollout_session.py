"""Opens what a phase needs to collect episodes: engines with a model's weights, the sandbox, and an event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from sandbox.machine import memory_available
from trainer.config import ConfigError, EnginesConfig, ModelConfig, RunConfig, SandboxConfig, expand_urls
from trainer.engines.engine import Engine, WeightTransfer
from trainer.engines.local import LocalEngine
from trainer.engines.openai_client import OpenAIEngine
from trainer.engines.pool import ALL_DOWN_TIMEOUT_S, EnginePool
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers
from trainer.environments.connection import SandboxConnection, open_sandbox
from trainer.environments.python_tool import TOOL_SCHEMA
from trainer.environments.registry import open_environment
from trainer.environments.services import open_services
from trainer.episodes.chat_format import ChatFormat, ToolSchema, rstar2_format, tokenizer_format
from trainer.episodes.chat_template import CHATML_TOOLS, CHATML_TOOLS_FILE
from trainer.recipe.phases import RecipeRun
from trainer.recipe.resource_plan import CACHE_MEMORY_SHARE
from trainer.rollout.collector import EpisodeCollector
from trainer.rollout.loop_thread import LoopThread
from trainer.rollout.runtime import RolloutRuntime
from trainer.scheduling.scheduler import Scheduler
from trainer.sync.broadcast import BroadcastTransfer
from trainer.sync.probe import SyncProbe
from trainer.sync.transfers import WakingTransfer, load_by_engine
from trainer.sync.weight_store import FileWeightStore
from trainer.training.context import model_errors_as_config_errors

PROMPT_SETTINGS = ("chat_format", "chat_template", "system_prompt")


def load_chat_format(config: RunConfig, model: Path, tools: Sequence[ToolSchema] = (TOOL_SCHEMA,)) -> ChatFormat:
    """Return the chat format of a model for these tools.

    Raises `ConfigError` if its tokenizer or template cannot be used.
    """
    create = rstar2_format if config.model.chat_format == "rstar2" else tokenizer_format
    with model_errors_as_config_errors(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        if template := config.model.chat_template:
            file = CHATML_TOOLS_FILE if template == CHATML_TOOLS else Path(template)
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        return create(tokenizer, tools=tools, system_prompt=config.model.system_prompt, eos_ids=model_eos_ids(model))


def model_eos_ids(model: Path) -> tuple[int, ...]:
    """Return the ids that end the model's texts. They are in generation_config.json or, without this file, in
    config.json. A folder with a tokenizer only gives no ids. An instruction model often has more of these ids than its
    tokenizer."""
    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        try:
            ids = PretrainedConfig.get_config_dict(model)[0].get("eos_token_id")
        except OSError:
            return ()
    return (ids,) if isinstance(ids, int) else tuple(ids or ())


def chat_formats(config: RunConfig, model: Path) -> Callable[[Sequence[ToolSchema]], ChatFormat]:
    """Return a function that loads the chat format for the tools of an environment. For equal tools, the format is
    loaded only once.

    Tools count as equal only if the keys of their schemas are in the same order, since a prompt shows this order.
    """

    @cache
    def load(tools: str) -> ChatFormat:
        return load_chat_format(config, model, json.loads(tools))

    return lambda tools: load(json.dumps(list(tools)))


def connect_sandbox(config: SandboxConfig) -> AbstractAsyncContextManager[SandboxConnection]:
    """Connect to the sandbox, or start one, until the block ends."""
    return open_sandbox(
        expand_urls(config.endpoints) or "local",
        timeout_s=config.timeout_s,
        memory_mb=config.memory_mb,
        answer_check=config.answer_check,
        answer_rounding=config.answer_rounding,
    )


@contextmanager
def open_rollout(run: RecipeRun, model: Path) -> Iterator[RolloutRuntime]:
    """Open engines with the weights of `model`, the sandbox, and a collector that uses them."""
    config = run.config
    with LoopThread() as loop_thread:
        sandbox = loop_thread.enter(connect_sandbox(config.sandbox))
        pool = loop_thread.enter(open_engine_pool(config, model, run.dir))
        gc.freeze()  # otherwise each garbage collection visits all objects of the libraries, which takes 0.2 s
        services = loop_thread.enter(open_services(sandbox, config.reward))
        create = partial(open_environment, services=services)
        collector = EpisodeCollector(pool, chat_formats(config, model), create, config.collect.episodes_per_worker)
        yield RolloutRuntime(loop_thread, collector, pool, sleep=pool.sleep if config.engines.sleep_mode else None)


@asynccontextmanager
async def open_engine_pool(config: RunConfig, model: Path, run_dir: Path) -> AsyncIterator[EnginePool]:
    """Open the engines that `config` describes. They get the weights of `model`, except for those of kind "openai"."""
    engines, dtype = config.engines, config.model.dtype
    if engines.kind == "openai":
        async with open_openai_pool(config, model) as pool:
            yield pool
        return
    async with AsyncExitStack() as stack:
        with model_errors_as_config_errors(model):
            initial = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        if engines.kind == "local":
            with model_errors_as_config_errors(model):
                local = _local_engine(config, initial)
            options: dict[str, Any] = {"transfer": load_by_engine}
            pool_engines: Sequence[LocalEngine | VllmEngine] = [local]
        else:
            pool_engines = await _vllm_engines(stack, config, model, run_dir, initial.config.vocab_size)
            options = _weight_transfer(config, run_dir, initial)
        if engines.sync_check != "off":
            device = "cuda" if config.hardware.gpus_per_node else "cpu"
            options["probe"] = SyncProbe(model, dtype, tolerance=engines.probe_tolerance, device=device)
            options["probes_once"] = engines.sync_check == "checksum"
        pool = create_pool(engines, pool_engines, **options)
        await stack.enter_async_context(pool)
        await pool.sync_weights(initial.state_dict(), 0)  # servers may have the weights of another phase or run
        if engines.kind == "vllm":
            initial.to("meta")  # the servers have its weights, and the transfer needs only its classes
        yield pool


@asynccontextmanager
async def open_openai_pool(config: RunConfig, tokenizer_path: Path, share: float = 1.0) -> AsyncIterator[EnginePool]:
    """Open clients of OpenAI-compatible servers. `share`: the part of `engines.max_num_seqs` for this process.

    Raises `ConfigError` if the servers reject the settings, and `EngineError` if none of them answers.
    """
    engines = config.engines
    with model_errors_as_config_errors(tokenizer_path):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    api_key = os.environ.get(engines.api_key_env, "").strip()
    if engines.api_key_env and not api_key:
        raise ConfigError(f"engines.api_key_env: expected an API key in the variable {engines.api_key_env}, got none")
    clients = [
        OpenAIEngine(url, tokenizer, engines, api_key=api_key, share=share) for url in expand_urls(engines.endpoints)
    ]
    async with create_pool(engines, clients) as pool:
        errors = await asyncio.gather(*(client.check_alive() for client in clients), return_exceptions=True)
        if rejection := next((error for error in errors if isinstance(error, ValueError)), None):
            raise ConfigError(f"engines: {rejection}; see the settings of kind=openai") from rejection
        if error := all(errors) and errors[0]:
            raise error
        yield pool


def create_pool(settings: EnginesConfig, engines: Sequence[Engine], **options: Any) -> EnginePool:
    """Return a pool of `engines` that is not open yet. `options` are further arguments of `EnginePool`. They take
    precedence over `settings`."""
    # Only servers are restarted, so episodes wait longer for them than for a local engine.
    max_down_s = ALL_DOWN_TIMEOUT_S if settings.kind == "local" else settings.max_down_s
    return EnginePool(
        engines,
        scheduler=Scheduler(settings.max_model_len),
        turn_timeout_s=settings.turn_timeout_s,
        **{"all_down_timeout_s": max_down_s, **options},
    )


def prompt_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that decide how a model reads a problem."""
    return {name: getattr(model, name) for name in PROMPT_SETTINGS}


def endpoint_settings(engines: EnginesConfig) -> dict[str, Any]:
    """Return the settings that decide what OpenAI-compatible servers sample; empty for engines that get weights."""
    if engines.kind != "openai":
        return {}
    names = ("model_name", "prompt_format", "extra_body")
    settings = {f"engines.{name}": getattr(engines, name) for name in names}
    return {**settings, "engines.stop_strings": list(engines.stop_strings)}


def find_device(config: RunConfig) -> torch.device:
    """Return the device of the local engine. Raises `ConfigError` if this machine does not have it."""
    device = torch.device(config.local_device)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"engines.device: expected the GPU {device} here, got {count} GPUs; set engines.device to another one of "
            "them, or to cpu"
        )
    return device


def _local_engine(config: RunConfig, model: PreTrainedModel) -> LocalEngine:
    """Start the local engine, which owns `model` from now on. Raises `ConfigError` and `ValueError`."""
    device = find_device(config)
    model.to(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available()
    return LocalEngine(
        model,
        max_num_seqs=config.engines.max_num_seqs,
        max_model_len=config.engines.max_model_len,
        max_cache_bytes=CACHE_MEMORY_SHARE * free_bytes,
    )


async def _vllm_engines(
    stack: AsyncExitStack, config: RunConfig, model: Path, run_dir: Path, vocab_size: int
) -> list[VllmEngine]:
    """Return clients of the servers at `engines.endpoints`, or of servers that run until `stack` is closed."""
    engines, hardware = config.engines, config.hardware
    endpoints: Sequence[str] = expand_urls(engines.endpoints)
    if not endpoints:
        servers = VllmServers(
            python=engines.vllm_python or sys.executable,
            model=model,
            max_model_len=engines.max_model_len,
            max_num_seqs=engines.max_num_seqs,
            dtype=config.model.dtype,
            gpus_per_server=engines.tensor_parallel_size if hardware.gpus_per_node else 0,
            first_gpu=hardware.gpus_per_node if hardware.engine_gpus else 0,
            gpu_memory_utilization=engines.gpu_memory_utilization,
            sleep_mode=engines.sleep_mode,
            args=engines.args,
        )
        endpoints = await stack.enter_async_context(servers.serve(engines.count, run_dir / "engines"))
    return vllm_clients(engines, endpoints, vocab_size)


def vllm_clients(
    engines: EnginesConfig, endpoints: Sequence[str], vocab_size: int, share: float = 1.0
) -> list[VllmEngine]:
    """Return clients of vLLM servers. `share`: the part of each server's capacity that this process may use."""
    return [
        VllmEngine(
            url,
            vocab_size=vocab_size,
            max_model_len=engines.max_model_len,
            max_num_seqs=engines.max_num_seqs,
            timeout_s=engines.turn_timeout_s,
            share=share,
        )
        for url in endpoints
    ]


def _weight_transfer(config: RunConfig, run_dir: Path, model: Any) -> dict[str, Any]:
    """Return the pool's arguments for the transfer of the weights of `model` to vLLM servers."""
    engines, dtype, uses_files = config.engines, config.model.dtype, config.engines.weight_sync == "file"
    transfer: WeightTransfer = load_by_engine if uses_files else BroadcastTransfer(engines.weight_sync, model, dtype)
    has_checksums = engines.sync_check == "checksum"
    store = FileWeightStore(run_dir / "weights", model, dtype, has_checksums=has_checksums) if uses_files else None
    return {"transfer": WakingTransfer(transfer) if engines.sleep_mode else transfer, "store": store}
