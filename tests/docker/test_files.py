"""Tests of the files in docker/, as far as they can be tested without a container engine."""

from __future__ import annotations

import errno
import json
import re
import runpy
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sandbox.commands import machine_checks
from sandbox.jail import kernel, userns
from sandbox.jail.seccomp import CALL_POLICY, ENOSYS, EPERM
from sandbox.jail.syscalls import X86_64
from sandbox.settings.server import load
from tests.containers import report
from trainer.config_loading import load_config

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
PROFILE: Mapping[str, Any] = json.loads((DOCKER / "seccomp.json").read_text())


def evaluate(syscall: str, *arguments: int) -> str | int:
    """Return the result of `PROFILE` for a system call: "SCMP_ACT_ALLOW", or an errno."""

    def holds(condition: Mapping[str, Any]) -> bool:
        argument = arguments[condition["index"]]
        match condition["op"]:
            case "SCMP_CMP_MASKED_EQ":
                return argument & condition["value"] == condition["valueTwo"]
            case "SCMP_CMP_EQ":
                return bool(argument == condition["value"])
        raise AssertionError(condition)

    for rule in PROFILE["syscalls"]:
        if syscall in rule["names"] and all(map(holds, rule.get("args", ()))):
            return rule.get("errnoRet", rule["action"])
    return PROFILE["defaultErrnoRet"]


def test_profile_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCKER / "seccomp.py"))
    assert script["PROFILE"].read_text() == script["profile"](), "run python docker/seccomp.py"


@pytest.mark.parametrize(
    ("syscall", "arguments"),
    [
        ("unshare", (kernel.CLONE_NEWUSER,)),
        ("unshare", (kernel.CLONE_NEWUSER | userns.JAIL_NAMESPACES,)),
        ("unshare", (kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS,)),
        ("clone", (kernel.CLONE_NEWPID | signal.SIGCHLD,)),
        ("mount", (0, 0, 0, kernel.MS_REC | kernel.MS_PRIVATE, 0)),
        ("mount", (0, 0, 0, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID, 0)),
        ("umount2", (0, kernel.MNT_DETACH)),
        ("pivot_root", (0, 0)),
        ("sethostname", (0, 7)),
        ("clone", (0x3D0F00,)),  # the flags by which the C library starts a thread
        ("socket", (socket.AF_INET, socket.SOCK_STREAM, 0)),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 0)),  # NETLINK_ROUTE
        ("memfd_create", (0, 0)),
        ("setpriority", (0, 0, 7)),
        ("sched_setscheduler", (0, 5, 0)),
    ],
)
def test_profile_allows_the_system_calls_of_the_server(syscall: str, arguments: tuple[int, ...]) -> None:
    assert evaluate(syscall, *arguments) == "SCMP_ACT_ALLOW"


@pytest.mark.parametrize(
    ("syscall", "arguments"),
    [
        ("unshare", (0x02000000,)),  # CLONE_NEWCGROUP
        ("unshare", (kernel.CLONE_NEWUSER | 0x80,)),  # 0x80: CLONE_NEWTIME
        ("setns", (9, kernel.CLONE_NEWPID)),
        ("mount", (0, 0, 0, 0x100000, 0)),  # MS_SHARED
        ("umount2", (0, 1)),  # MNT_FORCE
        ("clone", (kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | signal.SIGCHLD,)),
        ("clone", (kernel.CLONE_NEWNS | signal.SIGCHLD,)),
        ("bpf", (0, 0, 0)),
        ("open_tree", (0, 0, 0)),
        ("fsopen", (0, 0)),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 12)),  # NETLINK_NETFILTER
        ("socket", (socket.AF_PACKET, socket.SOCK_RAW, 0)),
        ("socket", (socket.AF_VSOCK, socket.SOCK_STREAM, 0)),
        *((name, ()) for name in ("ptrace", "process_vm_readv", "io_uring_setup", "keyctl", "userfaultfd")),
    ],
)
def test_profile_refuses_other_system_calls(syscall: str, arguments: tuple[int, ...]) -> None:
    assert evaluate(syscall, *arguments) == errno.EPERM


