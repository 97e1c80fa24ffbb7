"""What a cache of spans holds is bounded, and what it forgets it forgets whole."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from typing import Any

import pytest

from rollfeed.base.sglang_wire import RequestError
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.router.span_cache import SpanCache
from rollfeed.testing import CharTokenizer

TURN = 200
"""Characters, and tokens."""


def text_of(chance: random.Random, size: int = TURN) -> str:
    return "".join(chance.choices("abcdefghij ", k=size))


def reply_of(text: str, version: int, spans: list[tuple[int, int, int]] | None = None) -> dict[str, Any]:
    """A reply whose log-probabilities say its version."""
    spans = spans or [(0, len(text), version)]
    logprobs = [-0.5 - number for start, end, number in spans for _ in range(start, end)]
    meta = {
        "finish_reason": {"type": "length"},
        "completion_tokens": len(text),
        "output_token_logprobs": [[logprob, ord(each), None] for logprob, each in zip(logprobs, text, strict=True)],
        "weight_versions": [{"version": number, "start": start, "end": end} for start, end, number in spans],
    }
    return {"text": text, "output_ids": [ord(each) for each in text], "meta_info": meta}


def say(cache: SpanCache, prompt: str, reply: str, *, version: int = 0) -> str:
    cache.keep(cache.rewrite({"text": prompt}), reply_of(reply, version), policy_version=version)
    return prompt + reply


def is_known(cache: SpanCache, text: str) -> bool:
    try:
        return bool(cache.retrieve(text)["num_known_characters"] == len(text))
    except RequestError:
        return False


@pytest.mark.parametrize("num_tokens", [0, 100, 2_000, 20_000])
def test_the_bound_holds_and_what_was_used_last_stays(num_tokens: int) -> None:
    chance = random.Random(num_tokens)
    cache = SpanCache(CharTokenizer(), num_tokens=num_tokens)
    texts = [""]
    used = say(cache, "first of all", text_of(chance))
    for _ in range(300):
        before = chance.choice(texts[-5:])
        before = before if len(before) < 5 * TURN else ""
        texts.append(say(cache, before + text_of(chance, 20), text_of(chance)))
        assert cache.use().num_bytes <= 16 * num_tokens
        if num_tokens >= 20_000:
            assert is_known(cache, used)
            assert is_known(cache, texts[-1])
    use = cache.use()
    assert use.num_kept == 301
    assert use.num_evicted_tokens > 0
    assert (use.num_spans == 0) == (use.num_tokens == 0)
    assert num_tokens or not use.num_tokens
    known = [text for text in texts[1:] if is_known(cache, text)]
    assert len(known) < len(texts) - 1
    assert bool(known) == (num_tokens >= 2_000)


def test_everything_forgotten_leaves_nothing() -> None:
    chance = random.Random(0)
    cache = SpanCache(CharTokenizer())
    texts = ["x"]
    for number in range(200):
        texts.append(say(cache, chance.choice(texts) + str(number), text_of(chance, 10), version=number // 20))
    cache._tree.forget_versions_before(10)
    use = cache.use()
    assert (use.num_bytes, use.num_tokens, use.num_spans) == (0, 0, 0)
    assert is_known(cache, say(cache, "x", "y"))


@pytest.mark.parametrize("newest", [3, 4, 8])
def test_what_no_newer_version_has_used_is_forgotten_and_what_is_under_way_is_not(newest: int) -> None:
    cache = SpanCache(CharTokenizer(), max_version_age=2)
    old = say(cache, "old: ", "one", version=1)
    going_on = say(cache, "long: ", "one", version=1)
    for version in range(2, newest + 1):
        going_on = say(cache, going_on + "?", f"[{version}]", version=version)
    assert is_known(cache, old) == (newest <= 3)
    assert is_known(cache, going_on)
    versions = [int(span["version"]) for span in cache.retrieve(going_on)["weight_versions"]]
    assert versions == list(range(1, newest + 1))
    branch = say(cache, "long: one", "!", version=newest)
    cache._tree.forget_versions_before(newest)
    assert is_known(cache, branch)
    cache._tree.forget_versions_before(newest + 1)
    assert not is_known(cache, branch)


def test_a_prefix_that_is_forgotten_while_a_request_runs_comes_back_with_its_reply() -> None:
    cache = SpanCache(CharTokenizer())
    before = say(cache, "Q: ", "one", version=1)
    say(cache, "other", "x", version=2)
    body = cache.rewrite({"text": before + "?"})
    cache._tree.forget_versions_before(9)
    assert cache.use().num_tokens == 0
    cache.keep(body, reply_of("two", 9), policy_version=9)
    got = cache.retrieve(before + "?two")
    assert got["loss_mask"] == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert got["rollout_logp"] == [0, 0, 0, -1.5, -1.5, -1.5, 0, -9.5, -9.5, -9.5]
    assert [span["version"] for span in got["weight_versions"]] == ["1", "9"]
    assert is_known(cache, before)


def test_no_span_crosses_a_version_however_they_change() -> None:
    chance = random.Random(5)
    cache = SpanCache(CharTokenizer(), num_tokens=30_000, max_version_age=4)
    texts, version = ["x"], 0
    for number in range(300):
        reply = text_of(chance, chance.randint(1, 30))
        border = chance.randint(0, len(reply))
        spans = [span for span in ((0, border, version), (border, len(reply), version + 1)) if span[0] < span[1]]
        before = chance.choice(texts[-8:])
        prompt = (before if len(before) < TURN else "x") + f"<{number}>"
        cache.keep(cache.rewrite({"text": prompt}), reply_of(reply, version, spans), policy_version=version + 1)
        texts.append(prompt + reply)
        version += chance.random() < 0.2
        for text in texts[-8:]:
            got = cache.retrieve(text) if text != "x" else {"weight_versions": [], "loss_mask": []}
            assert sum(span["end"] - span["start"] for span in got["weight_versions"]) == sum(got["loss_mask"])
            for span in got["weight_versions"]:
                assert set(got["rollout_logp"][span["start"] : span["end"]]) == {-0.5 - int(span["version"])}
                assert set(got["loss_mask"][span["start"] : span["end"]]) == {1}


def test_a_hub_of_many_prompts_and_many_ways_to_say_one_thing_is_searched_to_the_end() -> None:
    chance = random.Random(1)
    cache = SpanCache(CharTokenizer())
    system = text_of(chance)
    asked = [system + f"{chance.randint(0, 10**9)}\u00e9 {number}?" for number in range(300)]
    said = [say(cache, prompt, chance.choice("yn") + str(number)) for number, prompt in enumerate(asked)]
    assert all(is_known(cache, text) for text in said)
    one = [say(cache, "same", "The" + text_of(chance, 10), version=number) for number in range(100)]
    for number, text in enumerate(one):
        assert cache.retrieve(text)["weight_versions"] == [{"version": str(number), "start": 4, "end": 17}]


def test_threads_that_ask_and_keep_one_prefix_lose_nothing() -> None:
    cache = SpanCache(CharTokenizer(), num_tokens=400_000)
    shared = say(cache, "shared", "prefix")
    failed: list[str] = []

    def work(number: int) -> None:
        text = shared
        for turn in range(40):
            text = say(cache, f"{text}<{number}.{turn}>", f"({number},{turn})", version=turn)
            if not is_known(cache, text) or not is_known(cache, shared):
                failed.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert cache.use().num_kept == 1 + 6 * 40


def test_a_token_takes_at_most_16_bytes_with_all_it_needs() -> None:
    """In 8 conversations of four turns of 150 tokens each, of the real tokenizer."""
    tokenizer = load_tokenizer(resolve_checkpoint(DEFAULT_MODEL))
    chance = random.Random(3)
    words = [token for token in range(1_000, 3_000) if tokenizer.decode([token], skip_special_tokens=True).isascii()]

    def shown(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    def play(cache: SpanCache, number: int, replies: list[list[int]]) -> None:
        text = str(number)
        for ids in replies:
            text += shown(chance.choices(words, k=150))
            meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, each, None] for each in ids]}
            said = shown(ids)
            cache.keep(cache.rewrite({"text": text}), {"text": said, "meta_info": meta}, policy_version=0)
            text += said

    cache = SpanCache(tokenizer)
    play(cache, 0, [words])  # so that the pieces of the tokenizer are known
    gc.collect()
    tracemalloc.start()
    try:
        before, held = tracemalloc.get_traced_memory()[0], cache.use()
        for number in range(8):
            play(cache, number, [chance.choices(words, k=150) for _ in range(4)])
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    use = cache.use()
    assert num_bytes <= 16 * (use.num_tokens - held.num_tokens)
    assert use.num_bytes - held.num_bytes == pytest.approx(num_bytes, rel=0.1)


@pytest.mark.parametrize("end", ["", "\x03"])
def test_replies_that_share_tokens_end_where_each_of_them_does(end: str) -> None:
    """Equal log-probabilities put both on one path; 3 is a special token, which is not shown."""
    cache = SpanCache(CharTokenizer())
    prompts = [cache.rewrite({"text": "Q:"}) for _ in range(2)]
    for prompt, said in zip(prompts, (" four is it", " four" + end), strict=True):
        reply = reply_of(said, 1)
        cache.keep(prompt, {**reply, "text": said.removesuffix(end)}, policy_version=1)
    for written in (" is", " isn't", " i", "!"):
        got = cache.retrieve("Q: four" + written)
        assert got["loss_mask"] == [0, 0] + [1] * 5 + [0] * (len(got["tokens"]) - 7)
        assert 3 not in got["tokens"]
    assert cache.retrieve("Q: four is it")["loss_mask"] == [0, 0] + [1] * 11
    assert cache.retrieve("Q: four")["loss_mask"] == [0, 0] + [1] * (5 + len(end))


def test_equal_tokens_with_other_log_probabilities_stay_apart_and_the_last_sampled_come_first() -> None:
    cache = SpanCache(CharTokenizer())

    def sample(text: str, logprob: float) -> None:
        reply = reply_of(text, 1)
        for entry in reply["meta_info"]["output_token_logprobs"]:
            entry[0] = logprob
        cache.keep(cache.rewrite({"text": "Q"}), reply, policy_version=1)

    sample("ab", -1.0)
    sample("ac", -2.0)
    sample("ab", -3.0)
    assert cache.retrieve("Qac")["rollout_logp"] == [0, -2, -2]
    assert cache.retrieve("Qab")["rollout_logp"] == [0, -3, -3]
    sample("ab", -1.0)
    assert cache.retrieve("Qab")["rollout_logp"] == [0, -1, -1]


def test_a_late_reply_of_older_weights_is_no_older_than_its_arrival() -> None:
    cache = SpanCache(CharTokenizer())
    say(cache, "new", "one", version=5)
    late = say(cache, "late", "one", version=3)
    cache._tree.forget_versions_before(5)
    assert is_known(cache, late)
    assert cache.retrieve(late)["weight_versions"][0]["version"] == "3"
