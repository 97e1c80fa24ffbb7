"""Cases in which turns of agents have gone wrong elsewhere, by the names R01 to R19."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.zoo.families import FAMILIES, load
from tests.generate.test_multi_turn import QUESTION, Echo, Talk, check_exact, play, turn_of
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from rollfeed import RolloutConfig, open_rollouts
from rollfeed.config import PluginSettings, RolloutSettings, SamplingSettings
from rollfeed.conversations import Conversation
from rollfeed.generate import Episode
from rollfeed.prompts import ChatRenderer, LocalTokenizer, load_tokenizer
from rollfeed.protocols import RewrittenTurns, RolloutRequest, Services, TurnJournal
from rollfeed.testing import CharTokenizer, Fault, ListSource, ScriptedEngine, make_prompt
from rollfeed.types import FinishKind, Sample, SampleStatus

TOLD = "No {heard}."
THINKS = "<think>\nWell.\n</think>\n\n"


def ids_of(name: str, text: str) -> list[int]:
    return load(name).encode(text, add_special_tokens=False).tolist()


def occurrences(ids: NDArray[np.int32], wanted: list[int]) -> int:
    return sum(ids[place : place + len(wanted)].tolist() == wanted for place in range(len(ids)))


async def test_r01_what_was_sampled_in_pieces_is_never_one_token() -> None:
    pieces = [*ids_of("chatml", "t"), *ids_of("chatml", "h"), *ids_of("chatml", "e")]
    assert len(ids_of("chatml", "the")) == 1
    turn = np.array([*pieces, *ids_of("chatml", "<|im_end|>")], np.int32)
    endpoint = Echo([turn] * 3)
    (sample,) = await play("chatml", endpoint, says=["Sure?"], num_turns=3)
    assert occurrences(sample.token_ids, pieces) == 3
    assert occurrences(sample.response_token_ids, ids_of("chatml", "the")) == 0
    for sent in endpoint.sent:
        assert sample.token_ids[: len(sent)].tolist() == sent.tolist()


class Tools(Talk):
    """Says what it says as results of tools."""

    def step(self, state: Any, response: str) -> Any:
        step = super().step(state, response)
        return replace(step, messages=tuple({**message, "role": "tool"} for message in step.messages))


RESULTS = ["result 0", "result 1"]


@pytest.mark.parametrize("name", ["qwen2.5", "merged_results"])
async def test_r02_r03_results_in_a_row_are_sent_as_the_full_render_shows_them(name: str) -> None:
    tokenizer = load(name)
    endpoint = Echo([turn_of(name, said, Random(0)) for said in ("first", "second", "third")])
    (sample,) = await play(name, endpoint, says=RESULTS, num_turns=3, environment=Tools())
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for sent, said in zip(endpoint.sent, ("first", "second", "third"), strict=True):
        assert tokenizer.decode(sent, skip_special_tokens=False) == tokenizer.render_chat(messages)
        messages.append({"role": "assistant", "content": said})
        messages += [{"role": "tool", "content": result} for result in RESULTS]
    check_exact([sample], endpoint, endpoint.turns)
    opening = "<|im_start|>user" if name == "qwen2.5" else "<|turn|>results"
    shown = tokenizer.decode(sample.token_ids, skip_special_tokens=False)
    assert shown.count(opening) == 2 + (name == "qwen2.5")  # of the question, too, and each pair has one


async def test_a_stop_token_that_opens_the_results_counts_once() -> None:
    turns = [turn_of("glm4", "call", Random(0), ending="<|observation|>"), turn_of("glm4", "yes", Random(0))]
    endpoint = Echo(turns)
    (sample,) = await play("glm4", endpoint, says=RESULTS[:1], num_turns=2, environment=Tools())
    (observation,) = ids_of("glm4", "<|observation|>")
    assert (sample.token_ids == observation).sum() == 1
    place = int(np.flatnonzero(sample.response_token_ids == observation)[0])
    assert sample.loss_mask[place] == 1.0
    check_exact([sample], endpoint, turns)


@pytest.mark.parametrize("rewritten", [RewrittenTurns.FORK, RewrittenTurns.APPEND])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "chatml"])
async def test_r04_a_thought_is_trained_in_the_context_in_which_it_was_sampled(
    name: str, rewritten: RewrittenTurns
) -> None:
    turns = [turn_of(name, f"{THINKS}{said}", Random(0)) for said in ("yes", "no", "yes")]
    endpoint = Echo(turns)
    samples = await play(name, endpoint, says=[TOLD], num_turns=3, rewritten=rewritten)
    check_exact(samples, endpoint, turns)
    if rewritten is RewrittenTurns.APPEND:
        (sample,) = samples
        assert load(name).decode(sample.token_ids, skip_special_tokens=False).count(THINKS) == 3


@pytest.mark.parametrize("name", FAMILIES)
async def test_r05_the_mask_is_one_on_what_was_sampled_with_its_stop_token_and_nowhere_else(name: str) -> None:
    (mark,) = ids_of(name, "\u00ff")[-1:]  # a byte of which nothing that is inserted has one
    (end,) = ids_of(name, FAMILIES[name].ends[0])
    turn = np.array([mark, mark, mark, end], np.int32)
    endpoint = Echo([turn] * 3)
    samples = await play(name, endpoint, says=[TOLD], num_turns=3, rewritten=RewrittenTurns.APPEND)
    (sample,) = samples
    ids = sample.response_token_ids
    is_sampled = ids == mark
    is_sampled[1:] |= (ids[1:] == end) & (ids[:-1] == mark)
    assert sample.loss_mask.tolist() == is_sampled.astype(np.float32).tolist()
    assert sample.loss_mask.sum() == 3 * len(turn)


async def test_r08_an_aborted_turn_between_two_leaves_no_gap_in_the_logprobs() -> None:
    turn, journal = turn_of("chatml", "yes", Random(0)), TurnJournal()
    turns, kinds = [turn, turn[:0]], [FinishKind.STOP, FinishKind.ABORT]
    for _ in range(3):  # nothing of the second turn, then two tokens, then nothing again
        (sample,) = await play("chatml", Echo(turns, kinds), says=[TOLD], num_turns=3, journal=journal)
        assert sample.status is SampleStatus.ABORTED
        assert len(sample.logprobs) == len(sample.loss_mask) == sample.response_length
        turns, kinds = [turn[:2] if len(turns) == 2 else turn[:0]], [FinishKind.ABORT]
    (sample,) = await play("chatml", Echo([turn[2:], turn]), says=[TOLD], num_turns=3, journal=journal)
    pieces = [turn, turn[:2], turn[2:], turn]
    expected = np.concatenate([np.linspace(-2.0, -1.0, len(piece), dtype=np.float32) for piece in pieces])
    assert sample.status is SampleStatus.COMPLETED
    assert sample.logprobs[sample.loss_mask == 1.0].tolist() == expected.tolist()
    assert not sample.logprobs[sample.loss_mask == 0.0].any()
    assert sample.response_token_ids[sample.loss_mask == 1.0].tolist() == np.concatenate([turn] * 3).tolist()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.bos])
async def test_r10_every_request_begins_with_one_bos_and_has_no_other(name: str) -> None:
    (bos,) = ids_of(name, FAMILIES[name].bos or "")
    endpoint = Echo([turn_of(name, "yes", Random(0)) for _ in range(4)])
    samples = await play(name, endpoint, says=[TOLD], num_turns=4)
    for ids in [*endpoint.sent, *(sample.token_ids for sample in samples)]:
        assert (ids[0], (ids == bos).sum()) == (bos, 1)


@pytest.fixture
def adds_bos(tmp_path: Path) -> LocalTokenizer:
    """Llama's tokenizer without its template, and with what puts a BOS before any text."""
    bos = FAMILIES["llama3"].bos or ""
    tokenizer = Tokenizer.from_str(load("llama3")._tokenizer.backend_tokenizer.to_str())
    special_tokens = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special_tokens)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos).save_pretrained(tmp_path)
    return load_tokenizer(tmp_path)


