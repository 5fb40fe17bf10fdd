"""The tables in the documents and the plots, out of the results that are committed.

    python -m bench.report --tables          # rewrite the tables in README.md and docs/
    python -m bench.report --check           # fail if they are not what the results say
    python -m bench.report --plots FOLDER    # draw the results (needs the [bench] extra)
    python -m bench.report                   # print all tables

A table stands between `<!-- numbers: NAME -->` and `<!-- /numbers -->`, and is made from `bench/results/NAME.json`,
which is what `python -m bench.NAME --json` printed. Where there is no such file yet, nothing stands there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness import command as output
from bench.layers import AT_MOST

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")
DRAWN = ("throughput", "peers", "layers", "leaks", "burst", "mixed", "soak", "scaling", "recipe", "roc", "rollouts")
"""Benchmarks whose module has a `draw(axes, figures)`. What others found is a sentence, and says more in words."""
BLOCK = re.compile(r"(<!-- numbers: ([\w-]+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)

PEERS = ("code-judge", "SandboxFusion")
KINDS = {
    "print": "`print(1 + 1)`",
    "numpy": "numpy determinant",
    "sympy": "`sympy.solve`",
    "mix": "the mix of real traffic",
}

Figures = Mapping[str, Any]
Render = Callable[[Figures], list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Whatever is asked for; 1 if `--check` finds a difference."""
    args = _parser().parse_args(argv)
    return output.run_as_command("report", lambda: _report(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tables", action="store_true", help="rewrite the tables in README.md and docs/")
    what.add_argument("--check", action="store_true", help="fail if they are not what the results say")
    what.add_argument("--plots", metavar="FOLDER", type=Path, help="draw the results into this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _report(args: argparse.Namespace) -> int:
    results = read_results(RESULTS)
    figures: dict[str, Any] = {"bench": "report", "results": sorted(results)}
    if args.plots:
        figures["plots"] = [str(file) for file in _plot(results, args.plots)]
    elif args.tables or args.check:
        texts = {file: file.read_text(encoding="utf-8") for file in documents()}
        fresh = {file: filled(text, results) for file, text in texts.items()}
        figures["differ"] = [str(file.relative_to(ROOT)) for file in texts if texts[file] != fresh[file]]
        _say_or_write(args, fresh, figures["differ"])
    else:
        for name in sorted(set(results) & set(TABLES)):
            print(f"{name}\n\n{table_of(name, results[name])}")
    if args.json:
        print(json.dumps(figures), flush=True)
    return 1 if args.check and figures["differ"] else 0


def read_results(folder: Path) -> dict[str, Figures]:
    """The results in a folder, by name."""
    return {file.stem: json.loads(file.read_bytes()) for file in sorted(folder.glob("*.json"))}


def documents() -> list[Path]:
    """Where tables may stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, results: Mapping[str, Figures]) -> str:
    """`text` with each table as `results` have it. Raises `BenchFailed` for one that nothing here renders."""

    def fill(block: re.Match[str]) -> str:
        head, name, _, foot = block.groups()
        if name not in TABLES:
            raise output.BenchFailed(f"expected numbers of one of {', '.join(TABLES)}, got a block for {name!r}")
        return head + (table_of(name, results[name]) if name in results else "") + foot

    if text.count("<!-- numbers:") != len(BLOCK.findall(text)):
        raise output.BenchFailed("expected <!-- /numbers --> after each <!-- numbers: NAME -->, each on its own line")
    return BLOCK.sub(fill, text)


def table_of(name: str, figures: Figures) -> str:
    """The lines of one result, and where it was measured."""
    command = figures.get("command", f"python -m bench.{name}")
    return "\n".join([*TABLES[name](figures), "", _where(command, figures["machine"]), ""])


def _say_or_write(args: argparse.Namespace, fresh: Mapping[Path, str], differ: Iterable[str]) -> None:
    for name in differ:
        if args.check:
            print(f"{name}: not what bench/results says; run `python -m bench.report --tables`", file=sys.stderr)
        else:
            (ROOT / name).write_text(fresh[ROOT / name], encoding="utf-8")
            print(f"wrote {name}", file=sys.stderr)


def _plot(results: Mapping[str, Figures], folder: Path) -> list[Path]:
    if find_spec("matplotlib") is None:
        raise output.BenchFailed("plots need matplotlib; pip install '.[bench]'")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {folder / f"{name}.png": name for name in DRAWN if name in results}
    for file, name in drawn.items():
        draw = partial(import_module(f"bench.{name}").draw, figures=results[name])
        output.plot(str(file), draw)
    return list(drawn)


# Tables


def _throughput(figures: Figures) -> list[str]:
    columns = ("calls", "calls/s", "fresh/s", "ratio", "p50 / p99 ms", "CPU ms a call", "fresh", "MiB at most")
    return _table(
        columns,
        (
            (
                KINDS[name],
                _number(row["calls_per_s"]),
                _number(row["fresh"]["calls_per_s"]),
                f"{row['ratio']:.1f}×",
                _pair(row["latency_ms"]),
                f"{row['cpu_ms']:.1f}",
                f"{row['fresh']['cpu_ms']:.0f}",
                _number(row["memory_mb"]),
            )
            for name, row in figures["kinds"].items()
        ),
    )


def _layers(figures: Figures) -> list[str]:
    columns = (
        "warm interpreter",
        "fork, run, exit: CPU ms",
        "by os.fork",
        "all of a call, over HTTP",
        "ratio",
        "to os.fork",
    )
    rows = []
    for name, profile in figures["profiles"].items():
        steps = profile["steps"]
        times = (f"{steps[step]['cpu_ms']:.2f}" for step in ("floor", "os.fork", "http"))
        rows.append((name, *times, f"{profile['ratio']:.2f}×", f"{profile['ratio_os_fork']:.2f}×"))
    verdicts = []
    for floor, ratio in (("by os.fork", "ratio_os_fork"), ("by the cheapest fork", "ratio")):
        over = [name for name, profile in figures["profiles"].items() if profile[ratio] > AT_MOST]
        verdicts.append(f"{floor}: {'all but ' + ', '.join(over) if over else 'all'}")
    return [*_table(columns, rows), "", f"At most {AT_MOST:g} times fork, run and exit {'; '.join(verdicts)}."]


def _chaos(figures: Figures) -> list[str]:
    answered = sum(figures["statuses"].values())
    return [
        f"{answered:,} calls while something that runs them was killed every {figures['kill_every_s']:g} s "
        f"({sum(figures['kills'].values()):,} kills): {figures['lost']:,} lost, {figures['doubled']:,} doubled, "
        f"{figures['mixed_up']:,} mixed up, {figures['statuses'].get('unavailable', 0):,} `unavailable`."
    ]


def _agreement(figures: Figures) -> list[str]:
    return [
        f"{figures['calls']:,} calls beside a fresh interpreter: {figures['equal']:,} with the same verdict and output,"
        f" {figures['different']:,} with another, {figures['unsettled']:,} that differ from run to run."
    ]


def _leaks(figures: Figures) -> list[str]:
    grown, left = (", ".join(figures[name]) or "nothing" for name in ("grown", "left_behind"))
    held = [mark["memory_mb"] for mark in figures["marks"] if mark["calls"] >= figures["settled"]]
    return [
        f"What {figures['calls']:,} calls made grow in the server beyond what allocators and connections explain: "
        f"{grown} (memory by {held[-1] - held[0]:+.1f} MiB to {held[-1]:,.0f}); what it left behind at its end: {left}."
    ]


def _burst(figures: Figures) -> list[str]:
    rows = [
        (name, _number(pace["calls"]), _number(pace["calls_per_s"]), _pair(pace["latency_ms"]), f"{pace['cpu_ms']:.2f}")
        for name, pace in (("all at once", figures["burst"]), ("a steady load", figures["steady"]))
    ]
    memory = figures["memory_mb"]
    missed = f" Missed: {'; '.join(figures['missed'])}." if figures["missed"] else ""
    loops = []
    if share := figures.get("loops"):
        ms = [" / ".join(map(_number, figures[name]["short_ms"].values())) for name in ("burst", "steady")]
        loops = [
            f"{100 * share:g} % of them never return, and get `timeout` after {figures['loop_s']:g} s of their own; "
            f"p50 / p90 / p99 of the others: {ms[0]} ms at once, {ms[1]} in the steady load.",
            "",
        ]
    return [
        *_table(("", "calls", "calls/s", "p50 / p99 ms", "CPU ms a call"), rows),
        "",
        *loops,
        f"{figures['lost']:,} lost, {figures['doubled']:,} doubled, {figures['wrong']:,} wrong; "
        f"{figures['ratio']:.2f} of the steady load's calls/s; "
        f"{memory['idle']:,} MiB idle, {memory['peak']:,} MiB at the peak.{missed}",
    ]


def _mixed(figures: Figures) -> list[str]:
    rows = []
    if traffic := figures.get("traffic"):
        loops = traffic["with_loops"]["loops"]
        rows.append((f"real traffic, {traffic['rate']:g} calls/s", traffic["without_loops"]["short_ms"]))
        rows.append((f"the same, {loops} endless loops among it", traffic["with_loops"]["short_ms"]))
    if storm := figures.get("storm"):
        rows.append(("one `print` after another", storm["calm_ms"]))
        rows.append((f"the same in the first second of {storm['loops']} endless loops", storm["arriving_ms"]))
        rows.append(("the same after that second", storm["storm_ms"]))
    points = ("p50", "p90", "p99")
    return _table(
        ("short calls", " / ".join(points) + " ms"),
        ((name, " / ".join(_number(ms[point]) for point in points)) for name, ms in rows),
    )


def _invariance(figures: Figures) -> list[str]:
    corpus = f" ({source['from']})" if (source := figures.get("corpus")) else ""
    return [
        f"{figures['calls']:,} calls alone, then all at once beside {figures['loops']} endless loops and "
        f"{figures['load']} busy processes: {len(figures['changed'])} verdicts or outputs changed, "
        f"{len(figures.get('unstable', ()))} that differ from themselves left out. "
        f"{figures['calls'] - figures['known']:,} of them are a corpus{corpus}; "
        f"{figures['known']:,} need a known share of their limit, from 0.5 to 2 times: "
        f"{len(figures['misjudged'])} misjudged."
    ]


def _soak(figures: Figures) -> list[str]:
    bad = [f"{figures[name]:,} {name.replace('_', ' ')}" for name in ("lost", "doubled", "mixed_up", "unavailable")]
    rows = [
        (name.replace("_", " "), *(f"{half[part]:,.1f}" for part in ("median", "growth", "noise")))
        for name, half in figures["last_half"].items()
    ]
    columns = ("of the server, in the last half", "median", "growth", "noise")
    rates = ", ".join(map(_number, figures["calls_per_s"]))
    rest = ", ".join(f"{mark['memory_mb']:,.0f}" for mark in figures["at_rest"])
    said = (
        f"{figures['answered']:,} calls: {', '.join(bad)}; {rates} calls/s, quarter by quarter; "
        f"{rest} MiB at rest after each."
    )
    return [said, "", *_table(columns, rows)]


def _gateway(figures: Figures) -> list[str]:
    return [
        f"One gateway process, its executors stubbed, in batches of {figures['batch']}: "
        f"{figures['calls_per_s']:,.0f} calls/s, {figures['cpu_us']:.0f} µs of its CPU a call."
    ]


def _scaling(figures: Figures) -> list[str]:
    gateway, held, in_time = figures["gateway"], figures["memory"], f"{figures['p99_s']:g} s"
    columns = ("they come", "calls/s", f"cores: 99 % begun in {in_time}", "answered", "gateways", "MB/s")
    lines: list[str] = []
    for name, kind in figures["kinds"].items():
        rows = []
        for way, cores in kind["ways"].items():
            flow = gateway["ways"][way]
            found = [f"{cores[part]:,}" if cores[part] else "-" for part in ("cores_for_wait", "cores_for_answer")]
            rows.append((way, f"{flow['calls_per_s']:,}", *found, str(flow["gateways"]), f"{flow['mb_per_s']:.1f}"))
        title = f"{KINDS[name]}: {kind['cpu_ms']:.1f} ms of CPU a call, 99 % of them within {kind['own_p99_s']:.2f} s"
        lines += [f"{figures['calls']:,} calls of {title}, {kind['core_s']:,} core seconds:", ""]
        lines += [*_table(columns, rows), ""]
    each = " and ".join(
        f"{of['each_kb']:.1f} KiB for each call of {KINDS[name]} in flight, {of['all_mb']:,} MiB for all"
        + (f" ({of['running_mb']:,} of it while they run here)" if of.get("running_mb") else "")
        for name, of in held.items()
    )
    sources = ", ".join(f"{name} of {machine['commit']}" for name, machine in figures["measured_on"].items())
    return [
        *lines,
        f"Memory: {held['print']['idle_mb']:,} MiB without calls, {each}. "
        f"A gateway's core moves {gateway['calls_per_core_s']:,} calls/s, an executor's "
        f"{figures['executor']['calls_per_core_s']:,} of {KINDS['print']}; "
        f"a call of the mix is {gateway['bytes']:,} bytes on the wire, in both directions. "
        f"Endless loops, 1 % of them with a time-out of 10 s, take {figures['endless_core_s']:,} core seconds more.",
        "",
        f"Reckoned from what was measured at these commits: {sources}.",
    ]


def _peers(figures: Figures) -> list[str]:
    systems = figures["systems"]
    rows = []
    for kind, row in figures["kinds"].items():
        rows.append((KINDS[kind], *(_peer(row.get(name)) for name in systems)))
    lines = _table(("calls/s (without a right verdict)", *systems), rows)
    absent = [name for name in PEERS if name not in systems]
    return [*lines, "", f"Not running there: {', '.join(absent)}."] if absent else lines


def _peer(row: Figures | None) -> str:
    if row is None:
        return "-"
    share = 100 * (row["wrong"] + row["unanswered"]) / row["calls"]
    return _number(row["calls_per_s"]) + (f" ({share:.1f} %)" if share else "")


def _roc(figures: Figures) -> list[str]:
    measures = {
        "accuracy": "accuracy",
        "tool_error_ratio_correct": "tool errors of correct",
        "tool_error_ratio": "tool errors",
        "one_answer": "one answer",
        "rollouts": "rollouts",
        "sampled_tokens": "tokens sampled",
        "in_loss": "in the loss",
    }
    names = figures["names"]
    rows = [(names[arm], *(output.spread(its[name]) for name in measures)) for arm, its in figures["arms"].items()]
    rows += [
        (f"RoC less {names[arm]}", *(output.spread(its.get(name)) for name in measures))
        for arm, its in figures["differences"].items()
    ]
    said = f"{figures['seeds']} seeds, {figures['steps']} steps, G = {figures['group']}; mean ± deviation over seeds."
    return [*_table(("", *measures.values()), rows), "", said]


def _recipe(figures: Figures) -> list[str]:
    rows = (
        (
            row["name"],
            *(f"{row[name]:.3f}" for name in ("accuracy", "tool_error_ratio", "one_answer")),
            f"{row['seconds']:.0f}",
        )
        for row in figures["stages"]
    )
    said = (
        f"Accuracy is that of {figures['problems']} fresh problems at temperature 1. A step's own time is what neither "
        f"generation, tools nor optimisation fill; beside them it had a processor for {figures['own_cpu']:.0%}."
    )
    return [
        *_table(("", "accuracy", "tool errors", "one answer", "seconds"), rows),
        "",
        *_table(*output.asked(figures["verdicts"])),
        "",
        said,
    ]


def _rollouts(figures: Figures) -> list[str]:
    rows = [
        (
            f"`{policy}`",
            f"{row['makespan_s']:,.1f}",
            f"{row['over_bound']:.2f}",
            f"{row['kv_makespan_of_its']:.2f}" if "kv_makespan_of_its" in row else "-",
            f"{row['preemptions']:,.0f}",
            f"{row['recomputed_tokens']:,.0f}",
            f"{row['prefix_hit_rate']:.2f}",
            f"{row['kv_use']:.2f}",
            f"{row['idle_share']:.2f}",
            *(
                " / ".join(f"{row[name][point]:,.1f}" for point in ("p50", "p95"))
                for name in ("service_s", "since_arrival_s")
            ),
        )
        for policy, row in figures["policies"].items()
    ]
    columns = (
        "",
        "makespan s",
        "/ bound",
        "`kv` / its",
        "preemptions",
        "recomputed",
        "hits",
        "KV use",
        "idle",
        "service p50 / p95 s",
    )
    what, repeat = ("**Simulated.**", "seed") if figures["is_simulated"] else ("vLLM on the CPU:", "round")
    count = figures["repeats"]
    said = (
        f"{what} {figures['engines']} engines of {figures['capacity']:,} tokens, {figures['episodes']:,} rollouts "
        f"of at most {figures['most_new']:,} tokens; no schedule takes less than {figures['lower_bound_s']:,.1f} s. "
        + (f"Medians of {count} {repeat}s." if count > 1 else f"One {repeat}.")
    )
    lines = [said, "", *_table((*columns, "since arrival"), rows)]
    if found := figures.get("validation"):
        off = (
            (
                f"`{policy}`",
                f"{row['makespan']:+.1%}",
                f"{row['worst_round']:+.1%}",
                f"{row['preemptions']:.2f}×",
                f"{100 * row['prefix_hit_rate']:+.1f}",
            )
            for policy, row in found.items()
        )
        lines += ["", "The simulator's answer for the same rollouts, against that:", ""]
        lines += _table(("", "makespan", "in its worst round", "preemptions + 1", "hits, points"), off)
    if asked := figures.get("verdicts"):
        how = "" if figures["is_simulated"] else "preemptions and recomputed tokens of all rounds together, the others "
        what = f"What is asked of `kv`, {how}by medians of each {repeat}'s ratios:"
        lines += ["", what, "", *_table(*output.asked(asked))]
    return lines


def _cost(figures: Figures) -> list[str]:
    rows = [
        (kind, f"{its['calls']:,}", _number(its["p50"]), _number(its["p99"]))
        for kind, its in figures["microseconds"].items()
    ]
    return _table(("", "calls", "median µs", "p99 µs"), rows)


TABLES: dict[str, Render] = {
    "throughput": _throughput,
    "peers": _peers,
    "layers": _layers,
    "burst": _burst,
    "burst-mix": _burst,
    "burst-loops": _burst,
    "mixed": _mixed,
    "mixed-storm": _mixed,
    "invariance": _invariance,
    "soak": _soak,
    "gateway": _gateway,
    "scaling": _scaling,
    "chaos": _chaos,
    "agreement": _agreement,
    "leaks": _leaks,
    "recipe": _recipe,
    "roc": _roc,
    "rollouts": _rollouts,
    "rollouts-8k": _rollouts,
    "rollouts-12k": _rollouts,
    "rollouts-cost": _cost,
}


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """In Markdown; the first column is text, the others are numbers."""
    return [
        f"| {' | '.join(columns)} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _where(command: str, machine: Figures) -> str:
    day = machine["date"].partition("T")[0]
    return (
        f"<sub>`{command}` on {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, "
        f"load {machine['load'][0]:g} at its end; commit {machine['commit']}, {day}</sub>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _pair(latency_ms: Figures, high: str = "p99") -> str:
    return " / ".join(_number(latency_ms[name]) for name in ("p50", high))


if __name__ == "__main__":
    sys.exit(main())
