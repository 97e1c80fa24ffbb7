"""Evaluation with a scripted engine: the same requests at every call, whatever comes first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollfeed import app
from rollfeed.config import EvalSettings, RolloutConfig, SamplingSettings
from rollfeed.errors import ConfigError, RunDirectoryError, RunFailedError
from rollfeed.evaluation import EvalProgress
from rollfeed.prompts import ChatRenderer, ColumnKeys, DatasetSource, load_prompts
from rollfeed.testing import CharTokenizer, Fault, ScriptedEngine, ScriptedRequest
from rollfeed.types import Prompt, Sample

Prepare = Callable[..., app.PreparedEvaluation]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six questions, answered by their own number; `notes` has no label."""
    path = tmp_path / "digits.jsonl"
    rows = [{"question": f"digit {number}", "answer": str(number), "about": {}} for number in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prepare(data: Path) -> Prepare:
    """Return a factory of evaluations on the digits; keyword arguments are settings of ``[eval]``."""

    def make(config: RolloutConfig | None = None, **keys: Any) -> app.PreparedEvaluation:
        dataset = {"path": data.name, "input_key": "question", "label_key": "answer"}
        return app.prepare_evaluation(
            EvalSettings(**{"datasets": [dataset], "rm_type": "exact", **keys}),
            config=config or RolloutConfig(rollout={"n_samples_per_prompt": 2}),
            tokenizer=CharTokenizer(),
            context_length=1_000,
            folders=[data.parent],
        )

    return make


async def measured(prepared: app.PreparedEvaluation, engine: ScriptedEngine, **settings: Any) -> Any:
    async with engine:
        return await app.evaluate(prepared, engine=engine, **settings)


def asked(engine: ScriptedEngine) -> dict[str, tuple[bytes, Any]]:
    return {request.request_id: (request.token_ids.tobytes(), request.params) for request in engine.requests}


def text_of(request: ScriptedRequest) -> str:
    return CharTokenizer().decode(request.token_ids, skip_special_tokens=True)


def right_answer(request: ScriptedRequest) -> str:
    return text_of(request).partition("digit ")[2][0]


async def test_numbers_of_a_policy_that_is_right_and_of_one_that_is_not(prepare: Prepare) -> None:
    prepared = prepare()
    found = (await measured(prepared, ScriptedEngine(answer=right_answer))).sets[0]
    assert (found.name, found.num_prompts, found.accuracy, found.reward_mean) == ("digits", 6, 1.0, 1.0)
    assert found.pass_hat_k == {1: 1.0, 2: 1.0}
    assert (await measured(prepared, ScriptedEngine(answer=lambda _: "x"))).accuracy == 0.0


async def test_requests_and_results_are_the_same_whatever_comes_first(prepare: Prepare) -> None:
    sets = [
        {"path": "digits.jsonl", "input_key": "question", "label_key": "answer"},
        {"path": "digits.jsonl@[2:5]", "name": "some", "input_key": "question", "label_key": "answer"},
    ]
    prepared = prepare(datasets=sets, environments=[{"id": "core/add_numbers", "num_prompts": 5}])
    seen, summaries = [], []
    for order in range(4):
        engine = ScriptedEngine(random_order=order, max_running_requests=1 + 7 * order)
        result = await measured(prepared, engine)
        seen.append(asked(engine))
        summaries.append([each.summary() for each in result.sets])
        assert [group.group_index for group in result.sets[1].groups] == list(range(6))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert summaries[0] == summaries[1] == summaries[2] == summaries[3]
    assert len(seen[0]) == prepared.num_answers == 2 * (5 + 6 + 3)


async def test_every_answer_has_a_seed_of_its_own_that_the_eval_seed_decides(prepare: Prepare) -> None:
    seeds = []
    for seed in (0, 0, 1):
        engine = ScriptedEngine()
        await measured(prepare(seed=seed), engine)
        seeds.append({params.seed for _, params in asked(engine).values()})
        assert len(seeds[-1]) == 12
    assert seeds[0] == seeds[1]
    assert not seeds[0] & seeds[2]


async def test_seed_of_the_run_does_not_matter(prepare: Prepare) -> None:
    requests = []
    for seed in (1, 2):
        engine = ScriptedEngine()
        environments = [{"id": "core/add_numbers", "num_prompts": 3}]
        await measured(prepare(RolloutConfig(seed=seed), environments=environments), engine)
        requests.append(asked(engine))
    assert requests[0] == requests[1]


async def test_held_out_problems_are_not_those_of_training(prepare: Prepare) -> None:
    prepared = prepare(datasets=[], environments=[{"id": "core/reverse_text", "level": 2, "num_prompts": 50}])
    source = app.environment_source("core/reverse_text", level=2, seed=0, tokenizer=CharTokenizer())
    trained = {prompt.text for prompt in await source.draw(500)}
    assert not trained & {prompt.text for prompt in prepared.sets[0].prompts}


@pytest.mark.parametrize("environment", ["core/add_numbers", "core/constrained_words", "core/copy_text"])
async def test_problems_of_a_level_with_few_are_asked_once_and_are_not_those_of_training(
    prepare: Prepare, caplog: pytest.LogCaptureFixture, environment: str
) -> None:
    (found,) = prepare(datasets=[], environments=[{"id": environment, "num_prompts": 100}]).sets
    texts = {prompt.text for prompt in found.prompts}
    assert 1 <= len(texts) == len(found.prompts) == 100 - found.num_missing < 60
    assert f"eval set {environment}@0: has {len(texts)} prompts, of 100 that were asked for" in caplog.text
    source = app.environment_source(environment, level=0, seed=0, tokenizer=CharTokenizer())
    assert not texts & {prompt.text for prompt in await source.draw(1000)}
    summary = (await measured(prepare(datasets=[], environments=[{"id": environment}]), ScriptedEngine())).sets[0]
    assert (summary.num_prompts, summary.num_missing) == (len(texts), 100 - len(texts))


def test_rows_that_ask_the_same_are_asked_once(prepare: Prepare, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    data.write_text(data.read_text() + data.read_text()[: data.read_text().index("\n") + 1])
    (found,) = prepare().sets
    assert [prompt.prompt_id for prompt in found.prompts] == [f"digits/{number}" for number in range(6)]
    assert found.num_repeats == 1
    assert "eval set digits: 1 prompts ask what an earlier one asks and are left out" in caplog.text
    found_by_name = asyncio.run(measured(prepare(), ScriptedEngine())).summary()["sets"]
    assert found_by_name["digits"]["num_repeats"] == 1


async def test_a_set_has_its_own_sampling_and_grader(prepare: Prepare) -> None:
    dataset = {"path": "digits.jsonl", "input_key": "question", "label_key": "answer"}
    prepared = prepare(
        RolloutConfig(
            rollout={"n_samples_per_prompt": 1},
            reward={"rm_type": "math"},
            sampling=SamplingSettings(rollout_temperature=0.7),
        ),
        rm_type=None,
        top_p=0.5,
        datasets=[{**dataset, "name": "boxed"}, {**dataset, "name": "plain", "rm_type": "exact", "temperature": 0}],
    )
    engine = ScriptedEngine(answer=right_answer)
    result = await measured(prepared, engine)
    assert [each.accuracy for each in result.sets] == [0.0, 1.0]
    of_sets = {
        (request.request_id.split("-")[1], request.params.temperature, request.params.top_p)
        for request in engine.requests
    }
    assert of_sets == {("boxed", 0.7, 0.5), ("plain", 0.0, 0.5)}


async def test_group_rewards_see_every_answer_to_a_prompt(prepare: Prepare) -> None:
    sizes: list[int] = []

    async def share_of_last(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
        sizes.append(len(samples))
        return [float(sample is samples[-1]) for sample in samples]

    config = RolloutConfig(rollout={"n_samples_per_prompt": 4}, plugins={"group_reward": share_of_last})
    found = (await measured(prepare(config, rm_type=None), ScriptedEngine())).sets[0]
    assert sizes == [4] * 6
    assert (found.accuracy, found.pass_at_k[4], found.pass_hat_k[2]) == (0.25, 1.0, 0.0)


async def test_reward_function_of_training_scores_unless_evaluation_names_a_grader(prepare: Prepare) -> None:
    async def half(sample: Sample, prompt: Prompt) -> float:
        del sample, prompt
        return 0.5

    config = RolloutConfig(rollout={"n_samples_per_prompt": 1}, plugins={"reward": half})
    engine = ScriptedEngine(answer=right_answer)
    assert (await measured(prepare(config, rm_type=None), engine)).sets[0].reward_mean == 0.5
    assert (await measured(prepare(config), engine)).sets[0].reward_mean == 1.0


async def test_eval_reward_key_chooses_what_is_measured(prepare: Prepare) -> None:
    async def named(sample: Sample, prompt: Prompt) -> dict[str, float]:
        del sample, prompt
        return {"shaped": 0.25, "accuracy": 1.0}

    config = RolloutConfig(
        rollout={"n_samples_per_prompt": 1}, reward={"reward_key": "shaped"}, plugins={"reward": named}
    )
    prepared = prepare(config, rm_type=None, eval_reward_key="accuracy")
    assert (await measured(prepared, ScriptedEngine())).sets[0].reward_mean == 1.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"datasets": []}, r"nothing to evaluate on: add \[\[eval.datasets\]\]"),
        (
            {"datasets": [{"path": "digits.jsonl", "input_key": "question"}]},
            r"eval set digits, prompt digits/0: has no label, and rm_type 'exact' needs one: set label_key",
        ),
        ({"rm_type": None}, "eval set digits, prompt digits/0: nothing scores it: set rm_type"),
        (
            {"eval_reward_key": "acc"},
            "eval set digits, prompt digits/0: reward_key = 'acc': rewards of rm_type 'exact' are single numbers",
        ),
        ({"rm_type": "dapo", "reward_key": "accuracy"}, "rewards of rm_type 'dapo' have the keys acc, score"),
        ({"rm_type": "exakt"}, "eval set digits: .*'exakt'.*did you mean exact"),
        ({"datasets": [{"path": "none.jsonl"}]}, "eval set none.jsonl: .*none.jsonl"),
        ({"datasets": [{"path": "digits.jsonl", "input_key": "q"}]}, "eval set digits.jsonl: .*'q'"),
        ({"datasets": [], "environments": [{"id": "core/add"}]}, "eval set core/add@0: .*core/add_numbers"),
        ({"datasets": [], "environments": [{"id": "core/add_numbers", "level": 99}]}, "levels are 0 to 40"),
        (
            {"datasets": [], "environments": [{"id": "core/add_numbers", "parameters": {"digits": 2}}]},
            "eval set core/add_numbers@0: .*has no parameters",
        ),
        ({"max_prompt_len": 3}, "every prompt .6. is longer"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    prepare: Prepare, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        prepare(**keys)
    assert len(str(refused.value).splitlines()) == 1


def test_rows_may_bring_a_grader_that_needs_no_label(prepare: Prepare, data: Path) -> None:
    rows = [{"question": "say it", "about": {"rm_type": "random"}}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": "digits.jsonl", "input_key": "question", "metadata_key": "about"}
    assert prepare(datasets=[dataset]).num_answers == 2
    rows.append({"question": "say it", "about": {}})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="prompt digits/1: has no label"):
        prepare(datasets=[dataset])


def test_two_sets_of_one_name_are_refused(prepare: Prepare, data: Path) -> None:
    dataset = {"input_key": "question", "label_key": "answer"}
    with pytest.raises(ConfigError, match="two eval sets are called 'digits'"):
        prepare(datasets=[{**dataset, "path": "digits.jsonl"}, {**dataset, "path": str(data)}])


async def test_a_broken_grading_fails_its_prompt_and_is_no_wrong_answer(prepare: Prepare) -> None:
    async def odd_only(sample: Sample, prompt: Prompt) -> float:
        if int(prompt.label) % 2 == 0:
            raise ValueError("even")
        return 1.0

    config = RolloutConfig(rollout={"n_samples_per_prompt": 1, "failure_budget": 1.0}, plugins={"reward": odd_only})
    found = (await measured(prepare(config, rm_type=None), ScriptedEngine())).sets[0]
    assert (found.num_prompts, found.num_failed, found.accuracy) == (3, 3, 1.0)
    assert "ValueError: even" in (found.first_failure or "")


async def test_more_failures_than_the_budget_end_the_evaluation(prepare: Prepare) -> None:
    engine = ScriptedEngine(fault_of=lambda _: Fault.RAISE)
    with pytest.raises(RunFailedError, match=r"more than rollout.failure_budget = 0.1"):
        await measured(prepare(RolloutConfig(rollout={"failure_minimum": 4})), engine)


async def test_it_can_be_cancelled_and_the_engine_goes_on(prepare: Prepare) -> None:
    all_asked = asyncio.Event()

    def hang(request: ScriptedRequest) -> Fault:
        if len(engine.requests) == 12:
            all_asked.set()
        return Fault.HANG

    engine = ScriptedEngine(fault_of=hang)
    async with engine:
        task = asyncio.create_task(app.evaluate(prepare(), engine=engine))
        await all_asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert (await engine.load()).running == 0
        await engine.health()


async def test_it_measures_between_the_batches_of_a_run(prepare: Prepare, data: Path) -> None:
    loaded = load_prompts(
        str(data),
        renderer=ChatRenderer(CharTokenizer(), rollout_max_prompt_len=None),
        keys=ColumnKeys(input_key="question", label_key="answer"),
    )
    source = DatasetSource(loaded, seed=0)
    config = RolloutConfig(rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2}, reward={"rm_type": "exact"})
    engine = ScriptedEngine(answer=right_answer)
    prepared = prepare(config)
    versions = []
    async with app.open_rollouts(config, source=source, engine=engine, tokenizer=CharTokenizer()) as rollouts:
        for step in range(3):
            await rollouts.generate_batch()
            await rollouts.update_weights({}, policy_version=step + 1)
            versions.append((await app.evaluate(prepared, engine=engine)).policy_versions)
        assert rollouts.ledger.trained == 6
    assert versions == [(1, 1), (2, 2), (3, 3)]
    training = [request for request in engine.requests if not request.request_id.startswith("eval-")]
    assert len(training) == 12
    evaluations = [request.params.seed for request in engine.requests if request.request_id.startswith("eval-")]
    assert sorted(evaluations[:12]) == sorted(evaluations[12:24]) == sorted(evaluations[24:])


async def test_progress_counts_every_answer(prepare: Prepare) -> None:
    seen: list[tuple[int, int, int]] = []

    def note(progress: EvalProgress) -> None:
        seen.append((progress.num_answered, progress.num_scored, progress.num_right))

    await measured(prepare(), ScriptedEngine(answer=right_answer), on_progress=note)
    assert seen[-1] == (12, 12, 12)
    assert [answered for answered, _, _ in seen] == sorted(answered for answered, _, _ in seen)


async def test_files_hold_the_numbers_and_every_answer(prepare: Prepare, tmp_path: Path) -> None:
    result = await measured(prepare(), ScriptedEngine(answer=right_answer))
    out = tmp_path / "new" / "eval"
    app.check_eval_output(out, overwrite=False)
    app.write_evaluation(result, out, about={"model": "scripted"})
    stored = json.loads((out / "eval.json").read_text())
    assert stored == {"model": "scripted", **result.summary()}
    assert stored["sets"]["digits"]["pass_at_k"] == {"1": 1.0, "2": 1.0}
    rows = pq.read_table(out / "answers.parquet").to_pylist()
    assert [(row["index"], row["answer"]) for row in rows] == [(index, n) for index in range(6) for n in range(2)]
    assert sorted(path.name for path in out.iterdir()) == ["answers.parquet", "eval.json"]
    with pytest.raises(RunDirectoryError, match=r"eval\.json: exists already; give another --out, or --overwrite"):
        app.check_eval_output(out, overwrite=False)
    app.check_eval_output(out, overwrite=True)


def test_a_folder_that_cannot_be_made_is_refused(data: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        app.check_eval_output(data / "below", overwrite=False)
