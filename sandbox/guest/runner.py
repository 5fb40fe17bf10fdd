"""Runs one call's code as a script, in a process that is already confined, and exits.

Invariants:
- The code finds what a script finds: a new `__main__`, `sys.argv == ["main.py", *argv]`, its working directory first on
  the path, and tracebacks of its own lines. The zygote, from which this process is forked, leaves nothing that changes
  the code's behaviour.
- Output goes to descriptors 1 and 2 unbuffered, so a killed call loses no output.
- The code may replace functions such as `os._exit` or `builtins.len`. The end of the code is still reported in the same
  way (`originals.py`).
- The report (descriptor 3) holds value and error only. The process of the code writes the report, so the code can forge
  it. The executor decides about the status of the call, by the way in which the process has ended.

`protocol` has the layout of the report. Returned files go to descriptor 4 (`returned_files.py`).

Compiled code consists of the magic number of the interpreter (4 bytes) and the two results of `_compile` in `marshal`
form. A call with `compile_only` writes the compiled code to the file `COMPILED_FILE` and runs nothing. Another call may
bring the compiled code, to save the time of the compilation. It is used only if its magic number is that of this
interpreter. Forged compiled code is no danger: the code of the call can do the same.
"""

from __future__ import annotations
import __future__

import _ast as ast  # saves the import of the Python code in `ast`
import _thread
import atexit
import builtins
import gc
import io
import json
import linecache
import marshal
import mmap
import os
import re
import sys
import threading
import time
import traceback
import types
import warnings
from _frozen_importlib_external import MAGIC_NUMBER
from _random import Random as _Random
from typing import Any

import fd_paths
import file_locks
import function_call
import interpreter_variables
import notebook
import originals
import output_files
import prelude
import replacements
import returned_files
import sockets
from protocol import (
    COMPILED_FILE,
    FILES_TRUNCATED,
    FUNCTION_CALL_LINE,
    OUT_OF_MEMORY,
    PRELUDE_LINE,
    REPORT,
    SCRIPT,
    TRACEBACK_TRUNCATED,
    VALUE_TRUNCATED,
)

originals.use_builtins(globals())
atexit, gc, os, threading, types, _thread = map(originals.own, (atexit, gc, os, threading, types, _thread))
_SCRIPT_USES = (b"__file__", b"main.py", b"argv", b"multiprocessing", b"concurrent", b"subprocess")
"""Code that contains one of these texts may read its own file, or start a process that runs this file. The file is
written only for such code, which saves other code the 20 us of a write."""
_SERVER_PROGRAM_START = b"__import__('rstar_"
"""Start of the programs of the server itself, such as the program that runs the cells of a notebook. They need no
file."""
REPORT_FD = 3
"""Descriptor to which a call writes its report."""
MAX_TYPE_BYTES = 256
"""Maximum bytes of an error's type in a report."""
MAX_MESSAGE_BYTES = 8192
"""Maximum bytes of an error's message in a report."""
_FUTURE_FLAGS = 0
"""All flags that `from __future__` statements set in a code object."""
for _name in __future__.all_feature_names:
    _FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag
_STATEMENT = re.compile(
    r"(?:for|while|if|elif|else|def|class|with|try|except|finally|import|from|return|assert|del|pass|raise|global|async)\b"
    r"|@|\w+[ \t]*=[^=]"
)
"""Matches lines that start a statement. A line that it does not match may be a statement nevertheless: then `_compile`
tries to compile it as an expression first, which takes time and does not change the result."""
_EMPTY_CODE = compile("", SCRIPT, "exec")
_GUEST_DIR = os.path.dirname(__file__)
_LIBRARY_PREFIXES = tuple(
    {_GUEST_DIR, os.path.dirname(os.__file__), "<frozen ", *(p for p in sys.path if p.endswith("-packages"))}
)
_MAX_TRACEBACK_FRAMES = 200
"""Maximum number of frames in a traceback. A recursion has a thousand, which are all the same."""
_EXCEPTION_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11
_excepthook = sys.__excepthook__
_memory_reserve = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
"""Address space that is released when a MemoryError has to be reported. Nothing writes to it, so it uses no memory."""


