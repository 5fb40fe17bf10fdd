"""Checks of single input fields. Each raises `InvalidCall` with the field's name, the expected and the received value.

- A hostile value may have any type, size and nesting. A check raises nothing but `InvalidCall`, with a short text.
- Bytes are base64 text in JSON and raw `bin` in msgpack; `decode_bytes` takes both. A file may also be `{"text": ...}`.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox.errors import InvalidCall
from sandbox.guest.protocol import ANY_DIRECTORIES, MAX_FILES, MAX_PATH_BYTES
from sandbox.path_patterns import MAX_PATTERN_BYTES, is_pattern

MAX_NAME_BYTES = 255
"""Bytes of one part of a path (NAME_MAX of Linux file systems)."""
MAX_LABEL_CHARS = 256
"""Characters of an id or a tenant."""
MAX_VARIABLES = 256
MAX_ARGUMENTS = 256
MAX_ENV_BYTES = 64 << 10
"""Maximum bytes of all names and texts of environment variables together. It is half of what the kernel accepts as one
variable or one argument of a program (MAX_ARG_STRLEN, 128 KiB). So the code can pass each of them on to a program."""
MAX_ARGV_BYTES = 64 << 10
"""Maximum bytes of all arguments together, for the same reason."""
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARENT = re.compile(r"\.(\w+(\[\d+\])?)$")
"""Finds the name of a nested object in the path that an error message shows: `limits` in `calls[3].limits`."""
_MAX_SHOWN_CHARS = 60
"""Maximum characters of a hostile text that an error message repeats."""


@dataclass(frozen=True, slots=True)
class NumberRule:
    """The accepted range of a number, both ends included, and whether the number must be whole."""

    low: float
    high: float
    whole: bool = True
    default: float = 0
    doc: str = ""
    metavar = "N"
    """Placeholder of the value in the help of commands. Each rule of a setting has it (`settings.server`)."""

    @property
    def expected(self) -> str:
        return f"a{' whole' if self.whole else ''} number from {self.low:.12g} to {self.high:.12g}"

    def parse(self, text: str) -> float | str:
        """Return the number that `text` spells. If `text` spells no number, return `text` itself: `accepts` refuses it,
        and the error message shows it."""
        try:
            return int(text) if self.whole else float(text)
        except ValueError:
            return text

    def accepts(self, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high and (not self.whole or value == int(value))

    def convert(self, value: Any) -> float:
        """Return an accepted value as an `int` if the rule demands a whole number, else as a `float`."""
        return int(value) if self.whole else float(value)


def check_mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidCall(f"{where}: expected an object, got {shown(value)}")
    return value


def check_names(
    mapping: Mapping[Any, Any],
    known: Mapping[str, Any],
    where: str,
    nested: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Refuse a mapping with a field that is not in `known`. The message suggests a field with a similar name. `nested`
    has fields of nested objects, which are suggested too: it maps the name of the object to the fields of the object.
    """
    if mapping.keys() <= known.keys():
        return
    unknown = next(name for name in mapping if name not in known)
    parent = match[1] if (match := _PARENT.search(where)) else ""
    paths = {name: f"{parent}.{name}" if parent else name for name in known}
    for outer, names in (nested or {}).items():
        paths = {name: f"{outer}.{name}" for name in names} | paths  # `known` wins over a nested field of this name
    similar = difflib.get_close_matches(unknown[:_MAX_SHOWN_CHARS], paths, n=1) if isinstance(unknown, str) else []
    suggestion = f"; did you mean {paths[similar[0]]}?" if similar else ""
    raise InvalidCall(f"{where}: unknown field {shown(unknown)}; the fields are {', '.join(known)}{suggestion}")


def check_number(value: Any, where: str, rule: NumberRule) -> float:
    if not rule.accepts(value):
        raise InvalidCall(f"{where}: expected {rule.expected}, got {shown(value)}")
    return rule.convert(value)


def check_text(value: Any, where: str, max_chars: int) -> str:
    if not isinstance(value, str):
        raise InvalidCall(f"{where}: expected text, got {shown(value)}")
    if len(value) > max_chars:
        raise InvalidCall(
            f"{where}: expected at most {max_chars} characters, got {len(value)}; send less, or use files"
        )
    return value


def check_stdin(value: Any, where: str, max_chars: int) -> str | bytes:
    if not isinstance(value, bytes):
        return check_text(value, where, max_chars)
    if len(value) > max_chars:
        raise InvalidCall(f"{where}: expected at most {max_chars} bytes, got {len(value)}; send less, or use files")
    return value


def check_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidCall(f"{where}: expected true or false, got {shown(value)}")
    return value