async def test_r10_a_raw_prompt_has_its_bos_once_however_many_turns_follow(adds_bos: LocalTokenizer) -> None:
    text, ids, *_ = ChatRenderer(adds_bos, rollout_max_prompt_len=None).render("1-4?", apply_chat_template=False)
    prompt = make_prompt(text, token_ids=ids)
    conversation = Conversation(prompt, adds_bos)
    told = conversation.follow_up(ids_of_text(adds_bos, "2"), [{"role": "user", "content": ">"}]).token_ids
    whole = np.concatenate([ids, ids_of_text(adds_bos, "2"), told])
    assert (whole == ids[0]).sum() == 1
    assert adds_bos.decode(whole, skip_special_tokens=True) == "1-4?2>"


def ids_of_text(tokenizer: LocalTokenizer, text: str) -> NDArray[np.int32]:
    return tokenizer.encode(text, add_special_tokens=False)


async def test_r15_each_turn_may_be_as_long_as_the_context_has_room() -> None:
    turn = turn_of("chatml", "yes", Random(0))
    everything = Echo([turn] * 3)
    (whole,) = await play("chatml", everything, says=[TOLD], num_turns=3)
    used = len(everything.sent[2])
    for room, status in ((5, SampleStatus.COMPLETED), (len(turn) - 1, SampleStatus.TRUNCATED)):
        endpoint = Echo([turn] * 3)
        (sample,) = await play("chatml", endpoint, says=[TOLD], num_turns=3, budget=1000, context=used + room)
        assert [params.max_new_tokens for params in endpoint.params] == [
            used + room - len(sent) for sent in endpoint.sent
        ]
        assert endpoint.params[-1].max_new_tokens == room
        assert (sample.status, len(sample.token_ids)) == (status, used + min(room, len(turn)))
    endpoint = Echo([turn] * 3)
    (sample,) = await play("chatml", endpoint, says=[TOLD], num_turns=3, context=used)
    assert (sample.status, len(endpoint.sent)) == (SampleStatus.TRUNCATED, 2)
    assert sample.token_ids.tolist() == whole.token_ids[: len(sample.token_ids)].tolist()


