"""Tests of uncaught exceptions: the result describes them in `error`, and stderr has them as Python prints them."""

from __future__ import annotations

import pytest

from sandbox.types import CallError, Result, Status
from tests.executor.calling import Caller


def error_of(result: Result) -> CallError:
    assert result.status is Status.ERROR, result
    assert result.exit_code == 1
    assert result.error is not None
    return result.error


def test_an_exception_has_type_message_line_and_traceback(guest: Caller) -> None:
    result = guest.run("x = 1\n\nprint('here')\ny = x / 0\nprint('never')")
    error = error_of(result)
    assert (error.type, error.message, error.line) == ("ZeroDivisionError", "division by zero", 4)
    assert (result.stdout, result.value) == ("here\n", None)
    assert result.stderr == error.traceback
    assert error.traceback.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "main.py", line 4, in <module>',
        "    y = x / 0",
    ]
    assert error.traceback.endswith("\nZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    "code",
    [
        "import json\njson.loads('{')",
        "from fractions import Fraction\nFraction('x')",
        "import re\nre.compile('(')",
        "sorted([1, 'a'], key=lambda v: v + 1)",
        "1/0",
        "x = 5\nx +\\\n  'a'",
    ],
)
def test_tracebacks_contain_only_frames_of_the_code(guest: Caller, code: str) -> None:
    trace = error_of(guest.run(code)).traceback
    files = [line for line in trace.splitlines() if line.startswith("  File ")]
    assert files
    assert all(line.startswith('  File "main.py"') for line in files), trace
    assert "runner" not in trace
    assert "zygote" not in trace


def test_the_line_is_that_of_the_innermost_frame_of_the_code(guest: Caller) -> None:
    error = error_of(guest.run("import json\ndef f():\n    json.loads('{')\n\nf()"))
    assert error.line == 3
    assert error.traceback.count("File") == 2


def test_modules_beside_the_script_belong_to_the_code(guest: Caller) -> None:
    error = error_of(guest.run("import other\nother.f()", files={"other.py": b"def f():\n    1/0\n"}))
    assert "other.py" in error.traceback
    assert "    1/0" in error.traceback
    assert error.line == 2


def test_an_error_in_the_last_expression_has_its_line(guest: Caller) -> None:
    for code in ("x = 1\n# two\n1/0", "x = 1\nif x:\n    pass\n1/0", "'''a\n'''\n1/0", "x = 1; y = 2\n\n1/0"):
        assert error_of(guest.run(code)).line == code.count("\n") + 1, code


