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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer.config import ConfigError, RunConfig, load

if TYPE_CHECKING:
    from trainer.arithmetic import Plan
    from trainer.recipe import Run

INTERRUPTED = 130
TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = _parser().parse_args(argv)
    # Before torch loads: its threads share cores with the sandbox, and ones that spin while they wait cost tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # nobody is told of a run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that what was started is ended, too
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 1
    except ModuleNotFoundError as why:
        print(f"rstar-train: needs {why.name}; pip install 'rstar-sandbox[train]'", file=sys.stderr)
        return 1
    except Exception as why:
        # Ours say all there is to say; of anything else the traceback is wanted.
        if not type(why).__module__.startswith("trainer."):
            raise
        print(f"rstar-train: {why}", file=sys.stderr)
        return 2 if isinstance(why, ValueError) else 1


def recipe(args: argparse.Namespace) -> int:
    """Run SFT and all stages, evaluated one by one; the same command goes on after a kill."""
    config = _config(args)
    if args.dry_run:
        return _dry_run(args, config)
    from trainer.recipe import UnitFailed, recipe

    try:
        run = recipe(config, say=lambda text: print(text, file=sys.stderr, flush=True))
    except UnitFailed as why:
        print(f"rstar-train: {why}", file=sys.stderr)
        return 2 if why.code == 2 else 1
    if args.json:
        print(json.dumps(run.summary()))
    else:
        _print_stages(run.summary()["stages"])
    return 0


