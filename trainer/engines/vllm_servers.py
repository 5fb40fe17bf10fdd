"""vLLM servers as children of this process, for as long as a block lasts.

Invariants:
- Each listens on loopback and has GPUs or cores of its own, which none of its processes leaves: of the GPUs that this
  process was given, if it was given some.
- None outlives the block, nor this process, whatever ends it.
- One that ends within the block is started anew, at the same address, with the weights that it had at first.
- They run in an environment of their own (`python`), of which nothing is assumed but vLLM.
- They are no ranks of this process's training, and get no variable by which a launcher tells a rank what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from trainer.config import ConfigError
from trainer.engines import __path__ as here
from trainer.engines.vllm_client import EngineFailed

logger = logging.getLogger(__name__)

WORKER = "vllm_worker"
START_S = 900.0
"""A large model's weights are read, and its graphs captured, in minutes."""
END_S = 20.0
AGAIN_S = 5.0
"""Before one that has ended is started anew."""
CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""A CPU's generator cannot be set back: a request with a seed whose prompt comes in two parts would end the engine."""
CORES = "VLLM_CPU_OMP_THREADS_BIND"
OF_RANKS = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|TORCHELASTIC_.*"
    "|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING|(ACCELERATE|FSDP)_.*"
)
"""Variables that torchrun and accelerate set for a rank. A vLLM server that has them waits for the other ranks, or
listens at the training's port. OMP_NUM_THREADS is torchrun's 1 for each of several ranks."""
ROCR = "ROCR_VISIBLE_DEVICES"
"""What shows GPUs to ROCm itself, as Slurm sets it: the others count among those."""
GPUS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""What shows GPUs to a process, AMD's own first: vLLM ends where both are set and differ."""
WITH_PARENT = f"""\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if cores := os.environ.get("{CORES}"):
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Dies with the thread that started it (prctl 1 is PR_SET_PDEATHSIG), also if that is killed; and keeps to its cores
with all that it starts. vLLM binds no more of itself to them than the threads that compute."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of one model, all alike."""

    python: str
    """Of an environment with vLLM."""
    model: Path
    max_length: int
    slots: int = 64
    dtype: str = "bfloat16"
    gpus: int = 0
    """Of one server, which splits the model over them; 0 is the CPU."""
    first_gpu: int = 0
    gpu_memory: float = 0.9
    is_nccl: bool = False
    cpu_kv_gb: int = 1

    def command(self, port: int) -> list[str]:
        """What one server runs."""
        options = {
            "--model": str(self.model),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--max-model-len": str(self.max_length),
            "--max-num-seqs": str(self.slots),
            "--dtype": self.dtype,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",  # not the model's own
        }
        if self.gpus:
            options |= {"--tensor-parallel-size": str(self.gpus), "--gpu-memory-utilization": str(self.gpu_memory)}
        else:
            options |= {"--worker-extension-cls": f"{WORKER}.Worker"}
        if self.is_nccl:
            options |= {"--weight-transfer-config": '{"backend": "nccl"}'}
        module = "vllm.entrypoints.openai.api_server"  # `vllm serve` does not find vllm-cpu's metadata
        flags = ["--disable-uvicorn-access-log", *([] if self.gpus else CPU_FLAGS)]
        flat = [word for pair in options.items() for word in pair]
        return [self.python, "-c", WITH_PARENT, "-m", module, *flat, *flags]

    def environment(self, number: int, count: int, cores: Sequence[int], base: Mapping[str, str]) -> dict[str, str]:
        """Of server `number` of `count`: its own GPUs of those that `base` shows, or its own share of `cores`.

        Raises `ConfigError` where `base` shows too few.
        """
        made = {name: value for name, value in base.items() if not OF_RANKS.fullmatch(name)}
        made |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.gpus:
            first = self.first_gpu + number * self.gpus
            told = [name for name in GPUS if name in base]
            by = told[0] if told else ROCR
            shown = [gpu for gpu in base[by].split(",") if gpu] if by in base else ["any"] * (first + self.gpus)
            mine = (shown if told else [str(index) for index in range(len(shown))])[first : first + self.gpus]
            if len(mine) < self.gpus:
                raise ConfigError(
                    f"engine {number + 1} of {count}: expected {first + self.gpus} GPUs or more, got {by}="
                    f"{base[by]}; lower engines.count or engines.tensor_parallel, or show this process more"
                )
            made |= dict.fromkeys(told or GPUS[1:], ",".join(mine))
            made.pop(CORES, None)
        else:
            mine = [str(core) for core in cores[number::count] or [cores[number % len(cores)]]]
            made |= {
                CORES: ",".join(mine),
                "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_gb),
            }
        return made

    @asynccontextmanager
    async def serve(self, count: int, logs: Path) -> AsyncIterator[list[str]]:
        """Start `count` servers, wait until they answer, and end them. Yields their URLs.

        `logs` gets a file for each. Raises `ConfigError` where there are too few GPUs, and `EngineFailed` with its last
        lines when one ends before it answers.
        """
        base = {**os.environ, "PYTHONPATH": str(_extension(logs))}
        cores = sorted(os.sched_getaffinity(0))
        environments = [self.environment(number, count, cores, base) for number in range(count)]
        async with aiohttp.ClientSession() as session:
            answers: list[asyncio.Future[str]] = []
            keepers = []
            for number, environment in enumerate(environments):
                answers.append(asyncio.get_running_loop().create_future())
                keeper = _keep(self.command, environment, logs / f"engine{number}.log", session, answers[-1])
                keepers.append(asyncio.create_task(keeper))
            try:
                yield list(await asyncio.gather(*answers))
            finally:
                for task in keepers:
                    task.cancel()
                await asyncio.gather(*keepers, return_exceptions=True)


async def _keep(
    command: Callable[[int], list[str]],
    environment: Mapping[str, str],
    log: Path,
    session: aiohttp.ClientSession,
    answers: asyncio.Future[str],
) -> None:
    """Have a server run until cancelled. Its URL goes to `answers` as soon as it is there, or `EngineFailed`."""
    port = free_port()
    while True:
        try:
            async with _child(command(port), environment, log) as process:
                if not answers.done():
                    answers.set_result(await _answering(session, f"http://127.0.0.1:{port}", process, log))
                why = f"it ended with exit code {await process.wait()}"
        except Exception as error:  # whatever it is, the first time it is the block's, and later it may pass
            if not answers.done():
                answers.set_exception(error)
                return
            why = repr(error)
        logger.warning("the vLLM server of %s is started anew: %s", log, why)
        await asyncio.sleep(AGAIN_S)


@asynccontextmanager
async def _child(command: Sequence[str], environment: Mapping[str, str], log: Path) -> AsyncIterator[Process]:
    """A process with all that it starts: a group, which gets a signal, some time, and is killed."""
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
            await asyncio.wait_for(process.wait(), END_S)
        with contextlib.suppress(ProcessLookupError):  # also what outlived its leader
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _answering(session: aiohttp.ClientSession, url: str, process: Process, log: Path) -> str:
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return url
            await asyncio.sleep(0.25)
    raise EngineFailed(f"expected a vLLM server, got exit code {process.returncode}; {log} ends with:\n{_end(log)}")


def _extension(logs: Path) -> Path:
    """A folder with our worker extension alone: our packages must not shadow those of vLLM's environment."""
    folder = (logs / "extension").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(here[0], f"{WORKER}.py"), folder)
    return folder


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on, of this host's address, or of all of them where that is empty."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
