r"""Decides whether two answers are equal, by rules of our own (docs/verify.md).

Invariants:
- Numbers are equal only if they are exactly equal. A numeric evaluation, relative to the size of the numbers, can only
  show that they differ. Only a symbolic proof can show that they are equal.
- In case of doubt two answers are "not equal", because a false reward is worse than a missing reward.
"""

from __future__ import annotations

import importlib
import re
from fractions import Fraction
from typing import Any

from answer_numbers import Unreadable, decimal_of, infinity, is_scalar, sympy_module, to_sympy
from answer_reader import Items, Quantity, Relation, Text, Value, read
from answer_tokens import normalise, plain

_MAX_PRECISION_BITS = 2000
"""Precision up to which a difference that may be zero is evaluated."""
_MAX_ITEMS = 100
"""Maximum number of values in two lists or sets together, unless all are rational numbers. The time to compare other
values grows with the square of their number."""
_POINTS = (Fraction(7, 5), Fraction(-13, 9), Fraction(5, 17), Fraction(31, 11))
"""Points at which two expressions are evaluated to see whether they differ. At the point p, the letter number n, from
0, has the value p * (n + 1)."""
_COMPLEX = re.compile(r"(?<![A-Za-z\\])[izw](?![A-Za-z])|\\bar|\\overline|mathbb\s*\{?C")
_GREEK_NAME = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|omega|rho|sigma|ell|pi)"
_NAME = re.compile(
    rf"(?:[A-Za-z]|{_GREEK_NAME})'{{0,3}}(?:_\{{?[A-Za-z0-9]+\}}?)?(?:\([A-Za-z0-9](?:,[A-Za-z0-9])*\))?"
    r"|[A-Z]{2,4}|\|[A-Z]{2}\||\[[A-Z]{3,6}\]|\([a-zA-Z](?:,[a-zA-Z])+\)|f\^\{-1\}\([a-z]\)|\\frac\{d[a-z]\}\{d[a-z]\}"
)
_CHOICE = re.compile(r"\(?([A-J])(?:\)|\.|:)\s*(.*)\Z", re.DOTALL)
_SECOND_ANSWER = re.compile(r"[,;+]|(?:or|and|is|not)(?![A-Za-z])|.*(?<![A-Za-z])[A-J](?![A-Za-z])", re.DOTALL)
_LETTER = re.compile(r"\(?([A-J])\)?\Z")
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def are_equal(gold_text: str, answer_text: str, rounding: bool = False) -> bool:
    """Return whether two extracted answers are equal."""
    gold_source, answer_source = normalise(gold_text), normalise(answer_text)
    gold_plain, answer_plain = plain(gold_source), plain(answer_source)
    if gold_plain and gold_plain == answer_plain:
        return True
    if _clock_or_date(gold_plain) is not None or _clock_or_date(answer_plain) is not None:
        return _clock_or_date(gold_plain) == _clock_or_date(answer_plain)
    gold_ratio, answer_ratio = _ratio(gold_plain), _ratio(answer_plain)
    if gold_ratio or answer_ratio:
        return gold_ratio == answer_ratio
    if _is_choice_with_text(gold_plain, plain(answer_source, keeps_case=True)):
        return True
    is_real = not _COMPLEX.search(gold_source + " " + answer_source)
    try:
        gold = read(gold_source, is_real)
        answer = read(answer_source, is_real)
        return _Comparison(answer_source if rounding else "").equal(gold, answer)
    except Unreadable:
        return False


# Answers that are no mathematics


_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?\s?(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_MONTH_NAMES = "january february march april may june july august september october november december"
_MONTHS = _MONTH_NAMES.split()
_MONTH = "(?P<month>" + "|".join(name[:3] + f"(?:{name[3:]})?" for name in _MONTHS) + r")\.?"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_MONTH} (?P<day>[0-9]{{1,2}})(?:st|nd|rd|th)?(?:,? ?(?P<year>[0-9]{{4}}))?",
        rf"(?P<day>[0-9]{{1,2}})(?:st|nd|rd|th)? (?:of )?{_MONTH}(?:,? ?(?P<year>[0-9]{{4}}))?",
    )
)
_ISO_DATE = re.compile("([0-9]{4})-([0-9]{2})-([0-9]{2})")
_RATIO = re.compile(r"[1-9][0-9]{0,8}(?::[1-9][0-9]{0,8})+")


