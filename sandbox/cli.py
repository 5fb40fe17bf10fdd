"""The commands of `rstar-sandbox`: read the command line, call one room, turn what happened into an exit code.

Exit codes: 0 fine, 1 failed, 2 misuse, 130 interrupted; `run` ends as the code it ran would have ended.

Rooms are imported by the command that needs them, so that `--help` stays fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.config import (
    ENV_PREFIX,
    RENAMED_SETTINGS,
    SETTINGS,
    NameListRule,
    ServeConfig,
    SettingRule,
    flag_name,
    load,
)
from sandbox.errors import ConfigError, InvalidCall, SandboxError
from sandbox.fields import NumberRule
from sandbox.types import LIMIT_FIELDS, Call, Profile, Result, Status

if TYPE_CHECKING:
    from sandbox.jail import ProbedLayer

TIMED_OUT = 124
"""What timeout(1) returns."""
INTERRUPTED = 130
SIGNALLED = 128
"""A shell reports death by signal n as 128 + n."""

_RUN_SETTINGS = ("isolation", "python")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 1
    except SandboxError as why:
        print(f"rstar-sandbox: {why}", file=sys.stderr)
        return 2 if isinstance(why, (ConfigError, InvalidCall)) else 1


def serve(args: argparse.Namespace) -> int:
    """Answer calls over HTTP until stopped."""
    import logging

    config = _config(args, (*SETTINGS, *RENAMED_SETTINGS))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    config = _with_python(config, args, logging.getLogger("sandbox.runtime").info)
    from sandbox.gateway import serve as serve_http
    from sandbox.jail import choose_level

    choice = choose_level(config.isolation)  # once, for all executors and however often they start
    return serve_http(replace(config, isolation=choice.level.value, isolation_reason=choice.reason))


def run(args: argparse.Namespace) -> int:
    """Run one piece of code as the service would, and end as it ended."""
    call = _call(args)
    for path in call.return_files:
        _destination(path, overwrite=args.force)  # raises before anything runs
    config = _with_python(_config(args, _RUN_SETTINGS), args)
    from sandbox.executor import run_once

    result = run_once(call, replace(config.executor_config(), zygote_pools=1, slots=1))
    for path, data in result.files.items():
        if path in call.return_files:
            _save(_destination(path, overwrite=args.force), data)
    if args.json:
        print(json.dumps(result.encode()))
    else:
        _print_like_python(result)
    return exit_code(result)


def doctor(args: argparse.Namespace) -> int:
    """Show each layer of isolation on this machine, what `auto` would take, and whether a call runs."""
    from sandbox.jail import choose_level, probe

    config = _config(args, _RUN_SETTINGS)
    layers = probe()
    try:
        choice = choose_level("auto")
        level, reason = choice.level.value, choice.reason
    except ConfigError as why:
        level, reason = "", str(why)
    python, why_no_python = _guest_python(config)
    is_isolated = bool(level) and level != "none"
    trial = _trial(replace(config, python=python)) if is_isolated and python else "not tried"
    if args.json:
        found = {"auto": level or None, "auto_reason": reason, "python": python or None, "call": trial}
        print(json.dumps({"layers": [asdict(layer) for layer in layers], **found}))
    else:
        _print_layers(layers)
        print(f"isolation auto: {'; '.join(filter(None, (level, reason)))}")
        print(f"python for calls: {python or why_no_python}\na call: {trial}")
    return 0 if is_isolated and trial == "ok" else 1


def runtime(args: argparse.Namespace) -> int:
    """Make the Python that runs the calls, unless it is there; print its path."""
    from sandbox import runtime as runtimes

    taken = runtimes.find()
    if taken is not None and not (args.python or args.path or args.force):
        print(taken / "bin" / "python")
        return 0
    if args.python:
        python, version = Path(args.python), runtimes.version_of(Path(args.python))
    else:
        python, version = runtimes.best_python()
    folder = Path(args.path).absolute() if args.path else runtimes.default_dir(version)
    if args.check and not runtimes.is_complete(folder):
        raise runtimes.RuntimeBuildError(f"no finished runtime at {folder}; run `rstar-sandbox runtime`")
    with _clean_end():
        made = folder / "bin" / "python" if args.check else runtimes.build(python, folder, force=args.force)
    print(made)
    if (taken := runtimes.find()) != folder:
        other = f"take {taken}" if taken else "do not find it"
        print(f"rstar-sandbox: other commands {other}; RSTAR_RUNTIME={folder} has them take this one", file=sys.stderr)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Run one of the benchmarks, which live in the checkout and are not installed."""
    import importlib.util
    import pkgutil
    import runpy

    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.find_spec("bench")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the benchmarks live in the project's checkout and are not installed; run this from there")
    names = sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    if args.name not in names:
        raise ConfigError(f"bench {args.name or ''}: expected one of {', '.join(names)}")
    sys.argv = [f"bench.{args.name}", *args.args]
    runpy.run_module(f"bench.{args.name}", run_name="__main__", alter_sys=True)
    return 0


