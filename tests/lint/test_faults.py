"""Each of the faults that samples have had elsewhere is found, and nothing in samples as they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.conversations.zoo.families import load
from tests.lint.making import QUESTION, Made, lint, made

from rollfeed.conversations import LossMaskType, answered_prompt
from rollfeed.lint import Flaw, SamplePlace, Subject
from rollfeed.types import Prompt, SampleStatus

FAMILIES = ("chatml", "qwen2.5", "qwen3", "llama3", "mistral", "gemma", "phi", "glm4", "plain")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_sample_as_it_is_made_is_clean(family: str, turns: int) -> None:
    sample = made(family, turns=tuple(f"turn {number}" for number in range(turns)))
    assert lint(sample.subject(), tokenizer=sample.tokenizer) == []
    assert lint(sample.subject()) == []


def tool_token_trained(sample: Made) -> Subject:
    _, end = sample.turns[0]
    for position in range(end, sample.turns[1][0]):
        sample.mask[position] = 1.0
    return sample.subject()


def some_of_a_tool_trained(sample: Made) -> Subject:
    middle = (sample.turns[0][1] + sample.turns[1][0]) // 2
    sample.mask[middle : middle + 3] = [1.0] * 3
    return sample.subject()


def opening_trained(sample: Made) -> Subject:
    start = sample.turns[1][0]
    sample.mask[start - 4 : start] = [1.0] * 4
    return sample.subject()


def tool_trained_with_a_logprob(sample: Made) -> Subject:
    _, end = sample.turns[0]
    for position in range(end, sample.turns[1][0]):
        sample.mask[position], sample.logprobs[position] = 1.0, -0.7
    return sample.subject()


def mask_late(sample: Made) -> Subject:
    sample.mask = [0.0, *sample.mask[:-1]]
    return sample.subject()


def mask_early(sample: Made) -> Subject:
    sample.mask = [*sample.mask[1:], 0.0]
    return sample.subject()


def end_lost(sample: Made) -> Subject:
    sample.drop(sample.turns[0][1] - 1)
    return sample.subject()


def end_without_weight(sample: Made) -> Subject:
    sample.mask[sample.turns[1][1] - 1] = 0.0
    return sample.subject()


def last_end_lost(sample: Made) -> Subject:
    sample.drop(sample.turns[-1][1] - 1)
    return sample.subject()


def begun_twice(sample: Made) -> Subject:
    sample.ids.insert(0, sample.ids[0])
    return sample.subject()


def begun_again(sample: Made) -> Subject:
    position = sample.turns[0][1] + len(sample.prompt.token_ids)
    sample.ids.insert(position, sample.ids[0])
    sample.mask.insert(sample.turns[0][1], 0.0)
    sample.logprobs.insert(sample.turns[0][1], 0.0)
    return sample.subject()


def turn_retokenised(sample: Made) -> Subject:
    start, end = sample.turns[1]
    sample.logprobs[start:end] = [0.0] * (end - start)
    return sample.subject()


def logprobs_late(sample: Made) -> Subject:
    sample.logprobs = [0.0, *sample.logprobs[:-1]]
    return sample.subject()


def logprob_above_zero(sample: Made) -> Subject:
    sample.logprobs[sample.turns[0][0] + 1] = 0.5
    return sample.subject()


def logprob_missing(sample: Made) -> Subject:
    sample.logprobs[sample.turns[0][0] + 1] = float("nan")
    return sample.subject()


def told_with_logprob(sample: Made) -> Subject:
    sample.logprobs[sample.turns[0][1]] = -0.3
    return sample.subject()


def prompt_in_response(sample: Made) -> Subject:
    sample.mask, sample.logprobs = [1.0] * 5 + sample.mask, [0.0] * 5 + sample.logprobs
    return sample.subject()


def other_prompt(sample: Made) -> Subject:
    sample.ids[3] += 1
    return sample.subject()


def cut_and_completed(sample: Made) -> Subject:
    sample.drop(sample.turns[-1][1] - 1)
    return sample.subject()


def version_of_some(sample: Made) -> Subject:
    return sample.subject(spans=[(0, 5, 3), (7, len(sample.mask), 3)])


def version_of_the_first(sample: Made) -> Subject:
    return sample.subject(spans=[(0, 5, 3)])


def version_back(sample: Made) -> Subject:
    return sample.subject(spans=[(0, 5, 3), (5, len(sample.mask), 2)], max_staleness=None)


def version_of_the_future(sample: Made) -> Subject:
    return sample.subject(spans=[(0, len(sample.mask), 4)])


def version_too_old(sample: Made) -> Subject:
    return sample.subject(spans=[(0, len(sample.mask), 2)])


def aborted(sample: Made) -> Subject:
    return sample.subject(status=SampleStatus.ABORTED)


def too_few_weights(sample: Made) -> Subject:
    del sample.mask[-1]
    return sample.subject(response_length=len(sample.logprobs))


FAULTS: dict[Callable[[Made], Subject], Flaw] = {
    tool_token_trained: Flaw.TOOL_TOKEN_TRAINED,
    some_of_a_tool_trained: Flaw.TOOL_TOKEN_TRAINED,
    opening_trained: Flaw.TOOL_TOKEN_TRAINED,
    tool_trained_with_a_logprob: Flaw.TOOL_TOKEN_TRAINED,
    mask_late: Flaw.SHIFTED_MASK,
    mask_early: Flaw.SHIFTED_MASK,
    end_lost: Flaw.MISSING_END_OF_TURN,
    end_without_weight: Flaw.MISSING_END_OF_TURN,
    last_end_lost: Flaw.MISSING_END_OF_TURN,
    begun_twice: Flaw.DOUBLED_BOS,
    turn_retokenised: Flaw.RETOKENISED_TURN,
    logprobs_late: Flaw.LOGPROB_OF_ANOTHER_TOKEN,
    told_with_logprob: Flaw.LOGPROB_OF_ANOTHER_TOKEN,
    logprob_above_zero: Flaw.IMPOSSIBLE_LOGPROB,
    logprob_missing: Flaw.IMPOSSIBLE_LOGPROB,
    prompt_in_response: Flaw.PROMPT_TRAINED,
    other_prompt: Flaw.PROMPT_TOKENS,
    version_of_some: Flaw.VERSION_GAP,
    version_of_the_first: Flaw.VERSION_GAP,
    version_back: Flaw.VERSION_GAP,
    version_of_the_future: Flaw.VERSION_GAP,
    version_too_old: Flaw.VERSION_GAP,
    aborted: Flaw.UNFINISHED_TRAINED,
    too_few_weights: Flaw.SHAPE,
}


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "gemma"])
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[Made], Subject], family: str) -> None:
    sample = made(family)
    kinds = [found.kind for found in lint(plant(sample), tokenizer=sample.tokenizer)]
    assert FAULTS[plant] in kinds, kinds


def test_a_first_token_in_the_middle_is_found() -> None:
    sample = made("llama3")
    assert [found.kind for found in lint(begun_again(sample), tokenizer=sample.tokenizer)] == [Flaw.DOUBLED_BOS]


def test_a_limit_or_a_stop_string_of_the_metadata_is_believed() -> None:
    sample = made()
    ended = sample.subject(metadata={"ended_by": "max_turns"})
    assert [found.kind for found in lint(ended, tokenizer=sample.tokenizer)] == [Flaw.TRUNCATED_MARKED_COMPLETE]
    open_ended = made(end=False)
    stopped = open_ended.subject(metadata={"stopped_at": "answer."})
    assert lint(stopped, tokenizer=sample.tokenizer) == []


def test_a_prompt_that_opens_turns_otherwise_is_no_finding() -> None:
    sample = made("chatml")
    thought = sample.tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False).tolist()
    start = sample.turns[1][0]
    position = start + len(sample.prompt.token_ids)
    sample.ids[position:position] = thought
    sample.mask[start:start] = [0.0] * len(thought)
    sample.logprobs[start:start] = [0.0] * len(thought)
    assert lint(sample.subject(), tokenizer=sample.tokenizer) == []


def talk(family: str = "chatml") -> Subject:
    """Return a conversation that is taught, as it is made."""
    tokenizer = load(family)
    messages = (
        *QUESTION,
        {"role": "assistant", "content": "Two."},
        *QUESTION,
        {"role": "assistant", "content": "So 2."},
    )
    prompt = Prompt(prompt_id="p", source="made", text="", token_ids=np.empty(0, np.int32), messages=messages)
    shown = answered_prompt(prompt, tokenizer=tokenizer, mask_type=LossMaskType.GENERIC)
    length = len(shown.response_ids)
    return Subject(
        place=SamplePlace("step 0", 0, 0, 0),
        token_ids=shown.token_ids,
        response_length=length,
        loss_mask=shown.response_mask.copy(),
        logprobs=np.zeros(length, np.float32),
        spans=[(0, length, 0)],
        status=SampleStatus.COMPLETED,
        prompt=prompt,
        is_taught=True,
    )


def all_trained(taught: Subject) -> Subject:
    return replace(taught, loss_mask=np.ones(taught.response_length, np.float32))


def taught_late(taught: Subject) -> Subject:
    return replace(taught, loss_mask=np.roll(taught.loss_mask, 1))


def taught_without_ends(taught: Subject) -> Subject:
    ends = np.isin(taught.response_ids, load("chatml").eos_token_ids)
    return replace(taught, loss_mask=np.where(ends, np.float32(0.0), taught.loss_mask))


def question_trained(taught: Subject) -> Subject:
    length = taught.response_length + 3
    mask = np.concatenate([np.ones(3, np.float32), taught.loss_mask])
    return replace(taught, response_length=length, loss_mask=mask, logprobs=None, spans=[(0, length, 0)])


def taught_twice_begun(taught: Subject) -> Subject:
    return replace(taught, token_ids=np.concatenate([taught.token_ids[:1], taught.token_ids]))


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (all_trained, Flaw.TOOL_TOKEN_TRAINED),
        (taught_late, Flaw.SHIFTED_MASK),
        (taught_without_ends, Flaw.MISSING_END_OF_TURN),
        (question_trained, Flaw.PROMPT_TRAINED),
        (taught_twice_begun, Flaw.DOUBLED_BOS),
    ],
)
def test_a_fault_in_a_taught_conversation_is_found(plant: Callable[[Subject], Subject], kind: Flaw) -> None:
    tokenizer = load("chatml")
    assert lint(talk(), tokenizer=tokenizer, mask_type=LossMaskType.GENERIC) == []
    kinds = {found.kind for found in lint(plant(talk()), tokenizer=tokenizer, mask_type=LossMaskType.GENERIC)}
    assert kinds == {kind}


def test_a_cut_answer_is_told_from_one_without_its_end_by_the_limit() -> None:
    sample = made(end=False)
    (found,) = lint(sample.subject(), tokenizer=sample.tokenizer, response_limit=len(sample.mask))
    assert found.kind is Flaw.TRUNCATED_MARKED_COMPLETE
    assert lint(sample.subject(status=SampleStatus.TRUNCATED), tokenizer=sample.tokenizer) == []


WITHOUT_TOKENIZER = {
    tool_token_trained: Flaw.TOOL_TOKEN_TRAINED,
    mask_late: Flaw.SHIFTED_MASK,
    mask_early: Flaw.SHIFTED_MASK,
    turn_retokenised: Flaw.RETOKENISED_TURN,
    prompt_in_response: Flaw.PROMPT_TRAINED,
    version_of_some: Flaw.VERSION_GAP,
}


@pytest.mark.parametrize("plant", WITHOUT_TOKENIZER, ids=lambda plant: plant.__name__)
def test_what_needs_no_tokenizer_is_found_without_one(plant: Callable[[Made], Subject]) -> None:
    kinds = [found.kind for found in lint(plant(made()))]
    assert WITHOUT_TOKENIZER[plant] in kinds, kinds


def test_beside_others_a_sample_that_begins_twice_or_ends_otherwise_is_found_without_a_tokenizer() -> None:
    clean = [made(turns=(f"answer {number}",)).subject() for number in range(5)]
    assert lint(*clean) == []
    odd, cut = made(), made(end=False)
    assert [found.kind for found in lint(*clean, replace(begun_twice(odd), prompt=None))] == [Flaw.DOUBLED_BOS]
    assert [found.kind for found in lint(*clean, cut.subject())] == [Flaw.TRUNCATED_MARKED_COMPLETE]


@pytest.mark.parametrize("plant", [end_lost, end_without_weight], ids=lambda plant: plant.__name__)
def test_beside_others_a_turn_without_its_end_is_found_without_a_tokenizer(plant: Callable[[Made], Subject]) -> None:
    clean = [made(turns=(f"answer {number}", "so")).subject() for number in range(5)]
    assert {found.kind for found in lint(*clean, replace(plant(made()), prompt=None))} == {Flaw.MISSING_END_OF_TURN}


def test_a_turn_that_two_samples_of_a_rollout_train_is_found() -> None:
    first, other = made(), made()
    forked = replace(other.subject(), place=SamplePlace("step 0", 0, 0, 1))
    kinds = {found.kind for found in lint(first.subject(), forked, tokenizer=first.tokenizer)}
    assert kinds == {Flaw.FORK_TRAINED_TWICE}
    of_another = replace(forked, rollout=(0, 1))
    assert lint(first.subject(), of_another, tokenizer=first.tokenizer) == []


def test_tokens_of_older_versions_may_be_without_weight() -> None:
    sample = made()
    length = sample.turns[0][0] + 2
    sample.mask[:length] = [0.0] * length
    masked = sample.subject(spans=[(0, length, 2), (length, len(sample.mask), 3)])
    assert lint(masked, tokenizer=sample.tokenizer) == []


def test_a_token_of_probability_one_is_no_finding() -> None:
    random = np.random.default_rng(0)
    subjects: list[Any] = []
    for _ in range(40):
        sample = made()
        for start, end in sample.turns:
            for position in range(start, end):
                if random.random() < 0.3:
                    sample.logprobs[position] = 0.0
        subjects.append(sample.subject(rollout=None))
    assert lint(*subjects, tokenizer=made().tokenizer) == []
