"""Entries of files that are appended to."""

from __future__ import annotations

import pytest

from rollfeed.base.sealed import sealed, size_unsealed, unsealed


@pytest.mark.parametrize("tail", [b"", b"\0" * 7, b"\0" * 8, b"\0" * 4096, sealed(b"last")[:-1], b"\1" * 20])
def test_what_is_no_whole_entry_ends_a_file(tail: bytes) -> None:
    """A power cut may leave zeros, of which eight would be an entry without bytes and its checksum."""
    whole = sealed(b"one") + sealed(b"two")
    assert list(unsealed(whole + tail)) == [b"one", b"two"]
    assert size_unsealed(whole + tail) == len(whole)