_write_file: Any = io.FileIO.write


class _OutputFile(io.FileIO):
    """An output file of fixed size: the first write beyond its end exits the process."""

    __slots__ = ()

    def write(self, data):  # type: ignore[no-untyped-def]
        try:
            return _write_file(self, data)
        except PermissionError:
            os._exit(1)  # the file is full: its seal refuses the write. The zygote notices this by the file's length


class _OutputBuffer(io.BufferedWriter):
    """The `buffer` of an output stream. It has the attributes of a `BufferedWriter` and writes at once, so that a
    killed call loses no output. It writes without a call of `_OutputFile.write`, which would cost each print 0.5 us."""

    __slots__ = ()

    def write(self, data):  # type: ignore[no-untyped-def]
        try:
            return _write_file(self.raw, data)
        except PermissionError:
            os._exit(1)


_OutputFile.__name__, _OutputBuffer.__name__ = "_io.FileIO", "_io.BufferedWriter"  # as their `repr` shows it
_OutputFile.__module__ = _OutputBuffer.__module__ = "_io"


main_module = types.ModuleType("__main__")


def prepare(directory: str) -> None:
    """Set up once, in the zygote, what is the same for each call: standard streams, an empty `__main__`, paths. A call
    that did this itself would write to more pages of memory, which the kernel would have to copy.

    `directory` is the working directory of calls, or "" if each call has its own.
    """
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = _OutputFile(fd, "wb", closefd=False)
        raw.name = f"<{name}>"
        is_stderr = name == "stderr"
        stream = io.TextIOWrapper(_OutputBuffer(raw), "utf-8", errors, "\n", is_stderr, write_through=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    replacements.install()
    sockets.install()
    file_locks.install()
    main_module.__dict__.update(__builtins__=builtins, __file__=SCRIPT, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main_module
    for file in os.listdir(_GUEST_DIR):
        sys.modules.pop(file.partition(".")[0], None)  # a call may bring files of these names
    sys.argv = [SCRIPT]
    sys.path[0] = directory or os.devnull


_logging: Any = None
_handlers: list = []


def keep_originals() -> None:
    """Keep the originals that reports need (`originals.keep`), and unregister the slow exit function of `logging`.
    `_finalize` runs this function for calls that have added handlers to `logging`. Called once in a zygote after all
    imports.
    """
    originals.keep()
    global _logging, _handlers
    logging: Any = sys.modules.get("logging")
    if hasattr(logging, "_handlerList"):
        atexit.unregister(logging.shutdown)
        _logging, _handlers = logging, list(logging._handlerList)


def run(call: dict, blobs: list) -> None:
    """Run a call and exit by `os._exit`.

    `blobs` are the code, the input, the options and the files of the call. If the call `has_compiled`, the compiled
    code follows. The options are empty or a JSON object. The object may have `files` (the names of the files),
    `return_files`, `figures`, `env` and `argv`.
    """
    exit_code = 70  # EX_SOFTWARE of sysexits.h: the runner itself failed
    try:
        gc.freeze()  # collections skip the objects of the zygote, and count allocations from 0
        gc.enable()
        source, stdin, options_json, *contents = blobs
        compiled = contents.pop() if "has_compiled" in call else b""
        _prepare_call(bool(stdin))
        working_dir = os.getcwd()
        options = json.loads(bytes(options_json)) if options_json else {}
        if options:
            _set_environment(options)
        report = _Report(call["output_bytes"])
        returned = returned_files.FileWriter(working_dir, call["return_bytes"]) if call["returns_files"] else None
        files = list(zip(options.get("files", ()), contents))
        source = bytes(source)
        sources = [source, *(bytes(content) for path, content in files if path.endswith(".py"))]
        if fd_paths.are_in(*sources, *map(os.fsencode, options.get("argv", ()))):
            fd_paths.install()
        uses_script = any(use in text for text in sources for use in _SCRIPT_USES)
        if uses_script and not source.startswith(_SERVER_PROGRAM_START):
            script = _write_script(source)
            if returned is not None:
                returned.script = script
        exit_code = _run_script(call, source, compiled, files, options.get("env", {}), report)
        if returned is not None and options.get("figures"):
            _write_stderr(returned.render_figures())
        exit_code = _finalize(exit_code)
        if returned is not None:
            report.files_truncated = returned.send(options.get("return_files", []))
        report.send()
    except SystemExit as error:  # raised by an exit handler
        exit_code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(exit_code & 0xFF)


def prepare_session(options_json: bytes) -> None:
    """Do once, in the first state of a session, what `run` does for a call before its code."""
    gc.freeze()
    gc.enable()
    _prepare_call(has_stdin=False)
    if options_json:
        _set_environment(json.loads(options_json))
    fd_paths.install()


def run_cell(call: dict, blobs: list) -> int:
    """Run a cell of a session, and return its exit code. In tracebacks, the cell number 3 is the file `Cell 3`."""
    source, _stdin, options_json, *contents = blobs
    name, scope, report = f"Cell {call['cell']}", main_module.__dict__, _Report(call["output_bytes"])
    file_locks.set_first_process()
    _open_stdin()
    options = json.loads(bytes(options_json)) if options_json else {}
    try:
        _write_files(list(zip(options.get("files", ()), contents)))
        text = _decode_source(bytes(source))
        linecache.cache[name] = (len(text), None, [line + "\n" for line in text.split("\n")], name)
        value = _evaluate_cell(text, name, call["echo"], scope)
        if value is not None:
            report.value = repr(value)
        exit_code = 0
    except SystemExit as error:
        exit_code = _exit_code(error, report)
    except BaseException as error:
        report.out_of_memory = isinstance(error, MemoryError)
        report.error = _describe(error, name)
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if call["returns_files"]:
        returned = returned_files.FileWriter(os.getcwd(), call["return_bytes"])
        if options.get("figures"):
            _write_stderr(returned.render_figures())
            returned_files.close_figures()  # they are not figures of the next cell
        report.files_truncated = returned.send(options.get("return_files", []))
    exit_code = _flush(exit_code)
    report.send()
    return exit_code


def _evaluate_cell(text: str, name: str, echo: bool, scope: dict) -> Any:
    """Run the code of a cell, which may use `await` outside functions. With `echo`, return the value of the last
    expression."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree: Any = compile(text, name, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        line = text.split("\n")[(error.lineno or 1) - 1 : error.lineno or 1]
        if line and line[0].lstrip()[:1] in ("%", "!"):
            error.msg = f"{line[0].strip()[:40]!r}: there are no magic commands and no shell here, only Python"
        raise
    last = _pop_last_expression(tree, text) if echo else None
    notebook.evaluate(tree, name, "exec", scope)
    return notebook.evaluate(last, name, "eval", scope) if last else None


def _open_stdin() -> None:
    raw = io.FileIO(0, closefd=False)
    raw.name = "<stdin>"
    stream = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="surrogateescape", newline="\n")
    stream.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stream  # type: ignore[misc]


def _prepare_call(has_stdin: bool) -> None:
    if sys.path[0] == os.devnull:
        sys.path[0] = os.getcwd()
    if has_stdin:
        _open_stdin()
    file_locks.set_first_process()
    _reseed()
    # Forget which warnings were shown. If this Python lacks the function, `int` is called instead, without effect.
    getattr(warnings, "_filters_mutated", int)()


def _set_environment(options: dict) -> None:
    env = options.get("env", {})
    os.environ.update(env)
    if "TZ" in env:
        time.tzset()  # the C library has read the old TZ when the zygote started
    sys.argv += options.get("argv", ())


def _reseed() -> None:
    """Reseed the random number generators. Otherwise all calls of a zygote would draw the same numbers."""
    random = sys.modules.get("random")
    if random is not None:
        _Random.seed(random._inst)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # seed() without an argument takes three times as long.
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
    sympy_random: Any = sys.modules.get("sympy.core.random")
    if sympy_random is not None:
        _Random.seed(sympy_random.rng)
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        # tempfile would choose new random names when it notices another process id, but every call has the id 1.
        tempfile._name_sequence = None
        tempfile.tempdir = None


def _write_files(files: list) -> None:
    for path, content in files:
        directory = os.path.dirname(path)
        if directory:
            os.makedirs(directory, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _write_script(source: bytes) -> bytes:
    """Write the file of the code, and return its content. If the scratch directory is too full, the code runs without
    the file. This is done before the files of the call are written, so that one of the same name replaces it."""
    script = source.removesuffix(FUNCTION_CALL_LINE.encode())  # a process that runs the file calls no function
    try:
        _write_files([(SCRIPT, script)])
    except OSError:
        if os.path.exists(SCRIPT):
            os.unlink(SCRIPT)
    return script


def _run_script(
    call: dict, source: bytes, compiled: bytes | memoryview, files: list, env: dict, report: _Report
) -> int:
    scope = main_module.__dict__
    try:
        _write_files(files)
        if env:
            interpreter_variables.apply(env)
        text = _decode_source(source)
        # Lines end as for the compiler. str.splitlines would also split at form feeds.
        linecache.cache[SCRIPT] = (len(text), None, [line + "\n" for line in text.split("\n")], SCRIPT)
        body, last = _load_compiled(compiled) or _compile(text, call["echo"])
        if "compile_only" in call:
            _write_files([(COMPILED_FILE, MAGIC_NUMBER + marshal.dumps((body, last)))])
            return 0
        is_function_test = text.endswith(FUNCTION_CALL_LINE)
        if is_function_test:
            scope["__name__"] = function_call.MODULE
            sys.modules[function_call.MODULE] = main_module
        if text.removesuffix(FUNCTION_CALL_LINE).rstrip("\n").endswith(PRELUDE_LINE):
            prelude.run(scope)
        exec(body, scope)
        if is_function_test:
            # The last line calls `__import__`, which the code may have replaced.
            scope["__import__"] = _import_function_call
        value = eval(last, scope) if last else None
        if value is not None:
            report.value = repr(value)
        return 0
    except SystemExit as error:
        return _exit_code(error, report)
    except BaseException as error:
        if isinstance(error, MemoryError):
            _memory_reserve.close()
            report.out_of_memory = True
        report.error = _describe(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1  # 128 + SIGINT


def _import_function_call(_name: str) -> types.ModuleType:
    return function_call


def _decode_source(source: bytes) -> str:
    """Return a script's text as Python reads it from a file: without byte order mark, and with lines that end in
    \\n."""
    text = source.decode("utf-8", "surrogatepass")
    if text[:1] == "\ufeff":
        text = text[1:]
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _compile(text: str, echo: bool) -> tuple[types.CodeType, types.CodeType | None]:
    """Compile a script. Return the code of the script and, with `echo`, the code of its last expression.

    With `echo` the value of the last expression is reported, so the first code object does not contain this expression.
    A `;` at the end of the script prevents the echo.

    The text is split at its last unindented line. If both parts compile, the result is that of `_compile_tree`, in half
    the time. Otherwise `_compile_tree` decides.
    """
    if not echo:
        return _compile_all(text), None
    start = _last_line_start(text)
    if ";" not in text[start:]:
        if _STATEMENT.match(text, start):
            return _compile_all(text), None
        try:
            body = compile(text[:start], SCRIPT, "exec", dont_inherit=True) if start else _EMPTY_CODE
            blank = "\n" * text.count("\n", 0, start)  # keeps the line numbers
            flags = body.co_flags & _FUTURE_FLAGS
            return body, compile(blank + text[start:], SCRIPT, "eval", flags, dont_inherit=True)
        except SyntaxError:
            pass  # the last line continues the lines before it, is not an expression, or is invalid
    return _compile_tree(text)


def _load_compiled(data: bytes | memoryview) -> tuple[types.CodeType, types.CodeType | None] | None:
    """Return the two results of `_compile` from compiled code. Return None if the compiled code is invalid, or was made
    by another interpreter."""
    if bytes(data[: len(MAGIC_NUMBER)]) != MAGIC_NUMBER:
        return None
    try:
        body, last = marshal.loads(data[len(MAGIC_NUMBER) :])
    except (EOFError, TypeError, ValueError):
        return None
    return (body, last) if isinstance(body, types.CodeType) and isinstance(last, (types.CodeType, type(None))) else None


def _last_line_start(text: str) -> int:
    """Return the index at which the last line starts that is not indented, blank, a comment or a closing bracket."""
    end = len(text)
    while True:
        start = text.rfind("\n", 0, end) + 1
        if text[start : start + 1] not in ("", " ", "\t", "\n", "\r", "\f", "#", ")", "]", "}") or start == 0:
            return start
        end = start - 1


def _compile_tree(text: str) -> tuple[types.CodeType, types.CodeType | None]:
    tree: Any = compile(text, SCRIPT, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = _pop_last_expression(tree, text)
    body = compile(tree, SCRIPT, "exec", dont_inherit=True)
    return body, compile(last, SCRIPT, "eval", body.co_flags & _FUTURE_FLAGS, dont_inherit=True) if last else None


def _pop_last_expression(tree: Any, text: str) -> Any:
    """Remove the last expression from the tree of a script, and return it as a tree of its own. Return None if the
    script ends with a statement or with a `;`."""
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not _has_semicolon_after(text, tree.body[-1]):
        return ast.Expression(tree.body.pop().value)
    return None


def _has_semicolon_after(text: str, last: Any) -> bool:
    lines = text.encode().split(b"\n")[last.end_lineno - 1 :]
    lines[0] = lines[0][last.end_col_offset :]
    return b"\n".join(lines).lstrip(b" \t\f\\\n")[:1] == b";"


def _compile_all(text: str) -> types.CodeType:
    return compile(text, SCRIPT, "exec", dont_inherit=True)


def _exit_code(error: SystemExit, report: _Report) -> int:
    """Return the exit code that sys.exit(code) defines: 0 for None, the number for a number, and 1 for any other
    object. Such an object is printed to stderr."""
    code = error.code
    if code is None or code == 0:
        return 0
    if not isinstance(code, int):
        _write_stderr(f"{code}\n")
    report.error = ("SystemExit", str(code), "", None)
    return code & 0xFF if isinstance(code, int) else 1


def _describe(error: BaseException, script: str = SCRIPT) -> tuple:
    """Return type, message, traceback and line of an uncaught exception in the file `script`. Writes the traceback to
    stderr."""
    _add_hint(error)
    _strip_internal_frames(error)
    text = _traceback_text(error)
    hook = getattr(sys, "excepthook", _excepthook)
    if hook is _excepthook:
        _write_stderr(text)
    else:
        try:
            hook(type(error), error, error.__traceback__)
        except BaseException as hook_error:
            _write_stderr(f"Error in sys.excepthook:\n{_traceback_text(hook_error)}\nOriginal exception was:\n{text}")
    return type(error).__qualname__, _message(error), text, _error_line(error, script)


def _add_hint(error: BaseException) -> None:
    """Add a note that the jail has no programs, if the code tried to start a program that was not found."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_of_subprocess = trace is not None and trace.tb_frame.f_code.co_name == "_execute_child"
    if is_of_subprocess and isinstance(error, FileNotFoundError) and hasattr(error, "add_note"):  # since Python 3.11
        path = str(error.filename)
        if "/" not in path or path.startswith(("/bin/", "/usr/", "/sbin/")):
            error.add_note(replacements.NO_PROGRAMS)


def _traceback_text(error: BaseException) -> str:
    try:
        return originals.call(_format, error)
    except BaseException:  # a __str__ method that raises, or no memory is left
        return f"{type(error).__qualname__}: {_message(error)}\n"


def _format(error: BaseException) -> str:
    return "".join(traceback.TracebackException.from_exception(error).format())


def _strip_internal_frames(error: BaseException) -> None:
    """Remove the frames of the runner and of libraries from an exception, its causes and its group's members."""
    seen: set = {id(None)}
    pending: list = [error]
    while pending:
        error = pending.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        error.__traceback__ = _user_frames(error.__traceback__)
        pending += (error.__cause__, error.__context__)
        if isinstance(error, _EXCEPTION_GROUP):
            pending += error.exceptions


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a copy of a traceback with the code's own frames only. If there are more than `_MAX_TRACEBACK_FRAMES`, the
    copy has the first half and the last half of this number."""
    links = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_LIBRARY_PREFIXES):
            links.append(trace)
        trace = trace.tb_next
    if len(links) > _MAX_TRACEBACK_FRAMES:
        links = links[: _MAX_TRACEBACK_FRAMES // 2] + links[-_MAX_TRACEBACK_FRAMES // 2 :]
    copy = None
    for link in reversed(links):
        copy = types.TracebackType(copy, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return copy


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "<exception str() failed>"


def _error_line(error: BaseException, script: str) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == script:
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == script:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _write_stderr(text: str) -> None:
    """Write to `sys.stderr`, or to descriptor 2 if the code has replaced `sys.stderr` by something that fails."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        os.write(2, text.encode("utf-8", "backslashreplace"))


def _finalize(code: int) -> int:
    """Do what an interpreter does at exit: wait for threads, run exit handlers, delete globals, flush. Return the exit
    code, which is `code` unless a flush fails."""
    # `logging` is last, because exit handlers run in reverse order of their registration.
    for step in (_wait_for_threads, atexit._run_exitfuncs, _shut_down_logging):
        try:
            step()
        except Exception as error:
            _write_stderr(_traceback_text(error))
    code = _flush(code)  # before the globals are deleted, because a stream of the code may need them
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, getattr(sys, f"__{name}__", None))
    scope = main_module.__dict__
    for name in list(scope):  # closes files and runs finalizers, which still find the builtins
        if name != "__builtins__":
            scope.pop(name, None)
    _flush(0)  # what finalizers have written. As in Python, a failure does not change the exit code here
    return code


def _wait_for_threads() -> None:
    if _thread._count():  # threads that have not ended
        threading._shutdown()  # type: ignore[attr-defined]


def _shut_down_logging() -> None:
    if _logging is not None and _logging._handlerList != _handlers:
        _logging.shutdown()


def _flush(code: int) -> int:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:
            code = code or 120  # the exit code of Python if its output cannot be flushed
    return code


class _Report:
    """The value of the last expression, and the error. `limit_bytes` applies to the value and to the traceback."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.value: str | None = None
        self.error: tuple | None = None
        self.files_truncated = False
        self.out_of_memory = False

    def send(self) -> None:
        if self.value is not None or self.error is not None or self.files_truncated:
            output_files.write_all(REPORT_FD, self.encode())

    def encode(self) -> bytes:
        value, value_truncated = _encode(self.value or "", self.limit_bytes)
        error_type, message, trace, line = self.error or ("", "", "", None)
        trace_bytes, trace_truncated = _encode_end(trace, self.limit_bytes)
        texts = [value, _encode(error_type, MAX_TYPE_BYTES)[0], _encode(message, MAX_MESSAGE_BYTES)[0], trace_bytes]
        sizes = [len(text) for text in texts]
        if self.value is None:
            sizes[0] = -1
        if self.error is None:
            sizes[1] = -1
        flags = VALUE_TRUNCATED * value_truncated | TRACEBACK_TRUNCATED * trace_truncated
        flags |= FILES_TRUNCATED * self.files_truncated | OUT_OF_MEMORY * self.out_of_memory
        return REPORT.pack(*sizes, -1 if line is None else line, flags) + b"".join(texts)


def max_report_bytes(output_limit_bytes: int) -> int:
    """Return the maximum size of a report, whose value and traceback are limited to `output_limit_bytes` each."""
    return REPORT.size + 2 * output_limit_bytes + MAX_TYPE_BYTES + MAX_MESSAGE_BYTES


def _encode(text: str, limit: int) -> tuple[bytes, bool]:
    data = text[: limit + 1].encode("utf-8", "replace")
    return data[:limit], len(data) > limit


def _encode_end(text: str, limit: int) -> tuple[bytes, bool]:
    """Encode the end of a text, because a traceback ends with the error."""
    data = text[-limit - 1 :].encode("utf-8", "replace")
    return data[-limit:], len(data) > limit
