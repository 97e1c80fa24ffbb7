"""Answers with parts: compared part by part, down to scalars.

``x = 5`` means 5, ``x > 3`` an interval, ``a ± b`` two values; a list in braces or without brackets has no
order, one in round or square brackets has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rollfeed.rewards.equality.complexity import check_complexity
from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.regions import MIRRORED, as_region, joined, names, without_holes
from rollfeed.rewards.equality.tree import (
    Apply,
    Based,
    Equality,
    Matrix,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
    TooComplexError,
    Values,
    walk,
)

_MAX_UNORDERED = 24
_MAX_SIGNS = 3
_FUNCTION_NAMES = frozenset("fghpyFGHPV")
_ARGUMENT_NAMES = frozenset("xtnzsu")


class CompareScalars(Protocol):
    """Compares what has no parts."""

    def __call__(self, left: Node, right: Node) -> Equality:
        """Compare two values."""

    def up_to_a_factor(self, left: Node, right: Node) -> Equality:
        """Compare ``left = 0`` with ``right = 0``."""


def compare_structures(left: Node, right: Node, scalars: CompareScalars) -> Equality:
    """Compare two trees. ``scalars`` compares what has no parts."""
    a, b = simplified(left), simplified(right)
    if isinstance(a, Relation) and isinstance(b, Relation):
        return _compare_relations(a, b, scalars)
    a, b = without_holes(_meaning(a, b)), without_holes(_meaning(b, a))
    match a, b:
        case (Values(opening="", members=parts), Values(opening="(", closing=")", members=values)) | (
            Values(opening="(", closing=")", members=values),
            Values(opening="", members=parts),
        ) if _assigned(parts) is not None:
            return _compare_groups(Values("(", ")", _assigned(parts) or ()), Values("(", ")", values), scalars)
        case Values(), Values():
            return _compare_groups(a, b, scalars)
        case (Values(opening="{", members=(member,)), other) | (other, Values(opening="{", members=(member,))):
            return compare_structures(member, other, scalars)
        case Matrix(), Matrix():
            return _compare_rows(a.rows, b.rows, scalars)
        case (Matrix(), Values()) | (Values(), Matrix()):
            return _compare_rows(_rows(a), _rows(b), scalars)
        case Based(), Based():
            return Equality.EQUAL if a == b else Equality.DIFFERENT
        case (Relation(), _) | (_, Relation()) | (Values(), _) | (_, Values()) | (Matrix(), _) | (_, Matrix()):
            return Equality.DIFFERENT
        case Apply(function="ratio"), Apply(function="ratio"):
            return _all_equal(_ratio_terms(a), _ratio_terms(b), scalars)
        case Apply(), Apply() if a.function == b.function and a.function in ("union", "intersection", "difference"):
            return _compare_unions(a, b, scalars)
    if any(isinstance(part, Values | Matrix | Based | Relation) or _is_set_operation(part) for part in _both(a, b)):
        return _compare_compounds(a, b, scalars)
    return scalars(a, b)


def simplified(node: Node) -> Node:
    """Return the value that an answer stands for: without ``x =``, with both signs of ``±`` written out."""
    if isinstance(node, Values) and not node.opening:
        region = joined(node.members, all_hold=node.closing == "and")
        if region is not None:
            return region
        flat: list[Node] = []
        for member in map(simplified, _without_shared_name(node.members)):
            flat += member.members if isinstance(member, Values) and not member.opening else [member]
        return Values("", "", tuple(flat))
    if isinstance(node, Relation):
        return _simplified_relation(node)
    return _scaled(_signs_written_out(node))


def _scaled(node: Node) -> Node:
    """Return a number times a matrix as one matrix."""
    match node:
        case Apply(function="negate", arguments=(Matrix(rows=rows),)):
            return Matrix(tuple(tuple(Apply("negate", (cell,)) for cell in row) for row in rows))
        case Apply(function="multiply", arguments=(*factors, Matrix(rows=rows))) if not any(
            isinstance(part, Matrix | Values) for factor in factors for part in walk(factor)
        ):
            return Matrix(tuple(tuple(Apply("multiply", (*factors, cell)) for cell in row) for row in rows))
        case _:
            return node


def _simplified_relation(relation: Relation) -> Node:
    value = relation.sides[-1]
    if set(relation.operators) <= {"=", "to"} and (_is_name(relation.sides[0]) or len(relation.operators) > 1):
        if isinstance(value, Symbol) and not _is_name(relation.sides[0]):
            return relation
        written = _signs_written_out(value)
        if isinstance(written, Values) and not written.opening:
            return written
        return Relation(("=",), (relation.sides[0], written)) if _is_name(relation.sides[0]) else written
    if relation.operators == ("=",) and _is_name(value) and not names(relation.sides[0]):
        return simplified(Relation(("=",), (value, relation.sides[0])))  # 5 = x
    if relation.operators == ("in",):
        return simplified(value)
    return relation


def _meaning(node: Node, other: Node) -> Node:
    """Return what a relation stands for beside something that is none."""
    if isinstance(node, Relation) and not isinstance(other, Relation):
        if node.operators == ("=",) and _is_name(node.sides[0]):
            return node.sides[1]
        if node.operators == ("=",) and not names(node.sides[0]) and not isinstance(node.sides[0], Values):
            return node if _contradicts(*node.sides) else node.sides[1]  # 2 + 3 = 5
        return as_region(node) or node
    return node


def _contradicts(left: Node, right: Node) -> bool:
    check_complexity(left)
    check_complexity(right)
    a, b = exact_value(left), exact_value(right)
    return a is not None and b is not None and a != b


# Names and signs


def _is_name(node: Node) -> bool:
    match node:
        case Symbol():
            return True
        case Apply(function="multiply", arguments=(Symbol(name=name), Number())):
            return name.rstrip("'") in _FUNCTION_NAMES or name.isupper()  # P(2)
        case Apply(function="multiply", arguments=(Symbol(name=name), Symbol(name=argument))):
            if name.isupper() and argument.isupper():
                return True  # the length AB
            is_function = name.isupper() or name.rstrip("'") in _FUNCTION_NAMES
            return is_function and argument in _ARGUMENT_NAMES and name + argument != "yx"  # f(x)
        case Apply(
            function="multiply", arguments=(Apply(function="power", arguments=(Symbol(name=name), _)), Symbol())
        ):
            return name in _FUNCTION_NAMES  # the inverse of f
        case Apply(function="sin" | "cos" | "tan", arguments=(Symbol(),)):
            return True
        case Apply(function="divide", arguments=(above, below)):
            return _is_differential(above) and _is_differential(below)
        case Values(opening="(", members=members):
            return all(isinstance(member, Symbol) for member in members)
        case _:
            return False


def _is_differential(node: Node) -> bool:
    match node:
        case Apply(function="multiply", arguments=(Symbol(name="d"), Symbol())):
            return True
        case _:
            return False


def _assigned(members: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return the values of ``x = 3, y = 4`` in the order of the names, or None for another list."""
    values: dict[str, Node] = {}
    for member in members:
        if not isinstance(member, Relation) or member.operators != ("=",) or not isinstance(member.sides[0], Symbol):
            return None
        values[member.sides[0].name] = member.sides[1]
    return tuple(values[name] for name in sorted(values)) if len(values) == len(members) > 1 else None


