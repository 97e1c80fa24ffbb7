"""Say what the package ``renderers`` makes of conversations, as JSON; run by a Python that has it.

The argument is the folder of a tokenizer. On standard input is an object with ``renderer`` (module and class),
``conversations`` (lists of messages), and ``turns`` (what was sent, sampled and is told next).
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from renderers.base import build_training_sample
from transformers import PreTrainedTokenizerFast


def main() -> None:
    asked = json.load(sys.stdin)
    module, _, name = asked["renderer"].partition(":")
    renderer = getattr(import_module(module), name)(PreTrainedTokenizerFast.from_pretrained(sys.argv[1]))
    learned = [build_training_sample(renderer, messages) for messages in asked["conversations"]]
    told = [renderer.bridge_to_next_turn(turn["sent"], turn["said"], turn["told"]) for turn in asked["turns"]]
    answer: dict[str, Any] = {
        "learned": [{"token_ids": list(each.token_ids), "mask": list(map(float, each.loss_mask))} for each in learned],
        "next": [None if each is None else list(each.token_ids) for each in told],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
