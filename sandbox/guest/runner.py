"""Runs one call's code as a script, in a process that is already confined, and never returns.

Invariants:
- The code sees what a script sees: a fresh `__main__`, `sys.argv == ["main.py"]`, its working folder first on the path,
  tracebacks with its own lines. Of the zygote it sees nothing that matters.
- Output goes to descriptors 1 and 2 unbuffered, so whatever was written before a kill is there to be read.
- The report (descriptor 3) is a courtesy of this process, which is the code's as much as ours: value and error text
  only. The verdict comes from outside, from how the process ended.

Report: six little-endian i32: lengths of value (-1: none), error type (-1: no error), message and traceback, line
(-1: unknown), bits (1 value cut, 2 traceback cut, 4 files cut, 8 a MemoryError); then the four texts, UTF-8.
Files (descriptor 4): for each, u32 index into `return_files`, u64 length, the content.
"""

from __future__ import annotations
import __future__

import _ast as ast
import _thread
import atexit
import builtins
import errno
import gc
import io
import json
import linecache
import mmap
import os
import re
import socket
import stat
import struct
import sys
import threading
import traceback
import types
import warnings
from _random import Random as _Random
from typing import Any

SCRIPT = "main.py"
REPORT_FD, FILES_FD = 3, 4
REPORT = struct.Struct("<6i")
FILE = struct.Struct("<IQ")
VALUE_CUT, TRACEBACK_CUT, FILES_CUT, OUT_OF_MEMORY = 1, 2, 4, 8
TYPE_BYTES, MESSAGE_BYTES = 256, 8192
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
_STATEMENT = re.compile(
    r"(?:for|while|if|elif|else|def|class|with|try|except|finally|import|from|return|assert|del|pass|raise|global|async)\b"
    r"|@|\w+[ \t]*=[^=]"
)
"""How a line starts that cannot be an expression. What it misses costs a second compilation, nothing else."""
_NOTHING = compile("", SCRIPT, "exec")
_HERE = __file__
_LIBRARY = tuple({os.path.dirname(os.__file__), "<frozen ", *(p for p in sys.path if p.endswith("-packages"))})
_TRACEBACK_FRAMES = 200
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on
_reserve = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
"""Room to say that memory is used up; never touched, so it costs address space alone."""


class _Output(io.FileIO):
    """A descriptor of bounded size: the first write that does not fit ends the process."""

    def write(self, data):  # type: ignore[no-untyped-def]
        try:
            return super().write(data)
        except PermissionError:
            os._exit(1)  # the file is full; the verdict is read off its length