def _clock_or_date(text: str) -> tuple[Any, ...] | None:
    """Return a time of day or a date, or None. `3:30` may be in the morning or in the afternoon, so it equals only
    `3:30`."""
    match = _CLOCK.fullmatch(text)
    if match and (match.group(3) or match.group(2)):
        hour, minute, half = int(match.group(1)), int(match.group(2) or 0), (match.group(3) or "").lower()
        if minute < 60 and half and 1 <= hour <= 12:
            return ("clock", hour % 12 + 12 * (half == "p"), minute)
        if minute < 60 and not half and hour < 25:
            return ("clock", hour, minute) if hour == 0 or hour > 12 else ("clock of 12 hours", hour, minute)
    match = _ISO_DATE.fullmatch(text)
    if match:
        return ("date", int(match.group(1)), int(match.group(2)), int(match.group(3)))
    for pattern in _DATES:
        match = pattern.fullmatch(text)
        if match:
            month = 1 + [name[:3] for name in _MONTHS].index(match.group("month")[:3].lower())
            return ("date", int(match.group("year") or 0), month, int(match.group("day")))
    return None


def _ratio(text: str) -> tuple[Fraction, ...]:
    """Return the terms of a ratio such as `2:3:4`, divided by the first; empty for other text."""
    if not _RATIO.fullmatch(text):
        return ()
    terms = [Fraction(term) for term in text.split(":")]
    return tuple(term / terms[0] for term in terms)


def _is_choice_with_text(gold: str, answer: str) -> bool:
    r"""Return whether the gold is a letter and the answer this letter with its text, such as `(B) 12`."""
    letter, match = _LETTER.match(gold), _CHOICE.match(answer)
    if not letter or not match or letter.group(1) != match.group(1):
        return False
    return not _SECOND_ANSWER.match(match.group(2))


# Values


