r"""Reads the text of an answer as a value: a number, an expression, a list, a relation, a quantity or words.

The reader accepts school mathematics in LaTeX or plain text, and refuses all else with `Unreadable`; such answers are
compared as text. It refuses what has two meanings, such as `5 7`, `1/2x` and `2\frac{5}{4}`. It works on tokens and
never evaluates text as code. Numbers are exact: a decimal is a `Fraction`.

Invariants:
- The time is bounded: an integer above `MAX_BITS` bits, or brackets nested deeper than `MAX_DEPTH`, are refused.
- Two different numbers never become the same value, and no part of the text is skipped except spaces.
"""

from __future__ import annotations

import importlib
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from answer_units import CURRENCIES, SHORT_UNITS, unit_of

MAX_BITS = 1 << 18
"""Maximum bits of an integer, about 79,000 decimal digits."""
MAX_DEPTH = 40

Scalar = Any
"""A `Fraction`, or a sympy expression with a root, a letter or a function."""
Value = Any
"""A `Scalar`, `Quantity`, `Items`, `Relation` or `Text`."""


class Unreadable(Exception):
    """The text is no mathematics that the reader knows, or has two meanings, or its numbers are too large."""


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


class Decimal(NamedTuple):
    """A number as it was written, for the option `rounding`: its exact value and one unit of its last digit."""

    value: Fraction
    step: Fraction


# Normalisation


_GREEK_WORDS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell"
)
_GREEK = frozenset(_GREEK_WORDS.split())
_UNICODE = {
    **dict.fromkeys("−–‐‑", "-"),
    **dict.fromkeys("×✕⨯", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("\u2009\u202f\u2006\u2008", r"\,"),
    **dict.fromkeys("\u00a0\u2003\u2002", " "),
    **dict.fromkeys("’′", "'"),
    **{"÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx "},
    **{"±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ "},
    **{"²": "^2", "³": "^3", "％": "%", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    **{"⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "∖": r"\setminus ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"},
    **{"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu "},
    **{"σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega "},
}
_TRANSLATED = str.maketrans(_UNICODE)
_GROUP_SPACE = r"(?:\\[,;:!]|\{,\})"
_GROUPED = re.compile(rf"(?<![0-9.,}}])[1-9][0-9]{{0,2}}(?:{_GROUP_SPACE}[0-9]{{3}})+(?![0-9])")
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√([0-9]+)", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])\.?", " "),
        (r"\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])", " "),
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9.])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*(?=\{)", r"\\frac{\1}"),
        (r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\\neq(?![a-zA-Z])", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\+/-", r"\\pm "),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
        (r"\*\*", "^"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", r" \\degree "),
        (r"\\(?:var)?(?:nothing|emptyset)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\mathbb\1 "),
        (r"\\percent(?![a-zA-Z])", r"\\%"),
    )
)
_MARKUP = (("**", "**"), ("__", "__"), ("```", "```"), ("`", "`"), ("*", "*"))
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_DOLLARS = re.compile(r"(?<!\\)\$(?!-?[0-9.])")


def normalise(text: str) -> str:
    """Return `text` without the marks of Markdown and LaTeX that have no meaning in mathematics."""
    text = _stripped(text.strip())
    text = _DOLLARS.sub(" ", text).translate(_TRANSLATED)
    text = re.sub(r",\\!(?=[0-9]{3})", ",", text)
    text = _GROUPED.sub(lambda match: re.sub(_GROUP_SPACE, "", match.group()), text)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _stripped(text: str) -> str:
    """Remove what surrounds the whole text: bold, code and math marks, a final point."""
    for _ in range(8):
        before = text
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in (*_MARKUP, *_DELIMITERS):
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner.strip() and closing not in inner:
                text = inner.strip()
        if text == before:
            break
    return text


def plain(text: str) -> str:
    """Return normalised text in the form in which unreadable answers are compared."""
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 ", text)
    text = " ".join(text.split())
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)
    return text.lower() if re.fullmatch(r"[A-Za-z ,'()-]*[A-Za-z]{2}[A-Za-z ,'()-]*", text) else text


# Tokens


class Token(NamedTuple):
    kind: str
    """ "number", "letter", "bold", "word", "function", "command", "mark" or "end"."""
    text: str
    start: int
    end: int


