"""The modules that a zygote of each profile imports, and the code that warms them up.

A zygote is an interpreter that forks once per call. Its profile is the set of modules that it imports before. This
module has the built-in profiles. The executor sends the profiles that an operator has defined, called own profiles
(`_run_own_profile`).

An import is not enough: the first `sympy.solve` takes ten times as long as later ones, because of lazy imports and
caches. So each zygote runs typical code of its profile once, before any call.

Every fork copies the zygote's mappings and page tables. So modules that few calls use (numpy.random with its 18
libraries, Fourier transforms, sympy.stats) are imported only by the calls that use them, or by the largest profile.

matplotlib is in the largest profile: with it a `print` of that profile takes 5 to 9 % more CPU time (5.7 instead of
5.4 ms), while a plot takes 115 instead of 490 ms.
"""

from __future__ import annotations

import _ast as ast  # saves the import of the Python code in `ast`
import builtins
import importlib
import threading
from typing import Any

from protocol import ANSWER_CHECK_MODULE, PARENT_PROFILE

_MODULES = {
    "bare": (
        "bisect cmath collections collections.abc contextlib copy datetime decimal enum fractions functools heapq "
        "itertools json math numbers operator os.path random re statistics string sys threading time traceback typing "
        "warnings"
    ),
    "numeric": "numpy numpy.linalg",
    "symbolic": "mpmath sympy sympy.abc",
    "scientific": (
        "numpy.fft numpy.polynomial numpy.random scipy scipy.optimize scipy.integrate scipy.linalg scipy.stats "
        "scipy.special scipy.interpolate scipy.sparse scipy.spatial scipy.signal networkx pandas "
        "matplotlib.pyplot"
    ),
    "verify": f"math_verify {ANSWER_CHECK_MODULE}",
}