@pytest.mark.parametrize("syscall", ["clone3", "mseal"])
def test_profile_fails_system_calls_with_a_fallback_by_enosys(syscall: str) -> None:
    assert evaluate(syscall, 0, 0) == errno.ENOSYS


def test_profile_allows_all_that_the_call_policy_allows() -> None:
    allowed = {name for rule in PROFILE["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert {name for name, rule in CALL_POLICY.items() if rule not in (EPERM, ENOSYS)} <= allowed


def test_profile_names_existing_system_calls_only() -> None:
    assert {name for rule in PROFILE["syscalls"] for name in rule["names"]} <= X86_64.keys()


@pytest.mark.parametrize("gpu", ["rocm", "cuda"])
def test_the_variables_of_a_trainer_image_are_settings(gpu: str) -> None:
    text = (DOCKER / f"trainer.{gpu}.Dockerfile").read_text()
    variables = dict(re.findall(r"(RSTAR_TRAIN_\w+)=(\S+)", text))
    assert load_config(REPOSITORY / "configs/tiny.toml", variables).engines.vllm_python == "/usr/bin/python3"


@pytest.mark.parametrize("dockerfile", ["sandbox.Dockerfile", "test.Dockerfile", "cluster.Dockerfile"])
def test_the_files_that_a_dockerfile_copies_exist(dockerfile: str) -> None:
    for line in (DOCKER / dockerfile).read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            _copy, *sources, _target = line.split()
            assert [source for source in sources if not (REPOSITORY / source).exists()] == []


@pytest.mark.parametrize("gpu", ["cuda", "rocm"])
def test_trainer_images_have_the_vllm_version_of_the_tests(gpu: str) -> None:
    pinned = re.search(r"^ARG BASE=.*:v(.*)$", (DOCKER / f"trainer.{gpu}.Dockerfile").read_text(), re.MULTILINE)
    tested = re.search(r"^VLLM .*==(.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert pinned and tested and pinned[1] == tested[1]


def test_image_serves_as_an_ordinary_user() -> None:
    lines = (DOCKER / "sandbox.Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    (argv,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT"))
    assert argv == ["rstar-sandbox", "serve", "--host", "0.0.0.0"]


def test_compose_file_names_existing_settings_and_files() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    environ = dict(re.findall(r"^ +(RSTAR_\w+): ([^\s#]+)", text, re.MULTILINE))
    del environ["RSTAR_SANDBOX_TOKEN_FILE"]  # the file exists only in the container
    assert len(environ) == 1
    assert load(None, environ, {}).isolation == "namespaces"
    (context, dockerfile) = (re.search(rf"{name}: (\S+)", text)[1] for name in ("context", "dockerfile"))  # type: ignore[index]
    assert (DOCKER / context / dockerfile).is_file()
    assert (DOCKER / re.search(r"seccomp:(\S+)", text)[1]).is_file()  # type: ignore[index]
    assert "privileged" not in text and "cap_add" not in text


def test_compose_file_is_valid_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["sandbox"]
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]


def test_docker_test_script_refuses_other_set_ups() -> None:
    run = subprocess.run(
        [DOCKER / "test", "default-user", "none"], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 2
    assert "expected some of default-user, default-root," in run.stderr and "got 'none'" in run.stderr


def test_doctor_names_files_and_profiles_that_exist() -> None:
    assert (REPOSITORY / machine_checks.SECCOMP_PROFILE).samefile(DOCKER / "seccomp.json")
    assert (REPOSITORY / machine_checks.UNIT).is_file()
    assert machine_checks.LOCALHOST_PROFILE.partition("seccompProfile: ")[2].rstrip("}") in (
        (DOCKER / "k8s.yaml").read_text().replace("}", "")
    )


def test_the_tables_of_the_containers_are_those_of_the_rows() -> None:
    assert report.main(["--check"]) == 0