def exit_code(result: Result) -> int:
    """How a shell would have seen this call end."""
    if result.status is Status.TIMEOUT:
        return TIMED_OUT
    if result.status is Status.OK:
        return 0
    if result.signal is not None and result.status is Status.KILLED:
        return SIGNALLED + result.signal
    return result.exit_code if result.status is Status.ERROR and result.exit_code else 1


# The command line


def _parser() -> argparse.ArgumentParser:
    about = "Hostile, model-written Python, run isolated and fast."
    parser = argparse.ArgumentParser(prog="rstar-sandbox", description=about)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, add_arguments, command in (
        ("serve", _serve_arguments, serve),
        ("run", _run_arguments, run),
        ("doctor", _doctor_arguments, doctor),
        ("runtime", _runtime_arguments, runtime),
        ("bench", _bench_arguments, bench),
    ):
        doc = (command.__doc__ or "").rstrip(".")
        sub = commands.add_parser(name, help=doc[0].lower() + doc[1:], description=doc + ".", allow_abbrev=False)
        add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: `importlib.metadata` is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rstar-sandbox {version('rstar-sandbox')}")
        parser.exit()


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Every setting is also a key of the TOML file and a variable: --queue-mb is queue_mb and "
        "RSTAR_SANDBOX_QUEUE_MB. The token has no flag, since command lines are public: use RSTAR_SANDBOX_TOKEN or "
        "--token-file."
    )
    _no_install_argument(parser)
    _settings_arguments(parser, tuple(SETTINGS))
    for name in RENAMED_SETTINGS:  # accepted here, so that `load` can say what became of the setting
        parser.add_argument(f"--{flag_name(name)}", dest=name, help=argparse.SUPPRESS)


def _no_install_argument(parser: argparse.ArgumentParser) -> None:
    text = "end with an error where the Python that runs the calls is missing, instead of making it"
    parser.add_argument("--no-install", action="store_true", help=text)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="the code; - reads it from standard input")
    parser.add_argument("-c", dest="code", metavar="CODE", help="the code itself")
    parser.add_argument("--stdin", metavar="FILE", help="the code's standard input (default: ours, if it is piped)")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATH"}
    parser.add_argument("--file", dest="files", help="a file to lay beside it", **many)
    parser.add_argument("--return", dest="returns", help="a file to bring back", **many)
    parser.add_argument("--force", action="store_true", help="let --return overwrite")
    echo = parser.add_mutually_exclusive_group()
    echo.add_argument("--echo", action="store_true", help="print the last expression's value, as a notebook does")
    echo.add_argument("--no-echo", dest="echo", action="store_false", help="do not (the default)")
    parser.add_argument("--json", action="store_true", help="print the whole result as one line of JSON")
    profiles = [profile.value for profile in Profile]
    parser.add_argument("--profile", choices=profiles, default="auto", help="warm interpreter to fork")
    for name, number in LIMIT_FIELDS.items():
        text = f"{number.doc} (default: {number.default:g})"
        parser.add_argument(f"--{flag_name(name)}", dest=name, metavar="N", help=text)
    _no_install_argument(parser)
    _settings_arguments(parser, _RUN_SETTINGS)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _settings_arguments(parser, ("python",))


def _runtime_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        metavar="PY",
        help="the Python to make it with (default: what is made already, else 3.13 or 3.12 if found, else this one)",
    )
    parser.add_argument("--path", metavar="DIR", help="where (default: $RSTAR_RUNTIME, or under ~/.local/share)")
    parser.add_argument("--force", action="store_true", help="make it anew, with the newest Python found")
    parser.add_argument("--check", action="store_true", help="make nothing; fail if it is not there")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one; left out, they are listed")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _settings_arguments(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML file")
    group = parser.add_argument_group("settings")
    defaults = ServeConfig()
    for name in names:
        setting = SETTINGS[name]
        if not setting.is_flag:
            continue
        limit = name.removeprefix("max_")
        default = getattr(defaults.max_limits, limit) if limit in LIMIT_FIELDS else getattr(defaults, name)
        shown = ",".join(default) if isinstance(default, tuple) else default
        text = setting.doc if default is None else f"{setting.doc} (default: {shown})"
        group.add_argument(f"--{flag_name(name)}", dest=name, metavar=_metavar(setting.rule), help=text)


def _metavar(rule: SettingRule) -> str:
    if isinstance(rule, NumberRule):
        return "N"
    if isinstance(rule, NameListRule):
        return "NAMES"
    return "|".join(rule.choices) or "TEXT"


def _config(args: argparse.Namespace, names: Sequence[str]) -> ServeConfig:
    flags = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    config = load(args.config, os.environ, flags)
    os.environ.pop(f"{ENV_PREFIX}TOKEN", None)  # what this process starts does not need it
    return config


