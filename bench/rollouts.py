"""What the scheduler's policies make of the same rollouts: on engines that are simulated, and on real ones.

    python -m bench.rollouts --simulate [--profile mi300x-14b] [--stage 1] [--seeds 5] [--gantt F.png] [--json]
    python -m bench.rollouts --engines 2 [--rounds 3] [--gantt F.png] [--json]    # vLLM on the CPU, small caches
    python -m bench.rollouts --engines 2 --fit      # the same, and measures the constants of the profile cpu-tiny

An episode is a script: how many tokens each turn samples, what its tool shows, how long that takes. Every policy plays
the same ones, all handed in at once. Real engines sample exactly as many tokens as the script says, whatever they are;
policies take turns over the rounds, each begins with an empty prefix cache, and medians over the rounds count. What
the simulator says of the same episodes stands beside it. The lengths of another step are known, as in all steps of a
training run but its first; of recorded episodes nothing is.

Measures, of one policy:
- service: an episode's time from its first turn's start to its end; with its wait before that, from its arrival.
- recomputed: tokens that an engine computed although it had before, because it had to forget them. An engine's first
  look at a prompt is none, nor is the block that a turn left half full.
- prefix hits: the share of the tokens that turns came with that the engine still had. Turns that go on after a
  preemption are not asked again.
- use: of the caches, by contexts of turns that run, over the whole time; idle: the share of time in which an engine has
  no turn.

Last, what is asked of `kv`, and whether it holds: ratios within a round or seed, of these the median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from bench.harness import command as output
from bench.simulator.placement import POLICIES
from bench.simulator.simulation import ORACLE, Hardware, Plan, Turn, decision_cost, lower_bound_s, simulate, workload
from trainer.config_loading import load_config
from trainer.recipe.resource_plan import resource_plan

FITTED = Path(__file__).parent / "simulator" / "profiles" / "cpu-tiny.json"
VLLM_PYTHON = "RSTAR_VLLM_PYTHON"
POINTS = (50, 95, 99)
BINS = 240
"""Of a timeline."""
STEP = 1000
"""From a seed to that of the training step before it."""


# Workloads and hardware


@dataclass(frozen=True, slots=True)
class Profile:
    """Engines and what they are asked. `plans` draws the episodes of a seed."""

    name: str
    hardware: Hardware
    engines: int
    most_new: int
    plans: Callable[[int], list[Plan]]
    is_simulated: bool
    command: str
    """What asks for it."""
    is_first: bool
    """Nothing is known of lengths before it begins."""

    def before(self, seed: int) -> list[Plan]:
        """The episodes of the training step before that of `seed`."""
        return [] if self.is_first else self.plans(seed + STEP)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the paper's recipe, as far as lengths go (arXiv 2508.20722, section 5.1)."""

    most_new: int
    mean: float
    """The middle of the lengths that the paper's figure shows."""


STAGES = {1: Stage(8 * 1024, 2500.0), 2: Stage(12 * 1024, 5000.0), 3: Stage(12 * 1024, 7000.0)}
CONFIG = Path(__file__).parent.parent / "configs" / "qwen3-14b-mi300x.toml"


def mi300x(cache_share: float | None = None) -> Hardware:
    """An engine of configs/qwen3-14b-mi300x.toml by its roofline: nothing here was measured on one.

    5.3 TB/s and 1,307 dense bfloat16 TFLOP/s are AMD's data sheet's; that 65 % of the one and 40 % of the other are had
    is assumed, as are 2 ms a step for all that is neither. Half of the 192 GB is the engine's, the other half trains;
    or `cache_share` of them all is its cache's.
    """
    config = load_config(CONFIG, {})
    assert config.model.shape is not None
    about = resource_plan(config, config.model.shape)
    bandwidth, flops = 0.65 * 5.3e12, 0.40 * 1307e12
    weights = 2.0 * about.parameters  # bytes, and operations of a token
    cache = cache_share and cache_share * config.hardware.gpu_memory_gb * 1e9 / about.kv_bytes_per_token
    return Hardware(
        name="mi300x-14b",
        capacity=int(cache or about.kv_tokens),
        most_running=config.engines.max_num_seqs,
        base_s=0.002,
        weights_s=weights / bandwidth,
        per_sequence_s=weights / flops,
        per_context_s=about.kv_bytes_per_token / bandwidth,
        prefill_s=weights / flops,
        source="roofline: 65 % of 5.3 TB/s, 40 % of 1,307 TFLOP/s, 2 ms a step; simulated",
    )