class _Comparison:
    def __init__(self, rounded_source: str) -> None:
        self._rounded = decimal_of(rounded_source) if rounded_source else None

    def equal(self, gold: Value, answer: Value) -> bool:
        return self._same(_without_single(_as_named_list(gold)), _without_single(_as_named_list(answer)))

    def _same(self, gold: Value, answer: Value) -> bool:
        """Return whether two values are equal. A set with one element is not equal to this element."""
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self._relations_equal(gold, answer)
        if isinstance(gold, Items) or isinstance(answer, Items):
            return self._items_equal(gold, answer)
        if isinstance(gold, Text) or isinstance(answer, Text):
            return bool(gold == answer)
        return self._quantities_equal(gold, answer)

    def _quantities_equal(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, Quantity) and isinstance(answer, Quantity):
            return gold.unit == answer.unit and self._scalars_equal(gold.value, answer.value)
        gold = gold.value if isinstance(gold, Quantity) else gold
        answer = answer.value if isinstance(answer, Quantity) else answer
        return self._scalars_equal(gold, answer)

    def _scalars_equal(self, gold: Value, answer: Value) -> bool:
        if not is_scalar(gold) or not is_scalar(answer):
            return False
        return scalars_equal(gold, answer) or self._is_rounded(gold)

    def _is_rounded(self, gold: Value) -> bool:
        if self._rounded is None:
            return False
        value, step = self._rounded
        if isinstance(gold, Fraction):
            return abs(gold - value) <= step / 2
        if gold.free_symbols:
            return False
        distance = sympy_module().N(to_sympy(value) - gold, 50)
        return bool(distance.is_real and abs(distance) <= to_sympy(step) / 2)

    # Several values

    def _items_equal(self, gold: Value, answer: Value) -> bool:
        if not isinstance(gold, Items) or not isinstance(answer, Items):
            return False
        gold, answer = _as_union(gold), _as_union(answer)
        items = (*gold.items, *answer.items)
        if len(items) > _MAX_ITEMS and not all(isinstance(item, Fraction) for item in items):
            return False
        unordered = {"list", "or", "set"}
        if gold.kind in unordered and answer.kind in unordered:
            if "set" in (gold.kind, answer.kind):
                return self._equal_in_any_order(self._distinct(gold.items), self._distinct(answer.items))
            return self._equal_in_any_order(gold.items, answer.items)
        if gold.kind != answer.kind or len(gold.items) != len(answer.items):
            return False
        if gold.kind in ("union", "cap"):
            return self._equal_in_any_order(gold.items, answer.items)
        return all(map(self._same, gold.items, answer.items))

    def _distinct(self, items: tuple) -> tuple:
        distinct: list[Value] = []
        items = tuple(dict.fromkeys(items))
        if all(isinstance(item, Fraction) for item in items):
            return items
        for item in items:
            if not any(self._same(item, other) for other in distinct):
                distinct.append(item)
        return tuple(distinct)

    def _equal_in_any_order(self, gold: tuple, answer: tuple) -> bool:
        if len(gold) != len(answer):
            return False
        if self._rounded is None and all(isinstance(item, Fraction) for item in (*gold, *answer)):
            return sorted(gold) == sorted(answer)
        gold_names, answer_names = ([_named(item)[0] for item in items] for items in (gold, answer))
        if len({*gold_names, *answer_names}) > 2 and "" in (*gold_names, *answer_names):
            return False  # as x = 1, y = 2 and 2, 1
        left = list(answer)
        for item in gold:
            index = next((index for index, other in enumerate(left) if self._same(item, other)), None)
            if index is None:
                return False
            del left[index]
        return True

    # Relations

    def _relations_equal(self, gold: Value, answer: Value) -> bool:
        gold, answer = _exact_side(gold), _exact_side(answer)
        if not isinstance(gold, Relation) and not isinstance(answer, Relation):
            return self.equal(gold, answer)
        gold_region, answer_region = _region(gold), _region(answer)
        if gold_region and answer_region:
            names = {gold_region[0], answer_region[0]} - {""}
            return len(names) < 2 and self.equal(gold_region[1], answer_region[1])
        gold_name, gold_value = _named(gold)
        answer_name, answer_value = _named(answer)
        if gold_name and answer_name:
            if gold_name == answer_name:
                return self.equal(gold_value, answer_value)
            return self._equations_equal(gold, answer)
        if gold_name or answer_name:
            other = answer if gold_name else gold
            if not isinstance(other, Relation):
                return self.equal(gold_value, answer_value)
            is_solved = not _letters(gold_value if gold_name else answer_value)
            return not is_solved and self._equations_equal(gold, answer)
        if gold_region or answer_region:
            return False
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._equations_equal(gold, answer) or self._chains_equal(gold, answer)
        if isinstance(answer, Relation) and set(answer.operators) == {"="} and not _letters(answer):
            return all(self.equal(gold, part) for part in answer.parts)  # such as 2 + 3 = 5
        return False

    def _equations_equal(self, gold: Relation, answer: Relation) -> bool:
        """Return whether two equations, or two inequalities, differ by a factor only."""
        gold_form, answer_form = _standard_form(gold), _standard_form(answer)
        if gold_form is None or answer_form is None or gold_form[1] != answer_form[1]:
            return False
        if not gold_form[0].free_symbols or gold_form[0].free_symbols != answer_form[0].free_symbols:
            return False
        ratio = sympy_module().cancel(gold_form[0] / answer_form[0])
        if not ratio.is_number or ratio.is_zero or not ratio.is_finite:
            return False
        return gold_form[1] in ("=", "!=") or bool(ratio.is_positive)

    def _chains_equal(self, gold: Relation, answer: Relation) -> bool:
        gold, answer = _ascending(gold), _ascending(answer)
        return gold.operators == answer.operators and all(map(self.equal, gold.parts, answer.parts))


def _without_single(value: Value) -> Value:
    if isinstance(value, Items) and value.kind == "set" and len(value.items) == 1:
        return value if isinstance(value.items[0], Items) and value.items[0].kind == "set" else value.items[0]
    return value


def _exact_side(value: Value) -> Value:
    r"""Return 22/7 for `\frac{22}{7} \approx 3.143`, if it rounds to that decimal, and other values as they are."""
    if not isinstance(value, Relation) or value.operators != ("~",) or not is_scalar(value.parts[0]):
        return value
    return value.parts[0] if _Comparison(value.sources[1])._is_rounded(value.parts[0]) else value


