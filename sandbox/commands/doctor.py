"""`doctor`: one table of what this machine has and lacks, and one verdict: the level at which `serve` runs calls.

The verdict names a level only if a call has run at it: in an executor, a jail and a zygote that start as in `serve`.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from sandbox import machine
from sandbox.commands.machine_checks import Check, Machine, Needs, check_machine
from sandbox.errors import ConfigError, IsolationError, SandboxError
from sandbox.gateway.http.listener import RESERVED_FDS, raise_connection_limit
from sandbox.jail import LevelChoice, ProbedLayer, choose_level, fds_for_slots, probe
from sandbox.jail.spec import Level
from sandbox.settings.server import ServeConfig, reserved_slots
from sandbox.types import Call

SCHEMA = 1
"""Version of the JSON form. It changes if a key or the name of a check changes its meaning or disappears."""
MAX_WIDTH = 100
"""Maximum width of the table in characters. The table is narrower in a narrower terminal."""
STRONGEST = (Level.NSJAIL, Level.NAMESPACES)


@dataclass(frozen=True, slots=True)
class Report:
    """What `doctor` found. `docs/operations.md` describes its JSON form."""

    level: str | None
    """The level at which `serve` runs calls. None: `serve` does not start, or calls would not be isolated."""
    verdict: str
    call: str
    """`ok` if a call has run at the level, or the reason why none has."""
    python: str | None
    """The Python that runs the calls."""
    user: str
    kernel: str
    checks: tuple[Check, ...]
    layers: tuple[ProbedLayer, ...]

    @property
    def exit_code(self) -> int:
        return 0 if self.level else 1

    def encode(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def doctor(config: ServeConfig) -> Report:
    """Probe the machine, run a call at the level that `serve` would choose, and give a verdict."""
    layers, user = probe(), _user_name()
    checks = check_machine(Machine({layer.name: layer for layer in layers}, _needs(config), user))
    python, problem = _guest_python(config)
    choice: LevelChoice | None = None
    try:
        raise_connection_limit(config.connections)
        choice = choose_level(config.isolation, layers)
    except IsolationError:  # the checks say why
        problem = f"isolation={config.isolation} is not possible on this machine"
    except ConfigError as error:
        problem = str(error)
    call = "not tried"
    if choice is not None and not problem:
        call = _try_call(replace(config, python=python, isolation=choice.level.value))
        problem = "" if call == "ok" else f"a call at level {choice.level} failed: {call}"
    level = None if problem or choice is None or choice.level is Level.NONE else choice.level
    verdict = _verdict(level, choice, problem, checks)
    return Report(level, verdict, call, python or None, user, os.uname().release, checks, layers)


def _needs(config: ServeConfig) -> Needs:
    resolved = config.resolved(machine.granted_cores())
    calls = resolved.slots + reserved_slots(resolved.slots) + resolved.long_slots
    return Needs(calls, max(config.connections + RESERVED_FDS, fds_for_slots(calls)))


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _verdict(level: Level | None, choice: LevelChoice | None, problem: str, checks: tuple[Check, ...]) -> str:
    sentences = []
    if level is not None:
        sentences.append(f"`serve` runs calls at level {level}; a call ran at it.")
    elif problem:
        sentences.append(f"`serve` does not start: {problem}.")
    else:
        sentences.append("`serve` starts, but calls are not isolated: isolation=none was asked for.")
    missing = [check.name for check in checks if not check.ok and check.level is not None]
    if level in STRONGEST:
        sentences.append("No level is stronger.")
    elif missing and level is None:
        sentences.append(f"Missing: {', '.join(missing)}: see above.")
    elif missing:
        sentences.append(f"A stronger level needs {', '.join(missing)}: see above.")
    elif choice is not None and choice.reason:
        sentences.append(f"{choice.reason}.")
    return " ".join(sentences)


def _guest_python(config: ServeConfig) -> tuple[str, str]:
    """Return the Python that runs the calls and no error, or an empty string and the reason why there is none."""
    if config.python is not None:
        return config.python, ""
    from sandbox.runtime.build import default_python

    try:
        return str(default_python()), ""
    except ConfigError as error:
        return "", str(error)


def _try_call(config: ServeConfig) -> str:
    """Run a small call. Return `ok`, or the reason why it failed."""
    from sandbox.executor import run_once

    try:
        result = run_once(Call("print(6 * 7)"), config.executor_config())
    except SandboxError as error:
        return str(error)
    if result.stdout == "42\n":
        return "ok"
    return f"{result.status}: {result.error.message if result.error else result.stderr.strip()}"


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the table and of the verdict. Commands stay on one line, so that they can be copied."""
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    name_width = max(len(check.name) for check in report.checks)
    indent = " " * (name_width + 6)
    for check in report.checks:
        head = f"{'ok' if check.ok else 'NO':4}{check.name:{name_width}}  "
        yield from textwrap.wrap(check.found, width, initial_indent=head, subsequent_indent=indent)
        if check.missing:
            text = f"missing: {check.missing}"
            yield from textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
        if check.command:
            yield f"    {check.command}"
    yield ""
    yield f"user {report.user}, Linux {report.kernel}"
    yield f"Python for calls: {report.python or 'none'}"
    yield from textwrap.wrap(report.verdict, width, break_long_words=False, break_on_hyphens=False)
