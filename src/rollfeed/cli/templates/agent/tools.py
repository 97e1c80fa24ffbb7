"""Tools: functions that a model may call. Name, types and docstring are what it is shown."""


def distance(city: str, other: str, unit: str = "km") -> str:
    """Tell how far two cities are from each other. Cities by their English names."""
    known = {frozenset({"Paris", "Rome"}): 1106, frozenset({"Oslo", "Rome"}): 2008}
    kilometres = known.get(frozenset({city, other}))
    if kilometres is None:
        return "unknown"
    return f"{kilometres if unit == 'km' else round(kilometres / 1.609)} {unit}"