def _as_named_list(value: Value) -> Value:
    """Return a list of solutions for one letter as a relation of this letter. Examples of such lists are `x = 1, x = 2`
    and `x = 1, 2`. Return other values as they are."""
    if not isinstance(value, Items) or value.kind not in ("list", "or"):
        return value
    regions = [region for item in value.items if (region := _region(item))]
    if value.kind == "or" and len(regions) == len(value.items):
        name = regions[0][0]
        if name and all(region[0] == name for region in regions):
            union = Items("union", tuple(region[1] for region in regions))
            return Relation((Text(name), union), ("in",), (name, ""))
    name = _named(value.items[0])[0]
    if not name:
        return value
    values = []
    for item in value.items:
        own_name, own_value = _named(item)
        if own_name not in ("", name) or (not own_name and isinstance(item, Relation)):
            return value
        values.append(own_value)
    return Relation((Text(name), Items("list", tuple(values))), ("=",), (name, ""))


def _named(value: Value) -> tuple[str, Value]:
    r"""Return the name and the value of a relation such as `x = 3`, `x \in A` or `\text{area} = 12`. For other values,
    return an empty name and the value itself.

    In a chain of equations such as `x = 2 + 1 = 3`, all parts behind the name must be equal. The value is the last
    part.
    """
    if not isinstance(value, Relation) or not set(value.operators) <= {"=", "~", "in"}:
        return "", value
    name = "".join(value.sources[0].split())
    if value.operators == ("=",) and not _NAME.fullmatch(name) and _NAME.fullmatch("".join(value.sources[1].split())):
        return _named(Relation(value.parts[::-1], value.operators, value.sources[::-1]))
    parts = list(value.parts[1:])
    if not isinstance(value.parts[0], Text) and not _NAME.fullmatch(name):
        return "", value
    if len(parts) > 1 and value.operators[-1] == "~":
        parts.pop()
    comparison = _Comparison("")
    if not all(comparison.equal(parts[0], part) for part in parts[1:]):
        return "", value
    if value.parts[0] in _letters(parts[-1]):
        return "", value  # such as x = x and x = 2x
    return name, parts[-1]


def _letters(value: Value) -> set:
    if isinstance(value, tuple):
        return set().union(*(_letters(item) for item in value)) if not isinstance(value, str) else set()
    return set() if isinstance(value, (Fraction, str)) else set(value.free_symbols)


def _region(value: Value) -> tuple[str, Items] | None:
    r"""Return the letter and the set of numbers of a relation, such as `x < 3`, `1 < x \le 2`, `x \ne 3` and
    `x \in [1, 2]`. For an interval or a union, return an empty letter and the set. Return None for other values."""
    if isinstance(value, Items):
        return ("", _as_union(value)) if _is_region(value) else None
    if not isinstance(value, Relation) or len(value.parts) > 3:
        return None
    if value.operators in (("in",), ("!=",)):
        return _membership(value)
    if not set(value.operators) <= _FLIPPED.keys():
        return None
    value = _ascending(value)
    if not set(value.operators) <= {"<", "<="}:
        return None
    names = ["".join(source.split()) for source in value.sources]
    index = 1 if len(names) == 3 else 0 if _NAME.fullmatch(names[0]) else 1
    others = [part for n, part in enumerate(value.parts) if n != index]
    if not _NAME.fullmatch(names[index]) or not all(is_scalar(part) and not _letters(part) for part in others):
        return None
    low, opening, high, closing = -infinity(), "(", infinity(), ")"
    if index == 1:
        low, opening = value.parts[0], "(" if value.operators[0] == "<" else "["
    if index == 0 or len(names) == 3:
        high, closing = value.parts[-1], ")" if value.operators[-1] == "<" else "]"
    return names[index], Items(opening + closing, (low, high))


