"""The use of each engine's cache over time, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.plots import new_figure, save
from bench.simulator.simulation import TurnTrace

NUM_BINS = 240
MAX_SHARE = 2.0
"""The darkest colour: contexts of twice the cache's capacity."""

Timeline = Mapping[str, Sequence[float]]
"""By engine, the contexts of its turns as a share of its cache, at even times. Above 1 they do not fit."""


def timeline(turns: Sequence[TurnTrace], engines: Sequence[str], kv_capacity: int, bins: int = NUM_BINS) -> Timeline:
    """The cache use of each engine until the last turn has ended."""
    width = max(turn.ended_at for turn in turns) / bins
    line = {engine: [0.0] * bins for engine in engines}
    for turn in turns:
        shares = line[turn.engine]
        rate = turn.sampled / max(turn.ended_at - turn.started_at, 1e-9)
        for number in range(int(turn.started_at / width + 0.5), min(bins, int(turn.ended_at / width + 0.5))):
            shares[number] += (turn.context + rate * ((number + 0.5) * width - turn.started_at)) / kv_capacity
    return line


def gantt(path: Path, title: str, lines: Mapping[str, Timeline], makespans: Mapping[str, float]) -> None:
    """Draw a panel for each policy with a row for each engine, on a common time axis.

    Blue: the contexts of the engine's turns fit. Red: they do not fit and cause preemptions. White: idle.
    """
    figure = new_figure((10, 1.0 + 1.5 * len(lines)))
    if figure is None:
        return
    from matplotlib.colors import LinearSegmentedColormap  # type: ignore[import-not-found,unused-ignore]

    stops = [(0.0, "white"), (0.02, "#dbe7f6"), (0.49, "#1f5fae"), (0.51, "#f2b8a2"), (1.0, "#8c1308")]
    colours = LinearSegmentedColormap.from_list("demand", stops)
    panels: Any = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (policy, line) in zip(panels, lines.items(), strict=True):
        extent = (0.0, makespans[policy], len(line) - 0.5, -0.5)
        image = axes.imshow(
            list(line.values()),
            aspect="auto",
            extent=extent,
            cmap=colours,
            vmin=0,
            vmax=MAX_SHARE,
            interpolation="nearest",
        )
        axes.set_title(policy, loc="left", fontsize="medium")
        axes.set_yticks(range(len(line)), list(line) if len(line) <= 8 else [""] * len(line))
        axes.tick_params(axis="y", length=0)
        axes.axvline(makespans[policy], color="black", linewidth=1)
    panels[-1].set_xlim(0, 1.02 * max(makespans.values()))
    panels[-1].set_xlabel("seconds")
    bar = figure.colorbar(image, ax=list(panels), label="contexts of the assigned turns, as a share of the cache")
    bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["0", "0.5", "1: full", "1.5", "2 or more"])
    figure.suptitle(title)
    save(figure, path)
