"""The plug-ins of examples/slime give the batches of native functions that do the same, with the same seed."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.config import FiltersSettings, RemoteForm, RewardSettings
from rollfeed.config.reward import RemoteRewardSettings
from rollfeed.protocols import PromptSource
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine


async def digit(sample: Any, prompt: Any) -> float:
    """Give 1 to answers above 4; awaited, as threads would end in any order."""
    return float(int(sample.response[0]) > 4)


def mostly_long(request: Any) -> str:
    """Answer with one digit, or with more than there is room for."""
    return "9" * (1 if request.params.seed % 3 == 0 else 20)


def told(batches: list[Any]) -> list[Any]:
    """Return what is trained on, by sample, in every field that counts."""
    return [
        (s.token_ids.tolist(), s.loss_mask.tolist(), s.logprobs.tolist(), s.version_spans, s.reward, s.index, s.status)
        for batch in batches
        for s in batch.samples
    ]


@pytest.mark.parametrize(
    ("slime", "native"),
    [
        ("is_reward_zero_std", "reward_std"),
        ("is_all_correct", "all_correct"),
        ("is_all_wrong", "all_wrong"),
        ("is_at_least_half_correct", "at_least_half_correct"),
        ("is_too_much_truncated", "truncated_fraction"),
    ],
)
async def test_a_filter_in_drop_polarity_chooses_the_batches_of_the_built_in_one(
    make_batches: Callable[..., Any], slime: str, native: str
) -> None:
    def engine() -> Any:
        return ScriptedEngine(answer=mostly_long) if native == "truncated_fraction" else ScriptedEngine()

    theirs = await make_batches(
        3, engine=engine(), reward_fn=digit, group_filters=[f"slime_drop:slime_filters.{slime}"]
    )
    ours = await make_batches(
        3,
        engine=engine(),
        reward_fn=digit,
        filters=FiltersSettings(dynamic_sampling=[{"name": native}]),
    )
    everything = await make_batches(3, engine=engine(), reward_fn=digit)
    assert told(theirs) == told(ours)
    assert told(theirs) != told(everything)


@pytest.fixture
async def verifier() -> AsyncIterator[tuple[str, list[Any]]]:
    """Give the address of a server that verifies in the predictions form, and what it was asked."""
    asked: list[Any] = []

    def right(prediction: str, answer: str) -> float:
        return float(prediction[0] == answer)

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if isinstance(body["predictions"], list):
            pairs = zip(body["predictions"], body["answers"], strict=True)
            return web.json_response({"reward": [right(*pair) for pair in pairs]})
        return web.json_response({"reward": right(body["predictions"], body["answers"])})

    app = web.Application()
    app.router.add_post("/get_reward", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/get_reward", asked
    await runner.cleanup()


@pytest.mark.parametrize(("key", "name"), [("reward_fn", "verify"), ("group_reward", "verify_group")])
async def test_the_http_verifier_gives_the_rewards_of_the_native_one(
    make_batches: Callable[..., Any], verifier: tuple[str, list[Any]], key: str, name: str
) -> None:
    url, asked = verifier
    remote = RemoteRewardSettings(url=url, form=RemoteForm.PREDICTIONS)
    theirs = await make_batches(2, reward=RewardSettings(remote=remote), **{key: f"slime:slime_verifier.{name}"})
    ours = await make_batches(2, reward=RewardSettings(remote=remote, rm_type="remote_rm"))
    assert told(theirs) == told(ours)
    assert set(asked[0]) == {"predictions", "answers"}
    assert {sample.reward for batch in theirs for sample in batch.samples} == {0.0, 1.0}


@pytest.mark.parametrize("mode", ["sync", "partial"])
async def test_the_asynchronous_rollout_function_makes_the_batches_of_the_scheduler(
    make_batches: Callable[..., Any], mode: str
) -> None:
    theirs = await make_batches(
        3, reward_fn=digit, rollout={"mode": mode}, rollout_fn="slime:slime_rollout.generate_rollout"
    )
    ours = await make_batches(3, reward_fn=digit, rollout={"mode": mode})
    assert told(theirs) == told(ours)


async def test_the_asynchronous_rollout_function_filters_in_drop_polarity_too(make_batches: Callable[..., Any]) -> None:
    theirs = await make_batches(
        3,
        reward_fn=digit,
        rollout_fn="slime:slime_rollout.generate_rollout",
        group_filters=["slime_drop:slime_filters.is_at_least_half_correct"],
    )
    rewards = [group.reward_values() for batch in theirs for group in batch.groups]
    assert all(values.sum() < 2 for values in rewards)
    assert sum(batch.metrics["rollout/groups_dropped"] for batch in theirs) > 0


async def test_the_agents_share_a_rollout_and_its_reward(make_batches: Callable[..., Any]) -> None:
    (batch,) = await make_batches(1, reward_fn=digit, generate="slime:slime_agents.generate")
    assert len(batch.groups) == 3
    for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
        assert len(rollout.samples) == 3
        assert len({sample.reward for sample in rollout.samples}) == 1
        assert not rollout.samples[0].metadata.get("own_context")
        assert rollout.samples[1].metadata["own_context"]
        assert rollout.samples[2].prompt_length > rollout.samples[0].prompt_length
        assert all(sample.loss_mask.all() for sample in rollout.samples)


class NativeAddition(PromptSource):
    """The sums of ``AdditionSource`` as a source of ours."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        self._texts = ListSource([])

    async def draw(self, count: int) -> Any:
        drawn = self._kept.get_samples(count)
        made = []
        for (first, *_), number in zip(drawn, range(self._kept.num_problems - count, 10**9), strict=False):
            (prompt,) = await ListSource([first.prompt], labels=[first.label]).draw(1)
            made.append(type(prompt)(**{**_fields(prompt), "prompt_id": f"sum/{number}", "metadata": first.metadata}))
        return made

    def learn(self, group: Any) -> None:
        self._kept.update(group.samples)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        del state


