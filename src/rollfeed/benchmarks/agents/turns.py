"""CPU time of a turn, ours and of a client that renders and tokenises the whole conversation again in each turn.

Ours is the multi-turn generate function. The engine takes no time, and conversations end at the same number of tokens
whatever the number of turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.environments import EnvironmentRegistry
from rollfeed.generate import multi_turn
from rollfeed.protocols import MULTI_TURN, EnvironmentStep, GenerateFn, RolloutRequest, Services, Tokenizer
from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    Message,
    Prompt,
    Sample,
    SamplingParams,
    Verdict,
    VersionSpan,
)

_WORDS = ("the", "of", "result", "is", "we", "compute", "then", "12", "x", "value", "and", "file", "so", "error", "add")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsWorkload:
    """Conversations that end at one number of tokens."""

    context_tokens: int = 8192
    num_turns: tuple[int, ...] = (8, 32, 128)
    """Of a conversation; half of each is sampled, the other half is what the model is told."""
    repetitions: int = 5
    seed: int = 0


def bench_turns(workload: TurnsWorkload, tokenizer: Tokenizer, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure ours and the reference in turn and return JSON values.

    Raises:
        ConfigError: If the tokenizer has no chat template, or that refuses a conversation.
    """
    rows = []
    for num_turns in workload.num_turns:
        talk = _Talk.of(workload, num_turns, tokenizer)
        ours, reference = [], []
        for _ in range(workload.repetitions):
            ours.append(asyncio.run(_seconds_of_turns(talk, tokenizer, multi_turn)))
            reference.append(asyncio.run(_seconds_of_turns(talk, tokenizer, partial(_render_again, talk=talk))))
        rows.append(_row(num_turns, talk, np.array(ours), np.array(reference)))
        progress(f"{num_turns} turns: {rows[-1]['turn_ms']:.3f} ms a turn, {rows[-1]['ratio']:.1f} times below")
    first, last = rows[0], rows[-1]
    return {
        "turns": rows,
        "turn_seconds_last_over_first": last["turn_ms"] / first["turn_ms"],
        "reference_turn_seconds_last_over_first": last["reference_turn_ms"] / first["reference_turn_ms"],
        "episode_seconds_last_over_first": last["episode_ms"] / first["episode_ms"],
        "reference_episode_seconds_last_over_first": last["reference_episode_ms"] / first["reference_episode_ms"],
    }


