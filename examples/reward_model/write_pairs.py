"""Writes pairs of answers, words reversed rightly and with wrong letters; a hundred words are held out.

Four pairs of a word are learned from, with 1, 1, 2 and 3 wrong letters; a held-out word has one, with one wrong letter.


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
    held_out, shown = _rows(words[:100], (1,), choice), _rows(words[100:], (1, 1, 2, 3), choice)
    for name, chosen in (("pairs", shown), ("held_out", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _rows(words: list[str], nums_wrong: tuple[int, ...], choice: random.Random) -> list[dict[str, str]]:
    """Return a row for each word and number of wrong letters."""
    rows = []
    for word in words:
        right = word[::-1]
        for num_wrong in nums_wrong:
            letters = list(right)
            for place in choice.sample(range(3), num_wrong):
                letters[place] = choice.choice(LETTERS.replace(right[place], ""))
            rows.append({"prompt": f"rv:{word}=", "chosen": right, "rejected": "".join(letters), "label": right})
    return rows


main()
