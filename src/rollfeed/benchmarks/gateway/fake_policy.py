"""A fake SGLang server whose turns call a tool, and which keeps what it sampled after what: the judge of a gateway.

Its tokens are not those that its text would be tokenised to, as with a real policy: what is tokenised again is seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.benchmarks.gateway.talks import TOOL
from rollfeed.prompts import load_tokenizer
from rollfeed.protocols import Tokenizer
from rollfeed.seeds import derive_seed
from rollfeed.testing.fake_sglang import FakeMode, FakeServer, FakeSettings
from rollfeed.testing.fake_sglang.clock import Clock
from rollfeed.testing.fake_sglang.core import ScriptedBackend
from rollfeed.testing.fake_sglang.tokens import explicit_output
from rollfeed.testing.fake_sglang.wire import FakeBackend, FakeJob

_WORDS = (
    " then",
    " the",
    " part",
    " says",
    " that",
    " we",
    " compute",
    " x",
    " 12",
    " and",
    " bec",
    "ause",
    " fi",
    "le",
)
_LONGEST_PIECE = 9
"""Characters that are tokenised together."""


class EngineTurn(msgspec.Struct, frozen=True):
    """A turn that was sampled."""

    context: str
    """Digest of the ids before it."""
    token_ids: list[int]
    logprobs: list[float]


class SamplesTurns(Protocol):
    """Decides what is sampled."""

    def turn(self, number: int, prompt_ids: NDArray[np.int32]) -> tuple[str, list[int]]:
        """Return text and ids of a turn, the last of which ends it.

        Args:
            number: How many turns were sampled before.
            prompt_ids: What it follows, ``(P,)``.
        """


@dataclass(frozen=True, slots=True)
class FakePolicy:
    """Makes turns of a text, a call and their tokens."""

    tokenizer: Tokenizer
    seed: int
    num_tokens: int
    """Of a turn, before its call."""
    known: dict[str, list[int]] = field(default_factory=dict)
    """Pieces of text by now."""

    def turn(self, number: int, prompt_ids: NDArray[np.int32]) -> tuple[str, list[int]]:
        del prompt_ids
        random = Random(derive_seed("gateway", self.seed, number))
        words = random.choices(_WORDS, k=self.num_tokens)
        call = json.dumps({"name": TOOL, "arguments": {"number": number, "why": random.choice(_WORDS)}})
        pieces = [*words, *split(f"\n<tool_call>\n{call}\n</tool_call>", random)]
        for piece in pieces:
            if piece not in self.known:
                self.known[piece] = self.tokenizer.encode(piece, add_special_tokens=False).tolist()
        token_ids = [token_id for piece in pieces for token_id in self.known[piece]]
        return "".join(pieces), [*token_ids, self.tokenizer.eos_token_ids[0]]


def split(text: str, random: Random) -> Iterator[str]:
    """Cut a text into pieces whose tokens are not those of the whole."""
    while text:
        size = random.randint(1, _LONGEST_PIECE)
        yield text[:size]
        text = text[size:]


def digest(token_ids: NDArray[np.int32]) -> str:
    """Return what stands for a context in the list of what was sampled."""
    return blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=16).hexdigest()


def read_sampled(path: Path) -> Iterator[EngineTurn]:
    """Return the turns that an engine has sampled, in order."""
    with path.open("rb") as lines:
        for line in lines:
            yield msgspec.json.decode(line, type=EngineTurn)


class _Backend(ScriptedBackend):
    def __init__(self, turns: SamplesTurns, log: Path, clock: Clock) -> None:
        super().__init__(clock)
        self._turns = turns
        self._log = log
        self._num_turns = 0

    def submit(self, job: FakeJob) -> None:
        prompt_ids = job.prompt_ids()
        text, token_ids = self._turns.turn(self._num_turns, prompt_ids)
        random = np.random.default_rng(self._num_turns)
        self._num_turns += 1
        kept = min(len(token_ids), job.max_new_tokens)
        logprobs = (-random.exponential(0.8, kept)).astype(np.float32)
        sampled = EngineTurn(digest(prompt_ids), token_ids[:kept], logprobs.tolist())
        # Kept before it is told, so that nothing is told that is not kept.
        with self._log.open("ab") as log:
            log.write(msgspec.json.encode(sampled) + b"\n")
        is_whole = kept == len(token_ids)
        reason = {"type": "stop", "matched": token_ids[-1]} if is_whole else {"type": "length", "length": kept}
        job.end(explicit_output(sampled.token_ids, sampled.logprobs, text), reason)


class FakeEngine(FakeServer):
    """One server of such turns."""

    def __init__(self, turns: SamplesTurns, log: Path) -> None:
        self._turns, self._log = turns, log
        super().__init__(FakeSettings(mode=FakeMode.SCRIPTED))

    def _make_backend(self) -> FakeBackend:
        return _Backend(self._turns, self._log, self.clock)


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Serve until standard input closes: folder of the tokenizer, file of what is sampled, tokens of a turn, seed."""
    folder, log, num_tokens, seed = arguments
    policy = FakePolicy(load_tokenizer(Path(folder)), int(seed), int(num_tokens))
    asyncio.run(_serve(policy, Path(log)))


async def _serve(policy: FakePolicy, log: Path) -> None:
    server = FakeEngine(policy, log)
    await server.start()
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
