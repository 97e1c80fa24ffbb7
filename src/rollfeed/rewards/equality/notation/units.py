"""Units that may stand after a number."""

from __future__ import annotations

import re

_ALIASES = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "dm": "dm decimeter decimeters decimetre decimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres kms",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams gm",
    "kg": "kg kilogram kilograms kgs kilo kilos",
    "t": "ton tons tonne tonnes",
    "oz": "oz ounce ounces",
    "lb": "lb lbs pound pounds",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "l": "L l liter liters litre litres",
    "gal": "gallon gallons gal",
    "s": "s sec secs second seconds",
    "ms": "ms millisecond milliseconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "d": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "degree": "degree degrees deg",
    "radian": "rad radian radians",
    "dollar": "dollar dollars usd USD",
    "euro": "euro euros eur EUR",
    "cent": "cent cents",
    "n": "N newton newtons",
    "j": "J joule joules",
    "kj": "kJ kilojoule kilojoules",
    "w": "W watt watts",
    "kw": "kW kilowatt kilowatts",
    "v": "V volt volts",
    "a": "A ampere amperes amp amps",
    "k": "K kelvin kelvins",
    "hz": "Hz hertz",
    "pa": "Pa pascal pascals",
    "mol": "mol mole moles",
    "mph": "mph",
    "kmh": "kmh kph",
    "unit": "unit units",
    "percent": "percent",
    "am": "AM",
    "pm": "PM",
}
SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
"""Words between a number and its unit that are part of the number."""
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_POWER_BEFORE = re.compile(r"\b(square|sq|cubic|cu)\.? ([A-Za-z]+)", re.IGNORECASE)
_POWER_AFTER = re.compile(r" (squared|cubed)\b", re.IGNORECASE)
_HALF_DAYS = frozenset(["am", "pm"])
_CANONICAL = {word: unit for unit, words in _ALIASES.items() for word in words.split()}


def is_unit(word: str) -> bool:
    """Whether ``word`` is a known unit; single letters are, too."""
    return word in _CANONICAL or word.lower() in _CANONICAL


def canonical_unit(text: str) -> str:
    """Return one name for the spellings of a unit; empty for what is no known unit, or only counts things."""
    half_day = text.replace(".", "").lower()
    if half_day in _HALF_DAYS:
        return half_day
    text = _POWER_BEFORE.sub(lambda match: f"{match[2]} ^ {_POWERS[match[1].lower()]}", text.replace(" per ", " / "))
    text = _POWER_AFTER.sub(lambda match: f" ^ {_POWERS[match[1].lower()]}", text)
    parts = [_lookup(part) if part.isalpha() else part for part in text.replace("/", " / ").replace("^", " ^ ").split()]
    return " ".join(parts) if all(parts) and "unit" not in parts else ""


def _lookup(word: str) -> str:
    return _CANONICAL.get(word) or _CANONICAL.get(word.lower(), "")