_FUNCTION_WORDS = "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh log ln lg exp sqrt"
_FUNCTIONS = frozenset(_FUNCTION_WORDS.split())
_PLAIN_NAMES = {"pi": r"\pi", "infinity": r"\infty", "inf": r"\infty", "infty": r"\infty", "theta": r"\theta"}
_SHORT_WORD_LIST = "yes no on odd and or the one two six ten all DNE dne am pm is of not per"
_SHORT_WORDS = frozenset(_SHORT_WORD_LIST.split())
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|\\(?P<style>textbf|textit|textrm|textnormal|text|mathrm|mathbf|mathit|mbox|operatorname|boldsymbol|bm|vec|hat)"
    r"\s*\*?\s*(?:\{(?P<styled>[^{}]*)\}|(?P<styled_letter>[A-Za-z]))"
    r"|\\(?P<edge>begin|end)\s*\{(?P<matrix>[pb]?matrix|array)\}(?:\{[lcr|]*\})?"
    r"|(?P<repeating>[0-9]+\.[0-9]*\\overline\s*\{[0-9]+\})"
    r"|(?P<command>\\[a-zA-Z]+|\\.)"
    r"|(?P<grouped>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9]|,[0-9]))"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<mark>.)",
    re.ASCII | re.DOTALL,
)
_UNIT = re.compile(r"[A-Za-z]+(?:\^[23])?(?:\s*/\s*[A-Za-z]+(?:\^[23])?)?", re.ASCII)
"""A unit with a power or a denominator, such as cm^2 and km/h."""
_OPENING, _CLOSING = frozenset(("(", "[", "{", r"\{")), frozenset((")", "]", "}", r"\}"))


def tokens_of(source: str) -> list[Token]:
    """Return the tokens of normalised text. Raises `Unreadable`."""
    tokens: list[Token] = []
    commas_group = re.search(r",\s|;", source) is not None or not re.search(r"[\[({]", source)
    depth, position = 0, 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise Unreadable
        kind, text = match.lastgroup or "", match.group()
        if kind == "grouped":
            after_comma = position > 0 and source[position - 1] == ","
            if after_comma or (depth and not commas_group):
                match = re.compile("[0-9]+").match(source, position)
                assert match
            kind, text = "number", match.group().replace(",", "")
        position, where = match.end(), (match.start(), match.end())
        if kind == "space":
            continue
        depth += (text in _OPENING) - (text in _CLOSING)
        if kind in ("styled", "styled_letter"):
            _add_styled(tokens, match.group("style"), match.group(kind), where)
        elif kind == "letters":
            _add_letters(tokens, text, where)
        elif kind == "matrix":
            tokens.append(Token("command", "\\" + match.group("edge"), *where))
        elif kind == "command" and text[1:] in _FUNCTIONS:
            tokens.append(Token("function", text[1:], *where))
        else:
            tokens.append(Token("number" if kind == "repeating" else kind, text, *where))
    return [*tokens, Token("end", "", len(source), len(source))]


def _add_styled(tokens: list[Token], style: str, content: str, where: tuple[int, int]) -> None:
    content = content.strip()
    if content in _FUNCTIONS:
        tokens.append(Token("function", content, *where))
    elif style in ("mathbf", "boldsymbol", "bm", "vec", "hat") and len(content) == 1 and content.isalpha():
        tokens.append(Token("bold", f"{'mathbf' if style in ('boldsymbol', 'bm') else style} {content}", *where))
    elif re.fullmatch(r"[A-Za-z][A-Za-z .'-]*", content, re.ASCII):
        tokens.extend(Token("word", word, *where) for word in content.replace(".", " ").split())
    elif _UNIT.fullmatch(content):
        for piece in re.findall(r"[A-Za-z]+|[23^/]", content):
            kind = "word" if piece.isalpha() else "number" if piece.isdigit() else "mark"
            tokens.append(Token(kind, piece, *where))
    else:
        tokens.extend(Token(token.kind, token.text, *where) for token in tokens_of(content)[:-1])


def _add_letters(tokens: list[Token], run: str, where: tuple[int, int]) -> None:
    follows_number = bool(tokens) and (tokens[-1].kind == "number" or tokens[-1].text in ("}", ")", "/", "^"))
    if run in _FUNCTIONS:
        tokens.append(Token("function", run, *where))
    elif run in _PLAIN_NAMES:
        tokens.append(Token("command", _PLAIN_NAMES[run], *where))
    elif len(run) > 3 or run in _SHORT_WORDS or (follows_number and run in SHORT_UNITS):
        tokens.append(Token("word", run, *where))
    else:
        tokens.extend(Token("letter", letter, *where) for letter in run)


