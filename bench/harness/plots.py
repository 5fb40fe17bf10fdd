"""Pictures of results, drawn with matplotlib where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(path: str | Path | None, draw: Callable[[Any], None]) -> None:
    """Let `draw(axes)` draw one picture and write it to `path`. Without matplotlib, print what is missing."""
    if path is None:
        return
    figure = new_figure((8.0, 4.5))
    if figure is not None:
        draw(figure.subplots())
        save(figure, path)


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure of `size` inches, or None with a message if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print("no plot: it needs matplotlib; pip install '.[bench]'", file=sys.stderr)
        return None
    return Figure(figsize=size, layout="constrained")


def save(figure: Any, path: str | Path) -> None:
    """Write the figure and print where."""
    figure.savefig(path, dpi=150)
    print(f"plot: {path}", file=sys.stderr)


def grouped_bars(axes: Any, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Vertical bars on a logarithmic axis: a group for each label, in it a bar for each series."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        bars = axes.bar([position + offset for position in range(len(labels))], values, width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.set_xticks(range(len(labels)), list(labels))
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.legend()


def percentile_bars(axes: Any, rows: Mapping[str, Mapping[str, float]], points: Sequence[str]) -> None:
    """The percentiles of latencies in ms as `grouped_bars`, a series for each row."""
    series = {name: [latency_ms.get(point, 0) for point in points] for name, latency_ms in rows.items()}
    grouped_bars(axes, points, series, "ms until the answer")
