"""A reward function of one's own: partial credit for a number that is close."""

import re

from rollfeed.types import Correct, Prompt, Sample, Verdict

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def closeness(sample: Sample, prompt: Prompt) -> Verdict:
    """1 for the right number at the end of the answer, less the further it is off, 0 without a number."""
    numbers = NUMBER.findall(sample.response.replace(",", ""))
    if not numbers:
        return Verdict(reward=0.0, correct=Correct.NO, format_ok=False)
    answer, label = float(numbers[-1]), float(prompt.label)
    right = answer == label
    reward = 1.0 if right else 0.5 / (1.0 + abs(answer - label))
    return Verdict(reward=reward, correct=Correct.YES if right else Correct.NO, extracted=numbers[-1])
