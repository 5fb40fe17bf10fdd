"""Tests of `echo`: the value of the last expression of the code is returned, as a notebook shows it.

Apart from this value, code runs with `echo` exactly as without it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sandbox
from sandbox.types import Status
from tests.executor.calling import Caller

GUEST = Path(sandbox.__file__).parent / "guest"


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    """The runner as a module, loaded by path."""
    spec = importlib.util.spec_from_file_location("rstar_guest_runner", GUEST / "runner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GUEST)  # the runner imports modules beside it
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
    for name in ("output_files", "protocol", "returned_files"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 5\nx", "5"),
        ("x = 5\nx\n\n# a comment\n   \n", "5"),
        ("'text'", "'text'"),
        ("None", None),
        ("print(1)", None),
        ("1 + 1;", None),
        ("x = 5", None),
        ("x = 1; x + 1", "2"),
        ("x = 1; x + 1;", None),
        ("x = 1\nx; ';'", "';'"),
        ("[\n  1,\n  2,\n]", "[1, 2]"),
        ("sum(\n[1, 2]\n)", "3"),
        ("sum(\n    [1, 2]\n    )  # three", "3"),
        ("'''a\nb'''", "'a\\nb'"),
        ("'''\nx = 1\n'''", "'\\nx = 1\\n'"),
        ("1 + \\\n2", "3"),
        ("def f():\n    return 4\nf()", "4"),
        ("if True:\n    5", None),
        ("for i in range(2):\n    i", None),
        ("lambda: 0", "<function <lambda> at 0x"),
        ("(x := 3)", "3"),
        ("import math\nmath.pi", "3.141592653589793"),
        ("from __future__ import annotations\ndef f(x: missing): ...\nf.__annotations__", "{'x': 'missing'}"),
        ("x = 1\nx == 1", "True"),
        ("x = [0]\nx[0]", "0"),
        ("not True", "False"),
        ("-1", "-1"),
        ("...", "Ellipsis"),
        ("'π'", "'π'"),
        ("'\\ud800'", "'\\ud800'"),
        ("importance = 1\nimportance", "1"),
        ("ifx = 2\nifx", "2"),
        ("printing = 2\nprinting if True else 0", "2"),
        ("x = 1\nx if x else 0", "1"),
        ("a = 1\na != 1", "False"),
        ("a = 1\na<=1", "True"),
        ("_ = 3\n_", "3"),
        ("π = 3\nπ", "3"),
        ("match = 4\nmatch", "4"),
        ("type = 4\ntype", "4"),
        ("'#'", "'#'"),
        ("'a;'", "'a;'"),
        ("1 # ;", "1"),
        ("1 # a comment;", "1"),
        ("if 1: 2\n3", "3"),
        ("3\nif 1: 2", None),
        ("x = 3\nx,", "(3,)"),
        ("b'\\xff'", "b'\\xff'"),
        ("f'{1}'", "'1'"),
        ("yes = 1\n\n\n(yes)", "1"),
        ("True and 2\n", "2"),
        ("[i for i in range(2)]", "[0, 1]"),
        ("f = lambda x: x\nf(\n1)", "1"),
        ("class A:\n    pass\n\nA.__name__", "'A'"),
        ("'a' \\\n'b'", "'ab'"),
        ('"""doc"""', "'doc'"),
        ("{\n'a': 1\n}", "{'a': 1}"),
        ("x = 2\r\nx", "2"),
    ],
)
def test_the_last_expression_is_echoed(guest: Caller, code: str, value: str | None) -> None:
    result = guest.run(code)
    assert result.status is Status.OK, result
    if value is not None and value.endswith("0x"):  # the address differs
        assert result.value is not None
        assert result.value.startswith(value)
    else:
        assert result.value == value


def test_without_echo_there_is_no_value(guest: Caller) -> None:
    assert guest.run("1 + 1", echo=False).value is None


def test_the_value_is_from_before_the_exit_handlers(guest: Caller) -> None:
    result = guest.run("import atexit\nx = [1]\natexit.register(x.append, 2)\nprint('out')\nx")
    assert (result.value, result.stdout) == ("[1]", "out\n")


def test_a_value_over_the_limit_is_truncated_and_reported(guest: Caller) -> None:
    exact = guest.run("'a' * 1022", output_kb=1)  # 1,024 bytes with the quotes
    assert (exact.value, exact.truncated) == ("'" + "a" * 1022 + "'", ())
    over = guest.run("'a' * 1023", output_kb=1)
    assert (over.status, over.value, over.truncated) == (Status.OK, "'" + "a" * 1023, ("value",))
    wide = guest.run("'π' * 1023", output_kb=1)
    assert wide.truncated == ("value",)


EXPRESSIONS = st.sampled_from(
    [
        *("1", "x", "x + 1", "'a;b'", '"#"', "'''t\nx = 1\n'''", "[1,\n2]", "(1,\n)", "f(\nx\n)", "x;x", "x;", "None"),
        *("-x", "x == 1", "x is None", "not x", "lambda: x", "...", "x if x else 0", "{'a':\n1}", "'a' \\\n  'b'"),
    ]
)
STATEMENTS = st.sampled_from(
    [
        *("x = 1", "x += 1", "import math", "from math import pi", "def f(a=1):\n    return a", "if x:\n    x"),
        *("for i in []:\n    i", "class A:\n    x", "with_ = 2", "x: int = 3", "del x", "pass", "while x:\n  break"),
        *(
            "try:\n    x\nfinally:\n    x",
            "x = 1;",
            "x = 1; y = 2",
            "assert x",
            "global x",
            "@f\ndef g(): pass",
            "# only",
        ),
        *("", "   ", "\f", "a = b = 1", "x[0] = 1", "x = [\n1,\n]", "s = '''\n1\n'''", "async def h():\n    pass"),
        *("match_ = 1", "if x: 1", "else_ = 1", "return 1", "(", "1 +", "from __future__ import annotations", "    1"),
        *("raise_", "print(1)", "x\\\n=1", "match x:\n    case 1:\n        2"),
    ]
)
ENDS = st.sampled_from(["", "\n", "\n\n", "  ", "\n# end", "\n#;", " # end", ";", " ;\n", "\n   \n", "\\\n", "\n\f\n"])


@st.composite
def programs(draw: st.DrawFn) -> str:
    lines = draw(st.lists(STATEMENTS | EXPRESSIONS, max_size=5))
    return "\n".join(lines) + draw(ENDS)


@given(programs())
@example("1;#")
@example("x = 1\n'''\n;'''")
@example("x = '''\n1\n2'''")
@example("x = 1\n#;")
@example("(1,\n#c\n2)")
def test_a_program_is_compiled_as_by_its_syntax_tree(runner: ModuleType, text: str) -> None:
    assert _comparable(runner._compile, text) == _comparable(_compile_by_tree, text)


@given(st.text(alphabet="x1='\"\\;#()\n \t:if,", max_size=25))
def test_any_text_is_compiled_as_by_its_syntax_tree(runner: ModuleType, text: str) -> None:
    assert _comparable(runner._compile, text) == _comparable(_compile_by_tree, text)


def _compile_by_tree(text: str, echo: bool) -> tuple[Any, Any]:
    """Compile code as the runner must do. If the last statement is an expression without a semicolon, it is echoed."""
    tree = compile(text, "main.py", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = None
    if echo and tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_in_semicolon(text, tree.body[-1]):
        last = ast.Expression(tree.body.pop().value)
    body = compile(tree, "main.py", "exec", dont_inherit=True)
    flags = body.co_flags & 0x1FF0000  # the flags of all `from __future__` statements
    return body, last and compile(last, "main.py", "eval", flags, dont_inherit=True)


def _ends_in_semicolon(text: str, last: ast.Expr) -> bool:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert last.end_lineno is not None
    rest = lines[last.end_lineno - 1].encode()[last.end_col_offset :].decode() + "\n".join(lines[last.end_lineno :])
    return rest.strip(" \t\f\n)").startswith(";")


def _comparable(compiler: Any, text: str) -> Any:
    """Return all parts of a compilation that can change how the code runs, or its error."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of calls and identity comparisons of constants
        try:
            body, last = compiler(text, True)
        except (SyntaxError, ValueError) as error:
            return type(error).__name__, getattr(error, "lineno", None)
    return _comparable_code(body), last and _comparable_code(last)


def _comparable_code(code: Any) -> Any:
    constants = [_comparable_code(item) if hasattr(item, "co_code") else repr(item) for item in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, list(code.co_lines())
