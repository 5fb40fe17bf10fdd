"""Builds the images, tries the server in containers of them, and writes a row for each set-up into rows.json.

    docker/test [SET-UP ...]             all set-ups by default
    docker/test --engine podman --parts escape profile-user

It needs only Python and a container engine. The containers have no network: the load runs in a second container, which
shares the network of the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tests.containers import report
from tests.machines.report import problems

DOCKER = Path(__file__).parents[2] / "docker"
IMAGE = "localhost/rstar-sandbox"
IMAGES = {"sandbox": IMAGE, "test": f"{IMAGE}-test", "cluster": f"{IMAGE}-cluster"}
"""By the name of the Dockerfile: the image. The later ones are built on the first one."""
USER, ROOT = ("--user", "10001:10001"), ("--user", "0:0")
PROFILE = (f"--security-opt=seccomp={DOCKER / 'seccomp.json'}", "--security-opt=apparmor=unconfined")
READ_ONLY = ("--read-only", "--tmpfs=/tmp:mode=1777,size=1g")
POD = (*USER, *READ_ONLY, "--cap-drop=ALL", "--security-opt=no-new-privileges")
"""The securityContext of the Deployment in docker/k8s.yaml, as flags."""
COMMON = ("--network=none", "--init", "--memory=4g", "--pids-limit=16384")
LIMITS = ("--ulimit=nofile=20000:20000", "--ulimit=nproc=16384:16384")
LOW_LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")
STEPS = ("answer", "crowd", "forks", "stop", "answer")
"""Steps of `tests.machines.load`. After `stop` the container is started again."""
ROW, RUNNING, TOKEN = "row: ", "running", "machine"
"""As in `tests.machines.guest` and `tests.machines.load`, which need packages that are only in the image."""
STOP_TIMEOUT_S = 60
TIMEOUT_S = 1800
MAX_PROBLEM_CHARS = 500


@dataclass(frozen=True)
class SetUp:
    level: str
    """The isolation level that the server is started with. It does not start without it."""
    flags: Sequence[str]
    limits: Sequence[str] = LIMITS
    image: str = "sandbox"
    command: Sequence[str] = ()


SET_UPS = {
    "default-user": SetUp("landlock", USER),
    "default-root": SetUp("landlock", ROOT),
    "profile-user": SetUp("namespaces", (*USER, *PROFILE)),
    "profile-root": SetUp("namespaces", (*ROOT, *PROFILE)),
    "low-limits-user": SetUp("namespaces", (*USER, *PROFILE), LOW_LIMITS),
    "read-only-root": SetUp("landlock", (*ROOT, *READ_ONLY)),
    "pod-default": SetUp("landlock", POD),
    "pod-localhost": SetUp("namespaces", (*POD, *PROFILE)),
    "cluster-user": SetUp(
        "landlock",
        USER,
        image="cluster",
        command=("rstar-sandbox", "serve", "--host=0.0.0.0", "--port=8642", "--cluster=ray"),
    ),
}


class Engine:
    """The container engine."""

    def __init__(self, command: str, flags: str) -> None:
        self.command = shlex.split(command)
        self._flags = shlex.split(flags)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

    def output(self, *arguments: str) -> str:
        """Return what the engine prints. Raises `OSError` if it fails."""
        run = self.call(*arguments)
        if run.returncode:
            raise OSError(f"{' '.join(arguments)} ended with {run.returncode}: {run.stderr or run.stdout}")
        return run.stdout

    def run(self, flags: Sequence[str], image: str, *arguments: str) -> list[str]:
        """Return the arguments that start a container."""
        return ["run", *flags, *self._flags, IMAGES[image], *arguments]

    def run_python(self, flags: Sequence[str], *arguments: str) -> list[str]:
        """Return the arguments that run Python in a container of the test image, which is removed at its end."""
        return self.run(["--rm", "--entrypoint=python", *flags], "test", *arguments)

    def versions(self) -> str:
        programs = [
            self.command[0],
            *(self.command[i + 1] for i, word in enumerate(self.command) if word == "--runtime"),
        ]
        texts = [
            subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout for name in programs
        ]
        return ", ".join(re.sub(r"^(\S+) version ([^\s,]+).*", r"\1 \2", text, flags=re.DOTALL) for text in texts)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the images and try the set-ups. Return exit code 1 if something does not hold in one of them."""
    parser = argparse.ArgumentParser(prog="docker/test", description="Tries the server in containers.")
    parser.add_argument("set_ups", nargs="*", metavar="SET-UP", help=f"some of {', '.join(SET_UPS)}")
    parser.add_argument("--engine", default="docker", help="docker or podman, with flags (default: docker)")
    parser.add_argument("--build", help="command that builds an image (default: ENGINE build; none: they are built)")
    parser.add_argument("--build-flags", default="", help="e.g. --build-arg=BASE=... --secret=id=pip,src=pip.conf")
    parser.add_argument("--run-flags", default="", help="e.g. --no-healthcheck")
    parser.add_argument("--parts", default="doctor,mix,escape,server", help="(default: %(default)s)")
    parser.add_argument("--calls", default="2000", help="calls of the mix (default: 2000)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.set_ups if name not in SET_UPS]:
        parser.error(f"expected some of {', '.join(SET_UPS)}, got {unknown[0]!r}")
    engine = Engine(args.engine, args.run_flags)
    if args.build != "none":
        build(args.build or f"{args.engine} build", args.build_flags)
    report.write_rows(report.IMAGES, {name: describe(engine, image) for name, image in IMAGES.items()})
    holds = True
    for name in args.set_ups or SET_UPS:
        row = try_set_up(engine, SET_UPS[name], name, args.parts.split(","), args.calls)
        print(json.dumps({name: row}), flush=True)
        report.write_rows(report.SET_UPS, {name: row})
        holds &= not any(problems(row))
    return 0 if holds else 1


def build(command: str, flags: str) -> None:
    for name, image in IMAGES.items():
        file = ["-f", f"docker/{name}.Dockerfile", "-t", image]
        words = [*shlex.split(command), *shlex.split(flags), f"--build-arg=IMAGE={IMAGE}", *file, "."]
        subprocess.run(words, cwd=DOCKER.parent, check=True)


def describe(engine: Engine, image: str) -> dict[str, Any]:
    """Return the size of an image in MB, and that of each directory in /opt."""
    size = int(engine.output("image", "inspect", "--format={{.Size}}", image))
    du = engine.output("run", "--rm", "--network=none", *LIMITS, "--entrypoint=sh", image, "-c", "du -sk /opt/*")
    directories = {path: int(kb) * 1024 // 10**6 for kb, path in (line.split() for line in du.splitlines())}
    return {"mb": size // 10**6, "directories_mb": directories, "date": date.today().isoformat()}


def try_set_up(engine: Engine, set_up: SetUp, name: str, parts: Sequence[str], calls: str) -> dict[str, Any]:
    row: dict[str, Any] = {"set_up": name, "engine": engine.versions()}
    row |= {"kernel": os.uname().release, "date": date.today().isoformat()}
    flags = [*COMMON, *set_up.flags, *set_up.limits, f"--env=RSTAR_SANDBOX_ISOLATION={set_up.level}"]
    if (guest_parts := [part for part in parts if part != "server"]) and set_up.image == "sandbox":
        arguments = ["-m", "tests.machines.guest", name, ",".join(guest_parts), calls]
        run = engine.call(*engine.run_python(flags, *arguments))
        rows = [line for line in run.stdout.splitlines() if line.startswith(ROW)]
        row |= json.loads(rows[-1].removeprefix(ROW)) if rows else {"problem": run.stderr[-MAX_PROBLEM_CHARS:]}
    if "server" in parts:
        row["server"] = try_server(engine, set_up, flags)
    return row


def try_server(engine: Engine, set_up: SetUp, flags: Sequence[str]) -> dict[str, Any]:
    """Start the image as a server, load it, stop it under load, and start it again."""
    failures = []
    try:
        with server(engine, set_up, flags) as name:
            for step in STEPS:
                if problem := try_step(engine, name, step):
                    failures.append(f"{step}: {problem}")
    except (OSError, subprocess.SubprocessError) as error:
        failures.append(str(error)[-MAX_PROBLEM_CHARS:])
    return {"passed": len(STEPS) - len(failures), "failures": failures}


@contextmanager
def server(engine: Engine, set_up: SetUp, flags: Sequence[str]) -> Iterator[str]:
    name = f"rstar-sandbox-test-{os.getpid()}"
    start = ["--detach", f"--name={name}", f"--env=RSTAR_SANDBOX_TOKEN={TOKEN}", *flags]
    try:
        engine.output(*engine.run(start, set_up.image, *set_up.command))
        yield name
        print(engine.call("logs", name).stderr[-4 * MAX_PROBLEM_CHARS :], flush=True)
    finally:
        engine.call("rm", "--force", name)


def try_step(engine: Engine, name: str, step: str) -> str:
    """Run a step in a second container, which shares the network of the server's container. Return an empty text if the
    step holds, else what does not hold."""
    arguments = engine.run_python([f"--network=container:{name}", *LIMITS], "-m", "tests.machines.load", step)
    with subprocess.Popen([*engine.command, *arguments], stdout=-1, stderr=-1, text=True) as client:
        assert client.stdout is not None
        if step == "stop" and client.stdout.readline().strip() == RUNNING:
            engine.output("stop", f"--time={STOP_TIMEOUT_S}", name)
        output, errors = client.communicate(timeout=TIMEOUT_S)
    if client.returncode:
        return (errors or output).strip()[-MAX_PROBLEM_CHARS:]
    if step != "stop":
        return ""
    status = engine.output("inspect", "--format={{.State.ExitCode}}", name).strip()
    engine.output("start", name)
    return "" if status == "0" else f"the server ended with {status}"


if __name__ == "__main__":
    sys.exit(main())