# Numbers


def _sympy() -> Any:
    return importlib.import_module("sympy")


def to_sympy(value: Scalar) -> Any:
    return _sympy().Rational(value.numerator, value.denominator) if isinstance(value, Fraction) else value


def simplest(value: Any) -> Scalar:
    """Return a sympy number as a `Fraction` if it is rational. Raises `Unreadable` for what is no number."""
    if value.is_Rational:
        return checked(Fraction(int(value.p), int(value.q)))
    sympy = _sympy()
    if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        raise Unreadable
    return value


def checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Unreadable
    return value


def is_scalar(value: Value) -> bool:
    return not isinstance(value, tuple)


def _scalars(*values: Value) -> None:
    if not all(map(is_scalar, values)):
        raise Unreadable


def add(left: Value, right: Value) -> Scalar:
    _scalars(left, right)
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return checked(left + right)
    return simplest(to_sympy(left) + to_sympy(right))


def multiply(left: Value, right: Value) -> Value:
    if isinstance(right, Items) and right.kind in ("matrix", "row") and is_scalar(left):
        return Items(right.kind, tuple(multiply(left, item) for item in right.items))
    if isinstance(right, Quantity) and left == -1:
        return Quantity(multiply(left, right.value), right.unit)
    _scalars(left, right)
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return checked(left * right)
    return simplest(to_sympy(left) * to_sympy(right))


def divide(left: Value, right: Value) -> Scalar:
    return multiply(left, power(right, Fraction(-1)))


def power(base: Value, exponent: Value) -> Scalar:
    _scalars(base, exponent)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MAX_BITS and abs(base) not in (0, 1):
            raise Unreadable
        if base == 0 and exponent <= 0:
            raise Unreadable
        if exponent.denominator == 1:
            return base ** (int(exponent) if abs(base) != 1 else int(exponent) % 2)
    return simplest(to_sympy(base) ** to_sympy(exponent))


def factorial(value: Value) -> Scalar:
    _scalars(value)
    if not isinstance(value, Fraction):
        return _sympy().factorial(value)
    if value.denominator != 1 or value < 0 or value * max(1, int(value)).bit_length() > MAX_BITS:
        raise Unreadable
    return Fraction(math.factorial(int(value)))


def binomial(n: Value, k: Value) -> Scalar:
    _scalars(n, k)
    if not isinstance(n, Fraction) or not isinstance(k, Fraction):
        return _sympy().binomial(to_sympy(n), to_sympy(k))
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        raise Unreadable
    if min(k, abs(n - k)) * int(n).bit_length() > MAX_BITS:
        raise Unreadable
    return Fraction(math.comb(int(n), int(k)))


def number_of(text: str) -> Fraction:
    """Return the exact value of a number such as `12`, `0.5`, `1.5e3` and `0.1\\overline{6}`. Raises `Unreadable`."""
    if "\\" in text:
        whole, _, digits = text.partition(".")
        once, _, repeated = digits.partition("\\")
        repeated = re.sub("[^0-9]", "", repeated)
        shift = 10 ** len(once)
        return Fraction(int(whole + once), shift) + Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    exponent = re.search(r"[eE]([+-]?[0-9]+)", text)
    if exponent and (len(exponent.group(1)) > 6 or abs(int(exponent.group(1))) * 4 > MAX_BITS):
        raise Unreadable
    return Fraction(text)


_DECIMAL = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<number>[0-9]*\.?[0-9]+)"
    r"(?:(?:[eE]|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*)(?P<exponent>[+-]?[0-9]{1,4})\s*\}?)?(?P<percent>\s*\\?%)?"
)


def decimal_of(source: str) -> Decimal | None:
    """Return a number that is written with a point or a power of ten and has two or more significant digits."""
    match = _DECIMAL.fullmatch(source.strip())
    if match is None:
        return None
    number, exponent = match.group("number"), int(match.group("exponent") or 0)
    if ("." not in number and not match.group("exponent")) or len(number.replace(".", "").lstrip("0")) < 2:
        return None
    scale = Fraction(10) ** exponent * (Fraction(1, 100) if match.group("percent") else 1)
    step = scale / 10 ** len(number.partition(".")[2])
    return Decimal(Fraction(number) * scale * (-1 if match.group("sign") == "-" else 1), step)


