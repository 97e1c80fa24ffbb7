"""Sets of real numbers: what inequalities describe, as unions of intervals."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rollfeed.rewards.equality.complexity import check_complexity
from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.tree import Apply, Constant, Node, Relation, Symbol, Values, walk

MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_INFINITY = Constant("infinity")
_MINUS_INFINITY = Apply("negate", (_INFINITY,))
_REALS = Values("(", ")", (_MINUS_INFINITY, _INFINITY))
_MAX_HOLES = 8


def names(node: Node) -> set[str]:
    """Return the variables in a tree."""
    return {part.name for part in walk(node) if isinstance(part, Symbol)}


def as_region(relation: Relation) -> Node | None:
    """Return the region that ``x > 3``, ``0 < x <= 1`` or ``x != 0`` describes; None for other relations."""
    sides, operators = relation.sides, relation.operators
    if len(operators) == 1 and operators[0] in MIRRORED and isinstance(sides[1], Symbol) and not names(sides[0]):
        sides, operators = (sides[1], sides[0]), (MIRRORED[operators[0]],)
    if len(operators) == 1 and isinstance(sides[0], Symbol) and not names(sides[1]):
        match operators[0]:
            case ">" | ">=":
                return Values("[" if operators[0] == ">=" else "(", ")", (sides[1], _INFINITY))
            case "<" | "<=":
                return Values("(", "]" if operators[0] == "<=" else ")", (_MINUS_INFINITY, sides[1]))
            case "!=":
                return Apply("difference", (_REALS, Values("{", "}", (sides[1],))))
    if len(operators) == 2 and isinstance(sides[1], Symbol) and not names(sides[0]) and not names(sides[2]):
        if set(operators) <= {">", ">="}:
            sides, operators = sides[::-1], tuple(MIRRORED[each] for each in reversed(operators))
        if set(operators) <= {"<", "<="}:
            opening = "[" if operators[0] == "<=" else "("
            return Values(opening, "]" if operators[1] == "<=" else ")", (sides[0], sides[2]))
    return None


def joined(members: Sequence[Node], *, all_hold: bool) -> Node | None:
    """Return the region of several inequalities in one variable, of which one or all hold; None if there is none.

    Of inequalities that all hold, one from below and one from above are understood.
    """
    variables = set().union(*(names(member) for member in members if isinstance(member, Relation)))
    regions = [as_region(member) if isinstance(member, Relation) else member for member in members]
    if len(variables) != 1 or len(members) < 2 or not all(is_interval(region) for region in regions):
        return None
    intervals = [region for region in regions if isinstance(region, Values)]
    if not all_hold:
        tree: Node = intervals[0]
        for interval in intervals[1:]:
            tree = Apply("union", (tree, interval))
        return tree
    above = [each for each in intervals if each.members[1] == _INFINITY]
    below = [each for each in intervals if each.members[0] == _MINUS_INFINITY]
    if len(intervals) != 2 or len(above) != 1 or len(below) != 1:
        return None
    return Values(above[0].opening, below[0].closing, (above[0].members[0], below[0].members[1]))


def is_interval(node: Node | None) -> bool:
    """Whether a tree may be an interval; a pair looks the same."""
    return isinstance(node, Values) and len(node.members) == 2 and node.opening in ("(", "[")


def without_holes(node: Node) -> Node:
    """Return a region with every point that is taken out of an interval written as the gap of two."""
    match node:
        case Apply(function="union", arguments=(left, right)):
            return Apply("union", (without_holes(left), without_holes(right)))
        case Apply(function="difference", arguments=(Values() as region, Values(opening="{", members=holes))):
            points = [_point(hole) for hole in holes]
            known = sorted(point for point in points if point is not None)
            if not is_interval(region) or len(known) != len(points) or len(points) > _MAX_HOLES:
                return node
            return _punctured(region, dict(zip(points, holes, strict=True)), known)
        case _:
            return node


def _punctured(interval: Values, written: dict[Fraction | None, Node], points: Sequence[Fraction]) -> Node:
    parts: list[Values] = [interval]
    for point in points:
        last = parts.pop()
        low, high = (_point(end) for end in last.members)
        if (low is not None and point < low) or (high is not None and point > high):
            parts.append(last)
        elif point == low:
            parts.append(Values("(", last.closing, last.members))
        elif point == high:
            parts.append(Values(last.opening, ")", last.members))
        else:
            hole = written[point]
            parts.append(Values(last.opening, ")", (last.members[0], hole)))
            parts.append(Values("(", last.closing, (hole, last.members[1])))
    tree: Node = parts[0]
    for part in parts[1:]:
        tree = Apply("union", (tree, part))
    return tree


def _point(node: Node) -> Fraction | None:
    check_complexity(node)
    return exact_value(node)