def unit(args: argparse.Namespace) -> int:
    """Run one unit of a recipe, as `recipe` does."""
    stages, run = _unit(args)
    work = {"prepare": stages.prepare, "sft": stages.sft, "filter": stages.drop_solved, "grpo": stages.grpo}
    work[args.unit](run, *([args.stage] if "stage" in args else []))
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Measure a model: accuracy, tool use, format, lengths."""
    stages, run = _unit(args)
    if args.stage:
        reports = stages.evaluate(run, args.stage)
    else:
        from trainer.data import read

        if not args.out:
            raise ConfigError("eval --model: expected --out DIR, where its episodes go")
        config = run.config
        problems = [
            problem for source in config.evaluate.data for problem in read(source, seed=config.seed, fresh=True)
        ]
        reports = stages.measure(run, Path(args.model), problems, Path(args.out))
    if args.json:
        print(json.dumps({source: report.to_dict() for source, report in reports.items()}))
    else:
        from rich.console import Console

        from trainer.evaluate import table

        Console().print(table(reports))
    return 0


def rollout(args: argparse.Namespace) -> int:
    """Sample episodes into a folder that `show` opens."""
    stages, run = _unit(args)
    stages.rollout(run, args.stage, problems=args.problems, samples=args.samples, out=Path(args.out))
    return 0


def data(args: argparse.Namespace) -> int:
    """Bring problems from files and hub names into one format, filtered and decontaminated."""
    from trainer.data import prepare, write

    problems, report = prepare(args.source, against=args.against, is_integer_only=not args.any_answer, seed=args.seed)
    write(problems, Path(args.out))
    print(json.dumps(report.to_dict(), indent=None if args.json else 2))
    return 0


def show(args: argparse.Namespace) -> int:
    """Look at a run, in the terminal or as a page; it may be going on."""
    from trainer import show

    return show.run(args)


# The command line

Arguments = Callable[[argparse.ArgumentParser], None]


def _parser() -> argparse.ArgumentParser:
    about = "A compact agentic-RL trainer: GRPO-RoC with sandboxed tools."
    parser = argparse.ArgumentParser(prog="rstar-train", description=about)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, add_arguments, command, doc in (
        ("recipe", _recipe_arguments, recipe, recipe.__doc__),
        ("prepare", _run_arguments, unit, "Bring a run's data, and its model if it is generated, into its folder."),
        ("sft", _run_arguments, unit, "Fine-tune on conversations."),
        ("filter", _stage_arguments, unit, "Take out what the model before a stage solves every time."),
        ("grpo", _stage_arguments, unit, "Train one stage of GRPO-RoC."),
        ("eval", _eval_arguments, evaluate, evaluate.__doc__),
        ("rollout", _rollout_arguments, rollout, rollout.__doc__),
        ("data", _data_arguments, data, data.__doc__),
        ("show", _show_arguments, show, show.__doc__),
    ):
        about = (doc or "").rstrip(".")
        sub = commands.add_parser(name, help=about[0].lower() + about[1:], description=doc, allow_abbrev=False)
        add_arguments(sub)
        sub.set_defaults(command=command, unit=name)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: `importlib.metadata` is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rstar-train {version('rstar-sandbox')}")
        parser.exit()


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or the folder of a run")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: run_dir in CONFIG)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as stages.rl1.steps=3")
    parser.epilog = (
        "Settings come from CONFIG, then variables (RSTAR_TRAIN_STAGES__RL1__STEPS=3), then --set. "
        "All of them, with what they are for, are in trainer/config.py."
    )


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the resolved run and what it needs; run nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, the last")


def _stage_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--stage", required=True, help="which of the stages in CONFIG")


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--stage", help="of a run's model: sft, or one of the stages in CONFIG")
    which.add_argument("--model", metavar="PATH", help="any model's folder, on the problems of [evaluate]")
    parser.add_argument("--out", metavar="DIR", help="where --model's episodes go; what is there is not run again")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, the last")


def _rollout_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--stage", required=True, help="whose model: start, sft, or one of the stages in CONFIG")
    parser.add_argument("--problems", type=int, default=16, help="how many, from the first (default: 16)")
    parser.add_argument("--samples", type=int, default=4, help="episodes of each (default: 4)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the episodes")


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="+", metavar="SOURCE", help="generated:N, a file, or owner/name[@config][:split]"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSONL file to write")
    parser.add_argument(
        "--against", action="append", default=[], metavar="SOURCE", help="drop what shares 8 words with it"
    )
    parser.add_argument("--any-answer", action="store_true", help="keep answers that are no integers, too")
    parser.add_argument("--seed", type=int, default=0, help="of generated problems (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    from trainer.show import add_arguments

    add_arguments(parser)


def _config(args: argparse.Namespace) -> RunConfig:
    sets = [*args.set, *([f"run_dir={args.run_dir}"] if args.run_dir else [])]
    return load(Path(args.config), os.environ, sets)


def _unit(args: argparse.Namespace) -> tuple[ModuleType, Run]:
    """What does the work, and for which run."""
    from trainer import stages
    from trainer.recipe import Run

    run = Run(_config(args))
    stages.quiet()
    return stages, run


# What is printed


def _dry_run(args: argparse.Namespace, config: RunConfig) -> int:
    from trainer.arithmetic import plan, shape_of, shortfalls

    file = Path(config.model.path) / "config.json"
    shape = config.model.shape
    if file.exists():
        shape = shape_of(json.loads(file.read_text(encoding="utf-8")))
    if not shape.layers:
        raise ConfigError(f"model.path={config.model.path} is no folder here: state the model's sizes in [model.shape]")
    needs = plan(config, shape)
    short = shortfalls(needs, config)
    if args.json:
        print(json.dumps({"config": config.to_dict(), "plan": asdict(needs), "shortfalls": short}))
    else:
        print(json.dumps(config.to_dict(), indent=2))
        _print_plan(needs)
        for text in short:
            print(f"does not fit: {text}")
    return 0


def _print_plan(plan: Plan) -> None:
    each = f"on each of {plan.gpus} GPUs" if plan.gpus else "on the CPU"
    for name, value in (
        ("parameters", f"{plan.parameters:,}"),
        (f"weights, gradients, moments {each}", " + ".join(map(_size, (plan.weight_bytes,) * 2 + (plan.adam_bytes,)))),
        ("KV cache of a token", f"{plan.kv_bytes_per_token / 1024:g} KiB"),
        ("engines", f"{plan.engines}, each with a cache of {plan.kv_tokens:,} tokens"),
        ("an engine's memory, on each of its GPUs" if plan.gpus else "that cache", _size(plan.engine_bytes)),
    ):
        print(f"{name:48}{value}")
    numbers = [
        (
            stage.name,
            *(f"{n:,}" for n in (stage.rollouts, stage.trained, stage.sampled_tokens, stage.trained_tokens)),
            _size(stage.train_bytes),
            str(stage.rollouts_per_engine),
        )
        for stage in plan.stages
    ]
    _print_table(("stage", "rollouts", "kept", "tokens", "trained on", "memory*", "at once**"), numbers)
    print(f"a step at most. * to train {each}, by estimate   ** rollouts of full length in one engine")


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _print_stages(stages: Sequence[dict[str, Any]]) -> None:
    def shown(share: float | None) -> str:
        return "-" if share is None else f"{share:.3f}"

    names = ("accuracy", "tool_error_ratio", "one_answer")
    rows = [(row["name"], *(shown(row[name]) for name in names), f"{row['seconds'] / 60:.1f}") for row in stages]
    _print_table(("stage", "accuracy", "tool errors", "one answer", "minutes"), rows)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
