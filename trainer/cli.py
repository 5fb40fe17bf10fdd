"""The commands of `rstar-train`: read the command line, call one module, turn what happened into an exit code.

Exit codes: 0 fine, 1 failed, 2 misuse, 130 interrupted, 143 terminated.

Modules are imported by the command that needs them, so that `--help` stays fast and knows no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import RunConfig
    from trainer.recipe.runner import Run, Unit

INTERRUPTED = 130
TERMINATED = 143
SOURCES = (
    "Settings come from CONFIG, then variables (RSTAR_TRAIN_STAGES__RL1__STEPS=3), then --set. All of them, with what "
    "they are for, are in trainer/config.py."
)
QUIET = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TRL_EXPERIMENTAL_SILENCE")
"""Variables of the libraries."""
OF_THE_EXTRA = frozenset(
    {"accelerate", "datasets", "numpy", "safetensors", "tokenizers", "torch", "transformers", "trl"}
)
"""Modules that `pip install '.[train]'` brings."""
EXPLAINED = """
Bytes are of one GPU that trains, or of the machine; gradients are as large as
weights, Adam's moments twice, train bytes are an estimate. Rollouts per engine
are of full length, at once. What does not fit has a share of a GPU over 1, or
no rollout per engine: lower micro_batch, set is_checkpointing or sharding;
engines.gpu_memory says who gets how much."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = _parser().parse_args(argv)
    # Before torch loads: its threads share cores with the sandbox, and ones that spin while they wait cost tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Nobody is told of a run, and what it shows are its own bars, not what libraries have to say to each other.
    for name in ("HF_HUB_DISABLE_TELEMETRY", *QUIET):
        os.environ.setdefault(name, "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that what was started is ended, too
    try:
        args.command(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 1
    except ModuleNotFoundError as why:
        print(f"rstar-train: {_what_to_install(why.name or str(why))}", file=sys.stderr)
        return 1
    except Exception as why:
        # Ours say all there is to say; of anything else the traceback is wanted.
        if not type(why).__module__.startswith("trainer."):
            raise
        print(f"rstar-train: {why}", file=sys.stderr)
        return 2 if isinstance(why, ValueError) else 1


def _what_to_install(module: str) -> str:
    name = module.partition(".")[0]
    if name in OF_THE_EXTRA:
        return f"needs {name}, which comes with the extra `train`: pip install '.[train]' in the checkout"
    return f"needs {name}: pip install {name}"


def recipe(args: argparse.Namespace) -> None:
    """Run SFT and all stages, evaluated one by one; the same command goes on after a kill."""
    if args.dry_run:
        return _dry_run(args)
    from trainer.recipe.runner import recipe

    summary = recipe(_config(args), has_preflight=not args.no_preflight).summary()
    if args.json:
        print(json.dumps(summary))
    else:
        _print_columns("after", {row.pop("name"): _by_source(row) for row in summary["stages"]})


def preflight(args: argparse.Namespace) -> None:
    """Look for all that a run needs of this machine, and name what is missing; run nothing."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else it prints each retry of a hub that cannot be reached
    from trainer.recipe.preflight import require
    from trainer.recipe.runner import Run

    run = Run(_config(args))
    units = [one for one in run.units() if not run.done(one)]
    require(run, units)
    print(f"preflight: nothing is missing for {len(units)} units", file=sys.stderr)


def unit(args: argparse.Namespace) -> None:
    """Run one unit of a recipe, as `recipe` does."""
    from trainer.recipe.runner import Unit

    run, one = _run(args), Unit(args.unit, args.stage)
    if run.done(one):
        print(f"{one} is done; to do it anew, delete {run.done_file(one).parent} first", file=sys.stderr)
        return
    _require(args, run, one)
    from trainer.recipe import phase_work as stages

    stages.WORK[args.unit](run, one)


def evaluate(args: argparse.Namespace) -> None:
    """Measure a model: accuracy, tool use, format, lengths."""
    from rich.console import Console

    from trainer.recipe.evaluation import ALL, read_reports, summary
    from trainer.recipe.runner import Unit

    run = _run(args)
    one = Unit("eval", args.stage) if args.stage else None
    reports = read_reports((run.done(one) or {}).get("reports", {})) if one else {}
    if not reports or reports[ALL].unavailable:  # it is not over, or an outage left something to do
        _require(args, run, one or Unit("eval", stage=""))
        from trainer.recipe import phase_work as stages

        reports = stages.evaluate(run, one) if one else stages.evaluate_model(run, args.model, args.out)
    if args.json:
        print(json.dumps({source: asdict(report) for source, report in reports.items()}))
    else:
        Console().print(summary(reports))


def rollout(args: argparse.Namespace) -> None:
    """Sample episodes into a folder that `show` opens."""
    from trainer.recipe.runner import Unit

    run = _run(args)
    _require(args, run, Unit("rollout", args.stage))
    from trainer.recipe import phase_work as stages

    stages.rollout(run, args.stage, problems=args.problems, samples=args.samples, out=args.out)


def data(args: argparse.Namespace) -> None:
    """Bring problems from files and hub names into one format, filtered and decontaminated."""
    from trainer.data.problems import prepare, write
    from trainer.progress_bar import bar

    how = {"against": args.against, "is_integer_only": not args.any_answer, "seed": args.seed}
    with bar("rows") as advance:
        problems, report = prepare(args.source, **how, advance=advance)
    write(problems, args.out)
    print(json.dumps(asdict(report), indent=None if args.json else 2))


def show(args: argparse.Namespace) -> None:
    """Look at a run, in the terminal or as a page; it may be going on."""
    from trainer.runs.show import run

    run(args)


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rstar-train", description="A compact agentic-RL trainer: GRPO-RoC with sandboxed tools."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Any, *parents: argparse.ArgumentParser, doc: str = "") -> argparse.ArgumentParser:
        doc = doc or command.__doc__
        about = doc[0].lower() + doc[1:].rstrip(".")
        made = commands.add_parser(
            name, help=about, description=doc, epilog=SOURCES if run in parents else None, parents=parents,
            allow_abbrev=False,
        )  # fmt: skip
        made.set_defaults(command=command, unit=name)
        return made

    run, started, stage, as_json = (argparse.ArgumentParser(add_help=False) for _ in range(4))
    run.add_argument("config", metavar="CONFIG", type=Path, help="a TOML file, or the folder of a run")
    run.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: run_dir in CONFIG)")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as stages.rl1.steps=3")
    started.add_argument("--no-preflight", action="store_true", help="start without looking for what is needed first")
    stage.add_argument("--stage", required=True, help="one of the stages in CONFIG")
    as_json.add_argument("--json", action="store_true", help="print the result as one line of JSON, the last")

    add("preflight", preflight, run)
    one = add("recipe", recipe, run, started, as_json)
    one.add_argument("--dry-run", action="store_true", help="show the resolved run and what it needs; run nothing")
    one = add(
        "prepare", unit, run, started, doc="Bring a run's data, and its model if it is generated, into its folder."
    )
    one.set_defaults(stage="start")
    add("sft", unit, run, started, doc="Fine-tune on conversations.").set_defaults(stage="sft")
    add("filter", unit, run, started, stage, doc="Take out what the model before a stage solves every time.")
    add("grpo", unit, run, started, stage, doc="Train one stage of GRPO-RoC.")

    one = add("eval", evaluate, run, started, as_json)
    which = one.add_mutually_exclusive_group(required=True)
    which.add_argument("--stage", help="of a run's model: sft, or one of the stages in CONFIG")
    which.add_argument("--model", metavar="PATH", help="any model's folder, on the problems of [evaluate]")
    kept = "folder of --model's episodes, where what is there is not run again (default: evaluation/ in the run's)"
    one.add_argument("--out", metavar="DIR", type=Path, help=kept)

    one = add("rollout", rollout, run, started)
    one.add_argument("--stage", required=True, help="whose model: start, sft, or one of the stages in CONFIG")
    one.add_argument("--problems", type=int, default=16, help="how many, from the first (default: 16)")
    one.add_argument("--samples", type=int, default=4, help="episodes of each (default: 4)")
    one.add_argument("--out", required=True, metavar="DIR", type=Path, help="folder for the episodes")

    one = add("data", data, as_json)
    source = "generated:N, a file, or owner/name[@config][:split]"
    one.add_argument("source", nargs="+", metavar="SOURCE", help=source)
    one.add_argument("--out", required=True, metavar="FILE", type=Path, help="the JSONL file to write")
    one.add_argument(
        "--against", action="append", default=[], metavar="SOURCE", help="drop what shares 8 words with it"
    )
    one.add_argument("--any-answer", action="store_true", help="keep answers that are no integers, too")
    one.add_argument("--seed", type=int, default=0, help="of generated problems (default: 0)")

    one = add("show", show)
    one.add_argument("run", type=Path, help="the run's folder")
    one.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page, with episodes, instead")
    one.add_argument("--episodes", type=int, default=400, metavar="N", help="at most so many in it (default: 400)")
    one.add_argument("--step", type=int, metavar="STEP", help="of this step alone")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: `importlib.metadata` is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rstar-train {version('rstar-sandbox')}")
        parser.exit()


def _config(args: argparse.Namespace) -> RunConfig:
    from trainer.config import load

    return load(args.config, os.environ, [*args.set, *([f"run_dir={args.run_dir}"] if args.run_dir else [])])


def _run(args: argparse.Namespace) -> Run:
    from trainer.recipe.runner import Run

    return Run(_config(args))


def _require(args: argparse.Namespace, run: Run, one: Unit) -> None:
    """The part of the preflight that concerns one unit, whose predecessor is over; on the first rank alone."""
    if args.no_preflight or os.environ.get("RANK", "0") != "0":
        return
    if one.command != "prepare" and one.stage:
        run.trained(one.stage, before=one.command in ("sft", "filter", "grpo"))
    from trainer.recipe.preflight import require

    require(run, [one])


# What is printed


def _dry_run(args: argparse.Namespace) -> None:
    from trainer.config import ConfigError
    from trainer.recipe.resource_plan import known_shape, plan

    config = _config(args)
    if not (shape := known_shape(config)):
        raise ConfigError(f"model.path={config.model.path} is no folder here: state the model's sizes in [model.shape]")
    needs = plan(config, shape)
    if args.json:
        print(json.dumps({"config": asdict(config), "plan": needs}))
        return
    print(json.dumps(asdict(config), indent=2))
    stages, sft = needs.pop("stages"), needs.pop("sft")
    _print_columns("a run needs", {"": needs})
    _print_columns("a step at most", {**({"sft": sft} if sft else {}), **stages})
    print(EXPLAINED)


def _by_source(row: dict[str, Any]) -> dict[str, Any]:
    """A stage's row with the accuracies of its sources, of a single one in place of that of all."""
    from trainer.recipe.evaluation import Estimate

    by_source = row.pop("accuracy_by_source", {})
    names = {source: f"accuracy, {source}" if len(by_source) > 1 else "accuracy" for source in by_source}
    shown = {names[source]: str(Estimate(**found)) if found else None for source, found in by_source.items()}
    return {"accuracy": row.pop("accuracy"), **shown, **row}


def _print_columns(about: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """A column for each that has numbers, a line for each number."""
    from rich.console import Console
    from rich.filesize import decimal

    from trainer.runs.show import figure, table

    def text(name: str, value: Any) -> str:
        return value if isinstance(value, str) else decimal(value) if name.endswith("bytes") else figure(value)

    made = table(about, *(f"{name}>…" for name in columns))
    for name in next(iter(columns.values()), {}):
        made.add_row(name.replace("_", " "), *(text(name, column[name]) for column in columns.values()))
    Console().print(made)