_WARMUP_CODE = {
    "bare": """
from fractions import Fraction
from math import comb, gcd, sqrt
import re, random, itertools, collections, decimal
def f(n):
    return n if n < 2 else f(n - 1) + f(n - 2)
text = f"{f(10)} {comb(10, 3)} {gcd(12, 18)} {sqrt(2):.3f} {Fraction(1, 3) + Fraction(1, 6)}"
re.findall(r"\\d+", text), collections.Counter(text).most_common(2), list(itertools.permutations(range(3)))
sorted(random.sample(range(100), 5)), decimal.Decimal(1) / 3
""",
    "numeric": """
import numpy as np
a = np.arange(9.0).reshape(3, 3) + np.eye(3)
np.linalg.det(a), np.linalg.solve(a, np.ones(3)), np.linalg.eig(a), np.linalg.inv(a), a.mean(), np.sqrt(a)
str(a), repr(a), str(a[0, 0]), a @ a, a.T.sum(axis=0), np.linspace(0, 1, 5), np.array([1, 2]).tolist(), np.cumsum(a)
""",
    "symbolic": """
from sympy import *
x, y, z = symbols("x y z")
n = symbols("n", real=True)
k = symbols("k", integer=True, positive=True)
solve(x**2 - 3*x + 2, x), solve([x + y - 3, x - y - 1], [x, y]), solve(Eq(x**3 - x, 0), x, dict=True)
solve(sqrt(x + 3) - x + 3, x), solve(sin(x) - Rational(1, 2), x), solve(2**x - 8, x), solveset(x**2 - 2, x, S.Reals)
solve([x**2 + y**2 - 25, x + y - 7], [x, y]), solve(x**2 - 4 > 0, x), solve(abs(n - 1) - 3, n), nsolve(cos(x) - x, 1)
factor(x**4 - 1), expand((x + y)**4), simplify(sin(x)**2 + cos(x)**2), apart(1/(x**2 - 1)), together(1/x + 1/y)
cancel((x**2 - 1)/(x - 1)), diff(sin(x)*exp(x), x), integrate(x**2*exp(x), x), integrate(1/(1 + x**2), (x, 0, oo))
limit(sin(x)/x, x, 0), series(exp(x), x, 0, 4), summation(k, (k, 1, n)), Sum(1/k**2, (k, 1, oo)).doit()
Matrix([[1, 2], [3, 4]]).det(), Matrix([[2, 1], [1, 3]]).eigenvals(), Matrix([[1, 2], [3, 4]]).inv()
factorint(360), isprime(97), divisors(36), gcd(12, 18), binomial(10, 3), factorial(6), Mod(17, 5), totient(36)
list(primerange(2, 20)), nextprime(100), N(pi, 20), sqrt(8), Rational(3, 4) + 1, trigsimp(sin(2*x)/cos(x))
radsimp(1/(sqrt(3) + 1)), nsimplify(0.75), sympify("x**2 + 1"), str(sqrt(2) + x/3), repr(solve(x**2 + x + 1, x))
latex(x**2/3), lambdify(x, x**2 + sin(x))(1.0), expand_log(log(x*y), force=True), Poly(x**2 - 1, x).all_roots()
Point(0, 0).distance(Point(3, 4)), Triangle(Point(0, 0), Point(4, 0), Point(0, 3)).area, Circle(Point(0, 0), 2).area
floor(x).subs(x, 2.5), Piecewise((x, x > 0), (0, True)).subs(x, 1)
""",
    "scientific": """
import numpy as np
from scipy import integrate, linalg, optimize, stats
optimize.fsolve(lambda v: v**2 - 2, 1.0), optimize.minimize(lambda v: (v[0] - 1)**2, [0.0])
optimize.brentq(lambda v: v**2 - 2, 0, 2), optimize.linprog([1, 1], A_ub=[[-1, -1]], b_ub=[-1])
integrate.quad(lambda v: v**2, 0, 1), integrate.solve_ivp(lambda t, v: -v, (0, 1), [1.0])
linalg.lu(np.eye(3)), stats.norm.cdf(1.0), stats.binom.pmf(2, 5, 0.5)
stats.ttest_ind([1.0, 2.0, 3.0], [2.0, 3.0, 4.5])
import networkx as nx, pandas as pd
nx.shortest_path(nx.path_graph(5), 0, 4), nx.is_connected(nx.cycle_graph(4))
nx.minimum_spanning_tree(nx.complete_graph(4)).size()
frame = pd.DataFrame({"a": [1, 2, 2], "b": [1.0, 2.0, 3.0]})
str(frame), str(frame.groupby("a").b.mean()), str(frame.describe()), frame.a.value_counts().to_dict()
str(frame.sort_values("b"))
import io, matplotlib.pyplot as plt, matplotlib.font_manager, matplotlib.mathtext
figure, axes = plt.subplots()
axes.plot(frame.a, frame.b, label="$x^2$"), axes.bar([1], [2]), axes.set_title("b"), axes.legend(), axes.grid(True)
figure.savefig(io.BytesIO(), format="png"), plt.close("all")
# Cached fonts are open files, which a call closes.
matplotlib.mathtext.MathTextParser._parse_cached.cache_clear(), matplotlib.font_manager._get_font.cache_clear()
""",
    "verify": r"""
from rstar_answer_check import compare
pairs = [
    ("42", "42"), ("42", "43"), (r"\frac{1}{2}", "0.5"), (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"), ("(1, 2)", "(1,2)"),
    ("[0, 1)", "[0,1)"), ("1,2", "2,1"), (r"\{1, 2\}", r"\{2, 1\}"), ("x^2 + 2x + 1", "(x+1)^2"), ("x = 3", "3"),
    ("x < 3", "3 > x"), (r"2\pi", r"\pi * 2"), (r"\text{even}", r"\text{odd}"), (r"50\%", "0.5"), ("1,000", "1000"),
    ("3 + 4i", "4i + 3"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"), ("1", ""),
    (r"\sqrt{3} + 1", r"\frac{2}{\sqrt{3} - 1}"), ("2x - y = 1", "y = 2x - 1"), (r"\sin 2x", r"2\sin x\cos x"),
    (r"\sqrt{2}", "1.41421356"), (r"\sqrt{3 + 2\sqrt{2}}", r"1 + \sqrt{2}"),
]
[compare(*pair, strictness) for strictness in ("strict", "math-verify") for pair in pairs]
""",
}


