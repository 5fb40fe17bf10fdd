r"""Reads the text of an answer as a value: a number, an expression, a list, a relation, a quantity or words.

The reader accepts school mathematics in LaTeX or plain text, and refuses all else with `Unreadable`; such answers are
compared as text. It refuses what has two meanings, such as `5 7`, `1/2x` and `2\frac{5}{4}`. It works on tokens and
never evaluates text as code.

Invariants:
- The time is bounded: an integer above `answer_numbers.MAX_BITS`, or brackets nested deeper than `MAX_DEPTH`, are
  refused.
- Two different numbers never become the same value, and no part of the text is skipped except spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from answer_numbers import (
    Scalar,
    Unreadable,
    add,
    binomial,
    check_scalars,
    divide,
    factorial,
    infinity,
    is_scalar,
    multiply,
    number_of,
    power,
    simplest,
    sympy_module,
    to_sympy,
)
from answer_tokens import GREEK, Token, tokens_of
from answer_units import CURRENCIES, unit_of

MAX_DEPTH = 40
"""Maximum depth of brackets."""
MAX_NESTED_FUNCTIONS = 8
"""Maximum depth of functions, roots and exponents inside each other. The time to evaluate them doubles with each
level."""


Value = Any
"""A `Scalar`, `Quantity`, `Items`, `Relation` or `Text`."""


class Quantity(NamedTuple):
    """A number with a unit."""

    value: Scalar
    unit: str


class Items(NamedTuple):
    """Several values. `kind` is a pair of brackets, or "list", "or", "set", "union", "minus", "matrix", "row"."""

    kind: str
    items: tuple


class Relation(NamedTuple):
    """Values between `=`, `<`, `<=`, `>`, `>=`, `!=`, `~` (approximately) and `in`. `sources` is the text of each."""

    parts: tuple
    operators: tuple
    sources: tuple


class Text(NamedTuple):
    """Words, in lower case."""

    text: str


_RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    r"\approx": "~",
    r"\in": "in",
}
_TIMES_SIGNS = ("*", r"\cdot", r"\times")
_DIVISION_SIGNS = ("/", r"\div")
_BRACKETS = {"(": (")", "]"), "[": ("]", ")"), r"\{": (r"\}",), r"\langle": (r"\rangle",)}
_SYMPY_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
_INVERSES = {"sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot"}
_NUMBER_SETS = {r"\mathbbR": "reals", r"\mathbbZ": "integers", r"\mathbbN": "naturals", r"\mathbbQ": "rationals"}
DEGREE = "deg"
"""Name of the symbol for one degree. As a symbol, it does not mix with the numbers of a sum."""
LOG_BASE = "log_base"
"""Name of the symbol for the base of a logarithm that is written without a base."""


def read(source: str, is_real: bool = True) -> Value:
    """Return the value of normalised text. With `is_real`, letters stand for real numbers. Raises `Unreadable`."""
    try:
        return _Reader(source, is_real).read()
    except (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError):
        raise Unreadable from None


def _scaled(factor: Value, value: Value) -> Value:
    """Return a product, also that of a number and a matrix, and the negative of a quantity."""
    if isinstance(value, Items) and value.kind in ("matrix", "row") and is_scalar(factor):
        return Items(value.kind, tuple(_scaled(factor, item) for item in value.items))
    if factor == -1 and value == infinity():
        return -value
    if isinstance(value, Quantity) and factor == -1:
        return Quantity(multiply(factor, value.value), value.unit)
    return multiply(factor, value)


def _is_matrix(value: Value) -> bool:
    return isinstance(value, Items) and value.kind == "matrix"


class _Reader:
    def __init__(self, source: str, is_real: bool) -> None:
        self._source, self._is_real = source, is_real
        self._tokens, self._index = tokens_of(source), 0
        self._depth = self._functions = 0
        """Number of brackets, and number of functions, roots and exponents, around the present token."""
        self._bars = 0
        """Number of bars of absolute values around the present token, since the last bracket."""
        self._sign = 1
        """The sign that `\\pm` has now. An element with `\\pm` is read twice, once for each sign."""
        self._has_signs = False
        """Whether the present element has a `\\pm` or `\\mp`."""

    def read(self) -> Value:
        value = self._list(expands=True)
        if self._token.kind != "end":
            raise Unreadable
        return value

    # Tokens

    @property
    def _token(self) -> Token:
        return self._tokens[self._index]

    def _next(self) -> Token:
        token = self._tokens[self._index]
        if token.kind == "end":
            raise Unreadable
        self._index += 1
        return token

    def _accept(self, *texts: str) -> str:
        token = self._token
        if token.kind in ("mark", "command") and token.text in texts:
            self._index += 1
            return token.text
        return ""

    def _expect(self, *texts: str) -> str:
        text = self._accept(*texts)
        if not text:
            raise Unreadable
        return text

    # Lists and relations

    def _list(self, expands: bool) -> Value:
        elements, words = self._elements(expands), set()
        while True:
            has_comma = self._accept(",", ";")
            if self._token.kind == "word" and self._token.text.lower() in ("and", "or"):
                words.add(self._next().text.lower())
            elif not has_comma:
                break
            elements += self._elements(expands)
        if len(elements) == 1:
            return elements[0]
        return Items("or" if words == {"or"} else "list", tuple(elements))

    def _elements(self, expands: bool) -> list[Value]:
        r"""Read one element of a list. If `expands`, an element with `\pm` gives two values."""
        start, outer_signs = self._index, self._has_signs
        self._has_signs = False
        values = [self._relation()]
        if expands and self._has_signs:
            self._index, self._sign = start, -1
            values.append(self._relation())
            self._sign = 1
            self._has_signs = False
            values = values[:1] if values[0] == values[1] else values
        self._has_signs = self._has_signs or outer_signs
        return values

    def _relation(self) -> Value:
        parts, operators, sources = [], [], []
        while True:
            start = self._token.start
            parts.append(self._union())
            sources.append(self._source[start : self._tokens[self._index - 1].end])
            operator = self._accept(*_RELATIONS)
            if not operator:
                break
            operators.append(_RELATIONS[operator])
        return Relation(tuple(parts), tuple(operators), tuple(sources)) if operators else parts[0]

    def _union(self) -> Value:
        value = self._side()
        while True:
            operator = self._accept(r"\cup", r"\setminus", r"\cap")
            if not operator:
                return value
            right = self._side()
            kind = {r"\cup": "union", r"\cap": "cap", r"\setminus": "minus"}[operator]
            if kind == "union" and all(isinstance(side, Items) and side.kind == "set" for side in (value, right)):
                value = Items("set", (*value.items, *right.items))
            elif isinstance(value, Items) and value.kind == kind == "union":
                value = Items(kind, (*value.items, right))
            else:
                value = Items(kind, (value, right))

    def _side(self) -> Value:
        """Read an expression with its unit, or words, or a name that is no expression, such as the name of an angle."""
        token = self._token
        if token.kind == "word" and len(token.text) > 1:
            words = []
            while self._token.kind == "word" and self._token.text.lower() not in ("and", "or"):
                words.append(self._next().text.lower())
            return Text(" ".join(words))
        if token.text in (r"\angle", r"\triangle", r"\overline") and token.kind == "command":
            self._next()
            braced = self._accept("{")
            while self._token.kind == "letter":
                self._next()
            if braced:
                self._expect("}")
            return Text(" ".join(self._source[token.start : self._tokens[self._index - 1].end].split()))
        value = self._sum()
        if is_scalar(value):
            return self._with_unit(value)
        return value

    def _with_unit(self, value: Scalar) -> Value:
        start = self._index
        pieces = []
        while self._token.kind == "word" and self._token.text.lower() not in ("and", "or"):
            pieces.append(self._next().text)
            if self._accept("^"):
                braced = self._accept("{")
                pieces.append("^" + self._next().text)
                if braced:
                    self._expect("}")
            if self._accept("/"):
                pieces.append("/")
        if pieces == ["percent"] or pieces == ["pct"]:
            return divide(value, Fraction(100))
        if pieces:
            unit = unit_of(pieces)
            if unit is None:
                self._index = start
                raise Unreadable
            return Quantity(value, unit)
        if not isinstance(value, Fraction) and value.has(self._symbol(DEGREE)):
            number = simplest(value / self._symbol(DEGREE))
            if isinstance(number, Fraction) or not number.has(self._symbol(DEGREE)):
                return Quantity(number, "degree")
        return value

    # Expressions

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable
        value = self._signed_term()
        while True:
            operator = self._accept("+", "-", r"\pm", r"\mp")
            if not operator:
                break
            value = add(value, _scaled(self._sign_of(operator), self._term()))
        self._depth -= 1
        return value

    def _sign_of(self, operator: str) -> Fraction:
        if operator in (r"\pm", r"\mp"):
            self._has_signs = True
            return Fraction(self._sign if operator == r"\pm" else -self._sign)
        return Fraction(-1 if operator == "-" else 1)

    def _signed_term(self) -> Value:
        operator = self._accept("+", "-", r"\pm", r"\mp")
        if not operator:
            return self._term()
        sign = self._sign_of(operator)
        value = self._term()
        return value if sign == 1 else _scaled(sign, value)

    def _term(self) -> Value:
        value = self._factor()
        was_divided = False
        while True:
            if self._accept(*_TIMES_SIGNS):
                value = _scaled(value, self._signed_factor())
            elif self._accept(*_DIVISION_SIGNS):
                value = divide(value, self._signed_factor())
                was_divided = True
            elif self._starts_factor():
                if was_divided or self._token.kind == "number" or self._token.text == "{":
                    raise Unreadable  # as 1/2x, x 3 and {5}{7}, which have two meanings
                value = _scaled(value, self._factor())
            else:
                return value

    def _signed_factor(self) -> Value:
        if self._accept("-"):
            return _scaled(Fraction(-1), self._factor())
        return self._factor()

    def _starts_factor(self) -> bool:
        kind, text = self._token.kind, self._token.text
        if kind in ("number", "letter", "bold", "function"):
            return True
        if kind == "mark":
            return text in "([{" or (text == "|" and not self._bars)
        return kind == "command" and (
            text in (r"\frac", r"\pi", r"\binom", r"\begin", r"\lfloor", r"\lceil") or text[1:] in GREEK
        )

    def _factor(self) -> Value:
        value = self._atom()
        while True:
            if self._accept("!"):
                if self._token.text == "!":
                    raise Unreadable
                value = factorial(value)
            elif self._accept("^"):
                value = power(value, self._nested(self._exponent))
            elif self._accept("%", r"\%"):
                value = divide(value, Fraction(100))
            elif self._accept(r"\degree"):
                scale = self._token
                if scale.kind in ("letter", "word") and scale.text in ("C", "F"):
                    self._next()
                    return Quantity(value, "celsius" if scale.text == "C" else "fahrenheit")
                value = _scaled(value, self._symbol(DEGREE))
            else:
                return value

    def _exponent(self) -> Value:
        if self._token.text == "{":
            return self._group()
        if self._accept("-"):
            return _scaled(Fraction(-1), self._atom())
        value = self._atom()
        if self._accept("^"):
            value = power(value, self._nested(self._exponent))
        return value

    def _nested(self, read: Callable[[], Value]) -> Value:
        self._functions += 1
        if self._functions > MAX_NESTED_FUNCTIONS:
            raise Unreadable
        value = read()
        self._functions -= 1
        return value

    def _group(self) -> Value:
        self._expect("{")
        bars, self._bars = self._bars, 0
        value = self._sum()
        self._bars = bars
        self._expect("}")
        return value

    def _argument(self) -> Value:
        r"""Read the argument of a LaTeX command: a group in braces, one digit, one letter or `\pi`."""
        token = self._token
        if token.text == "{":
            return self._group()
        if token.kind == "letter" or (token.kind == "number" and len(token.text) == 1):
            self._next()
            return self._letter(token.text) if token.kind == "letter" else number_of(token.text)
        if self._accept(r"\pi"):
            return sympy_module().pi
        raise Unreadable

    def _atom(self) -> Value:
        token = self._next()
        if token.kind == "number":
            return self._number(token)
        if token.kind == "letter" or (token.kind == "word" and len(token.text) == 1):
            return self._letter(token.text)
        if token.kind == "bold":
            return self._symbol(token.text)
        if token.kind == "function":
            return self._nested(lambda: self._function(token.text))
        if token.text in CURRENCIES and token.kind in ("mark", "command"):
            amount = self._signed_factor()
            check_scalars(amount)
            return Quantity(amount, CURRENCIES[token.text])
        if token.kind not in ("mark", "command"):
            raise Unreadable
        if token.text in _BRACKETS:
            return self._bracketed(token.text)
        return self._command(token.text)

    def _command(self, text: str) -> Value:
        if text == "{":
            bars, self._bars = self._bars, 0
            value = self._list(expands=False)
            self._bars = bars
            self._expect("}")
            return value
        if text in ("|", r"\lfloor", r"\lceil"):
            return self._fenced(text)
        if text in (r"\frac", r"\binom"):
            above, below = self._argument(), self._argument()
            return divide(above, below) if text == r"\frac" else binomial(above, below)
        if text == r"\begin":
            return self._matrix()
        if text[1:] in GREEK:
            return self._named_symbol(text[1:])
        return self._constant(text)

    def _constant(self, text: str) -> Value:
        if text == r"\pi":
            return sympy_module().pi
        if text == r"\infty":
            return infinity()
        if text == r"\emptyset":
            return Items("set", ())
        if text == r"\mathbbR":
            return Items("()", (-infinity(), infinity()))
        if text in _NUMBER_SETS:
            return Text(_NUMBER_SETS[text])
        raise Unreadable

    def _fenced(self, opening: str) -> Scalar:
        """Read an absolute value, or a number that is rounded up or down."""
        bars, self._bars = self._bars, self._bars + 1 if opening == "|" else 0
        value = self._sum()
        self._bars = bars
        self._expect({"|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}[opening])
        check_scalars(value)
        name = {"|": "Abs", r"\lfloor": "floor", r"\lceil": "ceiling"}[opening]
        return simplest(getattr(sympy_module(), name)(to_sympy(value)))

    def _number(self, token: Token) -> Value:
        value = number_of(token.text)
        following = self._token
        if following.text == "_" and following.kind == "mark":
            self._next()
            braced = self._accept("{")
            base = self._next()
            if base.kind != "number" or not token.text.isdigit():
                raise Unreadable
            if braced:
                self._expect("}")
            return Text(f"{token.text.lstrip('0')} in base {int(base.text)}")
        if value.denominator == 1 and token.text.isdigit():
            return self._mixed(value, token)
        return value

    def _mixed(self, whole: Fraction, token: Token) -> Value:
        r"""Read the fraction of a mixed number, such as `1 1/4` and `1\frac14`."""
        following, start = self._token, self._index
        if following.kind == "number" and following.text.isdigit() and following.start > token.end:
            self._next()
            if self._accept("/") and self._token.kind == "number" and self._token.text.isdigit():
                part = Fraction(int(following.text), int(self._next().text))
                if 0 < part < 1 and not self._starts_factor():
                    return whole + part
            raise Unreadable
        if following.text == r"\frac":
            self._next()
            above = self._argument()
            below = self._argument()
            if isinstance(above, Fraction) and isinstance(below, Fraction):
                whole_numbers = above.denominator == below.denominator == 1
                if not whole_numbers or not 0 < above < below or whole == 0 or self._token.text == r"\frac":
                    raise Unreadable
                return whole + above / below
            self._index = start
        return whole

    def _letter(self, letter: str) -> Value:
        if letter in ("e", "i") and self._token.text not in ("_", "'"):
            return sympy_module().E if letter == "e" else sympy_module().I
        if letter in ("f", "g", "h") and self._token.text == "(":
            self._next()
            arguments = [self._nested(self._sum)]
            while self._accept(","):
                arguments.append(self._nested(self._sum))
            self._expect(")")
            return sympy_module().Function(letter)(*map(to_sympy, arguments))
        return self._named_symbol(letter)

    def _named_symbol(self, name: str) -> Any:
        if self._accept("_"):
            if self._accept("{"):
                start = self._token.start
                while self._token.kind in ("number", "letter", "word") or self._token.text in ("+", "-", ","):
                    self._next()
                name += "_" + "".join(self._source[start : self._token.start].split())
                self._expect("}")
            else:
                token = self._next()
                if token.kind not in ("number", "letter"):
                    raise Unreadable
                name += "_" + token.text
        while self._accept("'"):
            name += "'"
        return self._symbol(name)

    def _symbol(self, name: str) -> Any:
        if name in (LOG_BASE, DEGREE):
            return sympy_module().Symbol(name, positive=True)
        return sympy_module().Symbol(name, real=True) if self._is_real else sympy_module().Symbol(name)

    def _bracketed(self, opening: str) -> Value:
        is_set = opening == r"\{"
        bars, self._bars = self._bars, 0
        if is_set and self._accept(r"\}"):
            return Items("set", ())
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable
        value = self._list(expands=is_set and self._depth <= 2)  # each level that expands is read twice
        self._depth -= 1
        self._bars = bars
        closing = self._expect(*_BRACKETS[opening])
        items = value.items if isinstance(value, Items) and value.kind in ("list", "or") else (value,)
        if is_set:
            return Items("set", items)
        if len(items) == 1 and (f"{opening}{closing}" == "()" or (closing == "]" and _is_matrix(value))):
            return value
        return Items(f"{opening}{closing}", items)

    def _matrix(self) -> Value:
        rows: list[Value] = []
        row: list[Value] = []
        while True:
            row.append(self._sum())
            separator = self._expect("&", r"\\", r"\end")
            if separator != "&":
                rows.append(Items("row", tuple(row)))
                row = []
            if separator == r"\\" and self._accept(r"\end"):
                separator = r"\end"
            if separator == r"\end":
                return Items("matrix", tuple(rows))

    def _function(self, name: str) -> Value:
        sympy = sympy_module()
        if name == "sqrt":
            degree = Fraction(2)
            if self._accept("["):
                degree = self._sum()
                self._expect("]")
            value = self._parenthesised() if self._token.text == "(" else self._argument()
            return power(value, divide(Fraction(1), degree))
        base: Any = None
        if name == "log" and self._accept("_"):
            base = self._argument()
        exponent: Any = self._exponent() if self._accept("^") else None
        if exponent == -1:
            if name not in _INVERSES:
                raise Unreadable
            name, exponent = _INVERSES[name], None
        value = to_sympy(self._parenthesised() if self._token.text == "(" else self._bare_argument())
        if name in ("log", "ln", "lg"):
            scale = sympy.Integer(1)
            if name == "lg" or base is not None:
                scale = sympy.log(to_sympy(Fraction(10) if base is None else base))
            elif name == "log":
                scale = self._symbol(LOG_BASE)
            result = sympy.log(value) / scale
        else:
            value = value.subs(self._symbol(DEGREE), sympy.pi / 180)
            result = getattr(sympy, _SYMPY_NAMES.get(name, name))(value)
        result = simplest(result)
        return result if exponent is None else power(result, exponent)

    def _parenthesised(self) -> Value:
        self._expect("(")
        value = self._sum()
        self._expect(")")
        check_scalars(value)
        return value

    def _bare_argument(self) -> Value:
        """Read the argument of a function without brackets: a product up to the next function or operator."""
        value = self._factor()
        while (
            self._starts_factor() and self._token.kind not in ("function", "number") and self._token.text not in "({["
        ):
            value = _scaled(value, self._factor())
        check_scalars(value)
        return value
