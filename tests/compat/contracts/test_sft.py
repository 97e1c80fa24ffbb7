"""Masks of conversations that are learned as they stand, and what of them is the response."""

from typing import Any

import pytest

from rollfeed.compat.slime_plugins.names.helpers import MultiTurnLossMaskGenerator, SlimeTokenizer
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.testing import CharTokenizer

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first"},
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "assistant", "content": "second"},
]


class Ending(CharTokenizer):
    """Ends turns of an assistant with the id 3."""

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True, **settings: Any) -> str:
        end = {"assistant": "\x03"}
        lines = "".join(f"{each['role']}: {each['content']}{end.get(each['role'], '')}\n" for each in messages)
        return lines + ("assistant: " if add_generation_prompt else "")


def masked(kind: str, messages: Any) -> tuple[list[int], list[int], list[str]]:
    generator = MultiTurnLossMaskGenerator(SlimeTokenizer(Ending()), tokenizer_type=kind)
    ids, mask = generator.get_loss_mask(messages)
    return ids, mask, generator.get_text_from_loss_mask(ids, mask)


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_the_assistants_turns_are_learned_with_what_ends_them_in_one_full_render(kind: str) -> None:
    ids, mask, texts = masked(kind, TALK)
    assert (
        ids
        == Ending().encode(Ending().render_chat(TALK, add_generation_prompt=False), add_special_tokens=False).tolist()
    )
    assert texts == ["first\x03", "second\x03"]
    assert len(ids) == len(mask)
    assert set(mask) == {0, 1}


def test_the_last_answer_alone_is_learned_for_distillation() -> None:
    assert masked("distill_qwen", TALK)[2] == ["second\x03"]


def test_a_turn_whose_step_loss_mask_is_0_is_not_learned() -> None:
    silenced = [*TALK[:2], {**TALK[2], "step_loss_mask": 0}, *TALK[3:]]
    assert masked("qwen", silenced)[2] == ["second\x03"]


def test_the_response_is_from_the_first_token_that_is_learned_to_the_end() -> None:
    generator = MultiTurnLossMaskGenerator(SlimeTokenizer(Ending()))
    _, mask, _ = masked("qwen", TALK)
    assert generator.get_response_lengths([mask, [0, 1, 0, 1], [0, 0]]) == [len(mask) - mask.index(1), 3, 0]


def test_another_type_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SlimeUseError, match=r"no type 'glm'; there are qwen3_5, generic, qwen"):
        MultiTurnLossMaskGenerator(SlimeTokenizer(Ending()), tokenizer_type="glm")
    with pytest.raises(SlimeUseError, match="give it the tokenizer that load_tokenizer returns"):
        MultiTurnLossMaskGenerator(CharTokenizer())