def fitted(path: Path = FITTED) -> Hardware:
    """The constants that `--fit` wrote."""
    if not path.exists():
        raise output.BenchFailed(f"{path} is not there: run `python -m bench.rollouts --engines 2 --fit` first")
    known = {field.name for field in fields(Hardware)}
    return Hardware(
        **{name: value for name, value in json.loads(path.read_bytes())["hardware"].items() if name in known}
    )


TINY_NEW, TINY_MEAN, TINY_PROMPT = 896, 220.0, 4
"""Of cpu-tiny's episodes: tokens of a response at most, and on average; prompts are this much shorter than Qwen3's."""


def tiny_plans(groups: int, samples: int, seed: int) -> list[Plan]:
    """Small multi-turn episodes. A cache of 8,192 tokens holds three in ten of those that come at once, as those of 64
    MI300X do in the paper's second stage."""
    plans = workload(groups, samples, TINY_NEW, TINY_MEAN, seed)
    return [replace(plan, prompt=plan.prompt // TINY_PROMPT) for plan in plans]


def profile_of(args: argparse.Namespace) -> Profile:
    """What the arguments ask for."""
    if args.profile == "cpu-tiny":
        groups, samples = args.groups or 12, args.samples or 16
        hardware, most_new, engines = fitted(), TINY_NEW, args.engines or 2
        plans = lambda seed: tiny_plans(groups, samples, seed)  # noqa: E731
    else:
        groups, samples, engines = args.groups or 512, args.samples or 32, args.engines or 64
        hardware, stage = mi300x(args.cache_share), STAGES[args.stage]
        most_new = stage.most_new
        plans = lambda seed: workload(groups, samples, most_new, stage.mean, seed)  # noqa: E731
    if args.episodes:
        recorded = list(recorded_plans(args.episodes))
        most_new = max(plan.length - plan.prompt for plan in recorded)
        plans = lambda seed: shuffled(recorded, seed)  # noqa: E731
    is_first = args.first_step or bool(args.episodes)  # another step than what is recorded there is not at hand
    how = f"--simulate --profile {args.profile} --stage {args.stage} " if args.simulate else ""
    how += f"--cache-share {args.cache_share} " if args.cache_share else ""
    command = f"python -m bench.rollouts {how}--engines {engines} --groups {groups} --samples {samples}"
    command += f" --seeds {args.seeds}" if args.simulate else f" --rounds {args.rounds}"
    command += " --fit" * args.fit + " --first-step" * args.first_step
    command += f" --episodes {' '.join(map(str, args.episodes))}" if args.episodes else ""
    command += "" if args.policies == tuple(POLICIES) else f" --policies {','.join(args.policies)}"
    return Profile(args.profile, hardware, engines, most_new, plans, args.simulate, command, is_first)


def recorded_plans(files: Iterable[Path]) -> Iterator[Plan]:
    """The episodes of a run's `episodes/*.jsonl`, with the lengths and tool times that they had."""
    groups: dict[tuple[int, int], int] = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                if row["turns"]:
                    yield _recorded(row, groups.setdefault((row["step"], row["group"]), len(groups)))
            except (KeyError, TypeError, ValueError) as why:
                raise output.BenchFailed(f"{file}:{number}: expected an episode as runs record them: {why!r}") from why


def _recorded(row: Mapping[str, Any], group: int) -> Plan:
    turns = row["turns"]
    ends = [*(turn["start"] for turn in turns[1:]), turns[-1]["end"]]
    return Plan(
        group=group,
        prompt=row["prompt_tokens"],
        turns=tuple(
            (turn["end"] - turn["start"], end - turn["end"], turn["tool_s"] if end > turn["end"] else 0.0)
            for turn, end in zip(turns, ends, strict=True)
        ),
    )


def shuffled(plans: Sequence[Plan], seed: int) -> list[Plan]:
    """Groups in another order, each whole."""
    groups: dict[int, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.group, []).append(plan)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    return [plan for group in order for plan in group]


# What a run comes to


@dataclass(frozen=True, slots=True)
class Counts:
    """What the engines say of themselves, all together."""

    preemptions: int
    recomputed: int
    asked: int
    hits: int


Played = dict[tuple[int, str], tuple[list[Turn], Counts]]
"""By round and policy."""
Passes = dict[int, list[list[float]]]
"""Sizes of batches and the seconds that they took, by the round before which that was measured."""


def measured(
    turns: Sequence[Turn], engines: Sequence[str], line: Mapping[str, Sequence[float]], counts: Counts
) -> dict[str, Any]:
    """One policy's measures; all episodes arrived at time 0. `line` is its timeline."""
    makespan = max(turn.ended for turn in turns)
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for turn in turns:
        began[turn.episode] = min(turn.began, began.get(turn.episode, turn.began))
        ended[turn.episode] = max(turn.ended, ended.get(turn.episode, turn.ended))
    uses = [min(1.0, share) for shares in line.values() for share in shares]
    busy = sum(_covered([turn for turn in turns if turn.engine == engine]) for engine in engines)
    return {
        "makespan_s": round(makespan, 3),
        "tokens_per_s": round(sum(turn.sampled for turn in turns) / makespan, 1),
        "preemptions": counts.preemptions,
        "recomputed_tokens": counts.recomputed,
        "prefix_hit_rate": round(counts.hits / counts.asked, 4) if counts.asked else 0.0,
        "kv_use": round(statistics.fmean(uses), 4),
        "idle_share": round(1 - busy / (makespan * len(engines)), 4),
        "service_s": output.percentiles((ended[key] - began[key] for key in began), POINTS),
        "since_arrival_s": output.percentiles(ended.values(), POINTS),
        "moves": sum(turn.has_moved for turn in turns),
    }


def timeline(turns: Sequence[Turn], engines: Sequence[str], capacity: int, bins: int = BINS) -> dict[str, list[float]]:
    """Of each engine, the contexts of its turns over its cache's tokens, at even times. Over 1: they do not fit."""
    width = max(turn.ended for turn in turns) / bins
    line = {engine: [0.0] * bins for engine in engines}
    for turn in turns:
        shares = line[turn.engine]
        rate = turn.sampled / max(turn.ended - turn.began, 1e-9)
        for number in range(int(turn.began / width + 0.5), min(bins, int(turn.ended / width + 0.5))):
            shares[number] += (turn.context + rate * ((number + 0.5) * width - turn.began)) / capacity
    return line


def _covered(turns: Iterable[Turn]) -> float:
    """Seconds in which at least one of `turns` is under way."""
    total = until = 0.0
    for turn in sorted(turns, key=lambda turn: turn.began):
        total += max(0.0, turn.ended - max(until, turn.began))
        until = max(until, turn.ended)
    return total


def simulated(profile: Profile, policy: str, seed: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A policy's measures on simulated engines, and its timeline."""
    run = simulate(
        profile.plans(seed), profile.hardware, profile.engines, policy, profile.most_new, profile.before(seed)
    )
    counts = Counts(*(sum(getattr(engine, name) for engine in run.engines) for name in Counts.__slots__))
    names = [engine.name for engine in run.engines]
    line = timeline(run.turns, names, profile.hardware.capacity)
    return measured(run.turns, names, line, counts), line


def middle(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each measure's median over rounds or seeds."""
    return {
        name: middle([row[name] for row in rows])
        if isinstance(value, dict)
        else output.median((row[name] for row in rows), 4)
        for name, value in rows[0].items()
    }


# What is asked of kv


def verdicts(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], off: Mapping[str, Mapping[str, float]] | None
) -> list[dict[str, Any]]:
    """What is needed, and what came: on real engines, and how far the simulator is `off` them, or on simulated ones
    where that is None. What needs a policy that was not played is left out."""

    def paired(other: str, compare: Callable[[Any, Any], float] = _makespans) -> float | None:
        """The median over rounds."""
        if not {"kv", other} <= rows.keys():
            return None
        return output.median((compare(*pair) for pair in zip(rows["kv"], rows[other], strict=True)), 4)

    def share(count: str) -> float | None:
        """Of all rounds together: of what is rare no round has enough."""
        if not {"kv", "static"} <= rows.keys():
            return None
        ours, its = (sum(row[count] for row in rows[policy]) for policy in ("kv", "static"))
        return round(ours / max(1, its), 4)

    wanted: list[tuple[str, str, float, float | None]] = [
        ("makespan, of static's", "≤", 0.75, paired("static")),
        ("makespan, of least_inflight's", "≤", 0.85, paired("least_inflight")),
        ("makespan, of the bound", "≤", 1.15, paired("kv", lambda row, _: row["over_bound"])),
    ]
    if off is not None:
        wanted = [
            ("preemptions, of static's", "≤", 0.05, share("preemptions")),
            ("recomputed tokens, of static's", "≤", 0.05, share("recomputed_tokens")),
            (
                "prefix hits over static's",
                "≥",
                0.2,
                paired("static", lambda a, b: a["prefix_hit_rate"] - b["prefix_hit_rate"]),
            ),
            (
                "p95 of service, of static's",
                "≤",
                1.0,
                paired("static", lambda a, b: a["service_s"]["p95"] / b["service_s"]["p95"]),
            ),
            ("makespan, of static's", "≤", 1.0, paired("static")),
            (
                "reserve_worst_case's makespan, of kv's",
                "≥",
                1.5,
                paired("reserve_worst_case", lambda a, b: 1 / _makespans(a, b)),
            ),
        ]
        for policy, row in off.items():
            wanted.append((f"simulator's makespan for {policy}, off by", "≤", 0.2, abs(row["makespan"])))
            factor = max(row["preemptions"], 1 / row["preemptions"])
            wanted.append((f"simulator's preemptions for {policy}, off by", "≤", 1.5, round(factor, 3)))
    return [
        {
            "what": what,
            "needed": f"{sign} {bound:g}",
            "got": got,
            "holds": got <= bound if sign == "≤" else got >= bound,
        }
        for what, sign, bound, got in wanted
        if got is not None
    ]


def _makespans(ours: Mapping[str, Any], its: Mapping[str, Any]) -> float:
    ratio: float = ours["makespan_s"] / its["makespan_s"]
    return ratio


# Commands


def main(argv: Sequence[str] | None = None) -> int:
    """The comparison, or the fit; 1 if it could not be made."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not (args.simulate or args.engines):
        parser.error("expected --simulate, or --engines N")
    if ORACLE in args.policies and not args.simulate:
        parser.error(f"expected --simulate with {ORACLE}: of real engines nobody knows all lengths")
    if args.cost and not args.simulate:
        parser.error("--cost goes with --simulate")
    if args.cache_share and not (args.simulate and args.profile == "mi300x-14b"):
        parser.error("--cache-share goes with --simulate --profile mi300x-14b, whose memory it divides")
    work = _cost if args.cost else _simulate if args.simulate else _real
    return output.run_as_command("rollouts", lambda: work(args))


def _parser() -> argparse.ArgumentParser:
    parser = output.parser("rollouts", __doc__ or "")
    parser.add_argument("--simulate", action="store_true", help="engines that exist as numbers")
    parser.add_argument("--fit", action="store_true", help="with --engines: measure the profile cpu-tiny, too")
    parser.add_argument("--engines", type=output.count, help="how many; alone: real vLLM servers on the CPU")
    parser.add_argument("--profile", choices=("mi300x-14b", "cpu-tiny"), default="mi300x-14b", help="with --simulate")
    parser.add_argument(
        "--stage", type=int, choices=STAGES, default=1, help="of the paper, for mi300x-14b (default: 1)"
    )
    parser.add_argument(
        "--episodes", type=output.file, nargs="+", metavar="FILE.jsonl", help="lengths of a recorded run"
    )
    what = f"of {','.join(POLICIES)}; with --simulate also {ORACLE}, which knows all lengths"
    parser.add_argument("--policies", type=_policies, default=tuple(POLICIES), help=what)
    parser.add_argument("--seeds", type=output.count, default=5, help="workloads that are simulated (default: 5)")
    parser.add_argument("--rounds", type=output.count, default=3, help="of real engines (default: 3)")
    parser.add_argument("--groups", type=output.count, help="problems (default: 512; cpu-tiny: 12)")
    parser.add_argument("--samples", type=output.count, help="rollouts of each (default: 32; cpu-tiny: 16)")
    parser.add_argument("--jobs", type=output.count, default=1, help="simulations at once (default: 1)")
    parser.add_argument(
        "--cache-share", type=_share, help="of an MI300X's memory, left to the cache (default: what the profile leaves)"
    )
    parser.add_argument("--cost", action="store_true", help="what the scheduler's decisions take, with --simulate")
    parser.add_argument("--first-step", action="store_true", help="nothing is known of lengths before it begins")
    parser.add_argument("--log", type=_made, metavar="FILE.jsonl", help="every turn that was played; goes on with it")
    parser.add_argument("--vllm", metavar="PYTHON", help=f"of an environment with vLLM (default: ${VLLM_PYTHON})")
    parser.add_argument("--gantt", type=_made, metavar="FILE.png", help="draw the engines over time")
    return parser


def _made(text: str) -> Path:
    """A file to be written: to find out after minutes of work that it cannot be is too late."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, got {text!r}")
    return path


def _policies(text: str) -> tuple[str, ...]:
    names, known = tuple(text.split(",")), (*POLICIES, ORACLE)
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown policy {unknown[0]!r}; expected some of {', '.join(known)}")
    return names


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, got {text!r}")
    return share


def _simulate(args: argparse.Namespace) -> int:
    profile = profile_of(args)
    rows: dict[str, list[Any]] = {policy: [] for policy in args.policies}
    lines: dict[str, dict[str, list[float]]] = {}
    bounds = []
    with output.progress() as bar:
        task = bar.add_task("simulated", total=args.seeds * len(args.policies))
        for seed in range(args.seeds):
            bounds.append(lower_bound_s(profile.plans(seed), profile.hardware, profile.engines))
        for (seed, policy), (found, line) in _all_simulated(args):
            rows[policy].append(found | {"over_bound": round(found["makespan_s"] / bounds[seed], 4)})
            if seed == 0:
                lines[policy] = line
            bar.advance(task)
    title = f"{profile.name}, simulated: {profile.engines} engines, {len(profile.plans(0)):,} episodes"
    figures = figures_of(rows, bounds, profile, args.seeds)
    figures["verdicts"] = verdicts(rows, None)
    return _finish(args, title, figures, rows, lines)


def _cost(args: argparse.Namespace) -> int:
    """Processor time of each decision of `kv`, in microseconds."""
    profile = profile_of(args)
    calls = decision_cost(
        profile.plans(0), profile.hardware, profile.engines, profile.most_new, before=profile.before(0)
    )
    about = {kind: {"calls": len(taken), **output.percentiles(taken)} for kind, taken in calls.items()}
    title = f"Microseconds of a decision: {profile.engines} engines, {len(profile.plans(0)):,} episodes"
    rows = ((kind, f"{row['calls']:,}", row["p50"], row["p99"]) for kind, row in about.items())
    output.show(title, ("", "calls", "median", "p99"), rows)
    figures = {"bench": "rollouts", "command": f"{profile.command} --cost", "microseconds": about}
    output.finish(figures, _parser(), args)
    return 0


def _all_simulated(args: argparse.Namespace) -> Iterator[tuple[tuple[int, str], Any]]:
    tasks = list(product(range(args.seeds), args.policies))
    if args.jobs == 1:
        yield from ((task, _one(args, *task)) for task in tasks)
        return
    with ProcessPoolExecutor(args.jobs) as pool:
        yield from zip(tasks, pool.map(_one, [args] * len(tasks), *zip(*tasks, strict=True)), strict=True)


def _one(args: argparse.Namespace, seed: int, policy: str) -> Any:
    return simulated(profile_of(args), policy, seed)


def figures_of(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], bounds: Sequence[float], profile: Profile, repeats: int
) -> dict[str, Any]:
    """Medians, and how each policy's makespan compares with `kv`'s on the same episodes."""
    policies = {policy: middle(found) for policy, found in rows.items()}
    for policy, found in policies.items():
        if "kv" in rows:
            pairs = zip(rows["kv"], rows[policy], strict=True)
            found["kv_makespan_of_its"] = output.median(
                (ours["makespan_s"] / its["makespan_s"] for ours, its in pairs), 4
            )
    return {
        "bench": "rollouts",
        "command": profile.command,
        "policies": policies,
        "lower_bound_s": output.median(bounds),
        "profile": profile.name,
        "source": profile.hardware.source,
        "is_simulated": profile.is_simulated,
        "engines": profile.engines,
        "capacity": profile.hardware.capacity,
        "most_new": profile.most_new,
        "episodes": len(profile.plans(0)),
        "repeats": repeats,
    }


def _finish(
    args: argparse.Namespace,
    title: str,
    figures: Mapping[str, Any],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    lines: Mapping[str, Mapping[str, list[float]]],
) -> int:
    """`lines`: timelines of the first round or seed."""
    show(title, figures)
    output.plot(args.plot, lambda axes: draw(axes, figures))
    if args.gantt:
        from bench.simulator.timeline import gantt

        gantt(args.gantt, title, lines, {policy: found[0]["makespan_s"] for policy, found in rows.items()})
    output.finish(figures, _parser(), args)
    return 0


def _real(args: argparse.Namespace) -> int:
    args.profile = "cpu-tiny"
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "played.jsonl"
        wanted = [(number, policy) for number in range(args.rounds) for policy in _rotated(args.policies, number)]
        played, passes = _read(log)
        if missing := [key for key in wanted if key not in played]:
            asyncio.run(_play(args, missing, passes, log, Path(folder)))
            played, passes = _read(log)
    if args.fit:
        fit = _write_fit(passes, args.engines)
        costs = [(name, f"{value:.3g}") for name, value in fit["hardware"].items() if name.endswith("_s")]
        output.show(f"{FITTED}: a batch is off by {fit['residual']:.1%} (median)", ("constant", ""), costs)
    profile = profile_of(args)
    rows: dict[str, list[Any]] = {policy: [] for policy in args.policies}
    said: dict[str, list[Any]] = {policy: [] for policy in args.policies}
    lines: dict[str, dict[str, list[float]]] = {}
    bounds = [lower_bound_s(profile.plans(number), profile.hardware, profile.engines) for number in range(args.rounds)]
    names = [f"e{number}" for number in range(profile.engines)]
    for number, policy in sorted(wanted):
        turns, counts = played[number, policy]
        line = timeline(turns, names, profile.hardware.capacity)
        found = measured(turns, names, line, counts)
        lines.setdefault(policy, line)
        rows[policy].append(found | {"over_bound": round(found["makespan_s"] / bounds[number], 4)})
        said[policy].append(simulated(profile, policy, number)[0])
    figures = figures_of(rows, bounds, profile, args.rounds)
    figures["simulated"] = {policy: middle(found) for policy, found in said.items()}
    figures["validation"] = validation(rows, said)
    figures["verdicts"] = verdicts(rows, figures["validation"])
    figures["rounds"], figures["simulated_rounds"] = rows, said
    title = f"vLLM on the CPU: {profile.engines} engines of {profile.hardware.capacity:,} tokens"
    return _finish(args, f"{title}, {figures['episodes']} episodes", figures, rows, lines)


async def _play(
    args: argparse.Namespace, missing: Sequence[tuple[int, str]], passes: Passes, log: Path, folder: Path
) -> None:
    from bench.simulator.testbed import Bench

    def note(row: Mapping[str, Any]) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    with output.progress() as bar:
        async with Bench.started(_vllm(args), args.engines, folder) as bench:
            for number, policy in bar.track(missing, description="rounds"):
                if args.fit and number not in passes:
                    took = await bench.batches(bar)
                    passes[number] = [[*astuple(batch), took[batch]] for batch in took]
                    note({"round": number, "batches": passes[number]})
                    _write_fit(passes, args.engines)
                profile = profile_of(args)
                turns, counts = await bench.play(
                    policy, profile.plans(number), profile.before(number), profile.most_new, seed=number
                )
                played = {"counts": astuple(counts), "turns": [*map(astuple, turns)]}
                note({"round": number, "policy": policy, **played})


def _read(log: Path) -> tuple[Played, Passes]:
    """What was played and what was measured."""
    played: Played = {}
    passes: Passes = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        row = json.loads(line)
        if "batches" in row:
            passes[row["round"]] = row["batches"]
        else:
            played[row["round"], row["policy"]] = [Turn(*turn) for turn in row["turns"]], Counts(*row["counts"])
    return played, passes


def _write_fit(passes: Passes, engines: int) -> dict[str, Any]:
    """The constants that all passes come to, which are the profile cpu-tiny from now on."""
    from bench.simulator.testbed import Batch, fitted

    if not passes:
        raise output.BenchFailed("expected rounds that were played with --fit, got a log without any")
    took = [{Batch(*map(int, sizes)): seconds for *sizes, seconds in rows} for rows in passes.values()]
    fit = fitted(took, engines)
    FITTED.write_text(json.dumps({**fit, "machine": output.machine()}, indent=2) + "\n", encoding="utf-8")
    return fit


def validation(rows: Mapping[str, Sequence[Any]], said: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, float]]:
    """How far the simulator is from what happened, by policy: of the makespan, as a share, of all rounds together and
    of the one that it missed most; of preemptions, as a factor of both sums, with one more for each round, in which one
    more or less is chance; of the hit rate, in points."""
    made = {}
    for policy, real in rows.items():
        sums = [sum(row["preemptions"] + 1 for row in some) for some in (said[policy], real)]
        spans = [sum(row["makespan_s"] for row in some) for some in (said[policy], real)]
        hits = [statistics.fmean(row["prefix_hit_rate"] for row in some) for some in (said[policy], real)]
        rounds = [a["makespan_s"] / b["makespan_s"] - 1 for a, b in zip(said[policy], real, strict=True)]
        made[policy] = {
            "makespan": round(spans[0] / spans[1] - 1, 4),
            "worst_round": round(max(rounds, key=abs), 4),
            "preemptions": round(sums[0] / sums[1], 3),
            "prefix_hit_rate": round(hits[0] - hits[1], 4),
        }
    return made


