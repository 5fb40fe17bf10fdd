"""Runs `main.py` of the working folder as a script that echoes: `fresh_script.py REPORT`.

Written independently of the guest's runner, to be held beside it: the repr of the last expression and the type of the
uncaught error go to REPORT as JSON, all else is as `python main.py` has it. Standard library only.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import sys
import types
from typing import Any

MEMORY = 4 << 30
DISK = 64 << 20


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, DISK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    place = sys.argv[1]
    with open("main.py", encoding="utf-8", errors="surrogatepass", newline="") as file:
        source = file.read()
    said: dict[str, Any] = {}
    leave = SystemExit(0)
    try:
        value = run(source)
        said["value"] = None if value is None else repr(value)
    except SystemExit as leaving:
        leave = leaving
        if leaving.code:
            said["error"] = "SystemExit"
    except BaseException as error:
        leave = SystemExit(1)
        said |= {"error": type(error).__qualname__, "message": message(error)}
        sys.excepthook(type(error), error, error.__traceback__)
    with open(place, "w") as file:
        json.dump(said, file)
    raise leave


def run(source: str) -> Any:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__="main.py")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    sys.path[0] = os.getcwd()
    tree = ast.parse(source, "main.py")
    last = tree.body.pop() if shows(tree, source) else None
    exec(compile(tree, "main.py", "exec"), module.__dict__)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "main.py", "eval"), module.__dict__)
    return None


def shows(tree: ast.Module, source: str) -> bool:
    """Whether the last statement is an expression that a notebook would echo."""
    return bool(tree.body) and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")


def message(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:
        return ""


if __name__ == "__main__":
    main()
