"""Tests of the launcher of vLLM servers: their commands and environments, restarts, and the end of all their processes.

A small HTTP server replaces vLLM. It answers the health route and starts a child process.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

import trainer
from trainer.config import ConfigError
from trainer.engines import vllm_servers
from trainer.engines.engine import EngineError
from trainer.engines.vllm_servers import CORES_VARIABLE, GPU_VARIABLES, WORKER_FILES, VllmServers

FAKE_VLLM = """
import http.server, json, os, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
model = sys.argv[sys.argv.index("--model") + 1]
open(f"{os.path.dirname(model)}/environment.{port}", "w").write(json.dumps(dict(os.environ)))
if model.endswith("broken"):
    sys.exit("no such architecture")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
cores = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
child_cores = ",".join(map(str, sorted(os.sched_getaffinity(child.pid))))
open(f"{model}.{port}", "w").write(f"{os.getpid()} {child.pid} {cores} {child_cores}")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
"""Code of the fake server. It writes its environment to `environment.PORT`, and four fields to `MODEL.PORT`: its
process id, the process id of its child, the cores that it should use, and the cores on which its child may run. It
exits at once if the name of the model ends with `broken`."""


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Settings of servers whose interpreter finds a fake `vllm` package."""
    module = tmp_path / "site/vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return VllmServers(str(python), tmp_path / "model", max_model_len=64)


RANK_SCRIPT = """
import json, os, sys
outside = json.load(open(sys.argv[1]))
if os.environ["RANK"] == "0":
    json.dump({name: value for name, value in os.environ.items() if outside.get(name) != value}, open(sys.argv[2], "w"))
"""
"""Code that writes the environment variables which torchrun has set or changed for rank 0."""


@pytest.mark.asyncio
async def test_servers_started_by_a_rank_get_no_launcher_variables(servers, tmp_path, monkeypatch):
    """Check the variables of the installed torchrun, and some of accelerate and of other versions of torchrun."""
    pytest.importorskip("torch")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # torchrun sets it only if it is not set
    (tmp_path / "rank.py").write_text(RANK_SCRIPT)
    outside = dict(os.environ)
    (tmp_path / "outside.json").write_text(json.dumps(outside))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(tmp_path / name) for name in ("rank.py", "outside.json", "rank.json")]
    process = await asyncio.create_subprocess_exec(*torchrun, *script, env=outside, stderr=subprocess.PIPE)
    _, output = await process.communicate()
    assert process.returncode == 0, output.decode()
    rank_variables = json.loads((tmp_path / "rank.json").read_text())
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"} < set(rank_variables)
    rank_variables |= {"NCCL_ASYNC_ERROR_HANDLING": "1", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    other_variables = {"NCCL_SOCKET_IFNAME": "eth0", "HF_HOME": "/models", "VLLM_USE_V1": "1"}
    for name, value in {**rank_variables, **other_variables}.items():
        monkeypatch.setenv(name, value)
    async with servers.serve(1, tmp_path / "logs"):
        (file,) = tmp_path.glob("environment.*")
    server_variables = json.loads(file.read_text())
    assert not set(rank_variables) & set(server_variables)
    assert other_variables.items() <= server_variables.items()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


async def wait_until_dead(pids):
    async with asyncio.timeout(60):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 (the kernel sends no event)
            await asyncio.sleep(0.02)


def fields_of_servers(directory, port="*"):
    """Return the four fields that each server has written to its file `model.PORT`."""
    return [path.read_text().split() for path in directory.glob(f"model.{port}")]


def pids_of_servers(directory, port="*"):
    """Return the process ids of all servers, or of the server at `port`, and of their child processes."""
    fields = fields_of_servers(directory, port)
    return [int(pid) for server, child, *_ in fields for pid in (server, child)]


async def is_healthy(session, url):
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/health") as response:
            return response.status == 200


@pytest.mark.asyncio
async def test_servers_run_on_their_own_cores_and_end_with_all_their_processes(servers, tmp_path):
    async with servers.serve(2, tmp_path / "logs") as urls:
        pids, fields = pids_of_servers(tmp_path), fields_of_servers(tmp_path)
        assert len(set(urls)) == 2
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        assert all(cores == child_cores for _, _, cores, child_cores in fields)
        if len(os.sched_getaffinity(0)) > 1:
            assert len({cores for _, _, cores, _ in fields}) == 2
    await wait_until_dead(pids)


@pytest.mark.asyncio
async def test_a_server_that_ends_is_restarted_at_its_address(servers, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(vllm_servers, "RESTART_DELAY_S", 0.0)
    async with servers.serve(2, tmp_path / "logs") as urls:
        port = urls[0].rpartition(":")[2]
        first_pids = pids_of_servers(tmp_path, port)
        os.kill(first_pids[0], signal.SIGKILL)
        await wait_until_dead(first_pids)  # the child too, since the restarted server needs its memory
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while not await is_healthy(session, urls[0]):  # noqa: ASYNC110 (the server sends no event)
                await asyncio.sleep(0.02)
        second_pids = pids_of_servers(tmp_path, port)
        assert not set(first_pids) & set(second_pids)
        assert all(map(is_alive, pids_of_servers(tmp_path)))
    await wait_until_dead(second_pids)
    assert "engine0.log restarts in 0 s: it ended with exit code -9" in caplog.text


@pytest.mark.asyncio
async def test_a_missing_python_is_an_error(servers, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        async with replace(servers, python=str(tmp_path / "nowhere")).serve(1, tmp_path / "logs"):
            pass


@pytest.mark.asyncio
async def test_a_failed_start_is_an_error_with_the_end_of_the_log(servers, tmp_path):
    broken = replace(servers, model=tmp_path / "broken")
    with pytest.raises(EngineError, match=r"exit code 1; .*engine0.log ends with:\nno such architecture"):
        async with broken.serve(1, tmp_path / "logs"):
            pass


@pytest.mark.asyncio
async def test_servers_end_when_their_owner_is_killed(servers, tmp_path):
    owner_script = f"""
