from __future__ import annotations

from rollfeed.seeds import derive_seed


def test_seed_is_64_bits_and_the_same_for_ever() -> None:
    assert derive_seed(1, "mix", 2) == 10442136975646084921
    assert all(0 <= derive_seed(number) < 2**64 for number in range(100))


def test_seed_depends_on_every_part_its_order_and_its_kind() -> None:
    seeds = {
        derive_seed("a", "b"),
        derive_seed("b", "a"),
        derive_seed("ab"),
        derive_seed("a", "b", ""),
        derive_seed(1),
        derive_seed("1"),
    }
    assert len(seeds) == 6