def _rotated(policies: Sequence[str], by: int) -> Sequence[str]:
    by %= len(policies)
    return [*policies[by:], *policies[:by]]


def _vllm(args: argparse.Namespace) -> str:
    python = args.vllm or os.environ.get(VLLM_PYTHON)
    if not python or not shutil.which(python):
        raise output.BenchFailed(
            f"expected an environment with vLLM: --vllm its/bin/python, or {VLLM_PYTHON}=...; got {python or 'none'}"
        )
    return str(python)


# Tables and plots

COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "makespan s": lambda row: f"{row['makespan_s']:.1f}",
    "/bound": lambda row: f"{row['over_bound']:.2f}",
    "kv/its": lambda row: f"{row['kv_makespan_of_its']:.2f}" if "kv_makespan_of_its" in row else "",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "evicted": lambda row: f"{row['preemptions']:,.0f}",
    "recomputed": lambda row: f"{row['recomputed_tokens']:,.0f}",
    "hits": lambda row: f"{row['prefix_hit_rate']:.2f}",
    "use": lambda row: f"{row['kv_use']:.2f}",
    "idle": lambda row: f"{row['idle_share']:.2f}",
    "service p50/95/99": lambda row: _points(row["service_s"]),
    "since arrival": lambda row: _points(row["since_arrival_s"]),
}