def _without_shared_name(members: Sequence[Node]) -> Sequence[Node]:
    """Return the members with ``n = 1, 2, 3`` and ``x = 3, x = 5`` as plain values."""
    first = members[0]
    if not isinstance(first, Relation) or first.operators != ("=",) or not isinstance(first.sides[0], Symbol):
        return members
    plain = []
    for member in members:
        if isinstance(member, Relation):
            if member.operators != ("=",) or member.sides[0] != first.sides[0]:
                return members
            plain.append(member.sides[1])
        else:
            plain.append(member)
    return plain


def _signs_written_out(node: Node) -> Node:
    num_signs = sum(isinstance(part, Apply) and part.function in ("pm", "mp") for part in walk(node))
    if not num_signs:
        return node
    if num_signs > _MAX_SIGNS:
        raise TooComplexError(f"more than {_MAX_SIGNS} double signs")
    return Values("", "", (_with_sign(node, upper=True), _with_sign(node, upper=False)))


def _with_sign(node: Node, *, upper: bool) -> Node:
    match node:
        case Apply(function="pm" | "mp", arguments=(inner,)):
            value = _with_sign(inner, upper=upper)
            return value if (node.function == "pm") is upper else Apply("negate", (value,))
        case Apply():
            return Apply(node.function, tuple(_with_sign(part, upper=upper) for part in node.arguments))
        case Values():
            return Values(node.opening, node.closing, tuple(_with_sign(part, upper=upper) for part in node.members))
        case Quantity():
            return Quantity(_with_sign(node.value, upper=upper), node.unit)
        case _:
            return node


# Members


def _all_equal(left: Sequence[Node], right: Sequence[Node], scalars: CompareScalars) -> Equality:
    """Return whether every pair is equal; DIFFERENT as soon as one is not, or one has no other."""
    if len(left) != len(right):
        return Equality.DIFFERENT
    verdict = Equality.EQUAL
    for a, b in zip(left, right, strict=True):
        match compare_structures(a, b, scalars):
            case Equality.DIFFERENT:
                return Equality.DIFFERENT
            case Equality.UNDECIDED:
                verdict = Equality.UNDECIDED
    return verdict


def _compare_groups(a: Values, b: Values, scalars: CompareScalars) -> Equality:
    unordered = ("", "{")
    if a.opening in unordered and b.opening in unordered:
        return _compare_unordered(a.members, b.members, scalars, repeats=a.opening == b.opening == "")
    if (a.opening, a.closing) != (b.opening, b.closing):
        return Equality.DIFFERENT
    return _all_equal(a.members, b.members, scalars)


