from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.app.scoring.reward_models import model_workers
from rollfeed.config.reward_model import Aggregate, RewardModelSettings, RewardServerKind, ScoredUnit
from rollfeed.errors import ConfigError
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer
from rollfeed.protocols import Workers
from rollfeed.rewards.isolation import InProcessWorkers
from rollfeed.rewards.models import RewardModelScorer, check_tokens
from rollfeed.rewards.models.inputs import ScoredText
from rollfeed.rewards.models.local_model import LocalRewardModel
from rollfeed.rewards.models.scorer import aggregated
from rollfeed.testing import make_prompt, sample_of
from rollfeed.types import Outcome, Prompt, Sample

Classifier = Callable[..., Path]
Serve = Callable[..., Any]


def answers(tokenizer: LocalTokenizer, *responses: str) -> list[tuple[Sample, Prompt]]:
    found = []
    for response in responses:
        prompt_ids, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", response))
        sample = sample_of(prompt_ids, np.append(ids, np.int32(0)), response=response + "<end>")
        found.append((sample, make_prompt("ab", token_ids=prompt_ids)))
    return found


@asynccontextmanager
async def scorer_of(
    folder: Path, *, alone: bool = False, ids: bool = True, workers: Workers | None = None, **settings: Any
) -> Any:
    """With the model in this process, unless ``workers`` are others."""
    made = RewardModelSettings(checkpoint=str(folder), device="cpu", **settings)
    about = {"workers": workers or InProcessWorkers(), "is_policys": ids, "alone": alone}
    async with RewardModelScorer(made, folder, load_tokenizer(folder), **about) as scorer:
        yield scorer