def _membership(relation: Relation) -> tuple[str, Items] | None:
    r"""Return the letter and the set of `x \in [1, 2]` and `x \ne 3`."""
    name, right = "".join(relation.sources[0].split()), relation.parts[1]
    if not _NAME.fullmatch(name):
        return None
    if relation.operators == ("in",):
        return (name, _as_union(right)) if _is_region(right) else None
    if not is_scalar(right) or _letters(right):
        return None
    return name, _as_union(Items("minus", (Items("()", (-infinity(), infinity())), Items("set", (right,)))))


def _is_region(value: Value) -> bool:
    """Return whether a value is an interval, a union or a difference of sets."""
    if not isinstance(value, Items):
        return False
    return value.kind in ("union", "minus") or (len(value.items) == 2 and value.kind in ("()", "[]", "(]", "[)"))


def _ascending(relation: Relation) -> Relation:
    if not set(relation.operators) <= {">", ">="}:
        return relation
    operators = tuple(_FLIPPED[operator] for operator in reversed(relation.operators))
    return Relation(relation.parts[::-1], operators, relation.sources[::-1])


def _as_union(value: Items) -> Items:
    r"""Return `\mathbb{R} \setminus \{1, 2\}` as a union of intervals, and other items as they are."""
    if value.kind != "minus":
        return value
    reals, removed = value.items
    if not isinstance(reals, Items) or reals.kind != "()" or not isinstance(removed, Items) or removed.kind != "set":
        return value
    if list(reals.items) != [-infinity(), infinity()]:
        return value
    if not all(is_scalar(item) and not _letters(item) for item in removed.items):
        return value
    sympy = sympy_module()
    bounds = [reals.items[0], *sorted(removed.items, key=lambda item: sympy.N(to_sympy(item), 30)), reals.items[1]]
    return Items("union", tuple(Items("()", pair) for pair in zip(bounds, bounds[1:])))


def _standard_form(relation: Relation) -> tuple[Any, str] | None:
    """Return the expression that an equation or inequality compares with 0, and `=`, `!=`, `>` or `>=`."""
    if len(relation.parts) != 2 or not all(map(is_scalar, relation.parts)):
        return None
    left, right = map(to_sympy, relation.parts)
    operator = relation.operators[0]
    if operator in ("<", "<="):
        return right - left, _FLIPPED[operator]
    return (left - right, operator) if operator in ("=", "!=", ">", ">=") else None


# Scalars


def scalars_equal(gold: Any, answer: Any) -> bool:
    """Return whether two exact numbers or expressions are proven to be equal."""
    if isinstance(gold, Fraction) and isinstance(answer, Fraction):
        return gold == answer
    gold, answer = to_sympy(gold), to_sympy(answer)
    difference = gold - answer
    if difference.is_zero:
        return True
    if _differ_numerically(gold, answer, difference):
        return False
    sympy = sympy_module()
    if sympy.expand(difference.rewrite([sympy.sin, sympy.cos], sympy.exp)) == 0:
        return True
    if sympy.expand(difference) == 0:
        return True
    return bool(sympy.simplify(difference) == 0 if difference.free_symbols else difference.equals(0))


def _differ_numerically(gold: Any, answer: Any, difference: Any) -> bool:
    """Return whether a numeric evaluation shows that two expressions differ. If they have no letters, their difference
    is evaluated until one of its digits is certain. Otherwise both are evaluated at `_POINTS`, to 50 digits."""
    evalf = importlib.import_module("sympy.core.evalf").evalf
    letters = sorted(difference.free_symbols, key=str)
    if not letters:
        real, imaginary, real_bits, imaginary_bits = evalf(difference, 60, {"maxprec": _MAX_PRECISION_BITS})
        return bool((real and (real_bits or 0) > 1) or (imaginary and (imaginary_bits or 0) > 1))
    sympy = sympy_module()
    for point in _POINTS:
        values = {
            letter: to_sympy(abs(point) * (n + 1) if letter.is_positive else point * (n + 1))
            for n, letter in enumerate(letters)
        }
        left, right = (expression.evalf(50, subs=values) for expression in (gold, answer))
        if left.is_number and right.is_number and left.is_finite and right.is_finite:
            distance, size = abs(left - right), abs(left) + abs(right)
            if distance > size * sympy.Float("1e-30", 50) > sympy.Float("1e-70", 50):
                return True
    return False