@pytest.mark.parametrize("separator", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_only_line_feeds_count_as_ends_of_lines(guest: Caller, separator: str) -> None:
    error = error_of(guest.run(f"x = 'a{separator}b'\ny = 1\n1/0"))
    assert error.line == 3
    assert "    1/0\n" in error.traceback


def test_a_chained_exception_shows_the_tracebacks_of_both_exceptions(guest: Caller) -> None:
    code = "try:\n    1/0\nexcept ZeroDivisionError as error:\n    raise ValueError('outer') from error"
    error = error_of(guest.run(code))
    assert error.type == "ValueError"
    assert "The above exception was the direct cause" in error.traceback
    assert error.traceback.index("division by zero") < error.traceback.index("outer")
    context = error_of(guest.run("try:\n    1/0\nexcept ZeroDivisionError:\n    {}['k']"))
    assert "During handling of the above exception" in context.traceback
    assert (context.type, context.message) == ("KeyError", "'k'")


def test_exception_groups_show_their_members(guest: Caller) -> None:
    error = error_of(guest.run("raise ExceptionGroup('both', [ValueError('one'), KeyError('two')])"))
    assert error.type == "ExceptionGroup"
    assert "ValueError: one" in error.traceback
    assert "KeyError: 'two'" in error.traceback


def test_a_cycle_of_causes_ends(guest: Caller) -> None:
    code = "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a"
    assert error_of(guest.run(code)).type == "ValueError"


def test_three_thousand_chained_causes_are_reported(guest: Caller) -> None:
    code = (
        "last = None\nfor n in range(3000):\n    new = ValueError(n)\n    new.__cause__, last = last, new\nraise last"
    )
    error = error_of(guest.run(code, output_kb=4096))
    assert (error.type, error.message) == ("ValueError", "2999")


def test_an_exception_with_unusual_attributes_is_reported(guest: Caller) -> None:
    code = (
        "class Odd(Exception):\n    exceptions = 5\n    __notes__ = 7\n    __suppress_context__ = True\nraise Odd('x')"
    )
    error = error_of(guest.run(code))
    assert (error.type, error.message, error.line) == ("Odd", "x", 5)


def test_a_traceback_over_the_output_limit_ends_with_status_output_limit(guest: Caller) -> None:
    """Python prints the traceback to stderr, so it counts as output."""
    result = guest.run("raise ValueError('a' * 100_000)")
    assert (result.status, result.truncated) == (Status.OUTPUT_LIMIT, ("stderr", "traceback"))


def test_a_syntax_error_shows_its_line(guest: Caller) -> None:
    result = guest.run("x = 1\ny = (2 +\nz = 3")
    error = error_of(result)
    assert error.type == "SyntaxError"
    assert error.line in (2, 3)  # the line number depends on the Python version
    assert 'File "main.py"' in error.traceback
    assert "Traceback" not in error.traceback
    assert "y = (2 +" in error.traceback or "z = 3" in error.traceback
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("code", "error_type", "line"),
    [
        ("def f():\nreturn 1", "IndentationError", 2),
        ("if True:\n\tx = 1\n        y = 2", "TabError", 3),
        ("print('a'\n", "SyntaxError", 1),
        ("x = 1\nreturn x", "SyntaxError", 2),
        ("x = 1\nawait x", "SyntaxError", 2),
        ("x = 1\nyield x", "SyntaxError", 2),
        ("print(1)\n1 +", "SyntaxError", 2),
        ("x = 5\nx = = 5", "SyntaxError", 2),
        ("print 'hello'", "SyntaxError", 1),
        ("'abc", "SyntaxError", 1),
        ("x = 1\n    y = 2", "IndentationError", 2),
        ("from __future__ import braces", "SyntaxError", 1),
        ("x = 1\nfrom __future__ import annotations", "SyntaxError", 2),
        ("```python\nprint(1)\n```", "SyntaxError", 1),
    ],
)
def test_code_that_does_not_compile_prints_nothing(guest: Caller, code: str, error_type: str, line: int) -> None:
    result = guest.run(code)
    error = error_of(result)
    assert (error.type, error.line, result.stdout) == (error_type, line, "")


def test_a_syntax_error_in_eval_has_the_line_of_the_eval(guest: Caller) -> None:
    assert error_of(guest.run("x = 1\neval('1 +')")).line == 2


def test_endless_recursion_has_a_short_traceback(guest: Caller) -> None:
    error = error_of(guest.run("def f(n):\n    return f(n + 1)\nf(0)"))
    assert (error.type, error.line) == ("RecursionError", 2)
    assert len(error.traceback) < 20_000


def test_code_too_deep_for_the_parser_is_an_error(guest: Caller) -> None:
    """The parser, the compiler and the walk over the syntax tree have limits of their own, which depend on the version
    of Python. If the last code is within these limits, it runs and raises NameError, because `x` is undefined."""
    for code in ("(" * 5000 + ")" * 5000, "-" * 100_000 + "1", "[" * 90 + "]" * 90 + "\nx" + ".a" * 3000):
        result = guest.run(code)
        assert result.error is not None
        assert result.error.type in ("SyntaxError", "RecursionError", "MemoryError", "NameError")


