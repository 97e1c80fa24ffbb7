"""Programs that speak text get the tokens that were sampled, whatever the texts are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from rollfeed.base.sglang_wire import RequestError
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.errors import ConfigError
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer
from rollfeed.router.span_cache import SpanCache
from rollfeed.testing import CharTokenizer

WORDS = [
    "the",
    "answer",
    "is",
    " 42",
    ",",
    "so 🙂",
    "we",
    "Ünïcode",
    "ÿ世界",
    "\ufffd\n\n",
    "  ",
    "x<|im_end|>",
    "\n\treturn x**2",
    "é",
]
Row = tuple[int, int, float, int | None]
"""Token, mask, log-probability and version."""


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return load_tokenizer(resolve_checkpoint(DEFAULT_MODEL))


class Reply(NamedTuple):
    body: dict[str, Any]
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str


class Server:
    """A server with the cache before it, which samples what it is told to."""

    def __init__(self, tokenizer: Any, cache: SpanCache, *, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.cache = cache
        self.random = random.Random(seed)

    def generate(
        self,
        text: str,
        token_ids: Sequence[int],
        *,
        version: int = 0,
        spans: Sequence[tuple[int, int, int]] = (),
        stop: str | None = None,
        finish: str = "stop",
        **sampling: Any,
    ) -> Reply:
        asked = {"text": text, "sampling_params": sampling}
        body = self.cache.rewrite(asked)
        assert asked == {"text": text, "sampling_params": sampling}
        reply = self.reply(token_ids, version=version, spans=spans, stop=stop, finish=finish, **sampling)
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        self.cache.keep(body, reply, policy_version=version)
        assert "output_token_logprobs" not in reply["meta_info"]
        return Reply(body, body["input_ids"], list(token_ids), logprobs, reply["text"])

    def reply(
        self,
        token_ids: Sequence[int],
        *,
        version: int = 0,
        spans: Sequence[tuple[int, int, int]] = (),
        stop: str | None = None,
        finish: str = "stop",
        **sampling: Any,
    ) -> dict[str, Any]:
        skip = sampling.get("skip_special_tokens", True)
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip)
        if stop is not None:
            text = text[: text.index(stop)]
        logprobs = [float(np.float32(-self.random.random())) for _ in token_ids]
        meta: dict[str, Any] = {
            "finish_reason": {"type": finish},
            "completion_tokens": len(token_ids),
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)
            ],
            "weight_version": str(version),
        }
        if spans:
            meta["weight_versions"] = [
                {"version": str(number), "start": start, "end": end} for start, end, number in spans
            ]
        return {"text": text, "output_ids": list(token_ids), "meta_info": meta}


def odd_tokens(tokenizer: LocalTokenizer, chance: random.Random) -> list[int]:
    """Tokens as policies sample them: texts in pieces that no tokenizer makes, halves of characters, special ones."""
    ids: list[int] = []
    for _ in range(chance.randint(1, 6)):
        kind = chance.random()
        text = " ".join(chance.choices(WORDS, k=chance.randint(1, 4)))
        if kind < 0.4:
            ids += tokenizer.encode(text, add_special_tokens=False).tolist()
        elif kind < 0.8:
            cut = chance.randint(0, len(text))
            for piece in (text[:cut], text[cut:]):
                ids += tokenizer.encode(piece, add_special_tokens=False).tolist() if piece else []
        elif kind < 0.9:
            ids.append(chance.randint(0, 300))
        else:
            whole = tokenizer.encode("🙂世", add_special_tokens=False).tolist()
            ids += whole[: chance.randint(1, len(whole))]
    return ids or [tokenizer.eos_token_ids[0]]


def check_known(cache: SpanCache, text: str, expected: Sequence[Row]) -> None:
    got = cache.retrieve(text)
    versions: list[int | None] = [None] * len(got["tokens"])
    for span in got["weight_versions"]:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    rows = list(zip(got["tokens"], got["loss_mask"], got["rollout_logp"], versions, strict=True))
    assert rows == list(expected)
    assert got["num_known_tokens"] == got["token_length"] == got["loss_mask_length"] == len(rows)
    assert got["num_known_characters"] == len(text)
    assert got["response"] == text


@pytest.mark.parametrize("seed", range(12))
def test_branching_conversations_come_back_as_they_were_sampled(tokenizer: LocalTokenizer, seed: int) -> None:
    chance = random.Random(seed)
    cache = SpanCache(tokenizer)
    server = Server(tokenizer, cache, seed=seed)
    eos = tokenizer.eos_token_ids[0]
    end = tokenizer.decode([eos], skip_special_tokens=False)
    known: dict[str, list[Row]] = {}
    """A naive tree: the rows of each text that ends with a reply."""
    begins: dict[str, list[Row]] = {"": []}
    """The rows of each text that may be gone on with: what was not shown of a reply only where the text has it."""
    for number in range(60):
        rest = f"{number} {chance.choice(WORDS)}:" if chance.random() < 0.5 else f"{end}\n{number}:"
        text = chance.choice(list(known or [""])) + rest
        start = max((each for each in begins if text.startswith(each)), key=len)
        tail = tokenizer.encode(text[len(start) :], add_special_tokens=False).tolist()
        rows = begins[start] + [(token, 0, 0.0, None) for token in tail]
        ids, version = odd_tokens(tokenizer, chance) + [eos] * chance.randint(0, 1), number // 10
        border = chance.randint(0, len(ids))
        spans = [span for span in ((0, border, version), (border, len(ids), version + 1)) if span[0] < span[1]]
        skips = chance.random() < 0.7
        reply = server.generate(text, ids, version=version + 1, spans=spans, skip_special_tokens=skips)
        assert reply.prompt_ids == [row[0] for row in rows]
        num_prompt = len(rows)
        for at, (token, logprob) in enumerate(zip(ids, reply.logprobs, strict=True)):
            rows.append((token, 1, logprob, version if at < border else version + 1))
        shown = next(
            size
            for size in range(len(ids) + 1)
            if tokenizer.decode(ids[:size], skip_special_tokens=skips) == reply.text
        )
        known[text + reply.text] = rows
        if shown:
            begins[text + reply.text] = rows[: num_prompt + shown]
        begins[text + reply.text + tokenizer.decode(ids[shown:], skip_special_tokens=False)] = rows
    for text, rows in known.items():
        check_known(cache, text, rows)


def encode(tokenizer: LocalTokenizer, *texts: str) -> list[int]:
    """Tokens of texts, each alone."""
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).tolist()]


def masked(cache: SpanCache, text: str) -> list[tuple[int, int]]:
    got = cache.retrieve(text)
    return list(zip(got["tokens"], got["loss_mask"], strict=True))


def test_a_prompt_is_tokenised_as_a_whole_however_much_of_it_is_known(tokenizer: LocalTokenizer) -> None:
    server = Server(tokenizer, SpanCache(tokenizer))
    for text in ("What is 12", "What is 123", "What is 12", "What is 1", "What is 123 and 4"):
        reply = server.generate(text, encode(tokenizer, " yes"))
        assert reply.prompt_ids == encode(tokenizer, text)
        assert reply.body["return_logprob"] is True
        assert "text" not in reply.body


def test_two_ways_to_sample_one_text_stay_apart_and_no_prompt_takes_their_place(tokenizer: LocalTokenizer) -> None:
    cache = SpanCache(tokenizer)
    server = Server(tokenizer, cache)
    one, other = encode(tokenizer, " wor", "ld"), encode(tokenizer, " w", "orl", "d")
    assert encode(tokenizer, " world") not in (one, other)
    server.generate("Hello", one)
    assert server.generate("Hello world.", encode(tokenizer, "x")).prompt_ids == encode(tokenizer, "Hello") + one + [30]
    latest = server.generate("Hello", other)
    assert server.generate("Hello world!", encode(tokenizer, "y")).prompt_ids[1:-1] == other
    got = cache.retrieve("Hello world")
    assert got["tokens"][1:] == other
    assert got["rollout_logp"] == [0.0, *latest.logprobs]
    # One that was gone on with stays what it was.
    assert cache.retrieve("Hello world.x")["tokens"][1:-2] == one
    # A client of tokens sends the text as the tokenizer makes it.
    body = {"input_ids": encode(tokenizer, "Hello world")}
    assert cache.rewrite(body) is body
    cache.keep(body, server.reply(encode(tokenizer, " z")), policy_version=0)
    assert masked(cache, "Hello world")[1:] == [(token, 1) for token in other]
    assert masked(cache, "Hello world z")[1:] == [(token, 0) for token in encode(tokenizer, " world")] + [
        (token, 1) for token in encode(tokenizer, " z")
    ]


def test_what_a_client_was_not_shown_belongs_to_its_reply_and_to_what_repeats_it(tokenizer: LocalTokenizer) -> None:
    cache = SpanCache(tokenizer)
    server = Server(tokenizer, cache)
    prompt, eos = encode(tokenizer, "Q:"), tokenizer.eos_token_ids[0]
    said = encode(tokenizer, " look it up", ".\n", "Observation:", " made up")
    reply = server.generate("Q:", said, stop="\nObservation:")
    assert reply.text == " look it up."
    assert [row[0] for row in masked(cache, "Q:" + reply.text)] == prompt + said
    # A token that is shown in part is no token of a text that goes on otherwise.
    shown = encode(tokenizer, " look it up")
    for rest, known in (("\nObservation: made up 7", said), ("\nSorry", shown), ("", shown)):
        text = "Q:" + reply.text + rest
        tail = text[len("Q:" + tokenizer.decode(known, skip_special_tokens=False)) :]
        assert server.cache.rewrite({"text": text})["input_ids"] == prompt + known + encode(
            tokenizer, *filter(None, [tail])
        )
    ended = server.generate("R:", [*shown, eos])
    end = tokenizer.decode([eos], skip_special_tokens=False)
    assert cache.rewrite({"text": "R:" + ended.text + end + "\nX"})["input_ids"][-3:] == [
        eos,
        *encode(tokenizer, "\nX"),
    ]
    assert eos not in cache.rewrite({"text": "R:" + ended.text + "\nX"})["input_ids"]
    assert masked(cache, "R:" + ended.text)[-1] == (eos, 1)


def test_a_reply_that_the_client_cuts_counts_and_a_longer_one_of_another_client_does_not(
    tokenizer: LocalTokenizer,
) -> None:
    cache = SpanCache(tokenizer)
    server = Server(tokenizer, cache)
    long, prompt = encode(tokenizer, " four", " is", " the", " answer"), encode(tokenizer, "Q:")
    server.generate("Q:", long)
    cut = cache.retrieve("Q: four is th. No")
    assert cut["loss_mask"] == [0] * len(prompt) + [1, 1] + [0] * (len(cut["tokens"]) - len(prompt) - 2)
    assert cut["tokens"] == prompt + long[:2] + encode(tokenizer, " th. No")
    assert cut["num_known_tokens"] == len(prompt) + 2
    assert cut["num_known_characters"] == len("Q: four is")
    assert cut["weight_versions"] == [{"version": "0", "start": len(prompt), "end": len(prompt) + 2}]
    # Another client got less, and wrote what the first one got.
    server.generate("Q:", long[:1])
    assert cache.retrieve("Q: four is th. No")["loss_mask"][len(prompt) :][:2] == [1, 0]
    assert cache.retrieve("Q: four is the answer")["loss_mask"][len(prompt) :] == [1] * 4


def test_half_a_character_at_the_end_is_kept_as_it_was_shown(tokenizer: LocalTokenizer) -> None:
    cache = SpanCache(tokenizer)
    server = Server(tokenizer, cache)
    smile = encode(tokenizer, "🙂")
    assert len(smile) > 1
    reply = server.generate("Q:", smile[:-1], finish="length")
    assert reply.text == "\ufffd"
    assert cache.rewrite({"text": "Q:\ufffd!"})["input_ids"] == encode(tokenizer, "Q:") + smile[:-1] + encode(
        tokenizer, "!"
    )
    whole = server.generate("W:", smile)
    assert whole.text == "🙂"
    # Half of it is nothing that can be gone on with.
    server.generate("W:", [*smile[:-1], *encode(tokenizer, "z")])
    assert cache.rewrite({"text": "W:🙂!"})["input_ids"] == encode(tokenizer, "W:") + smile + encode(tokenizer, "!")


class BeginningTokenizer(CharTokenizer):
    """Puts id 2 before texts, which is skipped with special tokens; ``^`` is its text, and it tells no places."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        ids = super().encode(text.replace("^", "\x02"), add_special_tokens=False)
        return np.append([2], ids).astype(np.int32) if add_special_tokens and ids[:1].tolist() != [2] else ids

    def encode_with_offsets(self, text: str) -> Any:
        raise ConfigError("no places")

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return (
            super()
            .decode(token_ids, skip_special_tokens=skip_special_tokens)
            .replace("\x02", "" if skip_special_tokens else "^")
        )


