"""The commands of `rstar-sandbox`. Each reads its arguments, calls one package and returns an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. `run` returns the exit code of the code that it ran.

A command imports the packages that it needs when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError, InvalidCall, SandboxError
from sandbox.settings.profiles import check_profile
from sandbox.settings.server import ENV_PREFIX, SETTING_GROUPS, SETTINGS, ServeConfig, flag_name, load
from sandbox.types import LIMIT_FIELDS, Network, Profile, Result, Status

EXIT_TIMEOUT = 124
"""Exit code of timeout(1)."""
EXIT_INTERRUPTED = 130
EXIT_SIGNAL_BASE = 128
"""If signal n killed a process, a shell gives 128 + n as its exit code."""

_RUN_SETTINGS = ("isolation", "python")
"""Settings of the server that also apply to `run` and `doctor`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        exit_status: int = args.command(args)
        sys.stdout.flush()
        return exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout at its exit. On the closed pipe that would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SandboxError as error:
        print(f"rstar-sandbox: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InvalidCall)) else 1


def serve(args: argparse.Namespace) -> int:
    """Run calls that come over HTTP, until stopped."""
    import logging

    from sandbox import logs

    config = _config(args, tuple(SETTINGS))
    logs.configure(config.log_format)
    if config.cluster is not None:  # the nodes have Pythons and isolation levels of their own
        from sandbox.cluster.command import serve_cluster

        return serve_cluster(config)
    config = _with_python(config, args, logging.getLogger("sandbox.runtime").info)
    from sandbox.gateway import serve as serve_http
    from sandbox.jail import choose_level

    choice = choose_level(config.isolation)  # chosen once: restarted executors get the same level
    config = replace(config, isolation=choice.level.value, isolation_reason=choice.reason)
    if config.workers > 1:
        from sandbox.commands.workers import serve_workers

        return serve_workers(config)
    return serve_http(config)


def run(args: argparse.Namespace) -> int:
    """Run one piece of code as the server would, with the exit code of that code."""
    from sandbox.commands import run as run_command

    call = run_command.call_of(args)
    run_command.check_return_files(call, overwrite=args.force)
    config = _config(args, _RUN_SETTINGS)
    check_profile(call.profile, config.own_profiles, "run")
    config = _with_python(config, args)
    from sandbox.executor import run_once

    result = run_once(call, config.executor_config())
    if args.json:
        print(json.dumps(result.encode()))
    else:
        run_command.print_like_python(result)
    run_command.write_returned(result, call, overwrite=args.force)
    return exit_code(result)


def doctor(args: argparse.Namespace) -> int:
    """Show what this machine has and lacks, the isolation level that `serve` runs calls at, and the commands that give
    a better one. The exit code is 0 if a call has run at that level, and 1 otherwise."""
    from sandbox.commands import doctor as doctor_command

    report = doctor_command.doctor(_config(args, _RUN_SETTINGS))
    print(report.encode() if args.json else "\n".join(doctor_command.lines(report)))
    return report.exit_code


def runtime(args: argparse.Namespace) -> int:
    """Build the guest runtime, the Python that runs the calls, unless it exists, and print its path."""
    from sandbox.runtime import build as runtimes

    if args.list or args.remove or args.added or args.requirements:
        return _runtime_extras(args)
    current = runtimes.find()
    if current is not None and not (args.python or args.path or args.force):
        print(current / "bin" / "python")
        return 0
    python, version = _python_to_build_with(args.python)
    directory = Path(args.path).absolute() if args.path else runtimes.default_dir(version)
    if args.check and not runtimes.is_complete(directory):
        raise runtimes.RuntimeBuildError(f"no complete runtime at {directory}; run `rstar-sandbox runtime`")
    if not args.check:
        with _sigterm_as_exit():
            runtimes.build(python, directory, force=args.force)
    print(directory / "bin" / "python")
    if (current := runtimes.find()) != directory:
        others = f"use {current}" if current else "do not find this runtime"
        print(
            f"rstar-sandbox: other commands {others}; set RSTAR_RUNTIME={directory} to make them use it",
            file=sys.stderr,
        )
    return 0


def _runtime_extras(args: argparse.Namespace) -> int:
    """List all runtimes, remove some, or build one with more packages and print its path."""
    from sandbox.runtime import extras

    if args.list:
        for python, packages in extras.installed_runtimes():
            print(f"{python}  {packages}")
        return 0
    if args.remove:
        for name in args.remove:
            print(f"removed {extras.remove(name)}")
        return 0
    if args.path or args.check or args.force:
        raise ConfigError("runtime: --with and --requirements cannot be combined with --path, --check or --force")
    added = [*args.added, *(extras.read_requirements(args.requirements) if args.requirements else ())]
    python, version = _python_to_build_with(args.python)
    with _sigterm_as_exit():
        built = extras.build_with(python, version, added)
    print("rstar-sandbox: pass this path to `serve` or `run` as --python:", file=sys.stderr)
    print(built)
    return 0


def _python_to_build_with(named: str | None) -> tuple[Path, tuple[int, int]]:
    """Return the Python that builds a runtime, and its version. Raises `ConfigError` if the named one is unsuitable."""
    from sandbox.runtime import build as runtimes

    return (Path(named), runtimes.version_of(Path(named))) if named else runtimes.best_python()


def mcp(args: argparse.Namespace) -> int:
    """Offer the sandbox to an MCP client over standard input and output, as the tool run_python."""
    import asyncio
    import importlib.util

    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("mcp: needs the MCP SDK: pip install 'rstar-sandbox[mcp]'")
    from sandbox.client.clients import check_url
    from sandbox.mcp.stdio import serve_stdio

    if args.url is not None:
        try:
            check_url(args.url, "--url")
        except ValueError as error:
            raise ConfigError(str(error)) from None
    # SIGINT must kill the process: the SDK's thread that reads standard input cannot be cancelled. A server that this
    # process has started ends with the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(serve_stdio(args.url, os.environ.get(f"{ENV_PREFIX}TOKEN")))
    return 0


def exit_code(result: Result) -> int:
    """Return the exit code of `run` for this result. If the code ended or a signal killed it, it is the exit code
    that a shell would report. After a time-out it is `EXIT_TIMEOUT`, and after any other failure 1."""
    if result.status is Status.TIMEOUT:
        return EXIT_TIMEOUT
    if result.status is Status.OK:
        return 0
    if result.signal is not None and result.status is Status.KILLED:
        return EXIT_SIGNAL_BASE + result.signal
    return result.exit_code if result.status is Status.ERROR and result.exit_code else 1


def _parser() -> argparse.ArgumentParser:
    about = "Run untrusted Python code, isolated and in batches."
    parser = argparse.ArgumentParser(prog="rstar-sandbox", description=about)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, add_arguments, command in (
        ("serve", _add_serve_arguments, serve),
        ("run", _add_run_arguments, run),
        ("doctor", _add_doctor_arguments, doctor),
        ("runtime", _add_runtime_arguments, runtime),
        ("mcp", _add_mcp_arguments, mcp),
    ):
        doc = (command.__doc__ or "").rstrip(".")
        sub = commands.add_parser(name, help=doc[0].lower() + doc[1:], description=doc + ".", allow_abbrev=False)
        add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


class _Version(argparse.Action):
    """Imports `importlib.metadata`, which is slow, only if the version is requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rstar-sandbox {version('rstar-sandbox')}")
        parser.exit()


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Each setting is also a key of the TOML file and an environment variable: --queue-mb is queue_mb and "
        "RSTAR_SANDBOX_QUEUE_MB. The token has no flag, because other users can read command lines: use "
        "RSTAR_SANDBOX_TOKEN or --token-file."
    )
    _add_no_install_argument(parser)
    _add_settings_arguments(parser, tuple(SETTINGS))


def _add_no_install_argument(parser: argparse.ArgumentParser) -> None:
    text = "fail if the guest runtime is missing, instead of building it"
    parser.add_argument("--no-install", action="store_true", help=text)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="file with the code; -: standard input")
    parser.add_argument("-c", dest="code", metavar="CODE", help="the code itself, instead of FILE")
    parser.add_argument(
        "args", nargs="*", metavar="ARG", help="arguments of the code; put -- before one that begins with -"
    )
    parser.add_argument(
        "--stdin", metavar="FILE", help="standard input of the code (default: that of this command, if it is piped)"
    )
    repeatable: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATH"}
    parser.add_argument("--file", dest="files", help="file to copy into the scratch directory", **repeatable)
    text = "file to copy back after the run, or a pattern such as '*.png'"
    parser.add_argument("--return", dest="returns", help=text, **repeatable)
    parser.add_argument(
        "--figures", action="store_true", help="copy the open figures of matplotlib back, as figure-1.png and so on"
    )
    parser.add_argument("--force", action="store_true", help="let --return and --figures overwrite files")
    text = "environment variable of the code"
    parser.add_argument("--env", dest="env", help=text, **{**repeatable, "metavar": "NAME=VALUE"})
    echo = parser.add_mutually_exclusive_group()
    echo.add_argument("--echo", action="store_true", help="print the value of the last expression, as a notebook does")
    echo.add_argument("--no-echo", dest="echo", action="store_false", help="do not print it (default)")
    parser.add_argument("--json", action="store_true", help="print the whole result as one line of JSON")
    names = ", ".join(Profile)
    parser.add_argument(
        "--profile", metavar="NAME", default="auto", help=f"profile of the zygote to fork: {names}, or one of --config"
    )
    text = f"network of the code: {', '.join(Network)} (TCP on 127.0.0.1, between its own processes)"
    parser.add_argument("--network", metavar="NAME", default=Network.NONE, help=text)
    for name, rule in LIMIT_FIELDS.items():
        text = f"{rule.doc} (default: {rule.default:g})"
        parser.add_argument(f"--{flag_name(name)}", dest=name, metavar="N", help=text)
    _add_no_install_argument(parser)
    _add_settings_arguments(parser, _RUN_SETTINGS)


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_settings_arguments(parser, ("python",))


def _add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        metavar="PY",
        help="Python to build it with (default: that of an existing runtime, else 3.13 or 3.12, else this Python)",
    )
    parser.add_argument("--path", metavar="DIR", help="directory (default: $RSTAR_RUNTIME, or under ~/.local/share)")
    parser.add_argument("--force", action="store_true", help="build it again, with the newest Python found")
    parser.add_argument("--check", action="store_true", help="build nothing; fail if it does not exist")
    parser.add_argument(
        "--with",
        dest="added",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="package to install in addition, such as scikit-learn (can be repeated); prints the path for --python",
    )
    parser.add_argument("--requirements", type=Path, metavar="FILE", help="file with such packages, one per line")
    parser.add_argument("--list", action="store_true", help="list all runtimes, build nothing")
    text = "remove this runtime, named as --list shows it or by its directory's name (can be repeated)"
    parser.add_argument("--remove", metavar="NAME", action="append", default=[], help=text)


def _add_mcp_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        help="server that runs the calls, with the token of RSTAR_SANDBOX_TOKEN (default: start one)",
    )


def _add_settings_arguments(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    for title, description in SETTING_GROUPS.items():
        shown = [name for name in names if SETTINGS[name].group == title and not SETTINGS[name].is_secret]
        group = parser.add_argument_group(title, description) if shown else parser
        for name in shown:
            setting = SETTINGS[name]
            default = ",".join(setting.default) if isinstance(setting.default, tuple) else setting.default
            text = setting.doc if default is None else f"{setting.doc} (default: {default})"
            group.add_argument(f"--{flag_name(name)}", dest=name, metavar=setting.rule.metavar, help=text)


def _config(args: argparse.Namespace, names: Sequence[str]) -> ServeConfig:
    flags = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    config = load(args.config, os.environ, flags)
    os.environ.pop(f"{ENV_PREFIX}TOKEN", None)  # child processes must not inherit it
    return config


def _with_python(
    config: ServeConfig, args: argparse.Namespace, log: Callable[[str], None] | None = None
) -> ServeConfig:
    """Set the Python that runs the calls, so that all executors use the same one. Builds the runtime if it is
    missing."""
    if config.python is not None:
        return config
    from sandbox.runtime import build as runtimes

    if args.no_install:
        return replace(config, python=str(runtimes.default_python()))
    with _sigterm_as_exit():
        return replace(config, python=str(runtimes.ensure_python(log or runtimes.log_to_stderr)))


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM, so that an unfinished build is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGNAL_BASE + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
