"""Reads a run's settings from defaults < TOML or JSON file < environment variables < `--set`.

Invariants:
- A key of `[rl]` is the default of every stage. The table `grpo` of `[rl]` and that of a stage are merged.
- An unknown name or a bad value is a `ConfigError` with its source: the file, the variable or the `--set`.
- A run's config.json, written from `asdict` of a `RunConfig`, is a config file that gives an equal `RunConfig`.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trainer.config import ConfigError, ModelShape, RunConfig, SamplingConfig, StageConfig, suggestion

ENV_PREFIX = "RSTAR_TRAIN_"
ENV_SEPARATOR = "__"
"""Stands for a dot in the name of a variable."""

PASSED_THROUGH = frozenset({"args", "extra_body", "grpo", "peft"})
"""Tables whose settings have no type here, since a library defines them. If a variable or `--set` gives such a setting
as text, the text is read as JSON."""

T = TypeVar("T")


def load_config(file: Path | None, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read the settings from all sources. Raises `ConfigError`.

    `file` may be a run folder. `overrides` are texts such as `stages.rl1.steps=3`.
    """
    tree, origins = {}, dict[str, str]()
    if file is not None and file.is_dir():
        run_dir, file = file, file / "config.json"
        tree = _read(file)
        if not os.path.exists(stored := str(tree.get("run_dir"))) or not os.path.samefile(stored, run_dir):
            tree["run_dir"] = str(run_dir)  # the folder was moved or copied
    elif file is not None:
        tree = _read(file)
    for origin, path, value in _overrides(environ, overrides):
        *parents, name = path.split(".")
        known = tree.get("stages", {})
        if parents[:1] == ["stages"] and parents[1:] and isinstance(known, dict) and parents[1] not in known:
            raise ConfigError(f"{origin}: no such stage; {suggestion(parents[1], known)}")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{origin}: expected a value, since {parent} is not a table")
        is_passed_through = not PASSED_THROUGH.isdisjoint([*parents, name])
        table[name], origins[path] = _typed(value) if is_passed_through else value, origin
    defaults, stages = tree.get("rl", {}), tree.get("stages")
    if isinstance(defaults, dict) and isinstance(stages, dict):
        own_tables = {name: own for name, own in stages.items() if isinstance(own, dict)}
        _check_inherited(origins, own_tables)
        tree["stages"] = {**stages, **{name: _inherit(defaults, own, name) for name, own in own_tables.items()}}
    return validate_tree(RunConfig, tree, f"{file}: " if file else "", origins)


def _inherit(defaults: Mapping[str, Any], own: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of a stage, from those in `[rl]` and its own."""
    tables = [table["grpo"] for table in (defaults, own) if isinstance(table.get("grpo"), dict)]
    return {**defaults, **own, "name": name} | ({"grpo": tables[0] | tables[-1]} if tables else {})


def _check_inherited(origins: Mapping[str, str], stages: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if a `--set` changes a default in `[rl]` and every stage has a value of its own."""
    used_elsewhere = {setting.name for setting in fields(SamplingConfig)}  # by `rollout --stage sft`
    for path, origin in origins.items():
        table, _, key = path.partition(".")
        if table != "rl" or key in used_elsewhere or not origin.startswith("--set") or not stages:
            continue
        *tables, name = key.split(".")
        if all(name in (own.get("grpo", {}) if tables == ["grpo"] else own) for own in stages.values()):
            raise ConfigError(f"{origin}: each stage has a {key} of its own; use stages.NAME.{key}")


def validate_tree(kind: type[T], tree: Mapping[str, Any], source: str, origins: Mapping[str, str] | None = None) -> T:
    """Build the dataclass `kind` from `tree`. Raises `ConfigError`.

    An error message begins with the variable or `--set` that `origins` has for the setting's path, or with `source`.
    """
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as invalid:
        error = invalid.errors()[0]  # an error in [rl] comes before its copies in the stages
    path = [str(part) for part in error["loc"]]
    prefixes = (".".join(path[:length]) for length in range(len(path), 0, -1))
    where = next((origins[prefix] for prefix in prefixes if origins and prefix in origins), source + ".".join(path))
    match error["type"]:
        case "value_error" if isinstance(error["ctx"]["error"], ConfigError):
            raise error["ctx"]["error"]
        case "unexpected_keyword_argument":
            raise ConfigError(f"{where}: unknown setting; {_advice(kind, path)}")
        case "missing":
            raise ConfigError(f"{where}: expected a value, got none")
    raise ConfigError(f"{where}: {error['msg'].replace('Input should be', 'expected')}, got {error['input']!r:.80}")


def _advice(kind: Any, path: Sequence[str]) -> str:
    """Return the last part of the message about an unknown setting: similar settings of the same table."""
    *parents, unknown = path
    table = kind()
    for name in parents:
        table = getattr(table, name) if is_dataclass(table) else StageConfig()
    return suggestion(unknown, [setting.name for setting in fields(table or ModelShape)])


def _read(file: Path) -> dict[str, Any]:
    syntax, parse = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        tree = parse(file.read_text(encoding="utf-8"))
        return dict(tree.get("config", tree) if syntax == "JSON" else tree)  # config.json of a run folder wraps it
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: expected a table of settings in {syntax} ({error})") from None


def _typed(text: str) -> Any:
    """Return a number, boolean, list or table that is written as JSON; any other text as it is."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _overrides(environ: Mapping[str, str], overrides: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (source, path of the setting, value) of variables and `--set`. A later one replaces an earlier one."""
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX):
            yield name, name.removeprefix(ENV_PREFIX).lower().replace(ENV_SEPARATOR, "."), text
    for override in overrides:
        path, equals, value = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(f"--set {override}: expected path.to.key=value")
        yield f"--set {path}", path, value