import asyncio, pathlib
from trainer.engines.vllm_servers import VllmServers
servers = VllmServers({servers.python!r}, pathlib.Path({str(servers.model)!r}), 64)
async def main():
    async with servers.serve(1, pathlib.Path({str(tmp_path / "logs")!r})):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", owner_script, stdout=subprocess.PIPE)
    assert await owner.stdout.readline() == b"up\n"
    server, child = pids_of_servers(tmp_path)
    owner.kill()
    await owner.wait()
    await wait_until_dead([server])
    os.kill(child, signal.SIGKILL)  # the fake's child does not end with its parent, unlike vLLM's child processes


def test_each_server_gets_its_own_gpus_and_cores_are_shared_if_there_are_too_few():
    gpu_servers = VllmServers("python", Path("model"), max_model_len=64, gpus_per_server=2, first_gpu=4)
    gpus = [gpu_servers.environment(number, 2, [0], {})["CUDA_VISIBLE_DEVICES"] for number in (0, 1)]
    assert gpus == ["4,5", "6,7"]
    assert CORES_VARIABLE not in gpu_servers.environment(0, 2, [0], {CORES_VARIABLE: "auto"})
    cpu_servers = VllmServers("python", Path("model"), max_model_len=64)
    cores = [cpu_servers.environment(number, 3, [0, 1], {})[CORES_VARIABLE] for number in range(3)]
    assert cores == ["0", "1", "0"]


@pytest.mark.parametrize("names", [["CUDA_VISIBLE_DEVICES"], ["HIP_VISIBLE_DEVICES"], GPU_VARIABLES])
def test_servers_use_only_the_visible_gpus(names):
    base = dict.fromkeys(names, "4,5,GPU-6f,7")
    servers = VllmServers("python", Path("model"), 64, gpus_per_server=1, first_gpu=2)  # training uses the first two
    for number, gpu in enumerate(("GPU-6f", "7")):
        variables = servers.environment(number, 2, [0], base)
        gpu_variables = {name: variables[name] for name in GPU_VARIABLES if name in variables}
        assert gpu_variables == dict.fromkeys(names, gpu)


def test_gpus_visible_to_rocm_are_counted_from_zero():
    """Slurm sets ROCR_VISIBLE_DEVICES for a job on AMD GPUs."""
    base = {"ROCR_VISIBLE_DEVICES": "4,5,6"}
    servers = VllmServers("python", Path("model"), 64, gpus_per_server=1, first_gpu=1)
    environments = [servers.environment(number, 2, [0], base) for number in (0, 1)]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in environments] == ["1", "2"]
    assert [variables["ROCR_VISIBLE_DEVICES"] for variables in environments] == ["4,5,6", "4,5,6"]
    message = "engine 3 of 3: expected 4 GPUs or more, got ROCR_VISIBLE_DEVICES=4,5,6; lower"
    with pytest.raises(ConfigError, match=message):
        servers.environment(2, 3, [0], base)


@pytest.mark.asyncio
async def test_too_few_gpus_are_a_config_error_before_any_server_starts(servers, tmp_path, monkeypatch):
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    for visible, server in (("4,5,6", 2), ("", 1)):  # the first server without enough GPUs
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpus = f"expected {2 * server} GPUs or more, got CUDA_VISIBLE_DEVICES={visible}; lower"
        with pytest.raises(ConfigError, match=f"^engine {server} of 2: {gpus}"):
            async with replace(servers, gpus_per_server=2).serve(2, tmp_path / "logs"):
                pass
    assert not pids_of_servers(tmp_path)


@pytest.mark.parametrize("file", WORKER_FILES)
def test_the_worker_extension_imports_nothing_but_vllm_and_torch(file):
    tree = ast.parse(Path(trainer.__path__[0], "sync", file).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {"vllm", "torch", "weight_group", *sys.stdlib_module_names}


def test_more_options_are_passed_on_and_those_of_the_trainer_are_refused() -> None:
    servers = VllmServers("python", Path("model"), max_model_len=64)
    more = {"kv_cache_dtype": "fp8", "enable_prefix_caching": False, "hf_overrides": {"a": 1}, "async_scheduling": True}
    command = replace(servers, args=more).command(8000)
    words = [
        "--kv-cache-dtype",
        "fp8",
        "--no-enable-prefix-caching",
        "--hf-overrides",
        '{"a": 1}',
        "--async-scheduling",
    ]
    assert [command[command.index(word)] for word in words] == words
    assert "--enable-sleep-mode" in replace(servers, sleep_mode=True).command(8000)
    assert "--enable-sleep-mode" not in command
    for name in ("max_model_len", "gpu_memory_utilization", "dtype", "worker_extension_cls", "enable_sleep_mode"):
        with pytest.raises(ConfigError, match=rf"engines\.args: --{name.replace('_', '-')}: expected other options"):
            replace(servers, args={name: 1}).command(8000)