def _compare_unordered(
    left: Sequence[Node], right: Sequence[Node], scalars: CompareScalars, *, repeats: bool
) -> Equality:
    """Match the members of two lists; without ``repeats`` a member may stand for several."""
    if max(len(left), len(right)) > _MAX_UNORDERED:
        return _all_equal(left, right, scalars)
    if repeats and len(left) != len(right):
        return Equality.DIFFERENT
    table = [[compare_structures(a, b, scalars) for b in right] for a in left]
    columns = [list(column) for column in zip(*table, strict=True)] if table else [[] for _ in right]
    best = Equality.EQUAL
    for row in [*table, *columns]:
        if Equality.EQUAL not in row:
            if Equality.UNDECIDED not in row:
                return Equality.DIFFERENT
            best = Equality.UNDECIDED
    if best is Equality.EQUAL and repeats and not _multiplicities_match(table):
        return Equality.DIFFERENT
    return best


def _multiplicities_match(table: list[list[Equality]]) -> bool:
    """Whether as many members on the right equal each on the left as there are of it on the left."""
    return all(row.count(Equality.EQUAL) == table.count(row) for row in table)


def _compare_rows(left: Sequence[Sequence[Node]], right: Sequence[Sequence[Node]], scalars: CompareScalars) -> Equality:
    if [len(row) for row in left] != [len(row) for row in right] or not left:
        return Equality.DIFFERENT
    return _all_equal([cell for row in left for cell in row], [cell for row in right for cell in row], scalars)


def _rows(node: Node) -> Sequence[Sequence[Node]]:
    """Return the rows of a matrix, or of a list of lists."""
    if isinstance(node, Matrix):
        return node.rows
    if not isinstance(node, Values) or node.opening not in ("[", "("):
        return []
    return [row.members for row in node.members if isinstance(row, Values) and row.opening in ("[", "(")]


def _ratio_terms(node: Node) -> list[Node]:
    terms = []
    while isinstance(node, Apply) and node.function == "ratio":
        terms.append(node.arguments[0])
        node = node.arguments[1]
    return [*terms, node]


def _is_set_operation(node: Node) -> bool:
    return isinstance(node, Apply) and node.function in ("union", "intersection", "difference", "ratio")


def _both(a: Node, b: Node) -> Iterable[Node]:
    yield from walk(a)
    yield from walk(b)


def _compare_compounds(a: Node, b: Node, scalars: CompareScalars) -> Equality:
    """Compare arithmetic on lists and matrices by its form; only its scalars are evaluated."""
    if isinstance(a, Apply) and isinstance(b, Apply) and a.function == b.function:
        return _all_equal(a.arguments, b.arguments, scalars)
    return Equality.EQUAL if a == b else Equality.DIFFERENT


# Regions and relations


def _parts(node: Node, operation: str) -> list[Node]:
    if isinstance(node, Apply) and node.function == operation:
        return [part for argument in node.arguments for part in _parts(argument, operation)]
    return [node]


def _compare_unions(a: Apply, b: Apply, scalars: CompareScalars) -> Equality:
    if a.function == "difference":
        return _all_equal(a.arguments, b.arguments, scalars)
    return _compare_unordered(_parts(a, a.function), _parts(b, b.function), scalars, repeats=False)


def _compare_relations(a: Relation, b: Relation, scalars: CompareScalars) -> Equality:
    interval_a, interval_b = as_region(a), as_region(b)
    if interval_a is not None and interval_b is not None:
        return compare_structures(interval_a, interval_b, scalars) if names(a) == names(b) else Equality.DIFFERENT
    if a.operators == b.operators == ("=",):
        return _compare_equations(a, b, scalars)
    if len(a.operators) == len(b.operators) == 1 and a.operators != b.operators:
        b = Relation((MIRRORED.get(b.operators[0], ""),), b.sides[::-1])
    if a.operators != b.operators:
        return Equality.DIFFERENT
    return _all_equal(a.sides, b.sides, scalars)


def _compare_equations(a: Relation, b: Relation, scalars: CompareScalars) -> Equality:
    same = _all_equal(a.sides, b.sides, scalars)
    if same is Equality.EQUAL:
        return same
    if _is_graph(a.sides[0], b.sides[0]) and names(a.sides[1]):
        return compare_structures(a.sides[1], b.sides[1], scalars)  # y = 2x and f(x) = 2x
    if any(isinstance(part, Values | Matrix | Based | Relation) for part in _both(a, b) if part not in (a, b)):
        return same
    zero = [Apply("add", (each.sides[0], Apply("negate", (each.sides[1],)))) for each in (a, b)]
    verdict = scalars.up_to_a_factor(*zero)
    if verdict is Equality.UNDECIDED:
        opposite = scalars(zero[0], Apply("negate", (zero[1],)))
        direct = scalars(*zero)
        return Equality.EQUAL if Equality.EQUAL in (direct, opposite) else direct
    return verdict


def _is_graph(left: Node, right: Node) -> bool:
    """Whether one side is ``y`` and the other ``f(x)``."""
    functions = [node for node in (left, right) if node != Symbol("y")]
    match functions:
        case [Apply(function="multiply", arguments=(Symbol(), _)) as function]:
            return _is_name(function)
        case _:
            return False
