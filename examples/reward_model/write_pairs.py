"""Writes pairs of answers: words reversed rightly, and with one letter wrong; and the same words as prompts.

python examples/reward_model/write_pairs.py examples/reward_model [SEED]
"""

import json
import random
import sys
from pathlib import Path

LETTERS = "abcdefghij"


def main() -> None:
    folder, choice = Path(sys.argv[1]), random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    words = sorted({"".join(choice.choices(LETTERS, k=3)) for _ in range(1_000)})
    choice.shuffle(words)
    rows = []
    for word in words:
        right = word[::-1]
        place, letter = choice.randrange(3), choice.choice(LETTERS)
        wrong = right[:place] + letter + right[place + 1 :]
        if wrong != right:
            rows.append({"prompt": f"rv:{word}=", "chosen": right, "rejected": wrong, "label": right})
    held_out, shown = rows[:100], rows[100:]
    for name, chosen in (("pairs", shown), ("held_out", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


main()
