"""Runs, files and stored answers that judges score."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.judging.conftest import judge_server

from rollfeed import app
from rollfeed.app import open_rollouts, replay_run
from rollfeed.app.checks import check_combination
from rollfeed.app.rewards import RewardServices, open_reward_hub, score_file
from rollfeed.app.sources import RowChecks
from rollfeed.config import EvalSettings, RewardSettings, RolloutConfig, validate_settings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.rewards.rows import row_prompt
from rollfeed.store import RunDirectory, RunReader
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine
from rollfeed.types import Outcome, TrainBatch


def digit(text: str) -> str:
    """A judge of single digits."""
    return f"Score: {text.split()[1]}"


def larger(text: str) -> str:
    """A judge of pairs of digits."""
    first, second = text.split()[1:3]
    return "C" if first == second else "A" if first > second else "B"


def config_of(url: str, *, group: int = 3, **judge: Any) -> RolloutConfig:
    given = {"servers": [url], "model": "j", "rubric": "Rate {response} please", "instruction": ""} | judge
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": group, "deterministic": True}
    tree = {"rollout": rollout, "reward": {"rm_type": "judge", "judge": given}}
    return RolloutConfig.model_validate(tree)


async def batch_of(config: RolloutConfig, **engine: Any) -> TrainBatch:
    source = ListSource([f"question {number}" for number in range(50)])
    async with open_rollouts(
        config, source=source, engine=ScriptedEngine(**engine), tokenizer=CharTokenizer()
    ) as rollouts:
        return await rollouts.generate_batch()


async def test_a_judge_scores_the_answers_of_a_run_and_its_metrics_are_the_steps() -> None:
    async with judge_server(digit) as server:
        batch = await batch_of(config_of(server.url, prompt_price=1e6))
    responses = [sample.response for sample in batch.samples]
    assert [sample.reward for sample in batch.samples] == [float(response[0]) for response in responses]
    verdict = batch.groups[0].rollouts[0].verdict
    assert verdict is not None
    assert verdict.detail == f"j (20 + 5 tokens): Score: {responses[0][0]}"
    num_asked = len({*server.questions}) - 1
    assert batch.metrics["judge/calls"] == num_asked == len(server.bodies) - 1
    assert batch.metrics["judge/cache_hits"] == len(responses) - num_asked
    assert batch.metrics["judge/cost"] == 20.0 * num_asked
    assert 0.0 <= batch.metrics["judge/seconds_p50"] <= batch.metrics["judge/seconds_p99"]


async def test_pairs_of_a_group_are_scored_together() -> None:
    async with judge_server(larger) as server:
        settings = {"mode": "pairwise", "rubric": "Compare {response_a} {response_b} please"}
        batch = await batch_of(config_of(server.url, **settings))
    for group in batch.groups:
        digits = [int(sample.response[0]) for sample in group.samples]
        wins = [sum((one > other) + 0.5 * (one == other) for other in digits) - 0.5 for one in digits]
        assert group.reward_values().tolist() == pytest.approx([each / 2 for each in wins])


async def test_an_answer_is_judged_while_others_of_its_group_are_written() -> None:
    was_asked = asyncio.Event()

    def says(text: str) -> str:
        if "please" in text:
            was_asked.set()
        return digit(text) if "please" in text else ""

    class Patient(ScriptedEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            made = await super().generate(*arguments, **options)
            if len(self.requests) > 1 and self.requests[0].request_id != options["request_id"]:
                await asyncio.wait_for(was_asked.wait(), 60)
            return made

    async with judge_server(says) as server:
        source = ListSource(["question"])
        config = config_of(server.url, group=4).model_copy(
            update={"rollout": config_of(server.url, group=4).rollout.model_copy(update={"rollout_batch_size": 1})}
        )
        async with open_rollouts(config, source=source, engine=Patient(), tokenizer=CharTokenizer()) as rollouts:
            batch = await rollouts.generate_batch()
    assert all(sample.reward is not None for sample in batch.samples)


@pytest.mark.parametrize("policy", ["drop", "retry"])
async def test_a_rollout_without_a_readable_verdict_has_failed(policy: str) -> None:
    """Of every second prompt the judge says nothing."""

    def says(text: str) -> str:
        return digit(text) if text[-1] in "13579" else "no idea"

    async with judge_server(says) as server:
        config = config_of(server.url, rubric="Rate {response} please, {prompt}")
        rollout = config.rollout.model_copy(update={"group_failure": policy, "failure_budget": 0.9})
        batch = await batch_of(config.model_copy(update={"rollout": rollout}))
    assert {group.prompt.text[-1] in "13579" for group in batch.groups} == {True}
    assert batch.metrics["judge/error_unreadable"] >= 1.0
    assert batch.metrics["rollout/reward_error"] >= 1.0


async def test_a_run_without_readable_verdicts_fails_with_what_the_judge_said() -> None:
    async with judge_server(lambda text: "no idea") as server:
        with pytest.raises(
            RunFailedError, match=r"reward error: reward.judge: no verdict, as it has no number.*no idea"
        ):
            await batch_of(config_of(server.url))


async def test_a_judge_that_does_not_answer_is_refused_before_the_engine_starts() -> None:
    class Untouched(ScriptedEngine):
        async def __aenter__(self) -> ScriptedEngine:
            raise AssertionError("the engine was started")

    async with judge_server(lambda text: {"status": 401, "text": ""}) as server:
        rollouts = open_rollouts(
            config_of(server.url), source=ListSource(["?"]), engine=Untouched(), tokenizer=CharTokenizer()
        )
        with pytest.raises(ConfigError, match=r"name the variable that holds the key as reward.judge.api_key_env"):
            async with rollouts:
                pass


GOOD = {"servers": ["http://127.0.0.1:9/v1"], "model": "j", "rubric": "{response}"}
PAIRS = GOOD | {"mode": "pairwise", "rubric": "{response_a}{response_b}"}


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({"rm_type": "judge"}, r"rm_type = 'judge': there is no \[reward.judge\]; add it"),
        ({"rm_type": "judge:a", "judges": {"b": GOOD}}, r"there is no \[reward.judges.a\]"),
        ({"verifier": "judge:b"}, r"there is no \[reward.judges.b\]"),
        ({"verifier": "judge", "judge": PAIRS}, "'judge' compares the answers of a group"),
        ({"judge": {}}, "reward.judge: servers is required"),
        ({"judge": GOOD | {"servers": ["localhost"]}}, "reward.judge.servers.0: .*is not an address"),
        ({"judge": {"servers": GOOD["servers"], "model": "j"}}, "a judge needs a rubric"),
        ({"judge": GOOD | {"rubric_file": "r.txt"}}, "set either rubric or rubric_file"),
        ({"judge": GOOD | {"reply": "letter"}}, "reply = 'letter' needs choices"),
        ({"judge": GOOD | {"choices": {"A": 1.0, "B": 0.0}}}, "choices have no effect with reply = 'number'"),
        ({"judge": GOOD | {"reply": "letter", "choices": {"a": 1.0, "A": 0.0}}}, "must differ by more than case"),
        ({"judge": GOOD | {"score_range": [1, 1]}}, "the first must be below the second"),
        ({"judge": PAIRS | {"reply": "number"}}, "a comparison is a letter"),
        ({"judge": PAIRS | {"choices": {"A": 1.0, "B": 0.0}}}, "choices have no effect with mode = 'pairwise'"),
        ({"judge": GOOD | {"mode": "listwise", "reply": "tool"}}, "whose verdict is a ranking"),
        ({"judge": GOOD | {"rubrik": "x"}}, "reward.judge.rubrik: unknown setting; did you mean rubric"),
        ({"judges": {"a": GOOD | {"rubrik": "x"}}}, "reward.judges.a.rubrik: unknown setting; did you mean"),
        ({"judge": {"panel": ["a"]}, "judges": {"a": GOOD}}, "name at least two judges"),
        ({"judge": {"panel": ["a", "c"]}, "judges": {"a": GOOD, "b": GOOD}}, r"there is no \[reward.judges.c\]"),
        (
            {"judge": {"panel": ["a", "b"], "model": "j"}, "judges": {"a": GOOD, "b": GOOD}},
            "model has no effect with a",
        ),
        (
            {"judge": {"panel": ["a", "b"]}, "judges": {"a": GOOD, "b": PAIRS}},
            "must all compare the answers of a group",
        ),
        (
            {"judges": {"a": GOOD, "b": {"panel": ["a", "c"]}, "c": {"panel": ["a", "b"]}}},
            "a judge of a panel cannot be one itself",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(reward: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate_settings({"reward": reward}, where="test")


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({"judge": GOOD | {"rubric": "Is it good?"}}, r"reward.judge.rubric: does not show the judge what it judges"),
        ({"judges": {"a": GOOD | {"rubric": "{response} {lable}"}}}, r"reward.judges.a.rubric: \{lable\} is no field"),
        (
            {"judge": {"servers": GOOD["servers"], "model": "j", "rubric_file": "none.txt"}},
            "reward.judge.rubric_file = 'none.txt': cannot be read",
        ),
        ({"judge": GOOD | {"api_key_env": "NO_SUCH_KEY"}}, "reward.judge.api_key_env = 'NO_SUCH_KEY'"),
    ],
)
def test_what_stands_outside_of_the_settings_is_checked_before_a_run(reward: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_rollouts(
            RolloutConfig(reward=RewardSettings.model_validate(reward)),
            source=ListSource(["?"]),
            engine=ScriptedEngine(),
            tokenizer=CharTokenizer(),
        )


def test_a_group_of_one_cannot_be_compared() -> None:
    tree = {"reward": {"rm_type": "judge", "judge": PAIRS}, "rollout": {"n_samples_per_prompt": 1}}
    tree |= {"prompts": {"environments": [{"id": "core/copy_text"}]}}
    with pytest.raises(ConfigError, match=r"compares the answers of a group, and rollout.n_samples_per_prompt = 1"):
        check_combination(validate_settings(tree, where="test"))


def test_rows_that_lack_what_the_rubric_shows_are_found_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("{response} {label} {metadata.topic}")
    judge = {"servers": GOOD["servers"], "model": "j", "rubric_file": "rubric.txt"}
    config = RolloutConfig.model_validate({"reward": {"judges": {"strict": judge}}})
    services = RewardServices(config.reward, rm_types=[], folders=[tmp_path])
    rows = RowChecks(config, unscored="?", no_images=None, label_problems=services.judges.problems())
    check = rows.of("rows.jsonl", label_key="answer", unlabelled=lambda prompt, rm_type: None)
    good: dict[str, Any] = {"rm_type": "judge:strict", "topic": "birds"}
    assert check(row_prompt("?", "a label", good)) is None
    assert check(row_prompt("?", None, good)) == (
        "has no label in column 'answer', and rm_type 'judge:strict' needs one"
    )
    assert "no 'topic'" in str(check(row_prompt("?", "a label", {"rm_type": "judge:strict"})))
    assert "did you mean judge:strict" in str(check(row_prompt("?", "a label", {"rm_type": "judge:strikt"})))


async def test_rows_of_a_file_choose_their_judge(tmp_path: Path) -> None:
    async with judge_server(digit) as server:
        common = {"servers": [server.url], "model": "j", "instruction": ""}
        settings = RewardSettings.model_validate(
            {
                "rm_type": "judge:one",
                "judges": {
                    "one": common | {"rubric": "Rate {response} please"},
                    "all": common | {"rubric": "{response_a}{response_b}", "mode": "pairwise"},
                },
            }
        )
        rows = [
            {"id": 1, "response": "7"},
            {"id": 2, "rm_type": "judge:one", "response": "x"},
            {"id": 3, "rm_type": "judge:all", "response": "7"},
            {"id": 4, "rm_type": "number", "response": "7", "label": "7"},
        ]
        path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        await score_file(path, out, settings=settings)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["reward"] for each in found] == [7.0, None, None, 1.0]
    assert [each["outcome"] for each in found] == ["ok", "error", "error", "ok"]
    assert "no other response to compare it with" in found[2]["detail"]


async def test_answers_that_are_stored_are_judged_again_without_being_made(tmp_path: Path) -> None:
    def says(text: str) -> str:
        return f"Score: {9 - int(text.split()[1])}" if "backwards" in text else digit(text)

    async with judge_server(says) as server:
        run = await stored_run(tmp_path / "run", config_of(server.url))
        with pytest.raises(ConfigError, match=r"rm_type = 'judge' .*asks a server"):
            _ = [each async for each in replay_run(run, [])]
        again = ["reward.pure=true", "reward.judge.rubric=Rate {response} backwards"]
        steps = [each async for each in replay_run(run, again)]
    assert len(steps) == 1
    before = RunReader(run).batch(0)
    after = steps[0].batch
    assert after is not None
    rewards = [sample.reward for sample in before.samples]
    assert [sample.reward for sample in after.samples] == [9.0 - float(str(each)) for each in rewards]


async def stored_run(out: Path, config: RolloutConfig) -> Path:
    """Make one step with a scripted engine and store it."""
    tree = {"prompts": {"environments": [{"id": "core/copy_text"}]}} | config.model_dump(mode="json")
    settings = validate_settings(tree, where="test")
    opened = RunDirectory.open(
        out, settings=settings.model_dump(mode="json"), identity=settings.identity(), overwrite=False
    )
    with opened as directory:
        async with open_rollouts(
            settings,
            source=ListSource([f"question {number}" for number in range(50)]),
            engine=ScriptedEngine(),
            tokenizer=CharTokenizer(),
            commit=lambda commit: directory.commit(commit, reward_key=None),
        ) as rollouts:
            await rollouts.generate_batch()
        directory.finish(None)
    return out


async def test_a_message_is_judged_as_it_was_asked() -> None:
    async with judge_server(digit) as server:
        judge = {"servers": [server.url], "model": "j", "rubric": "Rate {response} to {prompt}", "instruction": ""}
        settings = RewardSettings.model_validate({"rm_type": "judge", "judge": judge})
        async with open_reward_hub(settings) as hub:
            verdict = await hub.grade("4", None, prompt=[{"role": "user", "content": "two and two"}])
            assert (verdict.reward, verdict.outcome) == (4.0, Outcome.OK)
    assert server.questions[-1] == "Rate 4 to two and two"


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_an_evaluation_compares_the_answers_to_a_prompt_where_there_are_several(
    tmp_path: Path, num_answers: int
) -> None:
    (tmp_path / "digits.jsonl").write_text('{"question": "digit one"}\n{"question": "digit two"}\n')
    dataset = {"path": "digits.jsonl", "input_key": "question", "rm_type": "judge:pairs"}

    def prepare(url: str) -> app.PreparedEvaluation:
        pairs = PAIRS | {"servers": [url], "rubric": "Compare {response_a} {response_b} please", "instruction": ""}
        return app.prepare_evaluation(
            EvalSettings.model_validate({"datasets": [dataset], "n_samples_per_prompt": num_answers}),
            config=RolloutConfig.model_validate({"reward": {"judges": {"pairs": pairs}}}),
            tokenizer=CharTokenizer(),
            context_length=1_000,
            folders=[tmp_path],
        )

    async with judge_server(larger) as server:
        if num_answers == 1:
            with pytest.raises(ConfigError, match=r"judge:pairs compares the answers of a group, and n_samples"):
                prepare(server.url)
            return
        async with ScriptedEngine() as engine:
            evaluated = await app.evaluate(prepare(server.url), engine=engine)
    assert evaluated.sets[0].reward_mean == 0.5
