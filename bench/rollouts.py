"""How do placement policies compare on the same rollouts, on simulated engines and on real ones?

    python -m bench.rollouts --simulate [--profile mi300x-14b] [--stage 1] [--seeds 5] [--json]
    python -m bench.rollouts --engines 2 [--rounds 3] [--json]    # vLLM on the CPU, small caches
    python -m bench.rollouts --engines 2 --fit      # also measures the constants of the profile cpu-tiny

A placement policy decides which engine runs a turn. Every policy plays the same scripted episodes, which are all
submitted at once. For each turn, a script has the number of sampled tokens, the observation and the tool time. Real
engines sample exactly the number of tokens that the script has. In each round every policy runs once, with empty prefix
caches, and medians over rounds are compared. The simulator runs the same episodes. The scheduler knows the lengths of
the episodes of a preceding training step.

| measure | definition |
|---|---|
| service | time of an episode from the start of its first turn to its end |
| latency | time of an episode from its submission to its end |
| recomputed | tokens that an engine had computed before and evicted, without partly filled blocks |
| hits | share of the turns' context tokens that were cached; turns that resume after a preemption do not count |
| KV use | share of the caches used by contexts of running turns, over the whole time |
| idle | share of the time in which an engine runs no turn |

The requirements on `kv` use the median of the ratios within a round or seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.harness import arguments, command
from bench.harness.requirements import Requirement, at_least, at_most, requirement_table
from bench.harness.rounds import median_of_ratios, median_of_rows, rotated
from bench.harness.tables import Block, Result, Table, percentile_list
from bench.simulator import profiles
from bench.simulator.measures import measured, simulated, validation
from bench.simulator.oracle import ORACLE
from bench.simulator.placement import POLICIES
from bench.simulator.profiles import STAGES, Profile, profile_of

VLLM_PYTHON = "RSTAR_VLLM_PYTHON"
Rows = dict[str, list[dict[str, Any]]]
"""The measures of each round or seed, by policy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if it failed or a requirement is not met."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("rollouts", __doc__)
    count = arguments.count
    policies = arguments.names_of((*POLICIES, ORACLE))
    parser.add_argument("--simulate", action="store_true", help="simulated engines")
    parser.add_argument("--fit", action="store_true", help="with --engines: also measure the profile cpu-tiny")
    parser.add_argument("--engines", type=count, help="number of engines; without --simulate, vLLM servers on the CPU")
    parser.add_argument("--profile", choices=("mi300x-14b", "cpu-tiny"), default="mi300x-14b", help="simulated engine")
    parser.add_argument(
        "--stage", type=int, choices=STAGES, default=1, help="stage of the paper, for mi300x-14b (default: 1)"
    )
    policies_help = f"of {','.join(POLICIES)}; with --simulate also {ORACLE}, which knows all lengths"
    parser.add_argument("--policies", type=policies, default=tuple(POLICIES), help=policies_help)
    parser.add_argument("--seeds", type=count, default=5, help="simulated workloads (default: 5)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds on real engines (default: 3)")
    parser.add_argument("--groups", type=count, help="problems (default: 512; cpu-tiny: 12)")
    parser.add_argument("--samples", type=count, help="episodes per problem (default: 32; cpu-tiny: 16)")
    parser.add_argument("--cache-tokens", type=count, help="tokens of each cache, for cpu-tiny (default: 8192)")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help=f"Python of an environment with vLLM (default: ${VLLM_PYTHON})"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if not (args.simulate or args.engines):
        raise command.Misuse("expected --simulate, or --engines N")
    if ORACLE in args.policies and not args.simulate:
        raise command.Misuse(f"expected --simulate with {ORACLE}: the lengths on real engines are not known in advance")
    if args.cache_tokens and ((args.simulate and args.profile != "cpu-tiny") or args.fit):
        raise command.Misuse("expected --engines without --fit, or --profile cpu-tiny, with --cache-tokens")
    return _measure_simulated(args) if args.simulate else _measure_real(args)


# Simulated engines


def _measure_simulated(args: argparse.Namespace) -> dict[str, Any]:
    profile = profile_of(args)
    with command.counted_progress("simulated", args.seeds * len(args.policies)) as advance:

        def measure(policy: str, seed: int) -> dict[str, Any]:
            advance()
            return simulated(profile, policy, seed)

        rows = _rows(args.policies, args.seeds, measure)
    return {
        **summarize(rows, profile),
        "is_simulated": True,
        "repeats": args.seeds,
        "requirements": simulated_requirements(rows),
    }