# Reading


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
_TIMES, _OVER = ("*", r"\cdot", r"\times"), ("/", r"\div")
_BRACKETS = {"(": (")", "]"), "[": ("]", ")"), r"\{": (r"\}",), r"\langle": (r"\rangle",)}
_ENDS_BY_FUNCTION = {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arccot": "acot",
}
_INVERSES = {"sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot"}
_NUMBER_SETS = {r"\mathbbR": "reals", r"\mathbbZ": "integers", r"\mathbbN": "naturals", r"\mathbbQ": "rationals"}
INFINITY, DEGREE, LOG_BASE = "oo", "deg", "log_base"
"""Names of symbols: infinity is one, so that no arithmetic removes it; a degree, so that no sum confuses it; and the
base of a logarithm that is written without one."""


def read(source: str, is_real: bool = True) -> Value:
    """Return the value of normalised text. Raises `Unreadable`. With `is_real` letters are real numbers."""
    try:
        return _Reader(source, is_real).read()
    except (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError):
        raise Unreadable from None


class _Reader:
    def __init__(self, source: str, is_real: bool) -> None:
        self._source, self._is_real = source, is_real
        self._tokens, self._index = tokens_of(source), 0
        self._depth, self._bars = 0, 0
        self._sign = 1
        """The sign for which `\\pm` is read; an element that has one is read twice."""
        self._has_signs = False

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
        elements, joins = self._elements(expands), []
        while True:
            join = self._accept(",", ";") and ","
            if self._token.kind == "word" and self._token.text.lower() in ("and", "or"):
                join = self._next().text.lower()
            if not join:
                break
            joins.append(join)
            elements += self._elements(expands)
        if len(elements) == 1:
            return elements[0]
        return Items("or" if joins and "or" in joins and "and" not in joins else "list", tuple(elements))

    def _elements(self, expands: bool) -> list[Value]:
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
        """Read an expression with its unit, or words, or a name that is no expression, such as that of an angle."""
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
            value = add(value, multiply(self._sign_of(operator), self._term()))
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
        return value if sign == 1 else multiply(sign, value)

    def _term(self) -> Value:
        value = self._factor()
        was_divided = False
        while True:
            if self._accept(*_TIMES):
                value = multiply(value, self._signed_factor())
            elif self._accept(*_OVER):
                value = divide(value, self._signed_factor())
                was_divided = True
            elif self._starts_factor():
                if was_divided or self._token.kind == "number" or self._token.text == "{":
                    raise Unreadable  # as 1/2x, x 3 and {5}{7}, which have two meanings
                value = multiply(value, self._factor())
            else:
                return value

    def _signed_factor(self) -> Value:
        if self._accept("-"):
            return multiply(Fraction(-1), self._factor())
        return self._factor()

    def _starts_factor(self) -> bool:
        kind, text = self._token.kind, self._token.text
        if kind in ("number", "letter", "bold", "function"):
            return True
        if kind == "mark":
            return text in "([{" or (text == "|" and not self._bars)
        return kind == "command" and (
            text in (r"\frac", r"\pi", r"\binom", r"\begin", r"\lfloor", r"\lceil") or text[1:] in _GREEK
        )

    def _factor(self) -> Value:
        value = self._atom()
        while True:
            if self._accept("!"):
                if self._token.text == "!":
                    raise Unreadable
                value = factorial(value)
            elif self._accept("^"):
                value = power(value, self._exponent())
            elif self._accept("%", r"\%"):
                value = divide(value, Fraction(100))
            elif self._accept(r"\degree"):
                scale = self._token
                if scale.kind in ("letter", "word") and scale.text in ("C", "F"):
                    self._next()
                    return Quantity(value, "celsius" if scale.text == "C" else "fahrenheit")
                value = multiply(value, self._symbol(DEGREE))
            else:
                return value

    def _exponent(self) -> Value:
        if self._token.text == "{":
            return self._group()
        if self._accept("-"):
            return multiply(Fraction(-1), self._atom())
        value = self._atom()
        if self._accept("^"):
            value = power(value, self._exponent())
        return value

    def _group(self) -> Value:
        self._expect("{")
        bars, self._bars = self._bars, 0
        value = self._sum()
        self._bars = bars
        self._expect("}")
        return value

    def _argument(self) -> Value:
        """Read the argument of a command: a group, a digit or a letter."""
        token = self._token
        if token.text == "{":
            return self._group()
        if token.kind == "letter" or (token.kind == "number" and len(token.text) == 1):
            self._next()
            return self._letter(token.text) if token.kind == "letter" else number_of(token.text)
        if self._accept(r"\pi"):
            return _sympy().pi
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
            return self._function(token.text)
        if token.text in CURRENCIES and token.kind in ("mark", "command"):
            amount = self._signed_factor()
            _scalars(amount)
            return Quantity(amount, CURRENCIES[token.text])
        if token.kind not in ("mark", "command"):
            raise Unreadable
        if token.text in _BRACKETS:
            return self._bracketed(token.text)
        return self._command(token.text)

    def _command(self, text: str) -> Value:
        if text == "{":
            self._index -= 1
            return self._group()
        if text in ("|", r"\lfloor", r"\lceil"):
            return self._fenced(text)
        if text in (r"\frac", r"\binom"):
            above, below = self._argument(), self._argument()
            return divide(above, below) if text == r"\frac" else binomial(above, below)
        if text == r"\begin":
            return self._matrix()
        if text[1:] in _GREEK:
            return self._named_symbol(text[1:])
        return self._constant(text)

    def _constant(self, text: str) -> Value:
        if text == r"\pi":
            return _sympy().pi
        if text == r"\infty":
            return self._symbol(INFINITY)
        if text == r"\emptyset":
            return Items("set", ())
        if text == r"\mathbbR":
            return Items("()", (-self._symbol(INFINITY), self._symbol(INFINITY)))
        if text in _NUMBER_SETS:
            return Text(_NUMBER_SETS[text])
        raise Unreadable

    def _fenced(self, opening: str) -> Scalar:
        """Read an absolute value, or a number that is rounded up or down."""
        bars, self._bars = self._bars, self._bars + 1 if opening == "|" else 0
        value = self._sum()
        self._bars = bars
        self._expect({"|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}[opening])
        _scalars(value)
        name = {"|": "Abs", r"\lfloor": "floor", r"\lceil": "ceiling"}[opening]
        return simplest(getattr(_sympy(), name)(to_sympy(value)))

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
                if not whole_numbers or not 0 < above < below or whole == 0:
                    raise Unreadable
                return whole + above / below
            self._index = start
        return whole

    def _letter(self, letter: str) -> Value:
        if letter in ("e", "i") and self._token.text not in ("_", "'"):
            return _sympy().E if letter == "e" else _sympy().I
        if letter in ("f", "g", "h") and self._token.text == "(":
            self._next()
            arguments = [self._sum()]
            while self._accept(","):
                arguments.append(self._sum())
            self._expect(")")
            return _sympy().Function(letter)(*map(to_sympy, arguments))
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
        if name in (LOG_BASE, DEGREE, INFINITY):
            return _sympy().Symbol(name, positive=True)
        return _sympy().Symbol(name, real=True) if self._is_real else _sympy().Symbol(name)

    def _bracketed(self, opening: str) -> Value:
        is_set = opening == r"\{"
        bars, self._bars = self._bars, 0
        if is_set and self._accept(r"\}"):
            return Items("set", ())
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable
        value = self._list(expands=is_set)
        self._depth -= 1
        self._bars = bars
        closing = self._expect(*_BRACKETS[opening])
        items = value.items if isinstance(value, Items) and value.kind in ("list", "or") else (value,)
        if is_set:
            return Items("set", items)
        if opening == "(" and closing == ")" and len(items) == 1:
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
        sympy = _sympy()
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
            result = getattr(sympy, _ENDS_BY_FUNCTION.get(name, name))(value)
        result = simplest(result)
        return result if exponent is None else power(result, exponent)

    def _parenthesised(self) -> Value:
        self._expect("(")
        value = self._sum()
        self._expect(")")
        _scalars(value)
        return value

    def _bare_argument(self) -> Value:
        """Read the argument of a function without brackets: a product up to the next function or operator."""
        value = self._factor()
        while (
            self._starts_factor() and self._token.kind not in ("function", "number") and self._token.text not in "({["
        ):
            value = multiply(value, self._factor())
        _scalars(value)
        return value
