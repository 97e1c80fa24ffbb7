"""What servers say is read, whatever bytes it is made of."""

import pytest

from rollfeed.engine.http import ControlReply

ODD = [
    pytest.param(b'{"a": "\xff"}', id="a text that is not UTF-8"),
    pytest.param(b"[" * 100_000, id="nested without end"),
    pytest.param(b"<html>", id="a page"),
    pytest.param(b"[1]", id="a list"),
    pytest.param(b"", id="nothing"),
]


@pytest.mark.parametrize("content", ODD)
def test_a_body_that_is_no_object_is_none(content: bytes) -> None:
    assert ControlReply(200, content).json() == {}


@pytest.mark.parametrize("content", ODD)
def test_an_error_of_whatever_bytes_is_one_line(content: bytes) -> None:
    error = ControlReply(500, content).error
    assert error.startswith("HTTP 500: ")
    assert "\n" not in error
    assert len(error) < 1000
