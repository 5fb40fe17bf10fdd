"""Write the reference pages in docs/reference/ from the code: settings, commands, routes, metrics and so on.

    python -m bench.reference          # writes the pages
    python -m bench.reference --check  # exits with 1 and names each page that differs from the code

Both exit with 1 and name file and line of a public Python name that has no description (`bench.api_reference`).

No page is written by hand that a program knows. `tests/bench/test_reference.py` holds the pages against the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.api_reference import UndocumentedName, public_names, table
from bench.error_messages import messages
from sandbox.commands import main as sandbox_main
from sandbox.gateway import metrics, routes
from sandbox.gateway.http.errors import ERROR_TYPES
from sandbox.gateway.http.openapi import ERROR_DESCRIPTIONS, Route, document
from sandbox.settings.server import ENV_PREFIX, SETTING_GROUPS, SETTINGS, Setting
from trainer import cli as trainer_cli
from trainer.config import RunConfig
from trainer.setting_comments import setting_comments

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/reference"
NOTICE = "<!-- Written by `python -m bench.reference`. Change the code, not this page. -->"


def server_settings() -> str:
    """Return the page of the settings of `rstar-sandbox serve`, by the groups of its help."""
    parts = [
        "# Settings of the server",
        "Each setting of `rstar-sandbox serve` is a key of the TOML file (`--config FILE`), a flag, and a variable of "
        f"the environment. The flag of `queue_mb` is `--queue-mb`, and its variable is `{ENV_PREFIX}QUEUE_MB`. Flags "
        "take precedence over variables, variables over the file, and the file over the defaults. An unknown name is "
        "an error.\n\n"
        "The tables `[profiles.NAME]` and `[mounts]` of the file are described in "
        "[operations](../operations.md#profiles).",
    ]
    by_group = sorted(SETTINGS.items(), key=lambda item: list(SETTING_GROUPS).index(item[1].group))
    for group, settings in groupby(by_group, key=lambda item: item[1].group):
        rows = [_setting_row(name, setting) for name, setting in settings]
        parts += [
            f"## {group.capitalize()}",
            f"{SETTING_GROUPS[group][0].upper()}{SETTING_GROUPS[group][1:]}.",
            table(_SETTING_HEADER, rows),
        ]
    return "\n\n".join(parts)


_NO_SETTINGS = ("name", "stages")
"""Fields of the trainer's configuration that are no settings: a stage's name is the key of its table."""
_SETTING_HEADER = ("setting", "default", "expected", "description")


def _setting_row(name: str, setting: Setting) -> Sequence[str]:
    default = "none" if setting.default is None else f"`{_spelled(setting.default)}`"
    flag = "; no flag, since command lines are visible to other users" if setting.is_secret else ""
    return f"`{name}`", default, setting.rule.expected, setting.doc + flag


def _spelled(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def trainer_settings() -> str:
    """Return the page of the settings of `rstar-train`, by the tables of its TOML file."""
    schema = TypeAdapter(RunConfig).json_schema()
    parts = [
        "# Settings of the trainer",
        "Each setting of `rstar-train` is a key of the TOML file. `--set stages.rl1.steps=3` replaces it on the "
        "command line, and `RSTAR_TRAIN_STAGES__RL1__STEPS=3` in the environment. An unknown name is an error. "
        "[Training](../training.md#settings) explains how the tables work together.",
    ]
    tables = {"": RunConfig}
    tables |= {field.name: _table_class(field) for field in dataclasses.fields(RunConfig) if _table_class(field)}
    for name, cls in tables.items():
        comments = setting_comments(cls)
        properties = schema["properties"] if cls is RunConfig else schema["$defs"][cls.__name__]["properties"]
        rows = [
            (f"`{key}`", _default_text(field), _expected(properties[key]), comments.get(key, ""))
            for key, field in ((field.name, field) for field in dataclasses.fields(cls))
            if key not in _NO_SETTINGS and not (cls is RunConfig and key in tables)
        ]
        heading = f"[{name}]" if name != "rl" else "[rl] and [stages.NAME]"
        parts += [
            f"## {heading if name else 'Without a table'}",
            inspect.getdoc(cls) or "",
            table(_SETTING_HEADER, rows),
        ]
    return "\n\n".join(parts)


def _table_class(field: dataclasses.Field[Any]) -> Any:
    """Return the dataclass whose fields are the keys of this table, or None for a setting."""
    return field.default_factory if dataclasses.is_dataclass(field.default_factory) else None


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "none"
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{_spelled(value)}`" if value else "none"
    return f"`{value}`" if value not in ("", None) else "none"


def _expected(schema: Mapping[str, Any]) -> str:
    """Say in words what a JSON schema accepts."""
    if "enum" in schema or "const" in schema:
        return f"one of {', '.join(schema.get('enum') or [schema['const']])}"
    if schema.get("type") == "array":
        return "list of texts" if "enum" not in schema["items"] else f"list of {', '.join(schema['items']['enum'])}"
    if "anyOf" in schema or "$ref" in schema or schema.get("type") == "object":
        return "table"
    words = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return " ".join(
        [words[schema["type"]], *(f"{word} {schema[key]}" for key, word in bounds.items() if key in schema)]
    )


def http_routes() -> str:
    """Return the page of the HTTP routes, by the headings of the API page, with the examples of the API page."""
    parts = [
        "# HTTP routes",
        "Each route has an example of a request and of its response. A running server describes all fields at `/docs`, "
        "and in the OpenAPI document `/openapi.json`. [HTTP](../http.md) explains errors and retries.",
    ]
    operations = document(routes.ROUTES, needs_token=False)["paths"]
    for group in dict.fromkeys(route.group for route in routes.ROUTES):
        members = [route for route in routes.ROUTES if route.group == group]
        rows = [(route.method, f"[`{route.path}`](#{_anchor(route)})", route.summary) for route in members]
        parts += [f"## {group}", table(("method", "path", "does"), rows)]
        for route in members:
            parts += [f"### `{route.method} {route.path}`", *_route(operations[route.path][route.method.lower()])]
    rows = [(f"`{status}`", ERROR_TYPES[status], text) for status, text in ERROR_DESCRIPTIONS.items()]
    return "\n\n".join([*parts, "## Statuses of errors", table(("status", "`error.type`", "means"), rows)])


def _anchor(route: Route) -> str:
    """Return the anchor that the site and GitHub give to the heading of a route."""
    return re.sub(r"[^\w-]", "", f"{route.method}-{route.path}".lower()).rstrip("-")


def _route(operation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the page about a route."""
    yield operation["summary"] if operation["summary"].endswith("?") else f"{operation['summary']}."
    for parameter in operation.get("parameters", ()):
        yield f"`{parameter['name']}` in the {parameter['in']}: {parameter['description']}."
    if body := operation.get("requestBody"):
        yield "Request:"
        yield _example(body["content"])
    content = operation["responses"]["200"]["content"]
    if "text/html" in content:
        yield "The response is a page."
    else:
        yield "Response:"
        yield _example(content)
    lines = {
        "Content types of the response": list(content) if len(content) > 1 else (),
        "[Statuses of errors](#statuses-of-errors)": sorted(operation["responses"].keys() - {"200"}),
    }
    yield "\n".join(f"- {title}: {', '.join(f'`{word}`' for word in words)}" for title, words in lines.items() if words)


