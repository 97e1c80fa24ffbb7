"""Bytes of a tensor as a change: exact, and near the entropy of the change."""

from __future__ import annotations

import numpy as np
import pytest

from rollfeed.weights.transports.delta.encoding import DamagedError, decode, element_bytes, encode

SIZES = (0, 1, 2, 7, 1000, 20_011)
DENSITIES = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0)


def changed(old: np.ndarray, density: float, most: int, random: np.random.Generator) -> np.ndarray:
    new = old.copy()
    is_changed = random.random(len(old)) < density
    steps = random.integers(1, most + 1, int(is_changed.sum()))
    new[is_changed] += np.where(random.random(len(steps)) < 0.5, steps, -steps).astype(new.dtype)
    return new


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_change_is_told_exactly(width: int) -> None:
    random = np.random.default_rng(width)
    for size in SIZES:
        old = random.integers(0, 256, size * width, dtype=np.uint8)
        for density in DENSITIES:
            for most in (1, 3, 100_000):
                new = changed(old.view(f"<u{width}"), density, most, random).view(np.uint8)
                told = encode(old, new, width=width)
                assert np.array_equal(decode(told, old, num_bytes=len(new), width=width), new)
        told = encode(None, old, width=width)
        assert np.array_equal(decode(told, None, num_bytes=len(old), width=width), old)


@pytest.mark.parametrize("edge", [0, 1, 0x7F80, 0x7FC0, 0x8000, 0xFF80, 0xFFFF])
def test_zeros_infinities_and_nans_keep_their_bits(edge: int) -> None:
    values = np.array([0, 1, 0x7F80, 0x7FC1, 0x8000, 0xFFFF], np.uint16)
    old, new = np.full(6, edge, np.uint16).view(np.uint8), values.view(np.uint8)
    assert np.array_equal(decode(encode(old, new, width=2), old, num_bytes=12, width=2), new)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99])
def test_size_is_near_the_entropy_of_the_change(density: float) -> None:
    random = np.random.default_rng(0)
    num_elements, larger = 1_000_000, 0.1
    old = random.integers(0, 1 << 16, num_elements).astype(np.uint16)
    new = changed(old, density, 1, random)
    new = np.where((new != old) & (random.random(num_elements) < larger), 2 * new - old, new)

    def entropy(share: float) -> float:
        return -share * np.log2(share) - (1 - share) * np.log2(1 - share)

    bits = num_elements * (entropy(density) + density * (1 + entropy(larger)))
    told = encode(old.view(np.uint8), new.astype(np.uint16).view(np.uint8), width=2)
    assert len(told) <= 1.1 * bits / 8


def test_a_small_step_costs_what_small_elements_need(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    values = (0.1 * random.standard_normal(400_000)).astype(np.float32)
    stepped = values + np.where(random.random(400_000) < 0.5, 3e-6, -3e-6).astype(np.float32)
    old, new = ((each.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for each in (values, stepped))
    told = encode(old, new, width=2)
    assert np.array_equal(decode(told, old, num_bytes=len(new), width=2), new)
    monkeypatch.setattr("rollfeed.weights.transports.delta.encoding._PART_BITS", 1e12)
    as_one = encode(old, new, width=2)
    assert np.array_equal(decode(as_one, old, num_bytes=len(new), width=2), new)
    assert len(told) < 0.85 * len(as_one)


def test_damage_is_never_taken_for_a_tensor_of_another_size() -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 256, 20_000, dtype=np.uint8)
    new = changed(old.view(np.uint16), 0.02, 2, random).view(np.uint8)
    told = encode(old, new, width=2)
    for _ in range(400):
        damaged = bytearray(told)
        damaged[random.integers(len(told))] ^= 1 << random.integers(8)
        try:
            found = decode(bytes(damaged[: random.integers(1, len(told) + 1)]), old, num_bytes=20_000, width=2)
        except DamagedError:
            continue
        assert found.shape == (20_000,)
    with pytest.raises(DamagedError, match="other bytes"):
        decode(told, old[:-2], num_bytes=20_000, width=2)


def test_what_is_nested_without_end_is_damaged() -> None:
    nested = b"\x91" * 100_000 + b"\x90"
    with pytest.raises(DamagedError):
        decode(b"\x94\x00\x90\x90" + nested, None, num_bytes=4, width=4)  # behind the three fields


def test_elements_are_as_long_as_their_type_says() -> None:
    types = {
        "BF16": 2,
        "F16": 2,
        "F32": 4,
        "F64": 8,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "U8": 1,
        "I16": 2,
        "I64": 8,
        "BOOL": 1,
    }
    assert {dtype: element_bytes(dtype) for dtype in types} == types
