"""The files in docker/, as far as they can be tested without a container engine."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sandbox.config import load
from sandbox.jail import kernel, userns
from sandbox.jail.seccomp import CALL_POLICY, ENOSYS, EPERM
from sandbox.jail.syscalls import X86_64

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
DOCKERFILES = ("sandbox.Dockerfile", "test.Dockerfile")


def load_seccomp_script() -> Any:
    spec = importlib.util.spec_from_file_location("docker_seccomp", DOCKER / "seccomp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluate(profile: Mapping[str, Any], call: str, *arguments: int) -> str | int:
    """Return the profile's result for a system call: "SCMP_ACT_ALLOW", or an errno."""

    def holds(condition: Mapping[str, Any]) -> bool:
        argument = arguments[condition["index"]]
        match condition["op"]:
            case "SCMP_CMP_MASKED_EQ":
                return argument & condition["value"] == condition["valueTwo"]
            case "SCMP_CMP_EQ":
                return bool(argument == condition["value"])
        raise AssertionError(condition)

    for rule in profile["syscalls"]:
        if call in rule["names"] and all(map(holds, rule.get("args", ()))):
            return rule.get("errnoRet", rule["action"])
    return profile["defaultErrnoRet"]


def test_profile_is_up_to_date() -> None:
    module = load_seccomp_script()
    assert module.PROFILE.read_text() == module.profile(), "run python docker/seccomp.py"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("unshare", (kernel.CLONE_NEWUSER,)),
        ("unshare", (kernel.CLONE_NEWUSER | userns.JAIL_NAMESPACES,)),
        ("unshare", (kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS,)),
        ("clone", (kernel.CLONE_NEWPID | signal.SIGCHLD,)),
        ("mount", (0, 0, 0, kernel.MS_REC | kernel.MS_PRIVATE, 0)),
        ("mount", (0, 0, 0, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID, 0)),
        ("umount2", (0, kernel.MNT_DETACH)),
        ("pivot_root", (0, 0)),
        ("sethostname", (0, 7)),
        ("clone", (0x3D0F00,)),  # a thread, as the C library starts it
        ("socket", (socket.AF_INET, socket.SOCK_STREAM, 0)),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 0)),  # NETLINK_ROUTE
        ("memfd_create", (0, 0)),
    ],
)
def test_profile_allows_what_the_server_does(call: str, arguments: tuple[int, ...]) -> None:
    assert evaluate(json.loads(load_seccomp_script().PROFILE.read_text()), call, *arguments) == "SCMP_ACT_ALLOW"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("unshare", (0x02000000,)),  # CLONE_NEWCGROUP
        ("unshare", (kernel.CLONE_NEWUSER | 0x80,)),  # and CLONE_NEWTIME
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
def test_profile_refuses_other_calls(call: str, arguments: tuple[int, ...]) -> None:
    assert evaluate(json.loads(load_seccomp_script().PROFILE.read_text()), call, *arguments) == errno.EPERM


@pytest.mark.parametrize("call", ["clone3", "mseal"])
def test_profile_fails_optional_calls_with_enosys(call: str) -> None:
    assert evaluate(json.loads(load_seccomp_script().PROFILE.read_text()), call, 0, 0) == errno.ENOSYS


def test_profile_allows_all_that_the_call_policy_allows() -> None:
    profile = json.loads(load_seccomp_script().PROFILE.read_text())
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert {name for name, rule in CALL_POLICY.items() if rule not in (EPERM, ENOSYS)} <= allowed


def test_profile_names_existing_system_calls_only() -> None:
    named = [
        name for rule in json.loads(load_seccomp_script().PROFILE.read_text())["syscalls"] for name in rule["names"]
    ]
    assert {*named} <= X86_64.keys()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_copied_files_exist(name: str) -> None:
    for line in (DOCKER / name).read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            assert [word for word in line.split()[1:-1] if not (REPOSITORY / word).exists()] == []


@pytest.mark.parametrize("gpu", ["cuda", "rocm"])
def test_trainer_images_have_the_vllm_version_of_the_tests(gpu: str) -> None:
    pinned = re.search(r"^ARG BASE=.*:v(.*)$", (DOCKER / f"trainer.{gpu}.Dockerfile").read_text(), re.MULTILINE)
    tested = re.search(r"^VLLM .*==(.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert pinned and tested and pinned[1] == tested[1]


def test_image_serves_as_an_ordinary_user() -> None:
    lines = (DOCKER / "sandbox.Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT"))
    assert entry[:2] == ["rstar-sandbox", "serve"]
    flags = dict(zip((flag.removeprefix("--") for flag in entry[2::2]), entry[3::2], strict=True))
    assert load(None, {"RSTAR_SANDBOX_TOKEN": "secret"}, flags).host == "0.0.0.0"


def test_compose_file_names_existing_settings_and_files() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    environ = dict(re.findall(r"^ +(RSTAR_\w+): ([^\s#]+)", text, re.MULTILINE))
    assert len(environ) == 2
    environ |= {"RSTAR_SANDBOX_TOKEN_FILE": ""}
    assert load(None, {name: value for name, value in environ.items() if value}, {}).isolation == "namespaces"
    (context, dockerfile) = (re.search(rf"{name}: (\S+)", text)[1] for name in ("context", "dockerfile"))  # type: ignore[index]
    assert (DOCKER / context / dockerfile).is_file()
    assert (DOCKER / re.search(r"seccomp:(\S+)", text)[1]).is_file()  # type: ignore[index]
    assert "privileged" not in text and "cap_add" not in text


def test_compose_file_is_valid_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["sandbox"]
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("arguments", [["docker"], ["landlock", "none"]])
def test_docker_test_script_refuses_other_levels(arguments: list[str]) -> None:
    run = subprocess.run([DOCKER / "test", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert "expected landlock or namespaces, got" in run.stderr
