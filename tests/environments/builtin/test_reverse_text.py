from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.environments import make_task
from rollfeed.environments.builtin import ReverseText
from rollfeed.errors import ConfigError
from rollfeed.testing import check_environment
from rollfeed.types import Correct, Verdict

COMPACT = ReverseText(style="compact", alphabet_size=10)


def judge(response: str, *, text: str = "abcd", style: str = "chat") -> Verdict:
    return ReverseText().verify({"text": text, "style": style}, response)


def words_of(environment: ReverseText, split: str, *, level: int = 2, count: int = 400) -> set[str]:
    return {
        make_task(environment, level=level, index=index, run_seed=seed, split=split).params["text"]
        for index in range(count)
        for seed in (0, 1)
    }


def test_compact_prompt_has_the_word_and_nothing_else() -> None:
    question, params, answer = COMPACT.make(2, Random(0))
    word = params["text"]
    assert (question, answer) == (f"rev:{word}=", word[::-1])
    assert len(word) == 4
    assert set(word) <= set("abcdefghij")


@pytest.mark.parametrize("level", range(10))
def test_level_sets_the_length(level: int) -> None:
    for style in ("chat", "compact"):
        _, params, _ = ReverseText(style=style).make(level, Random(1))
        assert len(params["text"]) == 2 + level


def test_both_styles_keep_the_contract() -> None:
    for split in ("train", "eval"):
        check_environment(COMPACT.for_split(split), levels=range(1, 8), seeds=range(20))
        check_environment(ReverseText().for_split(split), levels=range(8), seeds=range(20))


@pytest.mark.parametrize(
    "response",
    [
        "dcba",
        " dcba\n",
        '"dcba"',
        "dcba.",
        "dcba<|im_end|>",
        'The reversed text is "dcba".',
        "Answer: dcba",
        "\\boxed{dcba}",
    ],
)
def test_word_is_found_in_the_way_chat_models_answer(response: str) -> None:
    assert judge(response).correct is Correct.YES


@pytest.mark.parametrize(
    "response", ["abcd", "dcb", "dcbaa", "DCBA", "d c b a", 'Write "abcd" backwards', "dcba or abcd"]
)
def test_word_must_be_exact(response: str) -> None:
    assert judge(response).correct is Correct.NO


@pytest.mark.parametrize("response", ["dcba", "dcba\n", "dcba\nrev:ab=ba", "dcba</s>", " dcba"])
def test_compact_answer_is_the_first_line(response: str) -> None:
    assert judge(response, style="compact").correct is Correct.YES


@pytest.mark.parametrize("response", ["", "\n", "\ndcba", " ", "</s>"])
def test_compact_answer_that_is_empty_is_none(response: str) -> None:
    verdict = judge(response, style="compact")
    assert (verdict.reward, verdict.format_ok, verdict.extracted) == (0.0, False, None)


def test_wrong_answers_earn_the_share_of_symbols_in_their_places() -> None:
    rewards = [judge(response, style="compact").reward for response in ("xxxx", "dxxx", "dcxx", "dcbx", "dcba")]
    assert rewards == pytest.approx([0.0, 0.225, 0.45, 0.675, 1.0])
    assert judge("dcbaxxxx", style="compact").reward == pytest.approx(0.45)


def test_word_is_never_the_same_backwards() -> None:
    small = ReverseText(alphabet_size=3, held_out_share=0.5)
    for split in ("train", "eval"):
        for word in words_of(small, split, level=4):
            assert word != word[::-1]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_no_word_is_both_trained_on_and_held_out(share: float) -> None:
    environment = COMPACT.with_parameters({"held_out_share": share})
    trained, held_out = words_of(environment, "train"), words_of(environment, "eval")
    assert not trained & held_out
    assert not {word[::-1] for word in trained} & held_out
    assert all(environment.is_held_out(word) for word in held_out)
    assert not any(environment.is_held_out(word) for word in trained)


def test_splits_hold_for_every_seed_style_and_parameter_but_the_share() -> None:
    trained = words_of(ReverseText(alphabet_size=5), "train", level=1)
    held_out = words_of(COMPACT.with_parameters({"alphabet_size": 5}), "probe", level=1)
    assert trained
    assert held_out
    assert not trained & held_out


@given(share=st.floats(0.01, 0.99), word=st.text(alphabet="abcdefghij", min_size=2, max_size=8))
def test_raising_the_share_only_adds_words(share: float, word: str) -> None:
    fewer, more = ReverseText(held_out_share=share * 0.5), ReverseText(held_out_share=share)
    assert more.is_held_out(word) or not fewer.is_held_out(word)
    assert fewer.is_held_out(word) == fewer.is_held_out(word[::-1])


def test_share_is_about_what_is_held_out() -> None:
    environment = ReverseText(held_out_share=0.3)
    words = [f"{a}{b}{c}x" for a in "abcdefghij" for b in "abcdefghij" for c in "abcdefghij"]
    assert sum(map(environment.is_held_out, words)) / len(words) == pytest.approx(0.3, abs=0.05)


def test_an_alphabet_too_small_for_its_level_is_an_error_and_not_a_loop() -> None:
    tiny = ReverseText(alphabet_size=2, held_out_share=0.01, split="eval")
    with pytest.raises(ValueError, match="raise alphabet_size or the level"):
        tiny.make(0, Random(0))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"style": "plain"}, "style = 'plain'"),
        ({"alphabet_size": 1}, "alphabet_size = 1"),
        ({"alphabet_size": 37}, "must be 2 to 36"),
        ({"alphabet_size": True}, "alphabet_size = True"),
        ({"alphabet_size": 10.0}, "alphabet_size = 10.0"),
        ({"held_out_share": 0.0}, "held_out_share = 0.0"),
        ({"held_out_share": "all"}, "held_out_share = 'all'"),
        ({"length": 4}, "no parameter 'length'; it has style, alphabet_size, held_out_share"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReverseText().with_parameters(parameters)


@given(response=st.text() | st.text(alphabet='abcd<|>/s\n"\\ '))
def test_verifier_takes_any_text_in_both_styles(response: str) -> None:
    for style in ("chat", "compact"):
        verdict = judge(response, style=style)
        assert isinstance(verdict.reward, float)
        assert 0.0 <= verdict.reward <= 1.0
        assert (verdict.reward == 1.0) is (verdict.correct is Correct.YES)
        assert (verdict.reward == 1.0) <= ("dcba" in response)


def test_verifier_copes_with_long_and_hostile_text() -> None:
    for response in ["d" * 100_000, "</s>" * 25_000, " " * 100_000 + "x", "<|" * 50_000, '"' * 100_000]:
        for style in ("chat", "compact"):
            json.dumps(judge(response, style=style).extracted)
