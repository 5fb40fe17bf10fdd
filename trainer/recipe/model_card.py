"""Writes the model of a run as a folder in Hugging Face's form: `rstar-train export-model RUN --out FOLDER`.

    config.json, *.safetensors, tokenizer...   as the stage wrote them
    README.md                                  the model card: base model, data, settings, accuracy, commands
    training_config.json                       all settings of the run

Everything in the card comes from the run folder. Paths on this machine are in it, so read it before you publish it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.config import TINY_MODEL, ConfigError, RunConfig
from trainer.config_loading import load_config
from trainer.data.sources import is_on_hub
from trainer.json_files import read_json, write_json
from trainer.recipe.evaluation import ALL, reports_from_json
from trainer.recipe.phases import DISTRIBUTED_PHASES, EvalResult, Phase, RecipeRun, TrainResult

CARD_FILE, SETTINGS_FILE = "README.md", "training_config.json"
LIBRARIES = ("rstar-sandbox", "torch", "transformers", "trl")
MEASURES = ("accuracy", "tool_error_ratio", "one_answer")


def export_model(run_dir: Path, out: Path, stage: str = "") -> str:
    """Copy the model of a stage, by default of the last one that is done, and write its card. Return the name of the
    stage. Raises `ConfigError` if there is no such model, or `out` has files."""
    config = load_config(run_dir, {})
    run = RecipeRun(config)
    done = [phase.stage for phase in run.phases() if phase.command in DISTRIBUTED_PHASES and run.result(phase)]
    if not done and not stage:
        raise ConfigError(f"{run_dir}: expected a trained model, got none; run `rstar-train recipe {run_dir}` first")
    stage = stage or done[-1]
    trained = run.trained_model(stage)
    source = run.model_path(trained.model)
    if not source.is_dir():
        raise ConfigError(f"{source}: expected a model that this run has trained; name one of its stages in --stage")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: expected a new or an empty folder; nothing was written")
    shutil.copytree(source, out, dirs_exist_ok=True)
    settings = run.run_folder.read_config()
    assert settings is not None, "load_config has read it"
    write_json(out / SETTINGS_FILE, settings)
    (out / CARD_FILE).write_text(card_text(run, stage, trained), encoding="utf-8")
    return stage


def card_text(run: RecipeRun, stage: str, trained: TrainResult) -> str:
    """Return the model card of a stage."""
    config = run.config
    phases = [phase for phase in run.phases() if phase.command in DISTRIBUTED_PHASES]
    phases = phases[: [phase.stage for phase in phases].index(stage) + 1]
    base = "a generated model" if config.model.path == TINY_MODEL else f"`{config.model.path}`"
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    sections = [
        _front_matter(config),
        f"# {run.dir.resolve().name}, after {stage}",
        f"{base[0].upper()}{base[1:]} after {trained.step} steps of {_method(phases)}, trained with rstar-train.",
        "## Accuracy",
        _accuracy(run, phases),
        "## Data",
        "\n".join(_data(run)),
        "## Training",
        "\n".join(_training(config, phases)),
        f"`{SETTINGS_FILE}` has all settings. The model was exported with {versions}.",
        "## Commands",
        f"The same training, with the data in place:\n\n    rstar-train recipe {SETTINGS_FILE} --run-dir NEW",
        f"An evaluation of this folder:\n\n    rstar-train eval {SETTINGS_FILE} --run-dir NEW --model .",
        f"A server:\n\n    vllm serve . --max-model-len {config.engines.max_model_len}",
        _prompt_advice(config),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: RunConfig) -> str:
    """Return the metadata that a hub reads. JSON is YAML, so a name with special characters is quoted."""
    sources = [*config.data.train, *config.sft.data, *(s for stage in config.stages.values() for s in stage.data)]
    datasets = sorted({source.partition("@")[0].partition(":")[0] for source in sources if is_on_hub(source)})
    is_on_this_machine = config.model.path == TINY_MODEL or Path(config.model.path).exists()
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rstar-train", "grpo"],
        **({} if is_on_this_machine else {"base_model": config.model.path}),
        **({"datasets": datasets} if datasets else {}),
    }
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"])


def _method(phases: list[Phase]) -> str:
    names = {"sft": "supervised fine-tuning", "grpo": "reinforcement learning by GRPO-RoC"}
    return " and ".join(dict.fromkeys(names[phase.command] for phase in phases))


def _accuracy(run: RecipeRun, phases: list[Phase]) -> str:
    """Return a table with the evaluation after each training, with 95 % intervals."""
    rows = []
    for phase in phases:
        result = run.result(Phase("eval", phase.stage))
        if isinstance(result, EvalResult) and result.reports:
            report = reports_from_json(result.reports)[ALL]
            cells = [str(report.measures.get(name, "–")) for name in MEASURES]
            rows.append([phase.stage, f"{report.problems} × {report.samples}", *cells])
    if not rows:
        return "It was not evaluated."
    header = ["after", "problems × samples", *(name.replace("_", " ") for name in MEASURES)]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    limits = run.config.eval
    sampling = (
        f"temperature {limits.temperature:g}, top-p {limits.top_p:g}, {limits.max_response_tokens} tokens at most"
    )
    return f"{table}\n\nIn brackets: 95 % intervals. Sampled with {sampling}."


def _data(run: RecipeRun) -> Iterator[str]:
    """Yield a line for each source of problems and of conversations."""
    report = read_json(run.dir / "data/report.json") or {}
    for name, part in report.items():
        for source, counts in part["counts"].items():
            yield f"- {name}: `{source}`, {', '.join(f'{count} {label}' for label, count in counts.items())}"
    yield from (f"- sft: `{source}`" for source in run.config.sft.data)


def _training(config: RunConfig, phases: list[Phase]) -> Iterator[str]:
    for phase in phases:
        if phase.command == "sft":
            sft = config.sft
            yield f"- sft: {sft.epochs:g} epochs, batch size {sft.batch_size}, learning rate {sft.learning_rate:g}"
            continue
        stage = config.stages[phase.stage]
        yield (
            f"- {phase.stage}: {stage.steps} steps of {stage.problems_per_step} problems, {stage.samples_per_problem} "
            f"samples, of which {stage.kept_per_problem} are kept (`{stage.roc_mode}`), learning rate "
            f"{stage.learning_rate:g}, at most {stage.max_response_tokens} tokens and {stage.max_turns} turns"
        )
    if config.reward.function:
        yield f"- reward: `{config.reward.function}`"


def _prompt_advice(config: RunConfig) -> str:
    if config.model.chat_format == "tokenizer":
        return "Prompts follow the chat template with which the model was trained."
    system = f" The system message is `{config.model.system_prompt}`." if config.model.system_prompt else ""
    return f"Prompts have rStar2-Agent's format (`trainer/episodes/chat_format.py`).{system}"
