"""The input and output of `rstar-sandbox run`.

- `call_of` turns the command line into a call.
- `print_like_python` prints the result as Python would print it.
- `write_returned` writes the returned files into the current directory.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError, SandboxError
from sandbox.path_patterns import is_pattern, matches
from sandbox.types import LIMIT_FIELDS, Call, Result, Status


def call_of(args: argparse.Namespace) -> Call:
    """Return the call that the arguments describe. Raises `ConfigError` or `InvalidCall`."""
    argv = args.args  # ARG..., the arguments that the code gets
    if args.code is not None and args.file is not None:
        # With -c CODE there is no FILE, but the parser has stored the first ARG as FILE. `args.file` is cleared too: if
        # the first ARG is "-", `_read_stdin` would conclude from it that the code comes on standard input.
        args.file, argv = None, [args.file, *argv]
    if args.code is None and args.file is None:
        raise ConfigError("run: expected one of FILE, - (code on standard input) or -c CODE")
    paths = [Path(name) for name in args.files]
    limits = {name: text for name in LIMIT_FIELDS if (text := getattr(args, name)) is not None}
    fields = {
        "code": args.code if args.code is not None else _read_code(args.file),
        "stdin": _read_stdin(args),
        # Names in the scratch directory are relative, so an absolute path is reduced to its last part.
        "files": {path.name if path.is_absolute() else path.as_posix(): _read_file(path) for path in paths},
        "return_files": args.returns,
        "limits": {name: LIMIT_FIELDS[name].parse(text) for name, text in limits.items()},
        "echo": args.echo,
        "profile": args.profile,
        "env": dict(map(_variable, args.env)),
        "argv": argv,
        "figures": args.figures,
        "network": args.network,
    }
    return Call.decode(fields, where="run")


def print_like_python(result: Result) -> None:
    """Print stdout, stderr and the value as Python does, then the facts that Python does not print."""
    _write(sys.stdout, result.stdout)
    if result.value is not None:
        _write(sys.stdout, result.value + "\n")
    _write(sys.stderr, result.stderr)
    for line in _status_lines(result):
        print(f"rstar-sandbox: {line}", file=sys.stderr)


def check_return_files(call: Call, *, overwrite: bool) -> None:
    """Raise `ConfigError` if a path of `return_files` could not be written after the run."""
    for path in call.return_files:
        if not is_pattern(path):
            _return_target(path, overwrite=overwrite)


def write_returned(result: Result, call: Call, *, overwrite: bool) -> None:
    """Write the returned files and figures. If one of them would overwrite a file or leave the directory, raises
    `ConfigError` and writes nothing. Raises `SandboxError` if a file cannot be written."""
    # The server must not choose which files of the current directory are written.
    returned = {path: data for path, data in result.files.items() if _is_requested(path, call)}
    targets = [_return_target(path, overwrite=overwrite) for path in returned]  # raises before anything is written
    for target, data in zip(targets, returned.values(), strict=True):
        _write_file(target, data)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--env {text}: expected NAME=VALUE")
    return name, value


def _read_code(file: str) -> str:
    data = sys.stdin.buffer.read() if file == "-" else _read_file(Path(file))
    return data.decode("utf-8-sig", "surrogateescape")  # bytes that are not UTF-8 cause a SyntaxError in the call


def _read_stdin(args: argparse.Namespace) -> bytes:
    if args.stdin is not None:
        return _read_file(Path(args.stdin))
    if args.file == "-" or sys.stdin is None or sys.stdin.isatty():
        return b""
    return sys.stdin.buffer.read()


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _is_requested(path: str, call: Call) -> bool:
    is_figure = call.figures and re.fullmatch(r"figure-\d+\.png", path) is not None
    return is_figure or path in call.return_files or any(matches(path, pattern) for pattern in call.return_files)


def _return_target(path: str, *, overwrite: bool) -> Path:
    """Return the target of a returned file. Raises `ConfigError` if a symbolic link leads it out of the current
    directory, or if it exists and must not be overwritten."""
    target = Path(path)
    # Only a symbolic link can lead out: `fields.check_path` refuses absolute paths and paths with a `..` part.
    if not target.resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError(f"--return {path}: leads out of the current directory through a symbolic link")
    if target.exists() and not overwrite:
        raise ConfigError(f"--return {path}: exists; use --force to overwrite it")
    return target


def _write_file(target: Path, data: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as error:
        raise SandboxError(f"--return {target}: cannot be written ({error.strerror})") from error


def _status_lines(result: Result) -> list[str]:
    """Return the facts about a result that Python itself does not print."""
    detail = f": {result.error.message}" if result.error and result.error.message else ""
    texts = {
        Status.TIMEOUT: f"timed out after {result.usage.run_ms / 1000:.1f} s{detail}",
        Status.MEMORY_LIMIT: f"ran out of memory{detail}; --memory-mb gives more",
        Status.OUTPUT_LIMIT: f"wrote too much output{detail}; --output-kb allows more",
        Status.KILLED: f"killed by signal {result.signal}{detail}",
        Status.UNAVAILABLE: f"could not be run{detail}",
        Status.INVALID: f"malformed call{detail}",
    }
    lines = [texts[result.status]] if result.status in texts else []
    lines += [f"truncated: {', '.join(result.truncated)}"] if result.truncated else []
    # `truncated` contains files if a file did not fit into the result.
    reason = "it did not fit, or the code left" if "files" in result.truncated else "the code left"
    return lines + [f"--return {path}: {reason} no such file" for path in result.missing_files]


def _write(stream: Any, text: str) -> None:
    """Write `text` as UTF-8, whatever the locale's encoding is. Lone surrogates become escapes."""
    stream.flush()
    stream.buffer.write(text.encode("utf-8", "backslashreplace"))
    stream.buffer.flush()
