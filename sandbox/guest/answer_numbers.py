"""Exact arithmetic of answers. A rational number is a `Fraction`, so that most answers do without sympy."""

from __future__ import annotations

import importlib
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

MAX_BITS = 1 << 18
"""Maximum bits of an integer, about 79,000 decimal digits."""

MAX_MIXED_BITS = 1 << 11
"""Maximum bits of an integer beside a root, a letter or a function, since sympy factors it."""
MAX_MIXED_EXPONENT = 20_000
"""Maximum exponent of a root, a letter or a function."""
MAX_BINOMIAL = 1000
"""Maximum k of a binomial coefficient whose n is no rational number."""

Scalar = Any
"""A `Fraction`, or a sympy expression with a root, a letter or a function."""


class Unreadable(Exception):
    """The text is no mathematics that the reader knows, or has two meanings, or its numbers are too large."""


class Decimal(NamedTuple):
    """A number as it was written, for the option `rounding`: its exact value and one unit of its last digit."""

    value: Fraction
    step: Fraction


def sympy_module() -> Any:
    return importlib.import_module("sympy")


def infinity() -> Any:
    """Return the symbol that stands for infinity. It is not sympy's own infinity, because sympy would calculate with
    that."""
    return sympy_module().Symbol("oo", positive=True)


def to_sympy(value: Scalar) -> Any:
    """Return a value for sympy. Raises `Unreadable` for a number that is too large for it."""
    if not isinstance(value, Fraction):
        return value
    return sympy_module().Rational(*checked(value, MAX_MIXED_BITS).as_integer_ratio())


def simplest(value: Any) -> Scalar:
    """Return a sympy value, as a `Fraction` if it is a rational number. Raises `Unreadable` for infinity and for
    undefined values."""
    if value.is_Rational:
        return checked(Fraction(int(value.p), int(value.q)))
    sympy = sympy_module()
    if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        raise Unreadable
    return value


def checked(value: Fraction, max_bits: int = MAX_BITS) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > max_bits:
        raise Unreadable
    return value


def is_scalar(value: Any) -> bool:
    """Return whether a value is one number or expression, and not several or one with a unit."""
    return not isinstance(value, tuple)


def check_scalars(*values: Any) -> None:
    """Raise `Unreadable` if a value is no number or expression, or is infinite, since infinity has no arithmetic."""
    for value in values:
        if not is_scalar(value) or (not isinstance(value, Fraction) and value.has(infinity())):
            raise Unreadable


def add(left: Any, right: Any) -> Scalar:
    check_scalars(left, right)
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return checked(left + right)
    return simplest(to_sympy(left) + to_sympy(right))


def multiply(left: Any, right: Any) -> Scalar:
    check_scalars(left, right)
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return checked(left * right)
    return simplest(to_sympy(left) * to_sympy(right))


def divide(left: Any, right: Any) -> Scalar:
    return multiply(left, power(right, Fraction(-1)))


def power(base: Any, exponent: Any) -> Scalar:
    check_scalars(base, exponent)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MAX_BITS and abs(base) not in (0, 1):
            raise Unreadable
        if base == 0 and exponent <= 0:
            raise Unreadable
        if exponent.denominator == 1:
            return base ** (int(exponent) if abs(base) != 1 else int(exponent) % 2)
    _check_exponent(to_sympy(exponent))
    return simplest(to_sympy(base) ** to_sympy(exponent))


def _check_exponent(exponent: Any) -> None:
    """Raise `Unreadable` for a large exponent, and for towers of four exponents with letters, since such powers cannot
    be evaluated."""
    if exponent.is_number and not abs(exponent.evalf(15)) <= MAX_MIXED_EXPONENT:
        raise Unreadable
    if _tower(exponent) > 2:
        raise Unreadable


def _tower(value: Any) -> int:
    """Return the height of the highest tower of exponents with letters: 1 for `2^x`, 2 for `2^{3^x}`."""
    sympy = sympy_module()
    powers = [power for power in value.atoms(sympy.Pow, sympy.exp) if power.exp.free_symbols]
    return max((1 + _tower(power.exp) for power in powers), default=0)


def factorial(value: Any) -> Scalar:
    check_scalars(value)
    if not isinstance(value, Fraction):
        return sympy_module().factorial(value)
    if value.denominator != 1 or value < 0 or value * max(1, int(value)).bit_length() > MAX_BITS:
        raise Unreadable
    return Fraction(math.factorial(int(value)))


def binomial(n: Any, k: Any) -> Scalar:
    check_scalars(n, k)
    if not isinstance(n, Fraction) or not isinstance(k, Fraction):
        if isinstance(k, Fraction) and k > MAX_BINOMIAL:
            raise Unreadable
        return sympy_module().binomial(to_sympy(n), to_sympy(k))
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