def _example(content: Mapping[str, Any]) -> str:
    """Return a code block with the example of a body. A body that can be JSON or msgpack is shown as JSON."""
    content_type = "application/json" if "application/json" in content else next(iter(content))
    example = content[content_type]["example"]
    text = example.rstrip("\n") if content_type.startswith("text/") else _json_lines(example)
    return f"```{'json' if content_type == 'application/json' else 'text'}\n{text}\n```"


MAX_LINE = 100
"""Characters of a line of JSON, without its indentation, that is not divided."""


def _json_lines(value: Any, indent: str = "") -> str:
    """Return a value as JSON. Objects and lists that do not fit on a line have a line for each of their items."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= MAX_LINE or not isinstance(value, (dict, list)):
        return line
    inner = f"{indent}  "
    if isinstance(value, list):
        items, brackets = [_json_lines(item, inner) for item in value], "[]"
    else:
        items, brackets = [f"{json.dumps(key)}: {_json_lines(item, inner)}" for key, item in value.items()], "{}"
    lines = f",\n{inner}".join(items)
    return f"{brackets[0]}\n{inner}{lines}\n{indent}{brackets[1]}"


def metric_names() -> str:
    """Return the page of the metrics of `GET /metrics`."""
    rows = [(f"`{metrics.PREFIX}{name}`", kind, text) for name, (kind, text) in metrics.METRICS.items()]
    return "\n\n".join(
        [
            "# Metrics",
            "`GET /metrics` has these metrics in the text format of Prometheus. [Tenants](../operations.md#tenants) "
            "says which of them the token of a tenant may read.",
            table(("metric", "type", "description"), rows),
        ]
    )


@dataclass(frozen=True, slots=True)
class ApiPage:
    """A page of the Python API. `sections` maps a heading to the files and names that the section shows."""

    title: str
    text: str
    sections: Mapping[str, Mapping[str, str]]

    def markdown(self) -> str:
        """Return the page. Raises `UndocumentedName`."""
        parts = [f"# {self.title}", self.text]
        for heading, names in self.sections.items():
            parts += [f"## {heading}", *(public_names(ROOT, path, each.split()) for path, each in names.items())]
        return "\n\n".join(parts)


API_PAGES = {
    "python-client.md": ApiPage(
        "Python API: clients",
        "`from sandbox.client import AsyncClient, Client` and so on: the module `sandbox.client` has all names of the "
        "first two sections. [The Python client](../python.md) explains them with examples. The arguments and results "
        "are on the page [Python API: types](python-types.md).",
        {
            "Clients: `sandbox.client`": {
                "sandbox/client/clients.py": "AsyncClient Client Session AnyCall Pair",
                "sandbox/client/sessions.py": "AsyncSession",
                "sandbox/client/judge.py": "RawProgram",
            },
            "Errors: `sandbox.client`": {
                "sandbox/errors.py": "SandboxError InvalidCall ServiceError Unreachable Overloaded RequestRefused "
                "SessionGone TooLarge",
            },
            "A server of your own: `sandbox.local`": {"sandbox/local.py": "local_service"},
            "A tool for a model: `sandbox.tool`": {
                "sandbox/tool.py": "tool_schema parse_arguments render TOOL_NAMES MAX_RESPONSE_CHARS"
            },
            "A tool for TRL: `sandbox.integrations.trl`": {
                "sandbox/integrations/trl.py": "PythonEnvironment SandboxOutage"
            },
        },
    ),
    "python-types.md": ApiPage(
        "Python API: types",
        "The arguments and results of the [clients](python-client.md): `from sandbox.client import Call, Limits` "
        "and so on. A name that is not in `sandbox.client` is imported from the module in the heading. All types are "
        "frozen: `dataclasses.replace` makes a changed copy.",
        {
            "Calls: `sandbox.types`": {"sandbox/types.py": "Call Limits Profile Network"},
            "Results of calls: `sandbox.types`": {
                "sandbox/types.py": "Result Status CallError Usage UnavailableReason",
            },
            "Results of cells: `sandbox.types`": {"sandbox/types.py": "CellResult SessionState"},
            "Answer checks: `sandbox.types`": {"sandbox/types.py": "Verdict Outcome Strictness"},
            "Judged programs: `sandbox.judging.programs`": {
                "sandbox/judging/programs.py": "JudgedProgram JudgeOutcome JudgedTest"
            },
        },
    ),
    "python-trainer.md": ApiPage(
        "Python API: trainer",
        "What an environment or a reward function of your own uses. [Environments](../environments.md) shows "
        "[a reward function](../environments.md#a-reward-of-your-own) and "
        "[an environment](../environments.md#writing-an-environment) with examples.",
        {
            "Episodes: `trainer.episodes.episode`": {
                "trainer/episodes/episode.py": "Problem Episode Turn ToolCall ToolCallStatus StopReason"
            },
            "Environments: `trainer.environments.environment`": {
                "trainer/environments/environment.py": "Environment InitialState EnvironmentFailure"
            },
            "The model's tool calls: `trainer.episodes.turn_parser`": {
                "trainer/episodes/turn_parser.py": "ToolCallRequest"
            },
            "Rewards: `trainer.episodes.reward`": {"trainer/episodes/reward.py": "INFRASTRUCTURE_STOPS VerifyOutcome"},
            "The sandbox: `Environment.services.required_sandbox`": {
                "trainer/environments/connection.py": "SandboxConnection",
                "trainer/environments/python_tool.py": "PythonTool",
                "trainer/environments/answer_check.py": "AnswerChecker",
                "trainer/environments/program_judge.py": "ProgramJudge",
            },
        },
    ),
}


def commands() -> str:
    """Return the page of both commands with their subcommands and options."""
    parts = [
        "# Commands",
        "`--help` of a command shows the same. The exit code is 0 if all is well, 1 after a failure, and 2 for a wrong "
        "command line, unless the command says otherwise.",
    ]
    for parser in (sandbox_main._parser(), trainer_cli._parser()):
        parts += [f"## `{parser.prog}`", parser.description or ""]
        (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        for name, command in subparsers.choices.items():
            parts += [f"### `{parser.prog} {name}`", " ".join((command.description or "").split()), *_options(command)]
    return "\n\n".join(parts)


def _options(command: argparse.ArgumentParser) -> Sequence[str]:
    """Return the table of a command's arguments. Those that are settings of the server are on a page of their own."""
    actions = [action for action in command._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    own = [action for action in actions if action.dest not in SETTINGS]
    formatter = command._get_formatter()
    rows = [(f"`{_invocation(action)}`", formatter._expand_help(action) if action.help else "") for action in own]
    parts = [table(("argument", "description"), rows)] if rows else []
    if len(own) < len(actions):
        settings = ", ".join(f"`{action.option_strings[0]}`" for action in actions if action.dest in SETTINGS)
        parts.append(f"Options that are [settings of the server](server-settings.md): {settings}.")
    return parts


def _invocation(action: argparse.Action) -> str:
    """Return an argument as a user writes it, such as `--out FILE`."""
    metavar = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = "" if action.nargs == 0 else str(metavar)
    return f"{', '.join(action.option_strings)} {value}".strip()


MESSAGE_SECTIONS = {
    "Settings of the server": ("sandbox/settings",),
    "Isolation, and the Python of calls": ("sandbox/jail", "sandbox/executor", "sandbox/runtime"),
    "Commands and clusters": ("sandbox/commands", "sandbox/cluster"),
    "Requests": ("sandbox/gateway", "sandbox/judging", "sandbox/client"),
    "The trainer": ("trainer",),
}
"""The folders whose messages a section of the page has."""


def error_messages() -> str:
    """Return the page of the error messages, by the part of the project that writes them."""
    parts = [
        "# Error messages",
        "The messages of both commands, of the server's responses and of the Python client. `...` is a part that "
        "differs from case to case. The beginning of a message names the setting, the file or the field. "
        "[Troubleshooting](../howto/troubleshooting.md) has the reasons of the most frequent ones.\n\n"
        "A message of the form `NAME: expected ..., got ...` is about one setting. "
        "[Settings of the server](server-settings.md) and [settings of the trainer](trainer-settings.md) say what each "
        "setting expects.",
    ]
    for heading, folders in MESSAGE_SECTIONS.items():
        texts = [text for folder in folders for text in messages(ROOT, folder)]
        parts += [f"## {heading}", "\n".join(f"- `` {text} ``" if "`" in text else f"- `{text}`" for text in texts)]
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Return the text of each page by its file name. Raises `UndocumentedName`."""
    texts = {
        "server-settings.md": server_settings(),
        "trainer-settings.md": trainer_settings(),
        "routes.md": http_routes(),
        "metrics.md": metric_names(),
        "commands.md": commands(),
        "messages.md": error_messages(),
        **{name: page.markdown() for name, page in API_PAGES.items()},
    }
    return {name: f"{NOTICE}\n\n{text}\n" for name, text in texts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    arguments = parser.parse_args(argv)
    try:
        texts = pages()
    except UndocumentedName as error:
        print(error)
        return 1
    PAGES.mkdir(exist_ok=True)
    different = []
    for name, text in texts.items():
        page = PAGES / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            different.append(page)
            if not arguments.check:
                page.write_text(text, encoding="utf-8")
    for page in different:
        print(f"{page}: {'differs from the code; run python -m bench.reference' if arguments.check else 'written'}")
    return int(arguments.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