def test_special_tokens_stand_before_a_text_once_and_never_between(tokenizer: LocalTokenizer) -> None:
    plain = BeginningTokenizer()
    cache = SpanCache(plain)
    server = Server(plain, cache)
    first = server.generate("ab", [99, 100])
    assert first.prompt_ids == [2, 97, 98]
    assert cache.rewrite({"text": "abcde"})["input_ids"] == [2, 97, 98, 99, 100, 101]
    assert cache.retrieve("abcd")["tokens"] == [2, 97, 98, 99, 100]
    assert server.generate("^ab", [101]).prompt_ids == [2, 97, 98]
    assert cache.retrieve("^abe")["loss_mask"] == [0, 0, 0, 1]
    body = {"input_ids": [2, 97, 98, 99]}
    cache.keep(body, server.reply([101, 102]), policy_version=0)
    assert cache.retrieve("abcef")["loss_mask"] == [0, 0, 0, 0, 1, 1]
    assert encode(tokenizer, "<|im_start|>x")[0] == 1
    told = cache.rewrite({"text": "abcd^e"})
    assert told["input_ids"] == [2, 97, 98, 99, 100, 2, 101]


def test_batches_samples_and_streams_are_kept_one_by_one(tokenizer: LocalTokenizer) -> None:
    cache = SpanCache(tokenizer)
    server = Server(tokenizer, cache)
    body = {"text": ["A:", "B:"], "return_logprob": [False, True], "sampling_params": {"n": 2}}
    forwarded = cache.rewrite(body)
    assert forwarded["input_ids"] == [encode(tokenizer, "A:"), encode(tokenizer, "B:")]
    texts = [" one", " two", " three", " four"]
    replies = [server.reply(encode(tokenizer, text)) for text in texts]
    for reply in replies:
        reply["meta_info"]["input_token_logprobs"] = []
    cache.keep(forwarded, replies, policy_version=0)
    assert ["output_token_logprobs" in reply["meta_info"] for reply in replies] == [False, False, True, True]
    assert ["input_token_logprobs" in reply["meta_info"] for reply in replies] == [False, False, True, True]
    for prompt, text in zip("AABB", texts, strict=True):
        assert cache.retrieve(f"{prompt}:{text}")["loss_mask"][-1] == 1
    events = cache.rewrite({"text": ["C:", "D:"], "stream": True})
    under_way = server.reply(encode(tokenizer, " five"))
    under_way["meta_info"]["finish_reason"] = None
    cache.keep(events, {**under_way, "index": 1}, policy_version=0)
    assert "output_token_logprobs" not in under_way["meta_info"]
    cache.keep(events, {**server.reply(encode(tokenizer, " five six")), "index": 1}, policy_version=0)
    newest = server.reply(encode(tokenizer, " seven"))
    newest["meta_info"]["completion_tokens"] = 9
    cache.keep(events, {**newest, "index": 0}, policy_version=0)
    assert cache.retrieve("D: five six")["loss_mask"][-2:] == [1, 1]
    with pytest.raises(RequestError):
        cache.retrieve("C: seven")
    assert (cache.use().num_rewritten, cache.use().num_kept, cache.use().num_not_kept) == (4, 5, 1)
    others: list[dict[str, Any]] = [
        {"text": ["E:"], "sampling_params": [{"max_new_tokens": 1}]},
        {"input_ids": [[7]]},
    ]
    for body in others:
        too_many = [server.reply(encode(tokenizer, " more")) for _ in range(3)]
        cache.keep(cache.rewrite(body), too_many, policy_version=0)
    assert (cache.use().num_kept, cache.use().num_not_kept) == (7, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_token_logprobs": None},
        {"output_token_logprobs": []},
        {"output_token_logprobs": [[None, 99, None]]},
        {"output_token_logprobs": [[float("nan"), 99, None]]},
        {"output_token_logprobs": [[1e308, 99, None]]},
        {"output_token_logprobs": [[-1e39, 99, None]]},
        {"output_token_logprobs": [[-1.0, -99, None]]},
        {"output_token_logprobs": [[-1.0, 100, None]]},
        {"completion_tokens": 2},
        {"weight_versions": [{"version": "1", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "1", "start": 1, "end": 1}]},
        {"weight_versions": "1"},
        {"finish_reason": None},
    ],
)
def test_a_reply_that_does_not_say_exactly_what_was_sampled_is_not_kept(wrong: dict[str, Any]) -> None:
    plain = CharTokenizer()
    cache = SpanCache(plain)
    reply = Server(plain, cache).reply([99])
    reply["meta_info"].update(wrong)
    cache.keep(cache.rewrite({"text": "ab"}), reply, policy_version=1)
    for broken in ({"error": "no"}, {"meta_info": None}, {}):
        cache.keep(cache.rewrite({"text": "ab"}), broken, policy_version=1)
    assert cache.use().num_tokens == 0
    with pytest.raises(RequestError, match="nothing of this text") as refused:
        cache.retrieve("abc")
    assert refused.value.status == 404