def _with_python(
    config: ServeConfig, args: argparse.Namespace, log: Callable[[str], None] | None = None
) -> ServeConfig:
    """With the Python that runs the calls named, so that all executors take the same one; made if there is none."""
    if config.python is not None:
        return config
    from sandbox import runtime as runtimes

    if args.no_install:
        return replace(config, python=str(runtimes.default_python()))
    with _clean_end():
        return replace(config, python=str(runtimes.ensure_python(log or runtimes.log_to_stderr)))


@contextmanager
def _clean_end() -> Iterator[None]:
    """SIGTERM as an exception, so that nothing that is half made stays behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGNALLED + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# run


def _call(args: argparse.Namespace) -> Call:
    if (args.file is None) == (args.code is None):
        raise ConfigError("run: expected one of FILE, - (code on standard input) or -c CODE")
    files = [Path(name) for name in args.files]
    raw = {
        "code": args.code if args.code is not None else _source(args.file),
        "stdin": _stdin(args),
        "files": {path.name if path.is_absolute() else path.as_posix(): _contents(path) for path in files},
        "return_files": args.returns,
        "limits": {name: _amount(getattr(args, name)) for name in LIMIT_FIELDS if getattr(args, name) is not None},
        "echo": args.echo,
        "profile": args.profile,
    }
    return Call.decode(raw, where="run")


def _source(file: str) -> str:
    data = sys.stdin.buffer.read() if file == "-" else _contents(Path(file))
    return data.decode("utf-8-sig", "surrogateescape")  # what is no UTF-8 fails inside, as a SyntaxError of the code's


def _stdin(args: argparse.Namespace) -> str:
    if args.stdin is not None:
        return _contents(Path(args.stdin)).decode("utf-8", "surrogateescape")
    if args.file == "-" or sys.stdin is None or sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def _amount(text: str) -> float | str:
    """A number if it is one; `Call.decode` names what is not."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as why:
        raise ConfigError(f"{path}: cannot be read ({why.strerror})") from None


def _destination(path: str, *, overwrite: bool) -> Path:
    """Where a returned file goes: below this folder, links followed, and not onto another file."""
    target = Path(path)
    if not target.resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError(f"--return {path}: leads out of this folder through a link")
    if target.exists() and not overwrite:
        raise ConfigError(f"--return {path}: is there already; use --force to overwrite it")
    return target


def _save(target: Path, data: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as why:
        raise SandboxError(f"--return {target}: cannot be written ({why.strerror})") from why


def _print_like_python(result: Result) -> None:
    _write(sys.stdout, result.stdout)
    if result.value is not None:
        _write(sys.stdout, result.value + "\n")
    _write(sys.stderr, result.stderr)
    for line in _remarks(result):
        print(f"rstar-sandbox: {line}", file=sys.stderr)


def _remarks(result: Result) -> list[str]:
    """What Python itself would not have said."""
    said = f": {result.error.message}" if result.error else ""
    ends = {
        Status.TIMEOUT: f"timed out after {result.usage.run_ms / 1000:.1f} s{said}",
        Status.MEMORY_LIMIT: f"ran out of memory{said}; --memory-mb gives more",
        Status.OUTPUT_LIMIT: f"wrote too much{said}; --output-kb keeps more",
        Status.KILLED: f"died of signal {result.signal}{said}",
        Status.UNAVAILABLE: f"no verdict{said}",
        Status.INVALID: f"malformed call{said}",
    }
    remarks = [ends[result.status]] if result.status in ends else []
    remarks += [f"{', '.join(result.truncated)} cut"] if result.truncated else []
    why = "it did not fit, or the code left" if "files" in result.truncated else "the code left"
    return remarks + [f"--return {path}: {why} no such file" for path in result.missing_files]


def _write(stream: Any, text: str) -> None:
    """Text as the bytes it was, whatever our own locale can show."""
    stream.flush()
    stream.buffer.write(text.encode("utf-8", "backslashreplace"))
    stream.buffer.flush()


# doctor


def _guest_python(config: ServeConfig) -> tuple[str, str]:
    if config.python is not None:
        return config.python, ""
    from sandbox.runtime import default_python

    try:
        return str(default_python()), ""
    except ConfigError as why:
        return "", str(why)


def _trial(config: ServeConfig) -> str:
    """`ok`, or what became of a small call."""
    from sandbox.executor import run_once

    try:
        result = run_once(Call("print(6 * 7)"), replace(config.executor_config(), zygote_pools=1, slots=1))
    except SandboxError as why:
        return str(why)
    if result.stdout == "42\n":
        return "ok"
    return f"{result.status}: {result.error.message if result.error else result.stderr.strip()}"


def _print_layers(layers: Sequence[ProbedLayer]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layer", "", "found", "purpose"):
        table.add_column(column)
    for layer in layers:
        mark = Text("yes", "green") if layer.ok else Text("no", "red")
        table.add_row(Text(layer.name), mark, Text(layer.found), Text(layer.purpose))
    Console().print(table)
