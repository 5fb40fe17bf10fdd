"""The programs that several benchmarks time: one for each zygote profile, and the names that tables show."""

from __future__ import annotations

PRINT = "print(1 + 1)\n"
NUMPY = "import numpy as np\nprint(np.linalg.det(np.array([[2.0, 1.0], [1.0, 3.0]])))\n"
SYMPY = "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))\n"
SCIPY = "from scipy.optimize import fsolve\nprint(fsolve(lambda x: x**2 - 2, 1.0))\n"

CODES = {"print": PRINT, "numpy": NUMPY, "sympy": SYMPY}
"""Programs by kind. The further kind `mix` is the mix of `bench.workloads.tool_calls`."""
PROFILE_CODES = {"bare": PRINT, "numeric": NUMPY, "symbolic": SYMPY, "scientific": SCIPY}
"""A program for the zygotes of each profile."""
KIND_NAMES = {
    "print": "`print(1 + 1)`",
    "numpy": "numpy determinant",
    "sympy": "`sympy.solve`",
    "mix": "the mix of real traffic",
}
