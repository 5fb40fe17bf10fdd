"""Engines over time, a picture for each policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST = 2.0
"""The darkest: contexts of twice what the cache holds."""


def gantt(
    path: Path, title: str, lines: Mapping[str, Mapping[str, Sequence[float]]], makespans: Mapping[str, float]
) -> None:
    """A row for each engine, as long as its policy took: how much of its cache the turns that it was given want.

    Blue fits; red does not, and is paid for by evictions; white is idle. All policies share the axis of time.
    """
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print("no plot: it needs matplotlib; pip install '.[bench]'", file=sys.stderr)
        return
    from matplotlib.colors import LinearSegmentedColormap

    stops = [(0.0, "white"), (0.02, "#dbe7f6"), (0.49, "#1f5fae"), (0.51, "#f2b8a2"), (1.0, "#8c1308")]
    colours = LinearSegmentedColormap.from_list("demand", stops)
    figure = Figure(figsize=(10, 1.0 + 1.5 * len(lines)), layout="constrained")
    panels: Any = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (policy, line) in zip(panels, lines.items(), strict=True):
        extent = (0.0, makespans[policy], len(line) - 0.5, -0.5)
        image = axes.imshow(
            list(line.values()), aspect="auto", extent=extent, cmap=colours, vmin=0, vmax=MOST, interpolation="nearest"
        )
        axes.set_title(policy, loc="left", fontsize="medium")
        axes.set_yticks(range(len(line)), list(line) if len(line) <= 8 else [""] * len(line))
        axes.tick_params(axis="y", length=0)
        axes.axvline(makespans[policy], color="black", linewidth=1)
    panels[-1].set_xlim(0, 1.02 * max(makespans.values()))
    panels[-1].set_xlabel("seconds")
    bar = figure.colorbar(image, ax=list(panels), label="contexts of the turns in hand, of the cache")
    bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["0", "0.5", "1: full", "1.5", "2 or more"])
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}", file=sys.stderr)
