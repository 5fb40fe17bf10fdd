"""The commands of `rstar-train`: parse the command line, call one module, turn errors into an exit code.

Exit codes: 0 success, 1 failure, 2 misuse, 130 interrupted, 143 terminated. `recipe` ends with that of the phase that
failed.

Each command imports its modules itself, so that `--help` is fast and loads no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.store_commands import episodes, export, replay, rescore

if TYPE_CHECKING:
    from trainer.config import RunConfig
    from trainer.recipe.phases import Phase, RecipeRun

INTERRUPTED = 130
TERMINATED = 143
SETTINGS_HELP = (
    "Settings come from CONFIG, then from variables (RSTAR_TRAIN_STAGES__RL1__STEPS=3), then from --set. "
    "trainer/config.py describes all of them."
)
SILENCING_VARIABLES = (
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "TRL_EXPERIMENTAL_SILENCE",
)
"""Variables that stop libraries from printing their own progress and notices."""
TRAIN_EXTRA_MODULES = frozenset(
    {"accelerate", "datasets", "numpy", "safetensors", "tokenizers", "torch", "transformers", "trl"}
)
"""Modules that `pip install '.[train]'` installs."""
DRY_RUN_NOTES = """
Bytes are those of one training GPU or, without GPUs, of the machine. Gradients
take as much memory as the weights, Adam's moments twice as much; train bytes
are an estimate. Episodes per engine is the number of episodes of maximum length
that one engine runs at once."""

Command = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    # OpenMP reads this when torch loads. By default its threads spin while they wait for each other. With ten processes
    # on two cores, the local engine then sampled 305 tokens/s instead of 3,769.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("HF_HUB_DISABLE_TELEMETRY", *SILENCING_VARIABLES):
        os.environ.setdefault(name, "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # A process that exits stops its children, a killed one does not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        args.command(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter reports it at exit
        return 1
    except ModuleNotFoundError as error:
        print(f"rstar-train: {_install_advice(error.name or str(error))}", file=sys.stderr)
        return 1
    except Exception as error:
        # The messages of the trainer's own errors are complete. Any other error needs its traceback.
        if not type(error).__module__.startswith("trainer."):
            raise
        print(f"rstar-train: {error}", file=sys.stderr)
        exit_code: int = getattr(error, "exit_code", 2 if isinstance(error, ValueError) else 1)
        return exit_code


def _install_advice(module: str) -> str:
    name = module.partition(".")[0]
    if name in TRAIN_EXTRA_MODULES:
        return f"needs {name} from the extra `train`: run pip install '.[train]' in the checkout"
    return f"needs {name}: pip install {name}"


def init(args: argparse.Namespace) -> None:
    """Write a folder with the settings and the data of a first run, which learns on two CPU cores in minutes."""
    from trainer.recipe.new_run import CONFIG_FILE, write_new_run

    for path in write_new_run(args.folder, args.kind):
        print(path, flush=True)
    command = f"PYTHONPATH=. rstar-train recipe {CONFIG_FILE} --smoke"
    print(f"next, in {args.folder}: `{command}` tries every phase; without --smoke it trains", file=sys.stderr)


def recipe(args: argparse.Namespace) -> None:
    """Run SFT and all RL stages, with an evaluation after each; after a kill, the same command continues."""
    if args.dry_run:
        return _dry_run(args)
    from trainer.recipe.runner import run_recipe

    if args.smoke:
        from trainer.recipe.smoke import run_smoke

        run = run_smoke(_config(args), has_preflight=not args.no_preflight)
    else:
        run = run_recipe(_config(args), has_preflight=not args.no_preflight)
    summary = run.summary()
    if args.json:
        print(json.dumps(summary))
        return
    rows = {row.pop("name"): _with_source_accuracies(row) for row in summary["stages"]}
    print(f"{run.dir}, evaluation after each stage:")
    _print_columns("after", rows)
    print(f"`rstar-train show {run.dir} --html run.html` writes a page with charts and episodes", file=sys.stderr)


def preflight(args: argparse.Namespace) -> None:
    """Check that this machine has all that a run needs, and list what is missing; run nothing."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # otherwise each retry of an unreachable hub is printed
    from trainer.recipe.preflight import require

    run = _run(args)
    phases = [phase for phase in run.phases() if not run.result(phase)]
    require(run, phases)
    print(f"preflight: nothing is missing for {len(phases)} phases", file=sys.stderr)


