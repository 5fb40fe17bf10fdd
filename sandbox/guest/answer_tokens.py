"""Normalises the text of an answer, and splits it into tokens. The text is never evaluated."""

from __future__ import annotations

import re
from typing import NamedTuple

from answer_numbers import Unreadable
from answer_units import SHORT_UNITS

_GREEK_WORDS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell"
)
GREEK = frozenset(_GREEK_WORDS.split())
_SIGNS_AND_LATEX = r"""
    × \times ✕ \times ⨯ \times · \cdot ⋅ \cdot ∙ \cdot ÷ \div π \pi ∞ \infty ≤ \le ≥ \ge ≠ \ne ≈ \approx ± \pm ∓ \mp
    ∪ \cup ∩ \cap ∖ \setminus ∈ \in ∅ \emptyset ° ^\circ α \alpha β \beta γ \gamma θ \theta λ \lambda μ \mu σ \sigma
    φ \phi ω \omega ½ \frac{1}{2} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ℝ \mathbb{R} ℤ \mathbb{Z}
    ² ^2 ³ ^3 ％ %
"""
_LATEX_BY_SIGN = re.findall(r"(\S) (\S+)", _SIGNS_AND_LATEX)
_UNICODE = {
    **{sign: f"{latex} " for sign, latex in _LATEX_BY_SIGN},
    **dict.fromkeys("−–‐‑", "-"),
    **dict.fromkeys("\u2009\u202f\u2006\u2008", r"\,"),  # thin spaces, which may group digits
    **dict.fromkeys("\u00a0\u2003\u2002", " "),
    **dict.fromkeys("’′", "'"),
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
        (r"(\.[0-9]*)\\bar\s*(?:\{([0-9]+)\}|([0-9]))", r"\1\\overline{\2\3}"),
        (r"\\\\\s*\[[0-9.]+\s*(?:pt|em|ex|mm|cm)\]", r"\\\\ "),
    )
)
_MARKUP = (("**", "**"), ("__", "__"), ("```", "```"), ("`", "`"), ("*", "*"))
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_PAIRED_DOLLARS = re.compile(r"(?<!\\)\$((?=[^$\s])[^$]*[^$\s\\])\$(?![0-9$])")
"""A formula between two dollar signs. `$5 and $6` contains no formula, but two prices."""
_DOLLARS = re.compile(r"(?<!\\)\$(?!-?[0-9.])")


def normalise(text: str) -> str:
    """Return `text` without the marks of Markdown and LaTeX that have no meaning in mathematics."""
    text = _stripped(text.strip())
    text = _DOLLARS.sub(" ", _PAIRED_DOLLARS.sub(r" \1 ", text)).translate(_TRANSLATED)
    text = re.sub(r",\\!(?=[0-9]{3})", ",", text)
    text = _GROUPED.sub(lambda match: re.sub(_GROUP_SPACE, "", match.group()), text)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _stripped(text: str) -> str:
    """Remove the marks around the whole text (bold, code, mathematics) and a final full stop."""
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


def plain(text: str, keeps_case: bool = False) -> str:
    """Return normalised text in the form in which two answers are compared as text. If `keeps_case` is false, words are
    in lower case."""
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 ", text)
    text = " ".join(text.split())
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)
    return text.lower() if not keeps_case and re.fullmatch(r"[A-Za-z ,'()-]*[A-Za-z]{2}[A-Za-z ,'()-]*", text) else text


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
    elif style in ("vec", "hat"):
        raise Unreadable
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
