"""The units that the answer reader knows. Units are compared by name; no value is converted from one into another."""

from __future__ import annotations

CURRENCIES = {"$": "dollar", "\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}

_ALIASES = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "g": "gram",
    "mg": "milligram",
    "kg": "kilogram",
    "pound": "lb lbs",
    "ounce": "oz",
    "ton": "tonne",
    "second": "s sec secs",
    "minute": "min mins",
    "hour": "h hr hrs",
    "year": "yr",
    "liter": "L l litre",
    "ml": "mL milliliter millilitre",
    "gallon": "gal",
    "dollar": "USD bucks",
    "euro": "EUR",
    "degree": "deg",
    "radian": "rad",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "kw": "kW kilowatt",
    "volt": "V",
    "ampere": "A amp",
    "hz": "Hz hertz",
    "pascal": "Pa",
    "kelvin": "K",
    "mole": "mol",
    "km/hour": "kmh kph",
    "person": "people persons",
    "man": "men",
    "woman": "women",
    "child": "children",
    "box": "boxes",
    "candy": "candies",
    "penny": "pennies",
}
"""Units, each with its other names."""
_UNITS_WITHOUT_ALIAS = """
    day week month cup quart pint cent yen rupee ohm acre hectare mph unit point digit side edge way time student
    boy girl apple orange egg book page coin marble ticket game ball car tree flower dog cat animal bag bottle
    cookie slice piece step mark solution number triangle square sq cubic
"""
_BY_NAME = {
    word: unit
    for unit, aliases in (_ALIASES | dict.fromkeys(_UNITS_WITHOUT_ALIAS.split(), "")).items()
    for name in (unit, *aliases.split())
    for word in ((name,) if len(name) == 1 else (name, f"{name}s"))
}
"""Unit by each of its names. A name of two or more letters may have a plural s."""
_SHORT_UNIT_NAMES = (
    "cm mm km in ft yd mi mg kg lb lbs oz sec min hr hrs yr mL ml gal USD EUR deg rad kW Hz Pa mol mph sq kmh kph"
)
SHORT_UNITS = frozenset(_SHORT_UNIT_NAMES.split())
"""Names of two or three letters that are units if they follow a number. Elsewhere each of their letters is a variable,
unless they are in `\\text`."""
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3"}


def unit_of(pieces: list[str]) -> str | None:
    """Return the name of a unit from its words, powers such as "^2", and "/"; None if a word is no unit."""
    words: list[str] = []
    power = ""
    for piece in pieces:
        name = _name_of(piece)
        if name in ("^2", "^3") and words and words[-1] != "/" and not power:
            words[-1] += name
        elif name in _POWERS:
            power = _POWERS[name]
        elif not name or name.startswith("^"):
            return None
        else:
            words.append(name + power)
            power = ""
    if words[:1] == ["mph"]:
        words[:1] = ["mile", "/", "hour"]
    # Units stand on both sides of each "/". Two units beside each other have no meaning that is known here.
    is_alternating = len(words) % 2 == 1 and all((word == "/") == (n % 2 == 1) for n, word in enumerate(words))
    return "".join(words) if is_alternating and not power else None


def _name_of(piece: str) -> str:
    if piece.startswith("^") or piece in ("/", "per"):
        return piece.replace("per", "/")
    return _BY_NAME.get(piece) or _BY_NAME.get(piece.lower() if len(piece) > 1 else "", "")