def run_phase(args: argparse.Namespace) -> None:
    """Run one phase of a recipe, as `recipe` does."""
    from trainer.recipe.phases import Phase
    from trainer.recipe.runner import check_settings

    run, phase = _run(args), Phase(args.phase, args.stage)
    check_settings(run)
    if run.result(phase):
        print(f"{phase} is done; delete {run.result_path(phase).parent} to run it again", file=sys.stderr)
        return
    _require(args, run, phase)
    from trainer.recipe.phase_work import PHASE_FUNCTIONS

    PHASE_FUNCTIONS[args.phase](run, phase)


def train(args: argparse.Namespace) -> None:
    """Train one stage of GRPO-RoC."""
    if args.episodes is None:
        return run_phase(args)
    from trainer.recipe.phases import Phase

    run, phase = _run(args), Phase("grpo", args.stage)
    _require(args, run, phase)
    from trainer.recipe.rl_phase import grpo

    grpo(run, phase, args.episodes)


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate a model: accuracy, tool use, format, lengths."""
    from rich.console import Console

    from trainer.config import ConfigError
    from trainer.json_files import check_same_settings
    from trainer.recipe.evaluation import ALL, report_table, reports_from_json, sampling_settings
    from trainer.recipe.phases import EvalResult, Phase
    from trainer.runs.run_folder import RunFolder

    run = _run(args)
    if args.stage and args.out:
        raise ConfigError("--out: expected --model; the evaluation of a stage has its place in the run folder")
    phase = Phase("eval", args.stage) if args.stage else None
    result = run.result(phase) if phase else None
    reports = reports_from_json(result.reports) if isinstance(result, EvalResult) else {}
    if phase and reports:
        folder = run.stage_dir(phase.stage) / "eval"
        mine = sampling_settings(run.config.eval, run.config.eval.samples_per_problem) | run.config.reward.recorded()
        stored = RunFolder(folder).read_config() or mine
        compared = {name: value for name, value in stored.items() if name in mine or name.startswith("reward.")}
        check_same_settings(folder, mine, compared)
    if not reports or reports[ALL].unavailable:  # not done yet, or an outage left episodes without a reward
        _require(args, run, phase or Phase("eval", stage=""))
        from trainer.recipe import eval_phase

        reports = eval_phase.evaluate(run, phase) if phase else eval_phase.evaluate_model(run, args.model, args.out)
    if args.json:
        print(json.dumps({source: asdict(report) for source, report in reports.items()}))
    else:
        name = f"after {args.stage}" if args.stage else f"of {args.model}"
        Console().print(report_table(reports, title=f"evaluation {name}"))


def compare(args: argparse.Namespace) -> None:
    """Compare two evaluations of the same problems: the difference in accuracy, with a paired interval."""
    from trainer.recipe.comparison import compare_evaluations

    comparisons = compare_evaluations(args.before, args.after)
    if args.json:
        return print(json.dumps({source: asdict(comparison) for source, comparison in comparisons.items()}))
    _print_columns("[95 %]", {source: comparison.row() for source, comparison in comparisons.items()})


def rollout(args: argparse.Namespace) -> None:
    """Collect episodes of a model into a folder that `show` opens."""
    from trainer.recipe.phases import Phase

    run = _run(args)
    _require(args, run, Phase("rollout", args.stage))
    from trainer.recipe import eval_phase

    eval_phase.rollout(run, args.stage, num_problems=args.num_problems, samples=args.samples_per_problem, out=args.out)


def try_env(args: argparse.Namespace) -> None:
    """Run scripted turns in the environments of problems, without a model: prompts, tool responses, rewards."""
    import asyncio

    from trainer.recipe.try_env import try_env as run_scripts

    async def show() -> None:
        async for line in run_scripts(_config(args), args.answers):
            print(line, flush=True)

    asyncio.run(show())


def collect(args: argparse.Namespace) -> None:
    """Collect episodes into a store, in this process or on a Ray cluster; after a kill, the same command continues."""
    if args.stage:
        return run_phase(args)
    from trainer.recipe import collect_work

    run = _run(args)
    if args.status:
        status = collect_work.read_status(collect_work.store_dir(run))
    else:
        status = asdict(collect_work.collect(run, collect_work.model_of(run, args.model_of)))
    if args.json:
        return print(json.dumps(status))
    _print_columns("episodes", {"": collect_work.status_rows(status)})


def data(args: argparse.Namespace) -> None:
    """Convert problems from files and hub names to one format, filtered and decontaminated."""
    from trainer.data.problems import prepare_problems, write_problems
    from trainer.progress_bar import progress_bar

    with progress_bar("rows") as advance:
        problems, report = prepare_problems(
            args.source,
            decontaminate_against=args.decontaminate_against,
            integer_answers_only=not args.allow_non_integer,
            seed=args.seed,
            on_progress=advance,
        )
    write_problems(problems, args.out)
    print(json.dumps(asdict(report), indent=None if args.json else 2))


def export_model(args: argparse.Namespace) -> None:
    """Write a trained model with a model card, as a folder for transformers, vLLM or a hub."""
    from trainer.recipe.model_card import CARD_FILE, export_model

    stage = export_model(args.run, args.out, args.stage)
    print(f"{args.out}: the model after {stage}; read {args.out / CARD_FILE} before you publish it", file=sys.stderr)


def show(args: argparse.Namespace) -> None:
    """Show a run in the terminal or as a page, also while it goes on."""
    from trainer.runs.show import show_run

    show_run(args)


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rstar-train", description="A compact agentic-RL trainer: GRPO-RoC with sandboxed tools."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, *parents: argparse.ArgumentParser, doc: str = "") -> argparse.ArgumentParser:
        doc = doc or command.__doc__ or ""
        subparser = commands.add_parser(
            name,
            help=doc[0].lower() + doc[1:].rstrip("."),
            description=doc,
            epilog=SETTINGS_HELP if run in parents else None,
            parents=parents,
            allow_abbrev=False,
        )
        subparser.set_defaults(command=command, phase=name)
        return subparser

    # Options that several commands share.
    run, skip, stage, store, where, out, as_json = (argparse.ArgumentParser(add_help=False) for _ in range(7))
    run.add_argument("config", metavar="CONFIG", type=Path, help="a TOML file, or a run folder")
    run.add_argument("--run-dir", metavar="DIR", help="the run folder (default: run_dir in CONFIG)")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for example stages.rl1.steps=3")
    skip.add_argument("--no-preflight", action="store_true", help="start without checking what is needed")
    stage.add_argument("--stage", required=True, help="one of the stages in CONFIG")
    as_json.add_argument("--json", action="store_true", help="print the result as one line of JSON, the last line")
    store.add_argument("store", type=Path, metavar="STORE", help="the directory of a store of episodes")
    where.add_argument(
        "--where", default="1", metavar="SQL", help="a condition on the columns, such as 'reward = 1 AND turns > 2'"
    )
    out.add_argument("--out", required=True, type=Path, metavar="FILE", help="the JSONL file to write")

    option = add("init", init).add_argument
    option("folder", type=Path, metavar="FOLDER", help="the folder to write; no file in it is changed")
    text = "questions with answers, programs with tests, or an environment with a tool of its own (default: math)"
    option("--kind", choices=("math", "code", "agent"), default="math", help=text)
    add("preflight", preflight, run)
    option = add("recipe", recipe, run, skip, as_json).add_argument
    text = "run every phase with the smallest sizes, in a folder RUN_DIR-smoke that begins anew each time"
    option("--smoke", action="store_true", help=text)
    option("--dry-run", action="store_true", help="show what the run needs and whether it fits; run nothing")
    doc = "Write a run's data, and its model if it is generated, to its folder."
    add("prepare", run_phase, run, skip, doc=doc).set_defaults(stage="initial")
    add("sft", run_phase, run, skip, doc="Fine-tune on conversations.").set_defaults(stage="sft")
    add("filter", run_phase, run, skip, stage, doc="Drop the problems that the model before a stage always solves.")
    option = add("grpo", train, run, skip, stage).add_argument
    option("--episodes", type=Path, metavar="STORE", help="train on the episodes of this store, and sample nothing")

    command = add("eval", evaluate, run, skip, as_json)
    option = command.add_mutually_exclusive_group(required=True).add_argument
    option("--stage", help="evaluate the model of sft, or of one of the stages in CONFIG")
    option("--model", metavar="PATH", help="evaluate any model's folder on the problems of [eval]")
    command.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for the episodes of --model; episodes that it has are not sampled again "
        "(default: a folder in eval/ of the run)",
    )

    option = add("compare", compare, as_json).add_argument
    option("before", type=Path, metavar="BEFORE", help="RUN/stages/NAME/eval, or RUN/eval/MODEL")
    option("after", type=Path, metavar="AFTER", help="another evaluation of the same problems")

    option = add("rollout", rollout, run, skip).add_argument
    option("--stage", required=True, help="use the model of initial, sft, or one of the stages in CONFIG")
    option("--num-problems", type=int, default=16, metavar="N", help="use the first N problems (default: 16)")
    option("--samples-per-problem", type=int, default=4, metavar="N", help="episodes per problem (default: 4)")
    option("--out", required=True, metavar="DIR", type=Path, help="folder for the episodes")

    option = add("try-env", try_env, run).add_argument
    text = 'JSONL with a row {"problem": ID, "turns": [TEXT, ...]} for each episode'
    option("--answers", required=True, type=Path, metavar="FILE", help=text)

    command = add("collect", collect, run, skip, as_json)
    option = command.add_mutually_exclusive_group().add_argument
    option(
        "--model-of", default="", metavar="STAGE", help="use the model of a stage, initial or sft (default: model.path)"
    )
    option(
        "--stage", default="", help="collect what a stage with episodes=collected trains on, with the model before it"
    )
    command.add_argument("--status", action="store_true", help="show how far the collection is, and collect nothing")

    option = add("episodes", episodes, store, where, as_json).add_argument
    option("--limit", type=int, default=20, metavar="N", help="list at most N (default: 20)")
    option = add("replay", replay, store).add_argument
    option("problem", metavar="PROBLEM", help="the id of a problem")
    option("sample", type=int, metavar="SAMPLE", help="the index of one of its episodes")
    option = add("rescore", rescore, store, where, out, as_json).add_argument
    option("--environment", default="", metavar="NAME", help="the environment (default: the problem's)")
    option("--reward", default="", metavar="NAME", help="a reward function, as package.module:function")
    option("--sandbox", default="", metavar="URL", help="a sandbox service (default: start one)")
    rules = "rules by which an answer is right (default: strict)"
    option("--answer-check", default="strict", choices=("strict", "math-verify"), help=rules)
    option("--answer-rounding", action="store_true", help="with strict: a decimal may be rounded")
    option = add("export", export, store, where, out).add_argument
    option("--format", required=True, choices=("tokens", "chat"), help="what each row has")
    option("--rewards", type=Path, metavar="FILE", help="take the rewards from this file of `rescore`")

    option = add("export-model", export_model).add_argument
    option("run", type=Path, metavar="RUN", help="the run folder")
    option("--out", required=True, type=Path, metavar="FOLDER", help="a new or an empty folder")
    option("--stage", default="", metavar="NAME", help="sft, or one of the stages (default: the last that is done)")

    option = add("data", data, out, as_json).add_argument
    sources = "generated:N, generated-programs:N, a file, or owner/name[@config][:split]"
    option("source", nargs="+", metavar="SOURCE", help=sources)
    option(
        "--decontaminate-against",
        action="append",
        default=[],
        metavar="SOURCE",
        help="drop problems that share 8 consecutive words with a problem of SOURCE",
    )
    option("--allow-non-integer", action="store_true", help="keep answers that are not integers")
    option("--seed", type=int, default=0, help="seed of generated problems (default: 0)")

    option = add("show", show).add_argument
    option("run", type=Path, help="the run folder")
    option("--step", type=int, metavar="STEP", help="only the episodes of this step")
    option("--html", type=Path, metavar="FILE", help="write one self-contained page instead")
    option("--max-episodes", type=int, default=400, metavar="N", help="episodes in the page (default: 400)")
    return parser


class _Version(argparse.Action):
    """Imports `importlib.metadata` only if needed, since the import is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rstar-train {version('rstar-sandbox')}")
        parser.exit()