def test_what_is_no_text_is_refused_and_other_bodies_pass() -> None:
    cache = SpanCache(CharTokenizer())
    for text in (None, "", 3, ["a"]):
        with pytest.raises(RequestError, match="prompt and responses together") as refused:
            cache.retrieve(text)
        assert refused.value.status == 400
    bodies: list[dict[str, Any]] = [
        {},
        {"text": ""},
        {"text": 3},
        {"text": []},
        {"text": ["a", ""]},
        {"text": "a", "image_data": ["x"]},
        {"input_ids": [97], "image_data": ["x"]},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_embeds": [[0.5]]},
    ]
    plain = CharTokenizer()
    for body in bodies:
        assert cache.rewrite(body) is body
        cache.keep(body, Server(plain, cache).reply([98]), policy_version=0)
    assert (cache.use().num_tokens, cache.use().num_not_kept) == (0, len(bodies))
    both = {"text": "a", "input_ids": [97]}
    assert cache.rewrite(both) is both


def test_an_aborted_reply_keeps_what_it_has_and_what_goes_on_from_it_has_a_version_of_its_own() -> None:
    plain = CharTokenizer()
    cache = SpanCache(plain)
    server = Server(plain, cache)
    first = server.generate("ab", [99, 100], version=3, finish="abort")
    second = server.generate("abcd", [101], version=4)
    assert second.prompt_ids == [97, 98, 99, 100]
    got = cache.retrieve("abcde")
    assert got["loss_mask"] == [0, 0, 1, 1, 1]
    assert got["rollout_logp"] == [0.0, 0.0, *first.logprobs, *second.logprobs]
    assert got["weight_versions"] == [
        {"version": "3", "start": 2, "end": 4},
        {"version": "4", "start": 4, "end": 5},
    ]
    unnamed = server.reply([102])
    unnamed["meta_info"]["weight_version"] = "of yesterday"
    cache.keep(cache.rewrite({"text": "x"}), unnamed, policy_version=7)
    assert cache.retrieve("xf")["weight_versions"][0]["version"] == "7"
