"""The names that LeetCode gives to a solution without imports, for programs with `prelude` (`judging/programs.py`).

Such a program ends with the comment `PRELUDE_LINE` of `protocol`. The prelude runs before the program and is not part
of its text, so the line numbers of the program do not change. If the program defines a name of the prelude, the
program's name counts.
"""

from __future__ import annotations

import builtins

_CODE = compile(
    """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from sys import maxsize
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator
import io, json, sys
from typing import *
inf = float("inf")
""",
    "<prelude>",
    "exec",
    dont_inherit=True,
)
_BUILTINS = frozenset(vars(builtins))


def run(scope: dict) -> None:
    """Add the names to a namespace. Names of builtins, such as `pow` of `math`, stay the builtins."""
    names: dict = {"__builtins__": builtins}
    exec(_CODE, names)
    scope.update({name: value for name, value in names.items() if name not in _BUILTINS and name not in scope})