def _fields(prompt: Any) -> dict[str, Any]:
    return {name: getattr(prompt, name) for name in ("source", "text", "token_ids", "label")}


def sum_of(request: Any) -> str:
    """Answer right."""
    text = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
    left, right = text.removesuffix(" = ").split(" + ")
    return str(int(left) + int(right))


async def test_the_adaptive_source_gives_the_problems_of_a_native_one_and_learns(
    make_batches: Callable[..., Any], open_source: Callable[..., Any]
) -> None:
    settings = {
        "prompt_source": "slime:slime_environment.AdditionSource",
        "slime_args": {"rollout_all_samples_process_path": "slime_environment.learn"},
    }
    source = open_source(**settings)
    batches = await make_batches(
        4, engine=ScriptedEngine(answer=sum_of), source=source, reward_fn="slime:slime_environment.check"
    )
    levels = [batch.groups[0].prompt.metadata["problem_difficulty"] for batch in batches]
    assert levels[0] == 1
    assert levels[-1] > 2
    native = open_source(**settings)._source
    ours = await make_batches(
        4,
        engine=ScriptedEngine(answer=sum_of),
        source=NativeAddition(native),
        reward_fn=lambda sample, prompt: float(sample.response.strip("\x03").strip() == prompt.label),
    )
    assert [s.token_ids.tolist() for b in batches for s in b.samples] == [
        s.token_ids.tolist() for b in ours for s in b.samples
    ]


async def test_the_adaptive_source_goes_on_where_its_state_was_taken(open_source: Callable[..., Any]) -> None:
    settings = {"prompt_source": "slime:slime_environment.AdditionSource"}
    first, second = open_source(**settings), open_source(**settings)
    await first.draw(3)
    second.load_state_dict(first.state_dict())
    assert [p.text for p in await first.draw(3)] == [p.text for p in await second.draw(3)]


async def test_the_search_agent_is_told_what_it_asks_and_learns_none_of_it(make_batches: Callable[..., Any]) -> None:
    def answer(request: Any) -> str:
        text = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
        return "It is Paris" if "<information>" in text else "<search>capital of France</search>"

    (batch,) = await make_batches(
        1,
        engine=ScriptedEngine(answer=answer),
        reward_fn=lambda sample, prompt: 1.0,
        generate="slime:slime_search.generate",
        slime_args={"max_turns": 3},
        max_response_len=200,
    )
    for sample in batch.samples:
        response = CharTokenizer().decode(sample.response_token_ids, skip_special_tokens=True)
        assert response == "<search>capital of France</search><information>Paris</information>It is Paris"
        told_ids = np.flatnonzero(sample.loss_mask == 0)
        text = CharTokenizer().decode(sample.response_token_ids[told_ids], skip_special_tokens=False)
        assert text == "<information>Paris</information>"
