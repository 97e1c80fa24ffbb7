"""Clean samples of a chat model with tools, made as a rollout makes them, to plant faults in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.conversations.zoo.families import load

from rollfeed.conversations import Conversation
from rollfeed.lint import Expected, Finding, Linter, Marks, SamplePlace, Subject
from rollfeed.protocols import RewrittenTurns
from rollfeed.types import Prompt, SampleStatus

QUESTION = ({"role": "user", "content": "How many words has the answer?"},)
TOLD = {"role": "tool", "content": "the result is 17 and the call took 2 seconds"}
TURNS = ("I call the counter.", "It has 17.", "So 17, answer.")


@dataclass
class Made:
    """A sample whose arrays may be changed, and where its turns are in the response."""

    tokenizer: Any
    prompt: Prompt
    ids: list[int]
    mask: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)

    def subject(self, **changes: Any) -> Subject:
        fields: dict[str, Any] = {
            "place": SamplePlace("step 0", 0, 0, 0),
            "token_ids": np.array(self.ids, np.int32),
            "response_length": len(self.mask),
            "loss_mask": np.array(self.mask, np.float32),
            "logprobs": np.array(self.logprobs, np.float32),
            "spans": [(0, len(self.mask), 3)],
            "newest_version": 3,
            "max_staleness": 0,
            "status": SampleStatus.COMPLETED,
            "prompt": self.prompt,
            "rollout": (0, 0),
        }
        return Subject(**{**fields, **changes})

    def drop(self, position: int) -> None:
        del self.ids[len(self.prompt.token_ids) + position], self.mask[position], self.logprobs[position]


def made(family: str = "qwen2.5", *, turns: tuple[str, ...] = TURNS, end: bool = True) -> Made:
    """Return an episode of several turns, with answers of a tool between them."""
    tokenizer = load(family)
    text = tokenizer.render_chat(QUESTION)
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = Prompt(prompt_id="p", source="made", text=text, token_ids=ids, messages=QUESTION)
    conversation = Conversation(prompt, tokenizer, rewritten=RewrittenTurns.APPEND)
    sample = Made(tokenizer, prompt, ids.tolist())
    random = np.random.default_rng(len(turns))
    told = {**TOLD, "role": "user"} if family in ("gemma", "chatml", "plain", "mistral", "phi") else TOLD
    for number, said in enumerate(turns):
        is_last = number == len(turns) - 1
        turn = tokenizer.encode(said, add_special_tokens=False).tolist()
        turn += [tokenizer.eos_token_ids[0]] if end or not is_last else []
        start = len(sample.mask)
        sample.turns.append((start, start + len(turn)))
        sample.ids += turn
        sample.mask += [1.0] * len(turn)
        sample.logprobs += (-random.exponential(1.0, len(turn)) - 1e-3).tolist()
        if not is_last:
            told_ids = conversation.follow_up(np.array(turn, np.int32), [told]).token_ids.tolist()
            sample.ids += told_ids
            sample.mask += [0.0] * len(told_ids)
            sample.logprobs += [0.0] * len(told_ids)
    return sample


def lint(*subjects: Subject, tokenizer: Any = None, **expected: Any) -> list[Finding]:
    linter = Linter(None if tokenizer is None else Marks.of(tokenizer), Expected(**expected))
    for subject in subjects:
        linter.check(subject)
    return linter.finish().findings
