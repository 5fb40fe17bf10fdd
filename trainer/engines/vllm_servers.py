"""Runs vLLM servers as child processes until an `async with` block ends.

Invariants:
- Each server listens on loopback. It has GPUs of its own, among those visible to this process, or CPU cores of its own.
  Its child processes use these GPUs or cores too.
- No server outlives the block or this process, however they end.
- A server that ends within the block is restarted at the same address with its initial weights.
- The servers run in their own Python environment, which needs nothing but vLLM.
- The servers do not belong to the training processes (ranks). So they get none of the variables that a launcher sets
  for ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from trainer import __path__ as package_path
from trainer.config import ConfigError
from trainer.engines.engine import EngineError

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "vllm_worker.Worker"
WORKER_FILES = ("vllm_worker.py", "weight_group.py")
"""Files of `trainer/sync` that a server loads."""
START_TIMEOUT_S = 900.0
"""Seconds that a server may take to start. Reading a large model and capturing its graphs takes minutes."""
KILL_AFTER_S = 20.0
"""Seconds between SIGTERM and SIGKILL."""
RESTART_DELAY_S = 5.0
CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Flags of servers on a CPU. Chunked prefill is off, because it would end the engine when the prompt of a seeded
request is computed in two chunks: vLLM then resets the request's random generator, which it cannot do on a CPU."""
OWN_OPTIONS = ("--tensor-parallel-size", "--gpu-memory-utilization", "--enable-sleep-mode", "--worker-extension-cls")
"""Options that `engines.args` may not have: they have settings of their own, or belong to the weight sync."""
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
RANK_VARIABLES = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|TORCHELASTIC_.*"
    "|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING|(ACCELERATE|FSDP)_.*"
)
"""Variables that torchrun and accelerate set for a rank. With them a vLLM server would wait for the other ranks or
listen at the training's port. OMP_NUM_THREADS is included because torchrun sets it to 1 if there are several ranks."""
ROCR_VARIABLE = "ROCR_VISIBLE_DEVICES"
"""Selects the GPUs that ROCm sees; Slurm sets this variable. If it is set, an index in one of `GPU_VARIABLES` counts
only the GPUs that it selects."""
GPU_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables that select the GPUs of a process: AMD's and NVIDIA's. vLLM ends if both are set and differ."""
LAUNCHER_SCRIPT = f"""\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if cores := os.environ.get("{CORES_VARIABLE}"):
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""A program that makes two settings and then replaces itself by the server, which inherits them. First, the kernel
sends SIGTERM (15) when the thread that started the process ends, also if it is killed (prctl 1 is PR_SET_PDEATHSIG).
Second, all threads stay on the server's cores; vLLM itself binds only its compute threads."""


CHECK_OPTIONS_CODE = """\
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])
"""
"""Ends with exit code 2, and the reason in the last line of stderr, if vLLM does not accept its arguments."""
CHECK_MODEL_CODE = """\
import sys
import transformers
from vllm import ModelRegistry
known = ModelRegistry.get_supported_archs()
if not any(name in known or hasattr(transformers, name) for name in sys.argv[1:]):
    sys.exit(f"vLLM does not know the architecture {', '.join(sys.argv[1:])}")
"""
"""Ends with exit code 1 if vLLM can run none of the architectures that the arguments name. It can run its own
architectures and those of transformers."""