def _points(found: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.3g}" for value in found.values())


def show(title: str, figures: Mapping[str, Any]) -> None:
    """The table of the policies, and how far the simulator was off."""
    policies = figures["policies"]
    output.show(
        title, ("", *COLUMNS), ((policy, *(cell(row) for cell in COLUMNS.values())) for policy, row in policies.items())
    )
    output.CONSOLE.print(f"No schedule takes less than {figures['lower_bound_s']} s.", highlight=False)
    if found := figures.get("validation"):
        rows = (
            (
                policy,
                f"{row['makespan']:+.1%}",
                f"{row['worst_round']:+.1%}",
                f"{row['preemptions']:.2f}×",
                f"{100 * row['prefix_hit_rate']:+.1f}",
            )
            for policy, row in found.items()
        )
        title = "The simulator against that"
        output.show(title, ("", "makespan", "in its worst round", "preemptions", "hits, points"), rows)
    if asked := figures["verdicts"]:
        output.show_asked("What is asked of kv", asked)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """Makespans, and what of them no schedule can take away."""
    policies = figures["policies"]
    axes.barh(list(policies), [row["makespan_s"] for row in policies.values()])
    axes.axvline(figures["lower_bound_s"], color="black", linestyle="--", linewidth=1, label="lower bound")
    axes.set_xlabel("seconds until the last rollout is over")
    what = "simulated" if figures["is_simulated"] else "vLLM"
    axes.set_title(f"{figures['profile']}, {what}: {figures['engines']} engines, {figures['episodes']:,} rollouts")
    axes.invert_yaxis()
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main())
