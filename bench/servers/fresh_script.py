"""Runs `main.py` of the working directory and reports its value: `fresh_script.py REPORT`.

Written independently of the guest's runner, so that the two can be compared. The repr of the last expression and the
type of the uncaught error go to REPORT as JSON; everything else is as with `python main.py`. Standard library only.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import sys
import types
from typing import Any

MEMORY_BYTES = 4 << 30
FILE_BYTES = 64 << 20
"""Limits that keep a call from exhausting the machine."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    report_path = sys.argv[1]
    with open("main.py", encoding="utf-8", errors="surrogatepass", newline="") as file:
        source = file.read()
    report: dict[str, Any] = {}
    exit_error = SystemExit(0)
    try:
        value = run(source)
        report["value"] = None if value is None else repr(value)
    except SystemExit as error:
        exit_error = error
        if error.code:
            report["error"] = "SystemExit"
    except BaseException as error:
        exit_error = SystemExit(1)
        report |= {"error": type(error).__qualname__, "message": message(error)}
        sys.excepthook(type(error), error, error.__traceback__)
    with open(report_path, "w") as file:
        json.dump(report, file)
    raise exit_error


def run(source: str) -> Any:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__="main.py")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    sys.path[0] = os.getcwd()
    tree = ast.parse(source, "main.py")
    last = tree.body.pop() if ends_in_expression(tree, source) else None
    exec(compile(tree, "main.py", "exec"), module.__dict__)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "main.py", "eval"), module.__dict__)
    return None


def ends_in_expression(tree: ast.Module, source: str) -> bool:
    """Whether the last statement is an expression whose value a notebook would print."""
    return bool(tree.body) and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")


def message(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:
        return ""


if __name__ == "__main__":
    main()