@dataclass(frozen=True, slots=True)
class VllmServers:
    """The settings of servers of one model."""

    python: str
    """The interpreter of an environment with vLLM."""
    model: Path
    max_model_len: int
    max_num_seqs: int = 64
    dtype: str = "bfloat16"
    gpus_per_server: int = 0
    """GPUs over which one server splits the model; 0 runs on the CPU."""
    first_gpu: int = 0
    gpu_memory_utilization: float = 0.9
    sleep_mode: bool = False
    cpu_kv_gb: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)
    """More options of vLLM's engine, named as in its `AsyncEngineArgs`."""

    def command(self, port: int) -> list[str]:
        """Return the command line of one server. Raises `ConfigError` for an option that is set twice."""
        options = {
            "--model": str(self.model),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--max-model-len": str(self.max_model_len),
            "--max-num-seqs": str(self.max_num_seqs),
            "--dtype": self.dtype,
            "--logprobs-mode": "processed_logprobs",
            "--worker-extension-cls": WORKER_EXTENSION,
            "--generation-config": "vllm",  # ignore the model's generation_config.json
        }
        if self.gpus_per_server:
            options["--tensor-parallel-size"] = str(self.gpus_per_server)
            options["--gpu-memory-utilization"] = str(self.gpu_memory_utilization)
        # Not `vllm serve`: if the installed package is vllm-cpu, this command does not find the package's metadata.
        module = "vllm.entrypoints.openai.api_server"
        flags = ["--disable-uvicorn-access-log", *([] if self.gpus_per_server else CPU_FLAGS)]
        if self.sleep_mode:
            flags.append("--enable-sleep-mode")
        arguments = [word for option in options.items() for word in option]
        more = [option_words(name, value) for name, value in self.args.items()]
        if twice := sorted({words[0] for words in more} & {*options, *flags, *OWN_OPTIONS}):
            raise ConfigError(f"engines.args: {', '.join(twice)}: expected other options, since the trainer sets these")
        arguments += [word for words in more for word in words]
        return [self.python, "-c", LAUNCHER_SCRIPT, "-m", module, *arguments, *flags]

    def environment(self, index: int, count: int, cores: Sequence[int], base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of server `index` of `count`: those in `base`, and those that give the
        server its own GPUs or its own share of `cores`.

        Raises `ConfigError` if `base` shows too few GPUs.
        """
        variables = {name: value for name, value in base.items() if not RANK_VARIABLES.fullmatch(name)}
        # VLLM_SERVER_DEV_MODE enables the routes that reload weights and let the engine sleep.
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.gpus_per_server:
            variables |= self._gpu_variables(index, count, base)
            variables.pop(CORES_VARIABLE, None)
        else:
            own_cores = cores[index::count] or [cores[index % len(cores)]]
            variables[CORES_VARIABLE] = ",".join(map(str, own_cores))
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(self.cpu_kv_gb)
        return variables

    def _gpu_variables(self, index: int, count: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that select the GPUs of server `index` among the GPUs that `base` makes visible.

        If `base` has some of `GPU_VARIABLES`, the result sets the same variables, to some of the GPUs that they name.
        Otherwise it sets `CUDA_VISIBLE_DEVICES` to indices, from 0, of the visible GPUs.
        """
        first = self.first_gpu + index * self.gpus_per_server
        end = first + self.gpus_per_server
        set_variables = [name for name in GPU_VARIABLES if name in base]
        variable = set_variables[0] if set_variables else ROCR_VARIABLE
        if variable in base:
            visible = [gpu for gpu in base[variable].split(",") if gpu]
            gpus = visible if set_variables else [str(gpu) for gpu in range(len(visible))]
        else:  # all GPUs of the machine are visible, and their number is not checked here
            gpus = [str(gpu) for gpu in range(end)]
        gpus = gpus[first:end]
        if len(gpus) < self.gpus_per_server:
            raise ConfigError(
                f"engine {index + 1} of {count}: expected {end} GPUs or more, got {variable}={base[variable]}; lower "
                "engines.count or engines.tensor_parallel_size, or make more GPUs visible to this process"
            )
        return dict.fromkeys(set_variables or GPU_VARIABLES[1:], ",".join(gpus))

    @asynccontextmanager
    async def serve(self, count: int, logs: Path) -> AsyncIterator[list[str]]:
        """Start `count` servers, wait until they are healthy, and stop them. Yields their URLs.

        Each server has a log file in the directory `logs`. Raises `ConfigError` if there are too few GPUs, and
        `EngineError` with the end of the log if a server ends before it is healthy.
        """
        base = {**os.environ, "PYTHONPATH": str(_extension_dir(logs))}
        cores = sorted(os.sched_getaffinity(0))
        environments = [self.environment(index, count, cores, base) for index in range(count)]
        async with aiohttp.ClientSession() as session:
            urls: list[asyncio.Future[str]] = []
            supervisors = []
            for index, environment in enumerate(environments):
                urls.append(asyncio.get_running_loop().create_future())
                supervisor = _supervise(self.command, environment, logs / f"engine{index}.log", session, urls[-1])
                supervisors.append(asyncio.create_task(supervisor))
            try:
                yield list(await asyncio.gather(*urls))
            finally:
                for task in supervisors:
                    task.cancel()
                await asyncio.gather(*supervisors, return_exceptions=True)


async def _supervise(
    command: Callable[[int], list[str]],
    environment: Mapping[str, str],
    log: Path,
    session: aiohttp.ClientSession,
    started: asyncio.Future[str],
) -> None:
    """Run and restart a server until cancelled. `started` gets the URL once the server is healthy, or the error of the
    first start."""
    port = free_port()
    while True:
        try:
            async with _process_group(command(port), environment, log) as process:
                if not started.done():
                    started.set_result(await _wait_until_healthy(session, f"http://127.0.0.1:{port}", process, log))
                reason = f"it ended with exit code {await process.wait()}"
        except Exception as error:  # boundary: only the first start's failure is an error; later starts are retried
            if not started.done():
                started.set_exception(error)
                return
            reason = repr(error)
        logger.warning("the vLLM server of %s restarts in %g s: %s", log, RESTART_DELAY_S, reason)
        await asyncio.sleep(RESTART_DELAY_S)


@asynccontextmanager
async def _process_group(command: Sequence[str], environment: Mapping[str, str], log: Path) -> AsyncIterator[Process]:
    """Start a process in its own process group. At the end of the block, stop and then kill the whole group."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_AFTER_S)
        with contextlib.suppress(ProcessLookupError):  # child processes may outlive the group's leader
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _wait_until_healthy(session: aiohttp.ClientSession, url: str, process: Process, log: Path) -> str:
    async with asyncio.timeout(START_TIMEOUT_S):
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return url
            await asyncio.sleep(0.25)
    raise EngineError(f"expected a vLLM server, got exit code {process.returncode}; {log} ends with:\n{_log_tail(log)}")


def _extension_dir(logs: Path) -> Path:
    """Copy the worker extension to a directory of its own, for PYTHONPATH, and return the directory. The package
    itself cannot be used: its modules would shadow modules of vLLM's environment."""
    directory = (logs / "extension").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    for file in WORKER_FILES:
        shutil.copy(Path(package_path[0], "sync", file), directory)
    return directory


def _log_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which no process listens at `host`. An empty `host` means all addresses of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def option_words(name: str, value: object) -> list[str]:
    """Return an option as words of a command line: a flag for true and false, JSON for a table."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
