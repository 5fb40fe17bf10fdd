"""Growth of a server's resources at rest, from snapshots taken between stretches of traffic."""

from __future__ import annotations

from collections.abc import Sequence

from bench.probes.resources import ResourceSnapshot

TOLERANCE = {"processes": 0, "zombies": 0, "descriptors": 4, "mounts": 0, "cgroups": 0, "temporary_files": 0}
"""Allowed increase of each count. The client's connections open and close, so descriptors vary."""
# Memory may increase by the larger of these two, since allocators keep blocks, and zygotes cease to share pages.
MEMORY_TOLERANCE_MB = 16.0
MEMORY_TOLERANCE_SHARE = 0.1


def growth_at_rest(snapshots: Sequence[ResourceSnapshot], warmed_up: int) -> dict[str, tuple[float, float]]:
    """The resources that have grown since the first snapshot after `warmed_up` calls. Each has two values: in that
    snapshot, and at the end.

    The value at the end is the minimum of the last three snapshots, since a leak is in all of them.
    """
    counted = [snapshot for snapshot in snapshots if snapshot.calls >= warmed_up]
    base, last = counted[0], counted[1:][-3:] or counted
    allowed = {**TOLERANCE, "memory_mb": max(MEMORY_TOLERANCE_MB, MEMORY_TOLERANCE_SHARE * base.memory_mb)}
    pairs = {name: (getattr(base, name), min(getattr(snapshot, name) for snapshot in last)) for name in allowed}
    return {name: (before, after) for name, (before, after) in pairs.items() if after > before + allowed[name]}