def reference(folder: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits of every place by transformers itself, one text at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return np.asarray(model.score(hidden)[0])


RESPONSES = ("c", "cdefgh", "jjjj", "abcdefghijabcdefghij", ".")


async def test_scores_are_those_of_transformers_and_texts_share_passes_by_length(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    folder = classifier()
    async with scorer_of(folder, batch_tokens=40) as scorer:
        asked = answers(policy_tokenizer, *RESPONSES)
        verdicts = await asyncio.gather(*(scorer(*each) for each in asked))
        assert isinstance(scorer.model, LocalRewardModel)
        before = scorer.model.num_batches
        ids = [tuple(sample.token_ids.tolist()) for sample, _ in asked]
        await asyncio.gather(*(scorer.model.logits(ScoredText(each, (len(each) - 1,), "")) for each in ids))
        assert scorer.model.num_batches - before == 2  # 23 tokens alone, then the others of 9 and less
    for (sample, _), verdict in zip(asked, verdicts, strict=True):
        assert verdict.reward == pytest.approx(reference(folder, sample.token_ids.tolist())[-1, 0], abs=1e-4)
    assert len({verdict.reward for verdict in verdicts}) == len(RESPONSES)


async def test_alone_a_score_is_the_same_to_the_last_bit_whatever_comes_along(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    asked = answers(policy_tokenizer, *RESPONSES)
    async with scorer_of(classifier(), alone=True) as scorer:
        together = await asyncio.gather(*(scorer(*each) for each in asked))
        assert [(await scorer(*each)).reward for each in asked] == [each.reward for each in together]


async def test_several_labels_are_probabilities_of_the_chosen_one(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    folder, (asked,) = classifier(3), answers(policy_tokenizer, "cd")
    logits = reference(folder, asked[0].token_ids.tolist())[-1].astype(float)
    async with scorer_of(folder, label=1) as scorer:
        assert (await scorer(*asked)).reward == pytest.approx(np.exp(logits[1]) / np.exp(logits).sum(), abs=1e-5)
    async with scorer_of(folder, label=1, activation="sigmoid") as scorer:
        assert (await scorer(*asked)).reward == pytest.approx(1 / (1 + math.exp(-logits[1])), abs=1e-5)


async def test_scores_of_steps_are_stored_and_make_one_reward(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    folder, (asked,) = classifier(), answers(policy_tokenizer, "cd;;ef;;gh")
    logits = reference(folder, asked[0].token_ids.tolist())[:, 0]
    wanted = [logits[place] for place in (5, 9, 12)]
    async with scorer_of(folder, unit=ScoredUnit.STEP, step_separator=";;") as scorer:
        verdict = await scorer(*asked)
    assert verdict.step_scores == pytest.approx(wanted, abs=1e-4)
    assert verdict.reward == min(verdict.step_scores)


async def test_a_classifier_of_tokens_scores_steps(classifier: Classifier, policy_tokenizer: LocalTokenizer) -> None:
    folder, (asked,) = classifier(2, by_token=True), answers(policy_tokenizer, "cd;;ef")
    async with scorer_of(folder, unit=ScoredUnit.TOKEN, label=1, aggregate=Aggregate.MEAN) as scorer:
        verdict = await scorer(*asked)
    assert len(verdict.step_scores) == asked[0].response_length
    assert all(0.0 < score < 1.0 for score in verdict.step_scores)


def test_aggregates() -> None:
    scores = np.array([0.5, 0.25, 1.0])
    assert {how.value: aggregated(scores, how) for how in Aggregate} == {
        "min": 0.25,
        "mean": pytest.approx(1.75 / 3),
        "last": 1.0,
        "sum": 1.75,
    }


async def test_a_text_that_breaks_the_model_costs_no_other_one_its_score(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    good, (broken, prompt), more = answers(policy_tokenizer, "c", "d", "ef")
    outside = sample_of(broken.token_ids[:2], [9_999, 0], response="?")  # no such token
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(model_workers(RewardModelSettings(device="cpu")))
        scorer = await stack.enter_async_context(scorer_of(classifier(), workers=workers))
        verdicts = await asyncio.gather(scorer(*good), scorer(outside, prompt), scorer(*more))
    assert [each.outcome for each in verdicts] == [Outcome.OK, Outcome.ERROR, Outcome.OK]
    assert verdicts[1].reward is None
    assert "reward model" in verdicts[1].detail


async def test_a_model_that_takes_too_long_makes_timeouts_of_its_texts(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    (asked,) = answers(policy_tokenizer, "c")
    async with scorer_of(classifier(), timeout_seconds=1e-9) as scorer:
        verdict = await scorer(*asked)
    assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)


async def test_a_score_that_is_not_finite_is_an_error(classifier: Classifier, policy_tokenizer: LocalTokenizer) -> None:
    (asked,) = answers(policy_tokenizer, "c")
    async with scorer_of(classifier()) as scorer:

        async def logits(_: Any) -> Any:
            return [[math.nan]]

        scorer.model.logits = logits
        assert (await scorer(*asked)).outcome is Outcome.ERROR


REPLIES = {
    RewardServerKind.SGLANG: {"embedding": [0.5, 2.0], "meta_info": {}},
    RewardServerKind.VLLM: {"data": [{"index": 0, "label": "LABEL_1", "probs": [0.5, 2.0], "num_classes": 2}]},
    RewardServerKind.TEI: [{"score": 2.0, "label": "LABEL_1"}, {"score": 0.5, "label": "LABEL_0"}],
}


@pytest.mark.parametrize("kind", list(RewardServerKind))
async def test_servers_are_sent_ids_or_text_and_their_logits_are_read(
    classifier: Classifier, policy_tokenizer: LocalTokenizer, serve_script: Serve, kind: RewardServerKind
) -> None:
    folder, (asked,) = classifier(2), answers(policy_tokenizer, "cd")
    ids = asked[0].token_ids.tolist()
    async with serve_script([{"json": REPLIES[kind]}]) as server:
        about = {"servers": (server.url.removesuffix("/"),), "kind": kind, "label": 1, "activation": "none"}
        async with scorer_of(folder, **about) as scorer:
            assert (await scorer(*asked)).reward == 2.0
    assert (
        server.bodies
        == {
            RewardServerKind.SGLANG: [{"input_ids": ids}],
            RewardServerKind.VLLM: [{"input": [ids], "use_activation": False}],
            RewardServerKind.TEI: [{"inputs": "abcd", "raw_scores": True, "truncate": False}],
        }[kind]
    )


async def test_scores_of_every_token_are_read_at_the_steps(
    classifier: Classifier, policy_tokenizer: LocalTokenizer, serve_script: Serve
) -> None:
    folder, (asked,) = classifier(), answers(policy_tokenizer, "cd;;ef")
    every = [[float(place)] for place in range(len(asked[0].token_ids))]
    replies = [{"json": {"data": [{"data": every}]}}, {"json": {"data": [{"data": every[1:]}]}}]
    async with serve_script(replies) as server:
        about = {"servers": (server.url.removesuffix("/"),), "kind": "vllm", "unit": "step", "step_separator": ";;"}
        async with scorer_of(folder, **about) as scorer:
            assert (await scorer(*asked)).step_scores == (5.0, 8.0)
            shorter = await scorer(*asked)
    assert server.bodies[0]["task"] == "token_classify"
    assert shorter.outcome is Outcome.ERROR
    assert "scores of 8 tokens, and 9 were sent" in shorter.detail


@pytest.mark.parametrize(
    "reply",
    [
        {"json": {"embedding": []}},
        {"json": {"embedding": [1.0, 2.0]}},
        {"json": {"embedding": ["1"]}},
        {"json": {"embedding": None}},
        {"json": [1.0]},
        {"text": '{"embedding": [NaN]}'},
        {"text": "no json"},
        {"status": 400, "text": "too long"},
    ],
)
async def test_nonsense_is_an_error_and_never_a_score(
    classifier: Classifier, policy_tokenizer: LocalTokenizer, serve_script: Serve, reply: dict[str, Any]
) -> None:
    (asked,) = answers(policy_tokenizer, "cd")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_script([reply]))
        scorer = await stack.enter_async_context(scorer_of(classifier(), servers=(server.url.removesuffix("/"),)))
        verdict = await scorer(*asked)
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)


async def test_a_busy_server_is_asked_again_and_half_of_a_batch_may_fail(
    classifier: Classifier, policy_tokenizer: LocalTokenizer, serve_script: Serve
) -> None:
    asked = answers(policy_tokenizer, *"cdef")
    fine = {"json": {"embedding": [0.25]}}
    busy = {"status": 429, "text": "busy", "headers": {"Retry-After": "0"}}
    replies = [busy, fine, {"status": 400, "text": "no"}, fine, {"json": {"embedding": []}}]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_script(replies))
        about = {"servers": (server.url.removesuffix("/"),), "concurrency": 1}
        scorer = await stack.enter_async_context(scorer_of(classifier(), **about))
        verdicts = [await scorer(*each) for each in asked]
    assert [each.outcome for each in verdicts] == [Outcome.OK, Outcome.ERROR, Outcome.OK, Outcome.ERROR]
    assert [each.reward for each in verdicts] == [0.25, None, 0.25, None]


async def test_a_server_that_does_not_answer_is_a_timeout(
    classifier: Classifier, policy_tokenizer: LocalTokenizer, serve_script: Serve
) -> None:
    (asked,) = answers(policy_tokenizer, "cd")
    async with serve_script([{"hang": True}]) as server:
        about = {"servers": (server.url.removesuffix("/"),), "timeout_seconds": 0.1, "max_tries": 1}
        async with scorer_of(classifier(), **about) as scorer:
            assert (await scorer(*asked)).outcome is Outcome.TIMEOUT


def test_models_and_settings_that_do_not_fit_are_refused(classifier: Classifier, tiny_policy: Path) -> None:
    def make(folder: Path, **settings: Any) -> None:
        made = RewardModelSettings(checkpoint="x", **settings)
        RewardModelScorer(
            made, folder, load_tokenizer(folder), workers=InProcessWorkers(), is_policys=True, alone=False
        )

    for folder, settings, told in (
        (tiny_policy, {}, "it is no classifier"),
        (classifier(2), {}, "it has 2 labels: set reward.model.label to one of 0"),
        (classifier(), {"label": 1}, "the model has labels 0 to 0"),
        (classifier(2, by_token=True), {"label": 1}, "it scores tokens"),
    ):
        with pytest.raises(ConfigError, match=told):
            make(folder, **settings)
    with pytest.raises(ConfigError, match="its ids mean other texts"):
        check_tokens(RewardModelSettings(checkpoint="x", input="token_ids"), has_policys_ids=False)


async def test_servers_are_asked_in_turns_and_the_next_one_where_one_fails(
    classifier: Classifier, policy_tokenizer: LocalTokenizer, serve_script: Serve
) -> None:
    asked = answers(policy_tokenizer, *"cdef")
    fine, broken = {"json": {"data": [{"probs": [0.5]}]}}, {"status": 500, "text": "broken"}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve_script([{**fine, "repeat": True}]))
        second = await stack.enter_async_context(serve_script([fine, broken]))
        urls = tuple(server.url.removesuffix("/") for server in (first, second))
        about = {"servers": urls, "kind": "vllm", "served_name": "rm"}
        scorer = await stack.enter_async_context(scorer_of(classifier(), **about))
        verdicts = [await scorer(*each) for each in asked]
    assert [verdict.reward for verdict in verdicts] == [0.5] * 4
    assert (len(first.bodies), len(second.bodies)) == (3, 2)
    assert {body["model"] for body in (*first.bodies, *second.bodies)} == {"rm"}


async def test_a_text_may_be_as_long_as_the_model_takes_and_no_longer(
    classifier: Classifier, policy_tokenizer: LocalTokenizer
) -> None:
    fits, longer = answers(policy_tokenizer, "cdefg", "cdefgh")
    async with scorer_of(classifier(max_position_embeddings=len(fits[0].token_ids))) as scorer:
        verdicts = [await scorer(*fits), await scorer(*longer)]
    assert [each.outcome for each in verdicts] == [Outcome.OK, Outcome.ERROR]
    assert "have 9 tokens, and the reward model takes 8" in verdicts[1].detail


async def test_a_model_that_pools_by_itself_scores_whole_texts_as_transformers_does_and_no_parts(
    policy_tokenizer: LocalTokenizer, tiny_policy: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=1, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that a token more or less is seen
            parameter.mul_(30.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_policy / name).read_bytes())
    asked = answers(policy_tokenizer, "c", "cdefgh")
    async with scorer_of(tmp_path) as scorer:
        verdicts = await asyncio.gather(*(scorer(*each) for each in asked))
    for (sample, _), verdict in zip(asked, verdicts, strict=True):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor(sample.token_ids[None].astype(np.int64))).logits
        assert verdict.reward == pytest.approx(float(alone[0, 0]), abs=1e-5)
    async with scorer_of(tmp_path, unit=ScoredUnit.TOKEN) as scorer:
        verdict = await scorer(*asked[1])
    assert verdict.outcome is Outcome.ERROR
    assert "scores whole texts only" in verdict.detail
