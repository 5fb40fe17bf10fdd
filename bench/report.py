"""Writes the tables of the documents, and plots, from the committed results.

    python -m bench.report --tables          # rewrite the tables in README.md and docs/
    python -m bench.report --check           # fail if a table is not what the results say
    python -m bench.report --plots DIR       # draw the results (needs the [bench] extra)
    python -m bench.report                   # print all tables

A table stands between `<!-- numbers: NAME -->` and `<!-- /numbers -->`. It is made from `bench/results/NAME.json`, the
last line of `python -m bench.BENCH --json`, by `bench.BENCH.tables`, where NAME is BENCH or BENCH-VARIANT. A block
without a result stays empty. The block `summary` is made from several results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.harness import command
from bench.harness.tables import Result, Table, markdown

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")
SUMMARY = "summary"
SUMMARY_RESULTS = {"throughput", "burst", "invariance", "mixed", "chaos", "recipe"}
"""Results that the summary needs."""
BLOCK = re.compile(r"(<!-- numbers: ([\w-]+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Write, check, draw or print. Return exit code 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--tables", action="store_true", help="rewrite the tables in README.md and docs/")
    action.add_argument("--check", action="store_true", help="fail if a table is not what the results say")
    action.add_argument("--plots", metavar="DIR", type=Path, help="draw the results into this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    try:
        return _report(args)
    except (command.BenchFailed, OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1


def _report(args: argparse.Namespace) -> int:
    results = read_results(RESULTS)
    report: dict[str, Any] = {"bench": "report", "results": sorted(results)}
    if args.plots:
        report["plots"] = [str(file) for file in _plot(results, args.plots)]
    elif args.tables or args.check:
        report["differ"] = _update(results, write=args.tables)
    else:
        for name, result in sorted(results.items()):
            print(f"{name}\n\n{table_of(name, result)}")
    if args.json:
        print(json.dumps(report), flush=True)
    return 1 if args.check and report["differ"] else 0


def read_results(directory: Path) -> dict[str, Result]:
    """The results in a directory, by name."""
    return {file.stem: json.loads(file.read_bytes()) for file in sorted(directory.glob("*.json"))}


def documents() -> list[Path]:
    """The files that may contain tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, results: Mapping[str, Result]) -> str:
    """`text` with each table as `results` have it. Raises `BenchFailed` for a block that no benchmark fills."""

    def fill(block: re.Match[str]) -> str:
        head, name, _, foot = block.groups()
        if name == SUMMARY:
            return head + (summary(results) if results.keys() >= SUMMARY_RESULTS else "") + foot
        _bench_module(name)
        return head + (table_of(name, results[name]) if name in results else "") + foot

    if text.count("<!-- numbers:") != len(BLOCK.findall(text)):
        raise command.BenchFailed("expected <!-- /numbers --> after each <!-- numbers: NAME -->, each on its own line")
    return BLOCK.sub(fill, text)


def table_of(name: str, result: Result) -> str:
    """The tables of one result as Markdown, and where it was measured."""
    blocks = _bench_module(name).tables(result)
    command_line = result.get("command", f"python -m bench.{name}")
    return f"{markdown(blocks)}\n\n{_where(command_line, result['machine'])}\n"


def summary(results: Mapping[str, Result]) -> str:
    """The README's table: one row per question, with a link to the details."""
    ratios = {kind: f"{row['ratio']:.0f} times" for kind, row in results["throughput"]["kinds"].items()}
    burst, mixed, invariance, chaos = (results[name] for name in ("burst", "mixed", "invariance", "chaos"))
    loops, runs = mixed["loops"], results["recipe"]["runs"]
    gains = [run["gain"] for run in runs]
    rows = [
        (
            "How fast is it beside a fresh interpreter?",
            f"{ratios['print']} (`print`), {ratios['numpy']} (numpy), {ratios['sympy']} (sympy)",
            "[throughput](docs/benchmarks.md#throughput)",
        ),
        (
            "How many calls can be in flight?",
            f"{burst['calls']:,} at once: {burst['lost']} lost, {burst['doubled']} doubled, "
            f"{burst['mismatched']} mismatched",
            "[calls in flight](docs/benchmarks.md#calls-in-flight)",
        ),
        (
            "Do results change under load?",
            f"{invariance['calls']} calls, idle and overloaded: {len(invariance['changed'])} changed",
            "[results under load](docs/benchmarks.md#results-under-load)",
        ),
        (
            "Do endless calls delay short ones?",
            f"p90 of a `print`: {loops['baseline_ms']['p90']:.1f} ms alone, {loops['under_loops_ms']['p90']:.1f} ms "
            f"beside {loops['loops']} endless loops",
            "[endless loops](docs/benchmarks.md#short-calls-beside-endless-loops)",
        ),
        (
            "Does it hold against attacks?",
            "every attack of `tests/escape` fails at every level, except for listed limits of `landlock` and `none`",
            "[isolation](docs/isolation.md)",
        ),
        (
            "What if processes die?",
            f"{chaos['calls']:,} calls during {sum(chaos['kills'].values())} kills: {chaos['lost']} lost, "
            f"{chaos['doubled']} doubled, {chaos['mismatched']} mismatched",
            "[kills](docs/benchmarks.md#kills)",
        ),
        (
            "Does a model learn to use the tool?",
            f"accuracy on {len(runs)} seeds: {fmean(run['stages'][0]['accuracy'] for run in runs):.2f} after SFT, "
            f"{fmean(run['stages'][-1]['accuracy'] for run in runs):.2f} after RL; gains of {min(gains):.2f} to "
            f"{max(gains):.2f}",
            "[recipe](docs/benchmarks.md#the-recipe)",
        ),
    ]
    return f"{markdown([Table(('question', 'measured', 'details'), rows)])}\n"


def _bench_module(name: str) -> Any:
    """The benchmark of a result. Raises `BenchFailed` if there is none."""
    module = f"bench.{name.partition('-')[0]}"
    if find_spec(module) is None or not hasattr(import_module(module), "tables"):
        raise command.BenchFailed(f"expected the name of a result of a benchmark, got {name!r}")
    return import_module(module)


def _update(results: Mapping[str, Result], *, write: bool) -> list[str]:
    """Names of the documents whose tables differ from the results; they are rewritten if `write` is set."""
    differ = []
    for file in documents():
        text = file.read_text(encoding="utf-8")
        if (updated := filled(text, results)) == text:
            continue
        differ.append(name := str(file.relative_to(ROOT)))
        if write:
            file.write_text(updated, encoding="utf-8")
            print(f"wrote {name}", file=sys.stderr)
        else:
            print(f"{name}: differs from bench/results; run `python -m bench.report --tables`", file=sys.stderr)
    return differ


def _plot(results: Mapping[str, Result], directory: Path) -> list[Path]:
    if find_spec("matplotlib") is None:
        raise command.BenchFailed("plots need matplotlib; pip install '.[bench]'")
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name in sorted(results):
        if draw := getattr(_bench_module(name), "draw", None):
            figure = Figure(figsize=(8.0, 4.5), layout="constrained")
            draw(figure.subplots(), results[name])
            files.append(directory / f"{name}.png")
            figure.savefig(files[-1], dpi=150)
    return files


def _where(command_line: str, machine: Result) -> str:
    day = machine["date"].partition("T")[0]
    return (
        f"<sub>`{command_line}` on {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, "
        f"load {machine['load'][0]:g} at its end; commit {machine['commit']}, {day}</sub>"
    )


if __name__ == "__main__":
    raise SystemExit(main())
