"""Every token is found by the text that it ends, whatever a tokenizer does to texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer
from rollfeed.router.span_cache import SpanCache
from rollfeed.router.span_cache.alignment import TextAligner
from rollfeed.router.span_cache.token_runs import TokenRun
from rollfeed.testing import CharTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return load_tokenizer(resolve_checkpoint(DEFAULT_MODEL))


def encode(tokenizer: LocalTokenizer, *texts: str) -> list[int]:
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).tolist()]


def widths(run: TokenRun) -> list[int]:
    wide = np.uint8 if len(run.widths) == run.num_tokens else np.uint32
    return [int(width) for width in np.frombuffer(run.widths, wide)]


def keep(cache: SpanCache, prompt: str, token_ids: list[int], text: str, spans: Any = None) -> None:
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, token, None] for token in token_ids],
        "weight_versions": spans or [{"version": 0, "start": 0, "end": len(token_ids)}],
    }
    cache.keep(cache.rewrite({"text": prompt}), {"text": text, "meta_info": meta}, policy_version=0)


def test_a_prompts_tokens_end_where_their_characters_do(tokenizer: LocalTokenizer) -> None:
    aligner = TextAligner(tokenizer)
    smile = len(encode(tokenizer, "🙂"))
    assert smile > 1
    assert widths(aligner.prompt("x", is_first=True)) == [1]
    run = aligner.prompt("é🙂\n7", is_first=True)
    assert widths(run) == [2, *[0] * (smile - 1), 4, 1, 1]
    assert run.text.decode() == "é🙂\n7"
    long = aligner.prompt("-" * 64 + "x", is_first=False)
    assert sum(widths(long)) == 65
    huge = aligner.reply([5, 6], np.zeros(2, np.float32), "?" * 300, [_span(2)], skip_special_tokens=True)
    assert [widths(each) for each in huge] == [[0, 300]]


def _span(size: int) -> Any:
    from rollfeed.types import VersionSpan

    return VersionSpan(0, size, 0)


@pytest.mark.parametrize("character", ["🙂", "\U00010348", "ÿ", "世", "👩‍💻"])
def test_no_part_of_a_character_is_gone_on_with_unless_it_was_shown(tokenizer: LocalTokenizer, character: str) -> None:
    ids = [tokenizer._tokenizer.convert_tokens_to_ids(byte) for byte in _byte_tokens(character)]
    assert tokenizer.decode(ids, skip_special_tokens=False) == character
    said = encode(tokenizer, "x") + ids + encode(tokenizer, "y")
    for border in range(1, len(said)):
        cache = SpanCache(tokenizer)
        spans = [
            {"version": 1, "start": 0, "end": border},
            {"version": 2, "start": border, "end": len(said)},
        ]
        keep(cache, "Q:", said, f"x{character}y", spans)
        for shown, num_tokens in (("x", 1), ("x" + character, len(said) - 1), (f"x{character}y", len(said))):
            body = cache.rewrite({"text": f"Q:{shown}!"})
            assert body["input_ids"] == encode(tokenizer, "Q:") + said[:num_tokens] + encode(tokenizer, "!")
    for size in range(1, len(ids)):
        cache = SpanCache(tokenizer)
        half = tokenizer.decode(ids[:size], skip_special_tokens=False)
        keep(cache, "Q:", ids[:size], half)
        assert cache.rewrite({"text": f"Q:{half}!"})["input_ids"][-size - 1 : -1] == ids[:size]
        assert cache.retrieve(f"Q:{half}")["loss_mask"][-size:] == [1] * size


def _byte_tokens(text: str) -> list[str]:
    """The names that tokens of single bytes have in vocabularies of GPT-2's form."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [names[byte] for byte in text.encode()]


def test_text_that_no_token_makes_is_kept_with_all_of_them(tokenizer: LocalTokenizer) -> None:
    cache = SpanCache(tokenizer)
    ids = encode(tokenizer, "one two three four five six seven eight nine ten")
    keep(cache, "Q:", ids, "uno dos")
    got = cache.retrieve("Q:uno dos")
    assert (got["tokens"][-len(ids) :], got["num_known_characters"]) == (ids, 9)
    assert cache.rewrite({"text": "Q:uno dos."})["input_ids"] == encode(tokenizer, "Q:") + ids + encode(tokenizer, ".")
    assert cache.rewrite({"text": "Q:uno"})["input_ids"] == encode(tokenizer, "Q:uno")
    keep(cache, "R:", ids, "one two!")
    assert cache.rewrite({"text": "R:one two?"})["input_ids"] == encode(tokenizer, "R:") + ids[:2] + encode(
        tokenizer, "?"
    )
    assert cache.retrieve("R:one two!")["tokens"][-len(ids) :] == ids


class StrippingTokenizer(CharTokenizer):
    """Leaves out the space that a text begins with, as SentencePiece's do."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).removeprefix(" ")


def test_the_space_that_a_reply_loses_is_a_token_of_it() -> None:
    plain = StrippingTokenizer()
    cache = SpanCache(plain)
    said = [ord(each) for each in " ab c"]
    keep(cache, "Q:", said, plain.decode(said, skip_special_tokens=True))
    assert cache.retrieve("Q:ab c")["tokens"] == [ord(each) for each in "Q: ab c"]
    assert cache.rewrite({"text": "Q:ab!"})["input_ids"] == [ord(each) for each in "Q: ab!"]