def check_label(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_LABEL_CHARS or not value.isprintable():
        raise InvalidCall(
            f"{where}: expected printable text of at most {MAX_LABEL_CHARS} characters, got {shown(value)}"
        )
    return value


def check_files(value: Any, where: str) -> Mapping[str, bytes]:
    mapping = check_mapping(value, where)
    if len(mapping) > MAX_FILES:
        raise InvalidCall(f"{where}: expected at most {MAX_FILES} files, got {len(mapping)}")
    files = {check_path(path, where): _decode_file(data, f"{where}[{shown(path)}]") for path, data in mapping.items()}
    for path in files:
        slash = path.find("/")
        while slash >= 0:
            if path[:slash] in files:
                raise InvalidCall(
                    f"{where}: expected each path to be a file or a directory, but {shown(path[:slash])} is a file "
                    f"and a directory in {shown(path)}; rename one"
                )
            slash = path.find("/", slash + 1)
    return files


def check_paths(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_FILES:
        raise InvalidCall(
            f"{where}: expected a list of at most {MAX_FILES} relative paths or patterns, got {shown(value)}"
        )
    for path in value:
        if is_pattern(check_path(path, where)):
            _check_pattern(path, where)
    return tuple(value)


def _check_pattern(path: str, where: str) -> None:
    size = len(path.encode())
    if size > MAX_PATTERN_BYTES or path.split("/").count(ANY_DIRECTORIES) > 1:
        expected = f"a pattern of at most {MAX_PATTERN_BYTES} bytes with at most one '**', such as 'out/**/*.csv'"
        raise InvalidCall(f"{where}: expected {expected}, got {size} bytes, {shown(path)}")


def check_env(value: Any, where: str) -> Mapping[str, str]:
    mapping = check_mapping(value, where)
    if len(mapping) > MAX_VARIABLES:
        raise InvalidCall(f"{where}: expected at most {MAX_VARIABLES} variables, got {len(mapping)}")
    for name in mapping:
        if not isinstance(name, str) or not VARIABLE_NAME.fullmatch(name):
            expected = "names of ASCII letters, digits and '_' that do not start with a digit"
            raise InvalidCall(f"{where}: expected {expected}, got {shown(name)}")
    texts = ((f"[{shown(name)}]", text) for name, text in mapping.items())
    _check_process_texts(texts, MAX_ENV_BYTES - sum(map(len, mapping)), where)
    return dict(mapping)


def check_arguments(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_ARGUMENTS:
        raise InvalidCall(f"{where}: expected a list of at most {MAX_ARGUMENTS} texts, got {shown(value)}")
    _check_process_texts(((f"[{index}]", text) for index, text in enumerate(value)), MAX_ARGV_BYTES, where)
    return tuple(value)


def _check_process_texts(texts: Iterable[tuple[str, Any]], max_bytes: int, where: str) -> None:
    """Refuse texts that the kernel cannot pass to a program, and texts that have more than `max_bytes` bytes together.
    Each item of `texts` is a text and, before it, the position of the text for error messages."""
    size = 0
    for position, text in texts:
        if not isinstance(text, str) or "\0" in text:
            raise InvalidCall(f"{where}{position}: expected text without NUL, got {shown(text)}")
        try:
            size += len(text.encode("utf-8", "surrogateescape"))  # as Python encodes it for a program
        except UnicodeEncodeError:
            raise InvalidCall(f"{where}{position}: expected text that UTF-8 can encode, got {shown(text)}") from None
        if size > max_bytes:  # of variables, `max_bytes` is without their names; the message has the limit with them
            raise InvalidCall(f"{where}: expected at most {MAX_ENV_BYTES >> 10} KiB together; use files for more")


def check_path(path: Any, where: str) -> str:
    parts = path.split("/") if isinstance(path, str) and len(path) <= MAX_PATH_BYTES else []
    is_clean = parts and path.isprintable() and len(path.encode("utf-8", "surrogatepass")) <= MAX_PATH_BYTES
    if not is_clean or any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME_BYTES for part in parts):
        expected = "a relative path without empty, '.' or '..' parts, such as 'data/in.csv'"
        raise InvalidCall(f"{where}: expected {expected}, got {shown(path)}")
    return str(path)


def decode_bytes(value: Any, where: str, expected: str = "base64 text") -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidCall(f"{where}: expected {expected} (or bytes in msgpack), got {shown(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidCall(f"{where}: expected {expected}, got {shown(value)} ({error})") from None


def _decode_file(value: Any, where: str) -> bytes:
    if isinstance(value, Mapping) and value.keys() == {"text"} and isinstance(value["text"], str):
        return encode_text(value["text"])
    return decode_bytes(value, where, 'base64 text, or {"text": "..."} for text')


def encode_text(text: str) -> bytes:
    """Return the content of a file with this text. A lone surrogate becomes bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def with_encoded_texts(files: Any) -> Any:
    """Return the `files` of a Python caller with the texts encoded as bytes. For a Python caller, a text is the content
    of a file; `check_files` would decode it as base64."""
    if not isinstance(files, Mapping):
        return files
    return {path: encode_text(data) if isinstance(data, str) else data for path, data in files.items()}


def with_decoded_stdin(mapping: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the mapping with `stdin` as bytes instead of `stdin_base64`."""
    text = mapping["stdin_base64"]
    if "stdin" in mapping:
        raise InvalidCall(f"{where}.stdin_base64: expected one of stdin and stdin_base64, got both; send one")
    if not isinstance(text, str):
        raise InvalidCall(f"{where}.stdin_base64: expected base64 text, got {shown(text)}")
    fields = {**mapping, "stdin": decode_bytes(text, f"{where}.stdin_base64")}
    del fields["stdin_base64"]
    return fields


def to_base64(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return file contents in their JSON form."""
    return {path: base64.b64encode(data).decode("ascii") for path, data in files.items()}


def shown(value: Any) -> str:
    """Return a short, printable text that shows a hostile value in an error message."""
    if isinstance(value, (Mapping, list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"  # repr() refuses integers of over 4,300 digits
    text = repr(value[:_MAX_SHOWN_CHARS] if isinstance(value, (str, bytes)) else value)
    return text[:80] if text.isascii() else ascii(text)[1:-1]  # `ascii` also adds quotes, which [1:-1] removes
