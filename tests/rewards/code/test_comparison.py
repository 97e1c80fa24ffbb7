from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.code.comparison import same_output, same_value


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("5\n", "5", True),
        ("5  \n\n", "5\n", True),
        ("\n 1  2\r\n3\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("1 2", "12", False),
        ("5\nextra", "5", False),
        ("", "5", False),
        ("", "", True),
        ("YES", "yes", False),
        ("0.3333333", "0.33333333333", True),
        ("0.3334", "0.33333333333", False),
        ("3", "3.0", True),
        ("3.0", "3", True),
        ("3.0000001", "3", False),
        ("1e3", "1000.0", True),
        ("1e999999999", "1e3", False),
        ("nan", "1.0", False),
        ("inf", "1e300", False),
        ("1_000", "1000", False),
        ("12345678901234567890123", "12345678901234567890124", False),
        ("0x10", "16", False),
        ("\u0663", "3", False),
        ("-0", "0", True),
        # The tolerance is no licence to print 0 where something small is expected.
        ("0", "1e-7", False),
        ("0", "0.0000001", False),
        ("0.0", "1e-6", False),
        ("2e-7", "1e-7", False),
        ("-1e-7", "1e-7", False),
        ("1.0000001e-7", "1e-7", True),
        ("0.000123", "0.0001234", True),
        ("1e-9", "0.0", True),
        ("0", "1.2e-16", True),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (5, 5, True),
        (5, "5", False),
        ("5", 5, False),
        (5.0, 5, True),
        (5.00000000001, 5.0, True),
        (5.1, 5.0, False),
        (0, 1e-7, False),
        (0.0, 3e-7, False),
        (1e-9, 0.0, True),
        (0, 6.1e-17, True),
        (float("nan"), 5.0, False),
        (float("inf"), 5.0, False),
        (10**400, 1.0, False),
        ([1, [2]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ([1], 1, False),
        ({"a": [1.0]}, {"a": [1.0000000001]}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, None, True),
        (None, 0, False),
        (0, None, False),
        (True, True, True),
        (False, True, False),
        ("a", ["a"], False),
    ],
)
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same