async def test_r19_a_group_that_is_aborted_in_its_second_turn_waits_once_and_is_not_trained() -> None:
    async def two_turns(request: RolloutRequest, *, services: Services) -> list[Sample]:
        episode = Episode(request, services)
        first = await episode.sample()
        if first.finish_reason.kind is FinishKind.ABORT:
            return episode.end(first)
        episode.tell(" more? ")
        return episode.end(await episode.sample())

    has_ended = False

    def hangs(request: Any) -> Fault | None:
        # A request has the number of its rollout at its end: those of the first group hang in their second turn.
        is_of_first = request.request_id.rpartition("rollout")[2] in ("0", "1")
        return Fault.HANG if is_of_first and "turn1" in request.request_id and not has_ended else None

    config = RolloutConfig(
        rollout=RolloutSettings(
            mode="partial", rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=3
        ),
        sampling=SamplingSettings(rollout_max_response_len=40),
        plugins=PluginSettings(generate=two_turns, reward=one),
    )
    engine, commits = ScriptedEngine(fault_of=hangs), []
    source = ListSource([f"prompt {number}" for number in range(8)])
    async with open_rollouts(
        config, source=source, engine=engine, tokenizer=CharTokenizer(), commit=commits.append
    ) as rollouts:
        batch = await rollouts.generate_batch()
        assert [group.group_index for group in batch.groups] == [1, 2]
        assert [each.group_index for each in commits[0].state.requeued].count(0) == 1
        assert all(sample.status is SampleStatus.COMPLETED for sample in batch.samples)
        has_ended = True
        num_asked = len(engine.requests)
        batch = await rollouts.generate_batch()
    assert batch.groups[0].group_index == 0
    assert all(sample.status is SampleStatus.COMPLETED for sample in batch.samples)
    asked = [each.request_id for each in engine.requests[num_asked:]]
    assert sum(each.endswith(("-rollout0", "-rollout1")) for each in asked) == 2  # the second turns only


async def one(sample: Sample, prompt: Any) -> float:
    return 1.0


async def test_a_suffix_that_would_be_one_token_with_the_end_of_the_turn_stays_apart() -> None:
    tokenizer = load("plain")
    turn = np.array([*ids_of("plain", "yes"), *ids_of("plain", ".")], np.int32)  # stopped by a text, not by a token
    endpoint = Echo([turn] * 3)
    (sample,) = await play("plain", endpoint, says=["Sure?"], num_turns=3)
    check_exact([sample], endpoint, endpoint.turns)
    assert (
        tokenizer.decode(sample.token_ids, skip_special_tokens=False).count("yes.\n\nUser: Sure?\n\nAssistant: ") == 2
    )
    (merged,) = ids_of("plain", ".\n\n")
    (full_stop,), behind = ids_of("plain", "."), ids_of("plain", "\n\n")
    assert not (sample.response_token_ids == merged).any()
    assert occurrences(sample.token_ids, [full_stop, *behind]) == 2
