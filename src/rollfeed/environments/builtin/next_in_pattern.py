"""``core/next_in_pattern``: the number that continues a sequence."""

from __future__ import annotations

from random import Random

from rollfeed.environments.builtin.styled import Drawn, StyledNumber

_FIRST_LEVEL_THAT_FALLS, _FIRST_LEVEL_WITH_GROWTH = 2, 4


class NextInPattern(StyledNumber):
    """Continue a sequence of ``1 + level // 3`` steps that come round twice before the number that is asked for.

    Steps are up to ``5 + level``; from level 2 on the sequence may fall, from level 4 on steps may grow by the round.
    """

    environment_id: str = "core/next_in_pattern"
    version: int = 1
    summary: str = "continue a sequence; levels add falling and growing steps, and longer periods"
    max_level: int | None = 20

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the share of the commonest number, at most."""
        return 0.0, 0.08

    def _draw(self, level: int, random: Random) -> Drawn:
        steps = [random.randint(1, 5 + level) for _ in range(1 + level // 3)]
        growth = random.randint(0, level // 2) if level >= _FIRST_LEVEL_WITH_GROWTH else 0
        sign = random.choice((1, -1)) if level >= _FIRST_LEVEL_THAT_FALLS else 1
        numbers = [random.randint(1, 10 + 10 * level)]
        for index in range(2 * len(steps) + 2):
            round_number, place = divmod(index, len(steps))
            numbers.append(numbers[-1] + sign * (steps[place] + growth * round_number))
        *shown, answer = map(str, numbers)
        question = f"How does this sequence go on: {', '.join(shown)}, ...?"
        return Drawn(question, f"next:{','.join(shown)}=", {"answer": numbers[-1]}, answer)
