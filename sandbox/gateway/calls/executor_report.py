"""The data that an executor reports about itself, decoded from its "ready" and "stats" frames.

A bug or an attack in an executor must not break the gateway's pages, so values of a wrong type are replaced by 0 or by
an empty text, and names are cut to `MAX_NAME_CHARS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sandbox.errors import ProtocolError
from sandbox.gateway.metrics import METRICS, MetricSample

EXECUTOR_GAUGES = ("queued", "running", "running_long", "slots", "long_slots", "sessions")
"""Names of the numbers in a "stats" frame that can rise and fall."""
MAX_NAME_CHARS = 60
MAX_CGROUPS_CHARS = 2000
"""Maximum characters of `cgroups`, and of each warning."""
MAX_WINDOW = 1_000_000
"""Calls that an executor may accept at once."""


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """The "ready" frame."""

    slots: int
    long_slots: int = 0
    sessions: int = 0
    """Number of sessions that may be open at once; 0 if the isolation level has none."""
    isolation: str = ""
    cgroups: str = ""
    """Version and directories of the cgroups of the calls; empty if there are none."""
    python: str = ""
    wanted_fds: int = 0
    """File descriptors that the executor needs for the slots it was configured with."""
    missing_modules: tuple[str, ...] = ()
    """Names of the modules that a profile imports and that the Python for calls does not have."""
    warnings: tuple[str, ...] = ()
    """One sentence for each thing that the machine of the executor lacks."""

    @classmethod
    def decode(cls, raw: Mapping[object, object]) -> ReadyReport:
        """Decode a "ready" frame. Raises `ProtocolError` if the number of slots is out of range."""
        slots, modules, warnings = raw.get("slots"), raw.get("missing_modules"), raw.get("warnings")
        if not isinstance(slots, int) or not 1 <= slots <= MAX_WINDOW // 2:
            raise ProtocolError(f"expected 'ready' with slots from 1 to {MAX_WINDOW // 2}, got {slots!r:.40}")
        return cls(
            slots=slots,
            long_slots=_number(raw.get("long_slots")),
            sessions=_number(raw.get("sessions")),
            isolation=_name(raw.get("isolation")),
            cgroups=_name(raw.get("cgroups"), MAX_CGROUPS_CHARS),
            python=_name(raw.get("python")),
            wanted_fds=_number(raw.get("wanted_fds")),
            missing_modules=tuple(map(_name, modules)) if isinstance(modules, list) else (),
            warnings=tuple(_name(text, MAX_CGROUPS_CHARS) for text in warnings) if isinstance(warnings, list) else (),
        )


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """The last "stats" frame, about a second old. Empty before the first frame."""

    gauges: Mapping[str, int] = field(default_factory=dict)
    """The reported numbers of `EXECUTOR_GAUGES`, by name."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Numbers that only grow, by name without `_total`. They start at 0 when the executor restarts."""
    zygotes: Counter[str] = field(default_factory=Counter)
    """Live zygotes by profile."""
    missed_imports: Counter[str] = field(default_factory=Counter)
    """Imports by calls of modules that no zygote had preloaded, by module."""

    @classmethod
    def decode(cls, raw: Mapping[object, object]) -> ExecutorStats:
        """Decode a "stats" frame. A gauge that is no number becomes 0; other values that are no numbers, and names that
        are not known, are ignored."""
        counts = _counts(raw)
        return cls(
            gauges={name: _number(raw[name]) for name in EXECUTOR_GAUGES if name in raw},
            totals={name.removesuffix("_total"): counts[name] for name in counts if name.endswith("_total")},
            zygotes=_counts(raw.get("zygotes")),
            missed_imports=_counts(raw.get("missed_imports")),
        )

    def samples(self, executor: int) -> Iterator[MetricSample]:
        """Yield the metrics of this executor. Numbers that `METRICS` does not list are left out."""
        labels = {"executor": str(executor)}
        for name, value in {**self.gauges, **{f"{name}_total": count for name, count in self.totals.items()}}.items():
            if f"executor_{name}" in METRICS:
                yield f"executor_{name}", labels, value
        for profile, count in self.zygotes.items():
            yield "executor_zygotes", {**labels, "name": profile}, count
        for module, count in self.missed_imports.items():
            yield "executor_missed_imports_total", {**labels, "name": module}, count


def _counts(raw: object) -> Counter[str]:
    """Return the whole numbers of a mapping, by name."""
    items = raw.items() if isinstance(raw, Mapping) else ()
    return Counter({_name(name): number for name, number in items if isinstance(number, int)})


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _name(value: object, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return a text that every encoder accepts. An executor may send unpaired surrogates, which are replaced."""
    return value[:max_chars].encode(errors="replace").decode() if isinstance(value, str) else ""