def _config(args: argparse.Namespace) -> RunConfig:
    from trainer.config_loading import load_config

    run_dir = [f"run_dir={args.run_dir}"] if args.run_dir else []
    return load_config(args.config, os.environ, [*args.set, *run_dir])


def _run(args: argparse.Namespace) -> RecipeRun:
    from trainer.recipe.phases import RecipeRun

    return RecipeRun(_config(args))


def _require(args: argparse.Namespace, run: RecipeRun, phase: Phase) -> None:
    """Check what one phase needs, including the result of the phase before it. Only the first rank checks."""
    if args.no_preflight or os.environ.get("RANK", "0") != "0":
        return
    if phase.command != "prepare" and phase.stage:
        run.trained_model(phase.stage, of_previous_stage=phase.command in ("sft", "filter", "collect", "grpo"))
    from trainer.recipe.preflight import require

    require(run, [phase])


# Output


def _dry_run(args: argparse.Namespace) -> None:
    from trainer.config import ConfigError
    from trainer.recipe.resource_plan import known_shape, misfits, resource_plan

    config = _config(args)
    if not (shape := known_shape(config)):
        raise ConfigError(
            f"model.path={config.model.path} is not a folder on this machine: set the model's sizes in [model.shape]"
        )
    plan = resource_plan(config, shape)
    lines = [line for phase_lines in misfits(config, plan).values() for line in phase_lines]
    if args.json:
        print(json.dumps({"config": asdict(config), "plan": asdict(plan), "misfits": lines}))
        return
    run_needs = {name: value for name, value in asdict(plan).items() if name not in ("stages", "sft")}
    _print_columns("a run needs", {"": run_needs})
    _print_columns("a training step needs at most", {name: asdict(phase) for name, phase in plan.phases().items()})
    print(DRY_RUN_NOTES, end="\n\n")
    print("\n".join(["fits: no", *lines]) if lines else "fits: yes")


def _with_source_accuracies(row: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's row with the accuracy of each source; a single source replaces the accuracy over all."""
    from trainer.recipe.evaluation import Estimate

    row.pop("accuracy_interval", None)
    by_source = row.pop("accuracy_by_source", {})
    names = {source: f"accuracy, {source}" if len(by_source) > 1 else "accuracy" for source in by_source}
    cells = {names[source]: str(Estimate(**value)) if value else None for source, value in by_source.items()}
    return {"accuracy": row.pop("accuracy"), **cells, **row}


def _print_columns(head: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table with a column per mapping and a row per key."""
    from rich.console import Console
    from rich.filesize import decimal

    from trainer.runs.text_tables import format_number, table

    def text(name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        return decimal(value) if name.endswith("bytes") else format_number(value)

    rows = table(head, *(f"{name}>…" for name in columns))
    for name in next(iter(columns.values()), {}):
        rows.add_row(name.replace("_", " "), *(text(name, column[name]) for column in columns.values()))
    Console().print(rows)
