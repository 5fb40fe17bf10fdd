"""Runs the cells of a notebook one after the other in one namespace, in a call. Code imports it as `rstar_notebook`.

- A cell that raises does not end the notebook, as in Jupyter. The value of a cell's last expression is displayed.
- While cells run, descriptors 1 and 2 are files, so that a cell's output contains what its child processes and C code
  write.
- When a cell ends, its result is written as one line of JSON to the standard output of the call. So if a later cell is
  killed, the earlier results are kept. The code can forge these lines; they contain its own results only.

    {"stdout": text, "stderr": text, "display": [{MIME type: text}],
     "error": [{"ename": type, "evalue": message, "traceback": [lines]}]}

  In texts, the characters `[`, `{` and `,` are escaped, so the reader can bound the time to decode a line by their
  number.
"""

from __future__ import annotations

import _ast as ast  # saves the import of the Python code in `ast`
import importlib
import io
import json
import linecache
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import originals

originals.use_builtins(globals())
os, _modules = originals.own(os), sys.modules
MAX_STREAM_BYTES = 1 << 20
"""Bytes of a cell's stdout, and of its stderr, that are returned."""
_MAX_LINE_CHARS = 80
"""A list or dict with a longer representation is displayed over several lines, as in Jupyter."""
_CO_COROUTINE = 0x80
"""Flag of a code object that contains `await` outside a function."""
_TEXT_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_latex_", "text/latex"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
)
_STRUCTURE = str.maketrans({"[": "\\u005b", "{": "\\u007b", ",": "\\u002c"})
_displayed: list = []
"""The MIME bundles that the current cell has displayed."""


def run(*cells: str) -> None:
    """Run the cells, and write the result of each to the standard output of the call."""
    scope = _modules["__main__"].__dict__
    scope["display"] = display
    results_fd = os.dup(1)
    streams = [_redirect(1), _redirect(2)]
    for number, source in enumerate(cells, 1):
        errors = _run_cell(source, f"Cell In[{number}]", scope)
        stdout, stderr = (_take_output(fd) for fd in streams)
        cell = {"stdout": stdout, "stderr": stderr, "display": _displayed, "error": errors}
        line = memoryview(originals.call(_encode, cell).encode() + b"\n")
        _displayed.clear()
        while line:
            line = line[os.write(results_fd, line) :]


def display(*values: object) -> None:
    """Add values to what the cell displays."""
    _displayed.extend(map(_mime_bundle, values))


def _redirect(fd: int) -> int:
    """Redirect a descriptor to a file without a name, and return a descriptor to read it."""
    path = f".cell-output-{fd}"
    file_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    os.dup2(file_fd, fd)
    return file_fd


def _take_output(fd: int) -> str:
    text = os.pread(fd, MAX_STREAM_BYTES, 0).decode("utf-8", "replace")
    os.ftruncate(fd, 0)
    return text


def _run_cell(source: str, name: str, scope: dict) -> list:
    """Run a cell and display its figures. Return the errors of both."""
    errors = []
    steps: tuple[Callable[[], None], ...] = (lambda: _execute(source, name, scope), _display_figures)
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(_describe(error))
    return errors


def _execute(source: str, name: str, scope: dict) -> None:
    linecache.cache[name] = (len(source), None, [line + "\n" for line in source.split("\n")], name)
    tree: Any = compile(source, name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    evaluate(tree, name, "exec", scope)
    value = evaluate(last, name, "eval", scope) if last else None
    if value is not None:
        scope["_"] = value
        display(value)


def evaluate(tree: Any, name: str, mode: str, scope: dict) -> Any:
    """Run a syntax tree, which may use `await` outside functions. Return the value of an expression."""
    code = compile(tree, name, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    value = eval(code, scope)
    return importlib.import_module("asyncio").run(value) if code.co_flags & _CO_COROUTINE else value


def _display_figures() -> None:
    """Display the open figures of matplotlib as PNG, and close them."""
    pyplot: Any = _modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot else ():
        figure = pyplot.figure(number)
        image = originals.call(_encode_image, figure)
        _displayed.append({"text/plain": repr(figure), "image/png": image})
        pyplot.close(figure)


def _encode_image(figure: Any) -> str:
    png = io.BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    text: str = importlib.import_module("base64").b64encode(png.getvalue()).decode()
    return text


def _encode(value: object) -> str:
    """Return JSON in which texts contain no `[`, `{` and `,`."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_encode(name)}:{_encode(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_encode, value)) + "]"
    return json.dumps(value).translate(_STRUCTURE)


def _mime_bundle(value: object) -> dict:
    bundle = {"text/plain": _plain_text(value)}
    if isinstance(value, type):
        return bundle  # its methods need an object
    for method_name, mime_type in _TEXT_METHODS:
        method: Callable[[], object] | None = getattr(value, method_name, None)
        content = method() if callable(method) else None
        if isinstance(content, str):
            bundle[mime_type] = content
    return bundle


def _plain_text(value: object) -> str:
    text = repr(value)
    if len(text) < _MAX_LINE_CHARS or type(value) not in (list, dict, tuple, set, frozenset):
        return text
    return originals.call(_pretty_text, value)


def _pretty_text(value: object) -> str:
    text: str = importlib.import_module("pprint").pformat(value, sort_dicts=False)
    return text


def _describe(error: BaseException) -> dict:
    try:
        message = str(error)
    except BaseException:  # a __str__ method that raises
        message = "<exception str() failed>"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        lines = originals.call(traceback.format_exception, type(error), error, trace)
    except BaseException:  # no memory is left
        lines = [f"{type(error).__name__}: {message}\n"]
    return {"ename": type(error).__name__, "evalue": message, "traceback": lines}
