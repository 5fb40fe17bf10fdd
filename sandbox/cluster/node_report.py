"""The report of a node, and the rules by which the gateway accepts or refuses the node.

`python -m sandbox.cluster.node_report ISOLATION [PYTHON]` prints the report of its machine as JSON. A Ray actor runs it
as a separate process, because the probe of the isolation layers forks, and the process of a Ray actor has threads.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from sandbox import machine
from sandbox.errors import ConfigError, ProtocolError, SandboxError
from sandbox.runtime import build as runtime
from sandbox.settings.server import ServeConfig, weakness

INSPECTION_TIMEOUT_S = 60.0
"""Maximum seconds for the inspection of a machine. The probe of the isolation layers takes about a second."""
MAX_TEXT_CHARS = 500
"""Maximum characters of an error in a report."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of one start of a node's agent."""

    instance: str
    """Random name of this start of the agent."""
    version: str
    """Version of rstar-sandbox."""
    cores: int
    memory_mb: int
    isolation: str
    """The isolation level that the operator requires, or with `auto` the strongest level of the node. Empty if the node
    lacks the required level."""
    isolation_error: str
    python: str
    """Path of the Python for calls. Empty if the node has none."""
    python_error: str
    runtime: str
    """Identity of the guest runtime. Empty if the operator names a Python."""
    host: str = ""
    port: int = 0
    """Address of the agent."""

    @classmethod
    def decode(cls, raw: Mapping[object, object]) -> NodeReport:
        """Raises `ProtocolError`."""
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if raw.keys() != kinds.keys() or not all(isinstance(raw[name], kind) for name, kind in kinds.items()):
            raise ProtocolError(f"expected the report of a node with {', '.join(kinds)}, got {raw!r:.200}")
        return cls(**raw)  # type: ignore[arg-type]


def inspect_machine(isolation: str, python: str) -> NodeReport:
    """Return the report of this machine, without the address. `python` may be empty."""
    from sandbox.jail import choose_level

    level = isolation_error = python_error = identity = ""
    try:
        level = choose_level(isolation).level.value
    except ConfigError as error:
        isolation_error = str(error)[:MAX_TEXT_CHARS]
    if python:
        python_error = "" if Path(python).exists() else f"has no {python}"
    elif (directory := runtime.find()) is not None:
        python, identity = str(directory / "bin" / "python"), runtime.identity(directory)
    else:
        python_error = "has no guest runtime; run `rstar-sandbox runtime` there"
    return NodeReport(
        instance=secrets.token_hex(8),
        version=version("rstar-sandbox"),
        cores=machine.granted_cores(),
        memory_mb=machine.memory_limit() >> 20,
        isolation=level,
        isolation_error=isolation_error,
        python=python,
        python_error=python_error,
        runtime=identity,
    )


def inspect_in_subprocess(isolation: str, python: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Return the encoded report of this machine. Raises `SandboxError`."""
    command = [sys.executable, "-m", __name__, isolation, python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSPECTION_TIMEOUT_S, env=dict(environ))
    try:
        report: dict[str, object] = json.loads(done.stdout)
    except ValueError:
        raise SandboxError(f"the machine could not be inspected: {done.stderr.strip()[-MAX_TEXT_CHARS:]}") from None
    return report


def refusal(report: NodeReport, config: ServeConfig, runtime_identity: str) -> str:
    """Return the reason why a node is not accepted, or an empty string. `runtime_identity` is the `runtime` of the
    first accepted node; it is empty if there is none yet."""
    ours = version("rstar-sandbox")
    if report.version != ours:
        return f"has rstar-sandbox {report.version}, the gateway has {ours}"
    if not report.isolation:
        return report.isolation_error or "reports no isolation level"
    if config.isolation == "auto" and weakness(report.isolation) > weakness(config.cluster_min_isolation):
        return (
            f"its strongest isolation level is {report.isolation}, --cluster-min-isolation is "
            f"{config.cluster_min_isolation}"
        )
    if not report.python or report.python_error:
        return report.python_error
    if runtime_identity and not config.python and report.runtime != runtime_identity:
        return f"its guest runtime is {report.runtime}, that of the first node is {runtime_identity}"
    return ""


if __name__ == "__main__":
    print(json.dumps(asdict(inspect_machine(*sys.argv[1:3]))))
