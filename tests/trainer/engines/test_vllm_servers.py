"""The launcher of vLLM servers: what it runs, and that nothing outlives it. A stand-in answers the health route."""

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
from trainer.engines.vllm_servers import CORES_VARIABLE, VllmServers

STAND_IN = """
import http.server, json, os, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
model = sys.argv[sys.argv.index("--model") + 1]
open(f"{os.path.dirname(model)}/environment.{port}", "w").write(json.dumps(dict(os.environ)))
if model.endswith("broken"):
    sys.exit("no such architecture")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
told, kept = os.environ["VLLM_CPU_OMP_THREADS_BIND"], ",".join(map(str, sorted(os.sched_getaffinity(child.pid))))
open(f"{model}.{port}", "w").write(f"{os.getpid()} {child.pid} {told} {kept}")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Servers whose Python has a fake `vllm` package."""
    module = tmp_path / "site/vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return VllmServers(str(python), tmp_path / "model", max_model_len=64)


OF_A_RANK = """
import json, os, sys
outside = json.load(open(sys.argv[1]))
if os.environ["RANK"] == "0":
    json.dump({name: value for name, value in os.environ.items() if outside.get(name) != value}, open(sys.argv[2], "w"))
"""


@pytest.mark.asyncio
async def test_servers_started_by_a_rank_get_no_launcher_variables(servers, tmp_path, monkeypatch):
    """Variables that the installed torchrun sets, and those of accelerate and other versions of torchrun."""
    pytest.importorskip("torch")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # torchrun sets it where nobody has
    (tmp_path / "rank.py").write_text(OF_A_RANK)
    outside = dict(os.environ)
    (tmp_path / "outside.json").write_text(json.dumps(outside))
    ranks = ["--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    files = [str(tmp_path / name) for name in ("outside.json", "inside.json")]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    process = await asyncio.create_subprocess_exec(*torchrun, *ranks, *files, env=outside, stderr=subprocess.PIPE)
    _, output = await process.communicate()
    assert process.returncode == 0, output.decode()
    of_rank = json.loads((tmp_path / "inside.json").read_text())
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"} < set(of_rank)
    of_rank |= {"NCCL_ASYNC_ERROR_HANDLING": "1", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    kept = {"NCCL_SOCKET_IFNAME": "eth0", "HF_HOME": "/models", "VLLM_USE_V1": "1"}
    for name, value in {**of_rank, **kept}.items():
        monkeypatch.setenv(name, value)
    async with servers.serve(1, tmp_path / "logs"):
        (file,) = tmp_path.glob("environment.*")
    told = json.loads(file.read_text())
    assert not set(of_rank) & set(told)
    assert kept.items() <= told.items()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


async def gone(pids):
    async with asyncio.timeout(60):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 (the kernel sends no event)
            await asyncio.sleep(0.02)


def started(folder):
    output = [path.read_text().split() for path in folder.glob("model.*")]
    return [int(pid) for pids in output for pid in pids[:2]], [cores for _, _, *cores in output]


def started_at(folder, url):
    output = Path(f"{folder}/model.{url.rpartition(':')[2]}").read_text().split()
    return [int(pid) for pid in output[:2]]


async def answers(session, url):
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/health") as response:
            return response.status == 200


@pytest.mark.asyncio
async def test_servers_answer_and_end_with_all_their_processes(servers, tmp_path):
    async with servers.serve(2, tmp_path / "logs") as urls:
        pids, cores = started(tmp_path)
        assert len(set(urls)) == 2
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        assert all(told == kept for told, kept in cores)
        if len(os.sched_getaffinity(0)) > 1:
            assert len({told for told, _ in cores}) == 2
    await gone(pids)


@pytest.mark.asyncio
async def test_a_server_that_ends_is_restarted_at_its_address(servers, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(vllm_servers, "RESTART_DELAY_S", 0.0)
    async with servers.serve(2, tmp_path / "logs") as urls:
        first = started_at(tmp_path, urls[0])
        os.kill(first[0], signal.SIGKILL)
        await gone(first)  # with all that it had started, whose memory the next one needs
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while not await answers(session, urls[0]):  # noqa: ASYNC110 (the server sends no event)
                await asyncio.sleep(0.02)
        second = started_at(tmp_path, urls[0])
        assert not set(first) & set(second)
        assert all(map(is_alive, started(tmp_path)[0]))
    await gone(second)
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
    owner = f"""
import asyncio, pathlib
from trainer.engines.vllm_servers import VllmServers
servers = VllmServers({servers.python!r}, pathlib.Path({str(servers.model)!r}), 64)
async def main():
    async with servers.serve(1, pathlib.Path({str(tmp_path / "logs")!r})):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", owner, stdout=subprocess.PIPE)
    assert await process.stdout.readline() == b"up\n"
    (server, child), _ = started(tmp_path)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await gone([server])
    os.kill(child, signal.SIGKILL)  # a stand-in's: vLLM's own end with their server


def test_each_server_gets_its_own_gpus_and_cores_are_shared_if_there_are_too_few():
    gpu = VllmServers("python", Path("model"), 64, gpus_per_server=2, first_gpu=4)
    assert [gpu.environment(number, 2, [0], {})["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == ["4,5", "6,7"]
    assert CORES_VARIABLE not in gpu.environment(0, 2, [0], {CORES_VARIABLE: "auto"})
    assert "--worker-extension-cls" not in gpu.command(1)
    cpu = VllmServers("python", Path("model"), 64)
    bound = [cpu.environment(number, 3, [0, 1], {})[CORES_VARIABLE] for number in range(3)]
    assert bound == ["0", "1", "0"]
    assert "nccl" in " ".join(replace(gpu, uses_nccl=True).command(1))


@pytest.mark.parametrize("shown", [["CUDA_VISIBLE_DEVICES"], ["HIP_VISIBLE_DEVICES"], vllm_servers.GPU_VARIABLES])
def test_servers_use_only_the_visible_gpus(shown):
    base = dict.fromkeys(shown, "4,5,GPU-6f,7")
    servers = VllmServers("python", Path("model"), 64, gpus_per_server=1, first_gpu=2)  # two train
    for number, own in enumerate(("GPU-6f", "7")):
        variables = servers.environment(number, 2, [0], base)
        assert {name: variables[name] for name in vllm_servers.GPU_VARIABLES if name in variables} == dict.fromkeys(
            shown, own
        )


def test_gpus_visible_to_rocm_are_counted_from_zero():
    """Slurm sets ROCR_VISIBLE_DEVICES for a job on AMD GPUs."""
    base = {"ROCR_VISIBLE_DEVICES": "4,5,6"}
    servers = VllmServers("python", Path("model"), 64, gpus_per_server=1, first_gpu=1)
    variables = [servers.environment(number, 2, [0], base) for number in (0, 1)]
    assert [
        (environment["CUDA_VISIBLE_DEVICES"], environment["ROCR_VISIBLE_DEVICES"]) for environment in variables
    ] == [
        ("1", "4,5,6"),
        ("2", "4,5,6"),
    ]
    with pytest.raises(
        ConfigError, match="engine 3 of 3: expected 4 GPUs or more, got ROCR_VISIBLE_DEVICES=4,5,6; lower"
    ):
        servers.environment(2, 3, [0], base)


@pytest.mark.asyncio
async def test_too_few_gpus_are_a_config_error_before_any_server_starts(servers, tmp_path, monkeypatch):
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    for shown, last in (("4,5,6", 2), ("", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        output = rf"^engine {last} of 2: expected {2 * last} GPUs or more, got CUDA_VISIBLE_DEVICES={shown}; lower"
        with pytest.raises(ConfigError, match=output):
            async with replace(servers, gpus_per_server=2).serve(2, tmp_path / "logs"):
                pass
    assert not started(tmp_path)[0]


def test_the_worker_extension_imports_nothing_but_vllm():
    tree = ast.parse(Path(trainer.__path__[0], "engines", "vllm_worker.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"vllm._custom_ops", "__future__"}
