"""Writes docs/machines.md from rows.json, which has one row for each machine that was booted.

python -m tests.machines.report --check     # fail if the page is not what the rows say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("rows.json")
PAGE = Path(__file__).parents[2] / "docs" / "machines.md"
HEAD = """\
# Machines

    make test-machines

This command boots Debian's kernels in virtual machines, one after another, and tries the server in each of them. Each
machine prints its results. They are in `tests/machines/rows.json`, from which the table below is generated. Each
machine has 2 cores, 2 GB of memory, systemd 252 and cgroups of version 2. The host needs root, and Debian's packages
debootstrap, e2fsprogs and qemu-system-x86. For the machines with a processor of 64-bit ARM (`arm64`) it needs
qemu-system-arm, qemu-user-static and binfmt-support.

QEMU emulates the cores, so the machines show what works on a kernel, but not how fast it is. With
`python -m tests.machines --accel kvm` the machines of `amd64` use the cores of the host.

The machines of `arm64` show nothing about the caches of a real processor, because QEMU emulates none. On a host with an
x86 processor they also show nothing about the weaker memory order of ARM.

How to read a cell: `400: 0 wrong or lost, 0 unavailable` means that 400 calls were sent. None of them had a wrong
result or none at all, and none was answered with the status `unavailable`.

"""
SET_UPS = """
The set-ups:

| set-up | the server runs |
|---|---|
| root | as root, in a unit of systemd with `Delegate=yes` |
| user | as an ordinary user with subordinate ids, in a unit of the user's own systemd with `Delegate=yes` |
| root-without-cgroups | as root; the kernel has no memory controller (`cgroup_disable=memory`) |
| user-without-cgroups | as an ordinary user with subordinate ids, in a cgroup of root |

The columns:

| column | what was run |
|---|---|
| level, cgroups | `rstar-sandbox doctor --json` |
| calls | `bench.chaos` without kills: calls whose results are known beforehand |
| kills | the same calls while executors, launchers and zygotes are killed: three in about the time of `doctor` |
| cgroup tests | `tests/executor/test_cgroups.py` and `tests/jail/test_cgroup_tree.py` |
| jail tests | `tests/jail`, `tests/guest/test_fork_batch.py` and `tests/guest/test_confine.py` |
| invariance | `bench.invariance`: calls that need 0.5 to 2 times their time limit, alone and on an overloaded machine |
| agreement | `bench.agreement`: results of the server and of fresh interpreters, for calls of which most import SymPy |
| escape | `tests/escape` at the level |
| systemd unit | `tests/machines/unit.py`: the unit is started, killed and stopped under load; a call is killed by OOM |

`not run`: the machine was booted without this part (`--parts`), or did not come to its end. `skipped`: the kernel, the
user or the set-up lacks what the tests need.

The calls use the standard library only, except for agreement. In each machine a user may have 64 IPC namespaces at a
time, so that calls that make some would be found: before Linux 6.3 the kernel frees one in each RCU grace period.
"""
NOT_RUN = "not run"
COLUMNS = (
    "Linux",
    "set-up",
    "level",
    "cgroups",
    "calls",
    "kills",
    "cgroup tests",
    "jail tests",
    "invariance",
    "agreement",
    "escape",
    "systemd unit",
    "date",
)
Row = Mapping[str, Any]


def main(argv: list[str]) -> int:
    text = page(read_rows())
    if argv == ["--check"]:
        if PAGE.read_text() == text:
            return 0
        print(f"report: {PAGE.name} is not what {ROWS.name} says; run python -m tests.machines.report", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


def read_rows() -> dict[str, Row]:
    return dict(json.loads(ROWS.read_text()))


def write_row(name: str, row: Row) -> None:
    """Replace one row. Parts that were not run this time keep their results if the kernel is the same."""
    rows = read_rows() if ROWS.exists() else {}
    old = {key: part for key, part in rows.get(name, {}).items() if key != "problem"}
    rows[name] = {**old, **row} if old.get("kernel") == row.get("kernel") else row
    ordered = sorted(rows.items(), key=lambda item: (*_order(item[1]["version"]), item[1]["set_up"]))
    ROWS.write_text(json.dumps(dict(ordered), indent=1) + "\n")


def _order(version: str) -> tuple[str, list[int]]:
    number, _, architecture = version.partition("-")
    return architecture, [*map(int, number.split("."))]


def page(rows: Mapping[str, Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows.values()]
    found = [f"- {row['version']}, {row['set_up']}: {problem}\n" for row in rows.values() for problem in problems(row)]
    does_not_hold = "\n## What does not hold\n\n" + ("".join(found) or "Nothing in these rows.\n")
    return HEAD + "\n".join(lines) + "\n" + does_not_hold + SET_UPS


def cells(row: Row) -> list[str]:
    doctor = row.get("doctor", {})
    return [
        row.get("kernel", row["version"]),
        row["set_up"],
        doctor.get("level") or NOT_RUN,
        _cgroups(doctor.get("cgroups", NOT_RUN)),
        calls_cell(row.get("mix")),
        calls_cell(row.get("kills")),
        tests_cell(row.get("cgroups")),
        tests_cell(row.get("jail")),
        _invariance(row.get("invariance")),
        _agreement(row.get("agreement")),
        tests_cell(row.get("escape")),
        tests_cell(row.get("unit")),
        row.get("date", ""),
    ]


def problems(row: Row) -> Iterator[str]:
    """Yield a sentence for each thing that does not hold on a machine."""
    if "problem" in row:
        yield _one_line(row["problem"])
    for name, part in row.items():
        if isinstance(part, Mapping):
            yield from (f"{name}: {problem}" for problem in _part_problems(part))


def _part_problems(part: Row) -> Iterator[str]:
    if "problem" in part:
        yield _one_line(part["problem"])
    if part.get("level", "") is None or part.get("call", "ok") != "ok":
        yield f"no level: {part['call']}"
    for name in ("lost", "doubled", "mismatched"):
        if part.get(name):
            yield f"{part[name]} calls {name}"
    for name in ("unavailable", "leftovers", "changed", "misjudged", "differences", "failures"):
        if part.get(name):
            yield f"{name}: {_one_line(str(part[name]))}"


def _one_line(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").split())[:500] + "`"


def _cgroups(found: str) -> str:
    return found.partition(", below")[0]


def calls_cell(part: Row | None) -> str:
    if part is None or "problem" in part:
        return NOT_RUN
    wrong = part["lost"] + part["doubled"] + part["mismatched"]
    kills = f", kills: {part['kills']}" if part["kills"] else ""
    return f"{part['calls']:,}{kills}: {wrong} wrong or lost, {sum(part['unavailable'].values())} unavailable"


def _invariance(part: Row | None) -> str:
    if part is None or "problem" in part:
        return NOT_RUN
    return f"{part['calls']} calls: {len(part['changed'])} changed, {len(part['misjudged'])} misjudged"


def _agreement(part: Row | None) -> str:
    if part is None or "problem" in part:
        return NOT_RUN
    return f"{part['calls']} calls: {len(part['differences'])} different, {part['unstable']} without a single result"


def tests_cell(part: Row | None) -> str:
    if part is None or "problem" in part:
        return NOT_RUN
    names = ("passed", "failed", "error", "errors", "xfailed", "skipped")
    return ", ".join(f"{part[name]} {name}" for name in names if part.get(name))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
