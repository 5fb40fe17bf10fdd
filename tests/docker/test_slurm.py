"""Tests of the script docker/slurm/collect.sbatch. Stubs replace Slurm, Ray and rstar-train."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/slurm/collect.sbatch"
STUBS = {
    "scontrol": r"printf 'node1\nnode2\nnode3\n'",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    # The stub of Ray runs until it gets a signal.
    "ray": 'echo "ray $* ${RAY_AUTH_MODE} ${#RAY_AUTH_TOKEN}" >>"$LOG"; [[ $1 == start ]] && exec sleep 100; exit 0',
    # The stub of the collection fails when all steps have started.
    "rstar-train": """
until (($(grep -c '^ray start' "$LOG") == STEPS)); do sleep 0.02; done
echo "rstar-train $*" >>"$LOG"
[[ $* != *--slow* ]] || exec sleep 100
exit 3
""",
}


def start(directory: Path, *arguments: str, nodes: int = 3) -> subprocess.Popen[bytes]:
    """Start the script with stubs that write their command lines to the file `log`."""
    for name, body in STUBS.items():
        stub = directory / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    environ = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "LOG": str(directory / "log"),
        "STEPS": "1" if nodes == 1 else "2",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": "77",
        "SLURM_CPUS_ON_NODE": "16",
    }
    with (directory / "stderr").open("w") as stderr:
        return subprocess.Popen(["bash", str(SCRIPT), *arguments], env=environ, start_new_session=True, stderr=stderr)


def assert_group_ends(pgid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(pgid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(pgid, signal.SIGKILL)
    raise AssertionError("a step has outlived the script")


def test_script_starts_head_and_workers_and_returns_the_exit_code_of_the_collection(tmp_path: Path) -> None:
    script = start(tmp_path, "run.toml", "/runs/a", "--set", "collect.samples_per_problem=4")
    assert script.wait(timeout=60) == 3
    assert_group_ends(script.pid)
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(line.endswith(" token 64") for line in lines if line.startswith("ray ")), "a token of 64 digits"
    (head,) = (line for line in lines if line.startswith("ray start --head"))
    assert "--port=6379 --num-cpus=0 " in head
    (worker,) = (line for line in lines if line.startswith("ray start --address=node1:6379"))
    assert "--num-cpus=16 " in worker
    assert lines[-1] == (
        "rstar-train collect run.toml --run-dir /runs/a --set collect.executor=ray "
        "--set collect.ray_address=node1:6379 --set collect.samples_per_problem=4"
    )


def test_a_job_of_one_node_runs_episodes_on_the_head(tmp_path: Path) -> None:
    script = start(tmp_path, "run.toml", "/runs/a", nodes=1)
    assert script.wait(timeout=60) == 3
    starts = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("ray start")]
    assert len(starts) == 1 and "--num-cpus=16 " in starts[0]


def test_sigterm_ends_the_collection_and_all_steps(tmp_path: Path) -> None:
    script = start(tmp_path, "run.toml", "/runs/a", "--slow")
    deadline = time.monotonic() + 30
    while "rstar-train" not in (log.read_text() if (log := tmp_path / "log").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.terminate()
    assert script.wait(timeout=30) == 128 + signal.SIGTERM
    assert_group_ends(script.pid)


def test_missing_arguments_are_a_misuse(tmp_path: Path) -> None:
    script = start(tmp_path, "run.toml")
    assert script.wait(timeout=30) == 2
    assert (tmp_path / "stderr").read_text().startswith("usage:")


def test_script_passes_shellcheck() -> None:
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("needs shellcheck")
    subprocess.run([shellcheck, str(SCRIPT)], check=True, timeout=60)