_OWN_WARMUP_FILE = "<warm-up>"
_loaded: dict[str, tuple[list[str], list[str]]] = {}
"""By profile that has been loaded: the missing modules and other problems of the profile and all its ancestors."""


def load(profile: str) -> tuple[list[str], list[str]]:
    """Import and warm up a built-in profile and its ancestors, each once in a zygote and the zygotes forked from it.
    Return the missing modules, and other problems, which only make calls slower."""
    if profile not in _loaded:
        parent = PARENT_PROFILE[profile]
        missing, problems = load(parent) if parent else ([], [])
        own_missing, import_problems = _import(profile)
        warm_up_problems = _warm_up(profile)
        # A missing module also makes the warm-up fail; then only the module is reported.
        problems = problems + import_problems + ([] if own_missing else warm_up_problems)
        _loaded[profile] = sorted({*missing, *own_missing}), problems
    return _loaded[profile]


def load_from(header: dict) -> tuple[list[str], list[str], str]:
    """Load the profile of a frame `configure` or `spawn`: its `own_profile` if it has one, else its `profile`. Return
    what `load` returns, and the reason why the profile cannot be used, or an empty text."""
    own_profile = header.get("own_profile")
    missing, problems = load(own_profile["extends"] if own_profile else header["profile"])
    refused = ""
    if own_profile:
        # A child zygote may load a profile that extends this one.
        _loaded[own_profile["name"]] = missing, problems
        refused = _run_own_profile(own_profile)
    if not refused and threading.active_count() != 1:
        refused = "expected one thread, because a zygote forks, but loading the profile started others"
    return missing, problems, refused


def _run_own_profile(own_profile: dict) -> str:
    """Import the modules of an operator's profile, and run its warm-up code as a whole. Return the error, or an empty
    text."""
    step = ""
    try:
        for module in own_profile["imports"]:
            step = f"import {module}"
            importlib.import_module(module)
        step = "warm-up code"
        scope: dict = {"__name__": "warm", "__builtins__": builtins}
        exec(compile(own_profile["warm"], _OWN_WARMUP_FILE, "exec", dont_inherit=True), scope)
    except BaseException as error:
        return f"{step}{_line_of(error)}: {type(error).__name__}: {error}"
    return ""


def _line_of(error: BaseException) -> str:
    """Return the line of the warm-up code that an error came from, as text."""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == _OWN_WARMUP_FILE else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _OWN_WARMUP_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line else ""


def _import(profile: str) -> tuple[set[str], list[str]]:
    missing, problems = set(), []
    for name in _MODULES[profile].split():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.add((error.name or name).partition(".")[0])
        except Exception as error:  # a call that imports the module gets the error
            problems.append(f"{profile}: {error}")
    return missing, problems


def _warm_up(profile: str) -> list[str]:
    """Run the profile's code, statement by statement. Return the errors."""
    problems = []
    scope: dict = {"__name__": "warm", "__builtins__": builtins}
    for number, statement in enumerate(_compile_statements(_WARMUP_CODE[profile]), 1):
        try:
            exec(statement, scope)
        except Exception as error:  # a library may be too old for one statement
            problems.append(f"{profile} warm-up {number}: {type(error).__name__}: {error}")
    return problems


def _compile_statements(source: str) -> list:
    """Compile each top-level statement into a code object of its own."""
    tree: Any = compile(source, "<warm>", "exec", ast.PyCF_ONLY_AST)
    return [compile(ast.Module([statement], []), "<warm>", "exec") for statement in tree.body]