@pytest.mark.parametrize("method", ["__str__", "__repr__"])
def test_an_exception_that_cannot_be_printed_is_reported_with_its_type(guest: Caller, method: str) -> None:
    code = f"class Bad(Exception):\n    def {method}(self):\n        1/0\nraise Bad(1)"
    error = error_of(guest.run(code))
    assert error.type == "Bad"
    assert "Bad" in error.traceback


@pytest.mark.parametrize("raised", ["1/0", "raise SystemExit(5)", "raise KeyboardInterrupt", "return 5"])
def test_a_value_whose_repr_fails_is_an_error_of_the_call(guest: Caller, raised: str) -> None:
    result = guest.run(f"class Bad:\n    def __repr__(self):\n        {raised}\nBad()")
    assert result.status is Status.ERROR
    assert result.error is not None
    assert result.error.type in ("ZeroDivisionError", "SystemExit", "KeyboardInterrupt", "TypeError")
    assert result.value is None


def test_an_excepthook_of_the_code_replaces_the_traceback(guest: Caller) -> None:
    result = guest.run("import sys\nsys.excepthook = lambda kind, *_: print('hook', kind.__name__)\n1/0")
    assert (result.stdout, result.stderr) == ("hook ZeroDivisionError\n", "")
    assert error_of(result).type == "ZeroDivisionError"


def test_an_excepthook_that_fails_does_not_hide_the_error(guest: Caller) -> None:
    result = guest.run("import sys\nsys.excepthook = lambda *_: {}['k']\n1/0")
    assert error_of(result).type == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("code", "error_type", "message"),
    [
        ("class Outer:\n    class Inner(Exception): pass\nraise Outer.Inner('x')", "Outer.Inner", "x"),
        ("raise ValueError", "ValueError", ""),
        ("raise ValueError(1, 2)", "ValueError", "(1, 2)"),
        ("raise 5", "TypeError", "exceptions must derive from BaseException"),
        ("assert 1 == 2, 'not so'", "AssertionError", "not so"),
        ("undefined", "NameError", "name 'undefined' is not defined"),
        ("import not_there", "ModuleNotFoundError", "No module named 'not_there'"),
        ("raise BaseException('base')", "BaseException", "base"),
        ("raise GeneratorExit", "GeneratorExit", ""),
        ("raise ValueError('\\ud800')", "ValueError", "?"),
        ("raise ValueError('\\0')", "ValueError", "\0"),
    ],
)
def test_errors_have_the_types_and_messages_of_python(guest: Caller, code: str, error_type: str, message: str) -> None:
    error = error_of(guest.run(code))
    assert (error.type, error.message) == (error_type, message)


def test_a_long_message_is_truncated_and_a_long_traceback_keeps_its_end(guest: Caller) -> None:
    result = guest.run("raise ValueError('a' * 100_000 + 'end')", output_kb=256)
    error = error_of(result)
    assert error.message == "a" * 8192  # MAX_MESSAGE_BYTES of `guest/runner.py`
    assert error.traceback.endswith("aend\n")
    # Without the hook, the printed traceback would exceed `output_kb`, and the status would be `output_limit`.
    truncated = guest.run(
        "import sys\nsys.excepthook = lambda *_: 0\nraise ValueError('a' * 100_000 + 'end')", output_kb=16
    )
    assert error_of(truncated).traceback.endswith("aend\n")
    assert len(error_of(truncated).traceback) == 16 << 10
    assert "traceback" in truncated.truncated


def test_a_warning_is_printed_once_per_line_of_code(guest: Caller) -> None:
    code = "import warnings\nfor _ in range(3): warnings.warn('careful')"
    for _ in range(2):
        result = guest.run(code)
        assert result.status is Status.OK
        assert result.stderr.count("UserWarning: careful") == 1
        assert "main.py:2" in result.stderr
    assert "SyntaxWarning" in guest.run("x = 5\nx is 5").stderr