def _rows(policies: Sequence[str], repeats: int, measure: Callable[[str, int], dict[str, Any]]) -> Rows:
    rows: Rows = {policy: [] for policy in policies}
    for repeat, policy in product(range(repeats), policies):
        rows[policy].append(measure(policy, repeat))
    return rows


# Real engines


def _measure_real(args: argparse.Namespace) -> dict[str, Any]:
    args.profile = "cpu-tiny"
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(_play(args, Path(directory)))
    profile = profile_of(args)
    simulated_rows = _rows(args.policies, args.rounds, lambda policy, number: simulated(profile, policy, number))
    errors = validation(rows, simulated_rows)
    return {
        **summarize(rows, profile),
        "is_simulated": False,
        "repeats": args.rounds,
        "validation": errors,
        "requirements": real_requirements(rows, errors),
    }


async def _play(args: argparse.Namespace, directory: Path) -> Rows:
    """Play all rounds on vLLM servers. With `--fit`, time batches before each round, and write the profile cpu-tiny."""
    from bench.simulator.fit import KV_CAPACITY, Batch, fit_profile
    from bench.simulator.testbed import VllmTestbed

    kv_capacity = args.cache_tokens or KV_CAPACITY
    names = [f"e{number}" for number in range(args.engines)]
    passes: list[dict[Batch, float]] = []
    rows: Rows = {policy: [] for policy in args.policies}
    with command.progress() as bar:
        async with VllmTestbed.started(_vllm_python(args), args.engines, directory, kv_capacity) as testbed:
            for number in bar.track(range(args.rounds), description="rounds"):
                if args.fit:
                    passes.append(await testbed.time_batches(bar))
                    fit = {**fit_profile(passes, args.engines), "machine": command.machine()}
                    profiles.FITTED.write_text(json.dumps(fit, indent=2) + "\n", encoding="utf-8")
                workload = profile_of(args).workload(number)
                for policy in rotated(args.policies, number):
                    turns, counters = await testbed.play(policy, workload, seed=number)
                    rows[policy].append(measured(turns, names, kv_capacity, counters))
    return rows


def _vllm_python(args: argparse.Namespace) -> str:
    python = args.vllm or os.environ.get(VLLM_PYTHON)
    if not python or not shutil.which(python):
        raise command.BenchFailed(
            f"expected an environment with vLLM: --vllm DIR/bin/python, or {VLLM_PYTHON}=...; got {python or 'none'}"
        )
    return str(python)


# Results


def summarize(rows: Mapping[str, Sequence[Mapping[str, Any]]], profile: Profile) -> dict[str, Any]:
    """Medians, and the ratio of `kv`'s makespan to each policy's on the same episodes."""
    policies = {policy: median_of_rows(policy_rows) for policy, policy_rows in rows.items()}
    if "kv" in rows:
        for policy, row in policies.items():
            row["kv_makespan_ratio"] = round(median_of_ratios(rows["kv"], rows[policy], _makespan_ratio), 4)
    return {
        "policies": policies,
        "profile": profile.name,
        "engines": profile.num_engines,
        "capacity": profile.engine.kv_capacity,
        "max_response_tokens": profile.max_response_tokens,
        "episodes": len(profile.scripts(0)),
    }


def simulated_requirements(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Requirement]:
    """The requirements on `kv` for the policies that were simulated."""
    requirements = [
        at_most(f"makespan / {other}'s", bound, _kv_median(rows, other, _makespan_ratio))
        for other, bound in (("static", 0.75), ("least_inflight", 0.85))
        if {"kv", other} <= rows.keys()
    ]
    return requirements + peer_requirements(rows)


def peer_requirements(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Requirement]:
    """The requirements on `kv` against the rules of other trainers; recomputed tokens over all rounds together."""
    requirements: list[Requirement] = []
    for other in ("sticky_least_loaded", "pause_at_tools"):
        if {"kv", other} <= rows.keys():
            ours, theirs = (sum(row["recomputed_tokens"] for row in rows[policy]) for policy in ("kv", other))
            requirements += [
                at_most(f"makespan / {other}'s", 0.95, _kv_median(rows, other, _makespan_ratio)),
                at_most(f"recomputed tokens / {other}'s", 0.5, round(ours / max(1, theirs), 4)),
            ]
    return requirements