def _row(
    num_turns: int, talk: _Talk, ours_RT: NDArray[np.float64], reference_RT: NDArray[np.float64]
) -> dict[str, Any]:
    """Return the figures of one number of turns; each turn's time is the median of its repetitions."""
    ours_T, reference_T = (1e3 * np.median(each, axis=0) for each in (ours_RT, reference_RT))
    quarter = max(1, num_turns // 4)

    def growth(each_T: NDArray[np.float64]) -> float:
        return float(each_T[-quarter:].mean() / each_T[:quarter].mean())

    return {
        "num_turns": num_turns,
        "context_tokens": talk.num_tokens,
        "turn_ms": float(ours_T.mean()),
        "reference_turn_ms": float(reference_T.mean()),
        "ratio": float(reference_T.mean() / ours_T.mean()),
        "episode_ms": float(ours_T.sum()),
        "reference_episode_ms": float(reference_T.sum()),
        "last_quarter_over_first": growth(ours_T),
        "reference_last_quarter_over_first": growth(reference_T),
    }


class _Talk(NamedTuple):
    """One conversation, all of it known beforehand."""

    prompt: Prompt
    completions: list[Completion]
    told: list[Message]
    num_tokens: int

    @classmethod
    def of(cls, workload: TurnsWorkload, num_turns: int, tokenizer: Tokenizer) -> _Talk:
        """Make texts that leave room for what the template puts between them."""
        size = workload.context_tokens // num_turns
        talk = cls._of_size(size, workload.seed, num_turns, tokenizer)
        too_many = (talk.num_tokens - workload.context_tokens) // num_turns
        return cls._of_size(max(2, size - too_many), workload.seed, num_turns, tokenizer)

    @classmethod
    def _of_size(cls, size: int, seed: int, num_turns: int, tokenizer: Tokenizer) -> _Talk:
        random = Random(seed)
        told, said = ([_text(random, size // 2, tokenizer) for _ in range(num_turns)] for _ in range(2))
        questions: list[Message] = [{"role": "user", "content": text} for text in told]
        text = tokenizer.render_chat(questions[:1])
        prompt = Prompt(
            prompt_id="talk",
            source="bench",
            text=text,
            token_ids=tokenizer.encode(text, add_special_tokens=False),
            messages=(questions[0],),
            metadata={"environment": _Tells.environment_id, "params": {}, MULTI_TURN: True},
        )
        messages: list[Message] = []
        for question, answer in zip(questions, said, strict=True):
            messages += [question, {"role": "assistant", "content": answer}]
        whole = tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=False), add_special_tokens=False)
        return cls(prompt, [_completion(text, tokenizer) for text in said], questions[1:], len(whole))


def _text(random: Random, num_tokens: int, tokenizer: Tokenizer) -> str:
    text = " ".join(random.choices(_WORDS, k=num_tokens))
    token_ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    return tokenizer.decode(token_ids, skip_special_tokens=False).strip()


def _completion(text: str, tokenizer: Tokenizer) -> Completion:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    token_ids = np.append(token_ids, np.array(tokenizer.eos_token_ids[:1], np.int32))
    return Completion(
        token_ids=token_ids,
        logprobs=np.full(len(token_ids), -1.0, np.float32),
        text=text,
        finish_reason=FinishReason(FinishKind.STOP),
        version_spans=(VersionSpan(0, len(token_ids), 0),),
        precision="none",
        prompt_tokens=0,
        cached_tokens=0,
        timings=CompletionTimings(0.0, 0.0),
    )


class _Tells:
    """An environment that has something prepared to say after each turn."""

    environment_id = "bench/tells"
    version = 1
    summary = "says what is prepared"
    max_level: int | None = 0

    def __init__(self, told: Sequence[Message]) -> None:
        self._told = told

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        return "Say something.", {}, None

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return self.give_up(self.start(params))

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"turn": 0}

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        turn = state["turn"]
        if turn == len(self._told):
            return EnvironmentStep(verdict=self.give_up(state))
        return EnvironmentStep(state={"turn": turn + 1}, messages=(self._told[turn],))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict(reward=1.0)


class _Prepared:
    """An endpoint that has all turns prepared, and looks at the clock at each."""

    policy_version = 0

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = iter(completions)
        self.times: list[float] = []

    async def generate(self, token_ids: NDArray[np.int32], params: SamplingParams, **_: Any) -> Completion:
        self.times.append(time.process_time())
        return next(self._completions)


async def _seconds_of_turns(talk: _Talk, tokenizer: Tokenizer, generate: GenerateFn) -> list[float]:
    """Return the CPU seconds of each turn: up to its request, and for the last one what follows, too."""
    endpoint = _Prepared(talk.completions)
    room = 2 * talk.num_tokens
    request = RolloutRequest(
        prompt=talk.prompt,
        params=SamplingParams(max_new_tokens=room),
        group_index=0,
        index=0,
        rollout_id=0,
        step=0,
        max_context_length=2 * room,
    )
    environments = EnvironmentRegistry([_Tells(talk.told)])
    services = Services(endpoint=endpoint, tokenizer=tokenizer, default=multi_turn, environments=environments)
    began = time.process_time()
    await generate(request, services=services)
    # The first request is sent what the prompt has: a turn ends with the next one's request.
    seconds: list[float] = np.diff([began, *endpoint.times[1:], time.process_time()]).tolist()
    return seconds


async def _render_again(request: RolloutRequest, *, services: Services, talk: _Talk) -> Sequence[Sample]:
    """Answer as is usual: each turn renders the conversation anew and tokenises it."""
    messages: list[Message] = list(talk.prompt.messages or ())
    for told in [*talk.told, None]:
        token_ids = services.tokenizer.encode(services.tokenizer.render_chat(messages), add_special_tokens=False)
        turn = await services.endpoint.generate(token_ids, request.params, request_id="")
        messages += [{"role": "assistant", "content": turn.text}, *([told] if told else [])]
    return []