def _sendmsg(sock: socket.socket, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
    """Stands in for `socket.socket.sendmsg`, which the filter refuses, since it can send descriptors: this sends data
    alone, as asyncio does from Python 3.12 on."""
    if ancdata or address is not None:
        raise PermissionError(errno.EPERM, "sendmsg sends no descriptors, and to no address, here; use send for data")
    if flags or sock.gettimeout():
        return sock.send(b"".join(buffers), flags)
    return os.writev(sock.fileno(), list(buffers))


main_module = types.ModuleType("__main__")


def prepare(folder: str) -> None:
    """What every call needs and no call changes, done once in the zygote: standard streams, an empty `__main__`, paths.

    `folder` is the working folder of calls, where it is the same for all. Doing it here rather than in each call is not
    about time but about memory: whatever a call writes to, the kernel copies first, a page at a time.
    """
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = _Output(fd, "wb", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, newline="\n", write_through=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    socket.socket.sendmsg = _sendmsg  # type: ignore[assignment]
    main_module.__dict__.update(__builtins__=builtins, __file__=SCRIPT, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main_module
    for file in os.listdir(os.path.dirname(_HERE)):
        sys.modules.pop(file.partition(".")[0], None)  # the code may bring files of these names
    sys.argv = [SCRIPT]
    sys.path[0] = folder or os.devnull


_logging: Any = None
_handlers: list = []


def take_over_logging() -> None:
    """Once in a zygote, with all imported: `logging` has nothing to shut down for a call that gave it no handler. As a
    function that runs at exit it would see to that at length."""
    global _logging, _handlers
    logging: Any = sys.modules.get("logging")
    if hasattr(logging, "_handlerList"):
        atexit.unregister(logging.shutdown)
        _logging, _handlers = logging, list(logging._handlerList)


def run(call: dict, blobs: list) -> None:
    """Run a call and leave by `os._exit`. `blobs` are its code, input, names and files; names are a JSON list of two
    lists, of the files that follow and of those to return."""
    code = 70
    try:
        gc.freeze()  # also sets the counters to 0: no collection in a small call goes over what the zygote left
        gc.enable()
        source, stdin, names, *contents = blobs
        _start(bool(stdin))
        home = os.getcwd()
        laid, returned = json.loads(bytes(names)) if names else ([], [])
        report = _Report(call["output_bytes"])
        code = _run_script(call, bytes(source), list(zip(laid, contents)), report)
        code = _finalize(code)
        report.files_cut = _return_files(returned, home, call["return_bytes"])
        report.send()
    except SystemExit as leaving:  # raised by what ran at exit
        code = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        os._exit(code & 0xFF)


def _start(stdin_given: bool) -> None:
    if sys.path[0] == os.devnull:
        sys.path[0] = os.getcwd()
    if stdin_given:
        raw = io.BufferedReader(io.FileIO(0, closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape")
        sys.stdin = sys.__stdin__ = stream  # type: ignore[misc]
    _reseed()
    getattr(warnings, "_filters_mutated", int)()  # "once per place" starts anew


def _reseed() -> None:
    """Without this every fork of a zygote would draw the same numbers."""
    random = sys.modules.get("random")
    if random is not None:
        _Random.seed(random._inst)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))  # a third of the cost of seed()
    sympy_random: Any = sys.modules.get("sympy.core.random")
    if sympy_random is not None:
        _Random.seed(sympy_random.rng)
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None  # it goes by the process id, which is always 1 here
        tempfile.tempdir = None


def _lay_files(files: list) -> None:
    for path, content in files:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _run_script(call: dict, source: bytes, files: list, report: _Report) -> int:
    scope = main_module.__dict__
    try:
        _lay_files(files)
        text = _decode_source(source)
        # Lines as the compiler counts them; str.splitlines would also cut at form feeds and the like.
        linecache.cache[SCRIPT] = (len(text), None, [line + "\n" for line in text.split("\n")], SCRIPT)
        body, last = _compile(text, call["echo"])
        exec(body, scope)
        value = eval(last, scope) if last else None
        if value is not None:
            report.value = repr(value)
        return 0
    except SystemExit as leaving:
        return _exit_code(leaving, report)
    except BaseException as error:
        if isinstance(error, MemoryError):
            _reserve.close()
            report.out_of_memory = True
        report.error = _describe(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _decode_source(source: bytes) -> str:
    """The text of a script as Python reads it from a file: without a byte order mark, with plain line ends."""
    text = source.decode("utf-8", "surrogatepass")
    if text[:1] == "\ufeff":
        text = text[1:]
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _compile(text: str, echo: bool) -> tuple[types.CodeType, types.CodeType | None]:
    """The script, and its last expression apart if there is one to be echoed (a trailing `;` hides it).

    Cutting the text before its last unindented line is exact when both parts compile, and half as much work as going
    by the syntax tree, which is what everything else gets.
    """
    if not echo:
        return _compile_all(text), None
    start = _last_line(text)
    if ";" not in text[start:]:
        if _STATEMENT.match(text, start):
            return _compile_all(text), None
        try:
            body = compile(text[:start], SCRIPT, "exec", dont_inherit=True) if start else _NOTHING
            blank = "\n" * text.count("\n", 0, start)
            flags = body.co_flags & _FUTURE
            return body, compile(blank + text[start:], SCRIPT, "eval", flags, dont_inherit=True)
        except SyntaxError:
            pass  # the last line belongs to what came before it, or is no expression, or is wrong
    return _compile_tree(text)


def _last_line(text: str) -> int:
    """Where the last line starts that is neither indented, blank, a comment, nor the end of something in brackets."""
    end = len(text)
    while True:
        start = text.rfind("\n", 0, end) + 1
        if text[start : start + 1] not in ("", " ", "\t", "\n", "\r", "\f", "#", ")", "]", "}") or start == 0:
            return start
        end = start - 1


def _compile_tree(text: str) -> tuple[types.CodeType, types.CodeType | None]:
    tree: Any = compile(text, SCRIPT, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not _is_hidden(text, tree.body[-1]):
        last = ast.Expression(tree.body.pop().value)
    body = compile(tree, SCRIPT, "exec", dont_inherit=True)
    return body, compile(last, SCRIPT, "eval", body.co_flags & _FUTURE, dont_inherit=True) if last else None


def _is_hidden(text: str, last: Any) -> bool:
    """Whether a `;` follows the last expression, as notebooks hide it."""
    lines = text.encode().split(b"\n")[last.end_lineno - 1 :]
    lines[0] = lines[0][last.end_col_offset :]
    return b"\n".join(lines).lstrip(b" \t\f\\\n")[:1] == b";"


def _compile_all(text: str) -> types.CodeType:
    return compile(text, SCRIPT, "exec", dont_inherit=True)


def _exit_code(leaving: SystemExit, report: _Report) -> int:
    """What `sys.exit(x)` means: None is 0, a number is itself, anything else is printed and is 1 (sys.exit)."""
    code = leaving.code
    if code is None or code == 0:
        return 0
    if not isinstance(code, int):
        _write_stderr(f"{code}\n")
    report.error = ("SystemExit", str(code), "", None)
    return code & 0xFF if isinstance(code, int) else 1


def _describe(error: BaseException) -> tuple:
    """Type, message, traceback and line of an uncaught exception; the traceback also goes to stderr."""
    _strip_internal_frames(error)
    text = _traceback_text(error)
    if sys.excepthook is sys.__excepthook__:
        _write_stderr(text)
    else:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException as why:
            _write_stderr(f"Error in sys.excepthook:\n{_traceback_text(why)}\nOriginal exception was:\n{text}")
    return type(error).__qualname__, _message(error), text, _line(error)


def _traceback_text(error: BaseException) -> str:
    try:
        return "".join(traceback.TracebackException.from_exception(error).format())
    except BaseException:  # a __str__ of the user's that raises, or no memory left to format with
        return f"{type(error).__qualname__}: {_message(error)}\n"


def _strip_internal_frames(error: BaseException) -> None:
    """Cut the frames of the runner and of libraries out of an exception, its causes, and its group's members."""
    seen: set = {id(None)}
    found: list = [error]
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _user_frames(one.__traceback__)
        found += (one.__cause__, one.__context__)
        if isinstance(one, _GROUP):
            found += one.exceptions


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    links = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != _HERE and not name.startswith(_LIBRARY):
            links.append(trace)
        trace = trace.tb_next
    if len(links) > _TRACEBACK_FRAMES:
        links = links[: _TRACEBACK_FRAMES // 2] + links[-_TRACEBACK_FRAMES // 2 :]
    kept = None
    for link in reversed(links):
        kept = types.TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "<exception str() failed>"


def _line(error: BaseException) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == SCRIPT:
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == SCRIPT:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _write_stderr(text: str) -> None:
    """To whatever stderr is by now, which may be anything."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        os.write(2, text.encode("utf-8", "backslashreplace"))


def _finalize(code: int) -> int:
    """What an interpreter does at its end: wait for threads, run exit handlers, let go of globals, flush."""
    try:
        if _thread._count():  # how many threads were started and have not ended
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if _logging is not None and _logging._handlerList != _handlers:
            _logging.shutdown()  # the last, as it was the first to be registered
    except Exception as error:
        _write_stderr(_traceback_text(error))
    scope = main_module.__dict__
    for name in list(scope):  # files close, finalizers speak, and find `print` while they do
        if name != "__builtins__":
            scope.pop(name, None)
    return _flush(code)


def _flush(code: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except Exception:
            code = code or 120  # what Python itself exits with when its output cannot be flushed
    return code


def _return_files(paths: list, home: str, limit: int) -> bool:
    """Write the asked-for files to descriptor 4, `limit` bytes at most; say whether something did not fit. Only regular
    files, no links."""
    cut = False
    for index, path in enumerate(paths):
        try:
            fd = os.open(os.path.join(home, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if stat.S_ISREG(about.st_mode):
                room = limit - os.lseek(FILES_FD, 0, os.SEEK_CUR) - FILE.size
                if about.st_size > room:
                    cut = True
                    continue
                content = file.read(about.st_size)
                os.write(FILES_FD, FILE.pack(index, len(content)))
                _write_all(FILES_FD, content)
    return cut


class _Report:
    """What the zygote cannot see from outside: the last expression's value, and the error in words."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.value: str | None = None
        self.error: tuple | None = None
        self.files_cut = False
        self.out_of_memory = False

    def send(self) -> None:
        if self.value is not None or self.error is not None or self.files_cut:
            _write_all(REPORT_FD, self.encode())

    def encode(self) -> bytes:
        value, value_cut = _encode(self.value or "", self.limit)
        kind, message, trace, line = self.error or ("", "", "", None)
        trace_bytes, trace_cut = _encode_end(trace, self.limit)
        texts = [value, _encode(kind, TYPE_BYTES)[0], _encode(message, MESSAGE_BYTES)[0], trace_bytes]
        sizes = [len(text) for text in texts]
        if self.value is None:
            sizes[0] = -1
        if self.error is None:
            sizes[1] = -1
        bits = VALUE_CUT * value_cut | TRACEBACK_CUT * trace_cut | FILES_CUT * self.files_cut
        bits |= OUT_OF_MEMORY * self.out_of_memory
        return REPORT.pack(*sizes, -1 if line is None else line, bits) + b"".join(texts)


def max_report_bytes(limit: int) -> int:
    """The most bytes a report takes under an output limit."""
    return REPORT.size + 2 * limit + TYPE_BYTES + MESSAGE_BYTES


def _encode(text: str, limit: int) -> tuple[bytes, bool]:
    data = text[: limit + 1].encode("utf-8", "replace")
    return data[:limit], len(data) > limit


def _encode_end(text: str, limit: int) -> tuple[bytes, bool]:
    """The end of a text: what went wrong is said last."""
    data = text[-limit - 1 :].encode("utf-8", "replace")
    return data[-limit:], len(data) > limit


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
