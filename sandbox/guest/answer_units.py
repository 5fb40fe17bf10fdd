"""The units that the answer reader knows. Units are compared by name; no value is converted from one into another."""

from __future__ import annotations

CURRENCIES = {"$": "dollar", "\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}

_NAMES = {
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
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "liter": "L l litre",
    "ml": "mL milliliter millilitre",
    "gallon": "gal",
    "cup": "",
    "quart": "",
    "pint": "",
    "dollar": "USD bucks",
    "cent": "",
    "euro": "EUR",
    "yen": "",
    "rupee": "",
    "degree": "deg",
    "radian": "rad",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "kw": "kW kilowatt",
    "volt": "V",
    "ampere": "A amp",
    "ohm": "",
    "hz": "Hz hertz",
    "pascal": "Pa",
    "kelvin": "K",
    "mole": "mol",
    "acre": "",
    "hectare": "",
    "mph": "",
    "km/hour": "kmh kph",
    "unit": "",
    "point": "",
    "digit": "",
    "side": "",
    "edge": "",
    "way": "",
    "time": "",
    "person": "people persons",
    "man": "men",
    "woman": "women",
    "child": "children",
    "student": "",
    "boy": "",
    "girl": "",
    "apple": "",
    "orange": "",
    "egg": "",
    "book": "",
    "page": "",
    "coin": "",
    "marble": "",
    "ticket": "",
    "game": "",
    "ball": "",
    "car": "",
    "tree": "",
    "flower": "",
    "dog": "",
    "cat": "",
    "animal": "",
    "bag": "",
    "box": "boxes",
    "bottle": "",
    "candy": "candies",
    "cookie": "",
    "slice": "",
    "piece": "",
    "step": "",
    "mark": "",
    "penny": "pennies",
    "solution": "",
    "number": "",
    "triangle": "",
    "square": "",
    "sq": "",
    "cubic": "",
}
_BY_NAME = {
    word: unit
    for unit, names in _NAMES.items()
    for name in (unit, *names.split())
    for word in ((name,) if len(name) < 2 else (name, name + "s"))
}
_SHORT_UNIT_WORDS = (
    "cm mm km in ft yd mi mg kg lb lbs oz sec min hr hrs yr mL ml gal USD EUR deg rad kW Hz Pa mol mph sq kmh kph"
)
SHORT_UNITS = frozenset(_SHORT_UNIT_WORDS.split())
"""Units of two or three letters that are read behind a number without `\\text`; alone they would be letters."""
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