def real_requirements(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], errors: Mapping[str, Mapping[str, float]]
) -> list[Requirement]:
    """The requirements on `kv` for the policies that were played, and on the simulator's errors."""
    requirements: list[Requirement] = []
    if {"kv", "static"} <= rows.keys():
        for name in ("preemptions", "recomputed_tokens"):  # rare events: over all rounds together
            kv, static = (sum(row[name] for row in rows[policy]) for policy in ("kv", "static"))
            requirements.append(at_most(f"{name.replace('_', ' ')} / static's", 0.05, round(kv / max(1, static), 4)))
        hits = _kv_median(rows, "static", lambda a, b: a["prefix_hit_rate"] - b["prefix_hit_rate"])
        service = _kv_median(rows, "static", lambda a, b: a["service_s"]["p95"] / b["service_s"]["p95"])
        requirements += [
            at_least("prefix hit rate - static's", 0.2, hits),
            at_most("p95 of service / static's", 1.0, service),
            at_most("makespan / static's", 1.0, _kv_median(rows, "static", _makespan_ratio)),
        ]
    if {"kv", "reserve_worst_case"} <= rows.keys():
        ratio = _kv_median(rows, "reserve_worst_case", lambda a, b: 1 / _makespan_ratio(a, b))
        requirements.append(at_least("reserve_worst_case's makespan / kv's", 1.5, ratio))
    requirements += peer_requirements(rows)
    for policy, row in errors.items():
        factor = max(row["preemptions"], 1 / row["preemptions"])
        requirements.append(at_most(f"simulator's makespan error for {policy}", 0.2, abs(row["makespan"])))
        requirements.append(at_most(f"simulator's preemption factor for {policy}", 1.5, round(factor, 3)))
    return requirements


def _kv_median(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], other: str, ratio: Callable[[Any, Any], float]
) -> float:
    return round(median_of_ratios(rows["kv"], rows[other], ratio), 4)


def _makespan_ratio(ours: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return float(ours["makespan_s"] / other["makespan_s"])


def tables(result: Result) -> list[Block]:
    """A row for each policy, the simulator's errors, and the requirements."""
    kind, repeat = ("**Simulated.**", "seed") if result["is_simulated"] else ("vLLM on the CPU:", "round")
    repeats = f"Medians of {result['repeats']} {repeat}s." if result["repeats"] > 1 else f"One {repeat}."
    blocks: list[Block] = [
        f"{kind} {result['engines']} engines of {result['capacity']:,} tokens, {result['episodes']:,} episodes "
        f"of at most {result['max_response_tokens']:,} tokens. {repeats}",
        Table.from_cells([_policy_row(policy, row) for policy, row in result["policies"].items()]),
    ]
    if errors := result.get("validation"):
        rows = [
            {
                "": f"`{policy}`",
                "makespan": f"{row['makespan']:+.1%}",
                "in its worst round": f"{row['worst_round']:+.1%}",
                "preemptions + 1": f"{row['preemptions']:.2f}×",
                "hits, points": f"{100 * row['prefix_hit_rate']:+.1f}",
            }
            for policy, row in errors.items()
        ]
        blocks.append(Table.from_cells(rows, "The simulator's errors on the same rollouts"))
    if requirements := result.get("requirements"):
        scope = "" if result["is_simulated"] else "preemptions and recomputed tokens over all rounds, the others "
        title = f"The requirements on `kv`, {scope}by medians of each {repeat}'s ratios"
        blocks.append(requirement_table(requirements, title))
    return blocks


def _policy_row(policy: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "": f"`{policy}`",
        "makespan s": f"{row['makespan_s']:,.1f}",
        "`kv` / this": f"{row['kv_makespan_ratio']:.2f}" if "kv_makespan_ratio" in row else "-",
        "preemptions": f"{row['preemptions']:,.0f}",
        "recomputed": f"{row['recomputed_tokens']:,.0f}",
        "hits": f"{row['prefix_hit_rate']:.2f}",
        "KV use": f"{row['kv_use']:.2f}",
        "idle": f"{row['idle_share']:.2f}",
        "service p50 / p95 s": percentile_list(row["service_s"], "p50", "p95"),
        "latency p50 / p95 s": percentile_list(row["latency_s"], "p50", "p95"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
