"""New weights reach the engine, and generation waits for those that it needs."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollfeed.errors import EngineProtocolError, RunFailedError
from rollfeed.pipeline import WeightFollower
from rollfeed.testing import ListSource
from rollfeed.types import FolderUpdate, TensorUpdate
from rollfeed.weights import Publisher, WeightDirectory


def publish(folder: Path, version: int, *, logprob: float | None = None) -> None:
    temporary = folder / f".version-{version}"
    temporary.mkdir(parents=True)
    save_file({"weight": np.zeros(2, np.float32)}, temporary / "model.safetensors")
    (temporary / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if logprob is not None:
        probe = {"token_ids": [[1, 2, 3]] * 20, "logprobs": [[logprob, 2 * logprob]] * 20}
        (temporary / "probe.json").write_text(json.dumps(probe))
    temporary.rename(folder / f"version-{version:06d}")


def follower(
    folder: Path, publisher, *, max_lag: int, timeout_seconds: float = 60.0, again_seconds: Sequence[float] = ()
) -> WeightFollower:
    return WeightFollower(
        WeightDirectory(folder, poll_seconds=0.01, again_seconds=again_seconds),
        publisher,
        max_lag=max_lag,
        poll_seconds=0.01,
        timeout_seconds=timeout_seconds,
    )


def prompts() -> ListSource:
    return ListSource([f"prompt {number}" for number in range(1000)])


SETTINGS = {"max_response_len": 1000, "n_samples_per_prompt": 2}


async def test_a_step_is_made_with_the_weights_of_the_batches_before_it(make_rollouts, tick_engine, tmp_path) -> None:
    engine = tick_engine(lambda rollout_id: 3)
    async with make_rollouts(
        engine, source=prompts(), weights=follower(tmp_path, Publisher(engine), max_lag=0), **SETTINGS
    ) as rollouts:
        for step in range(4):
            batch = await rollouts.generate_batch()
            assert batch.policy_version == step
            assert batch.metrics["rollout/staleness_max"] == 0
            publish(tmp_path, step + 1)
            assert (batch.metrics["time/publish_seconds"] > 0) is (step > 0)


async def test_a_version_that_does_not_come_ends_the_run_and_says_so(make_rollouts, tick_engine, tmp_path) -> None:
    engine = tick_engine(lambda rollout_id: 3)
    weights = follower(tmp_path, Publisher(engine), max_lag=0, timeout_seconds=0.05)
    async with make_rollouts(engine, source=prompts(), weights=weights, **SETTINGS) as rollouts:
        await rollouts.generate_batch()
        with pytest.raises(RunFailedError, match="version 1"):
            await rollouts.generate_batch()
        publish(tmp_path, 1)
        assert (await rollouts.generate_batch()).policy_version == 1


async def test_a_step_that_waits_for_weights_says_so(make_rollouts, tick_engine, tmp_path, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "rollfeed")
    monkeypatch.setattr("rollfeed.pipeline.weight_follower._TOLD_AFTER_SECONDS", 2.0)
    engine = tick_engine(lambda rollout_id: 3)
    weights = follower(tmp_path, Publisher(engine), max_lag=0, timeout_seconds=600.0)
    async with make_rollouts(engine, source=prompts(), weights=weights, **SETTINGS) as rollouts:
        await rollouts.generate_batch()
        waiting = asyncio.create_task(rollouts.generate_batch())
        while not waiting.done() and "step 1 waits for weights of version 1, 2 s of" not in caplog.text:
            await asyncio.wait({waiting}, timeout=0.01)
        publish(tmp_path, 1)
        assert (await waiting).policy_version == 1


class Saying:
    """Gives an engine the log-probabilities of the versions that it serves."""

    def __init__(self, engine, logprobs) -> None:
        async def score(texts):
            assert [text.tolist() for text in texts] == [[1, 2, 3]] * 20
            logprob = logprobs[engine.policy_version]
            return {"http://a": np.array([logprob, 2 * logprob] * 20)}

        engine.score = score


async def test_a_trainers_probes_prove_its_weights_and_show_in_the_metrics(
    make_rollouts, tick_engine, tmp_path
) -> None:
    engine = tick_engine(lambda rollout_id: 3)
    Saying(engine, {1: -1.0, 2: -1.1, 3: -1.3})
    publisher = Publisher(engine)
    weights = follower(tmp_path, publisher, max_lag=0)
    async with make_rollouts(engine, source=prompts(), weights=weights, publisher=publisher, **SETTINGS) as rollouts:
        await rollouts.generate_batch()
        slopes = []
        for step, logprob in ((1, -1.0), (2, -1.1), (3, -1.3)):
            publish(tmp_path, step, logprob=logprob)
            batch = await rollouts.generate_batch()
            slopes.append(batch.metrics.get("weights/proof_slope"))
        assert slopes == [None, pytest.approx(1.0), pytest.approx(1.0)]


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_weights_that_did_not_arrive_end_the_run_though_the_engine_says_that_it_has_them(
    make_rollouts, tick_engine, tmp_path, max_lag
) -> None:
    engine = tick_engine(lambda rollout_id: 3)
    Saying(engine, {1: -1.0, 2: -1.0})
    publisher = Publisher(engine)
    weights = follower(tmp_path, publisher, max_lag=max_lag)
    async with make_rollouts(engine, source=prompts(), weights=weights, publisher=publisher, **SETTINGS) as rollouts:
        await rollouts.generate_batch()
        publish(tmp_path, 1, logprob=-1.0)
        await rollouts.generate_batch()
        publish(tmp_path, 2, logprob=-1.1)
        for _ in range(2):
            with pytest.raises(EngineProtocolError, match="http://a: version 2 is not what it has"):
                await rollouts.generate_batch()


async def test_a_trainer_without_probes_is_told_of_once(make_rollouts, tick_engine, tmp_path, caplog) -> None:
    engine = tick_engine(lambda rollout_id: 3)
    publisher = Publisher(engine)
    weights = follower(tmp_path, publisher, max_lag=0)
    async with make_rollouts(engine, source=prompts(), weights=weights, publisher=publisher, **SETTINGS) as rollouts:
        for step in range(3):
            await rollouts.generate_batch()
            publish(tmp_path, step + 1)
    assert sum("weights not proved" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("resumed", [False, True])
async def test_r44_staleness_stays_within_the_limit_with_an_outside_trainer_also_after_a_resume(
    make_rollouts, tick_engine, tmp_path, max_staleness, resumed
) -> None:
    commits = []
    for part in range(2 if resumed else 1):
        engine = tick_engine(lambda rollout_id: 2 + rollout_id * 7 % 40)
        weights = follower(tmp_path, Publisher(engine), max_lag=max_staleness)
        async with make_rollouts(
            engine,
            source=prompts(),
            mode="async",
            max_staleness=max_staleness,
            over_sampling_batch_size=8,
            weights=weights,
            state=commits[-1].state if commits else None,
            commit=commits.append,
            **SETTINGS,
        ) as rollouts:
            for step in range(30 * part, 30 * part + 30):
                batch = await rollouts.generate_batch()
                assert batch.step == step
                assert batch.metrics["rollout/staleness_max"] <= max_staleness
                assert batch.policy_version >= step - max_staleness
                publish(tmp_path, step + 1)
    trained = [group.group_index for commit in commits for group in commit.batch.groups]
    assert len(trained) == len(set(trained))


async def test_a_version_that_is_not_newer_is_never_published(tick_engine, tmp_path) -> None:
    taken: list[int] = []

    class Engine(tick_engine):
        async def apply(self, update) -> None:
            if isinstance(update, FolderUpdate):
                taken.append(update.policy_version)
            await super().apply(update)

    engine = Engine(lambda rollout_id: 3)
    weights = follower(tmp_path, Publisher(engine), max_lag=0)
    for version in (2, 5):
        publish(tmp_path, version)
        await weights.before_step(0)
        await weights.before_step(0)
    await engine.apply(TensorUpdate({}, policy_version=7))  # published by somebody else meanwhile
    await weights.before_step(0)
    assert taken == [2, 5]
    assert engine.policy_version == 7


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_x07_weights_that_the_engine_refuses_are_named_and_skipped_for_the_next_good_ones(
    make_rollouts, tick_engine, tmp_path, caplog, max_lag
) -> None:
    class Engine(tick_engine):
        async def apply(self, update) -> None:
            if isinstance(update, FolderUpdate) and update.policy_version in (2, 3, 5):
                raise EngineProtocolError("weight 'weight': some of its values are not finite as torch.float32")
            await super().apply(update)

    engine = Engine(lambda rollout_id: 3)
    weights = follower(tmp_path, Publisher(engine), max_lag=max_lag)
    async with make_rollouts(engine, source=prompts(), weights=weights, **SETTINGS) as rollouts:
        assert (await rollouts.generate_batch()).policy_version == 0
        for version in (1, 2, 3):
            publish(tmp_path, version)
        assert (await rollouts.generate_batch()).policy_version == 1
        waiting = asyncio.create_task(rollouts.generate_batch())  # which needs version 2 where no lag is allowed
        publish(tmp_path, 4)
        assert (await waiting).policy_version in ((4,) if max_lag == 0 else (1, 4))
        assert (await rollouts.generate_batch()).policy_version == 4
    told = [message for message in caplog.messages if "not taken as weights" in message]
    assert len(told) == 2
    for version in (2, 3):
        assert any(
            f"version-00000{version}: not taken" in each and "not finite as torch.float32" in each for each in told
        )


async def test_x07_a_run_whose_weights_are_all_refused_ends_with_their_names(
    make_rollouts, tick_engine, tmp_path
) -> None:
    class Engine(tick_engine):
        async def apply(self, update) -> None:
            raise EngineProtocolError("weight 'weight': some of its values are not finite as torch.float32")

    engine = Engine(lambda rollout_id: 3)
    weights = follower(tmp_path, Publisher(engine), max_lag=0, timeout_seconds=0.05)
    publish(tmp_path, 1)
    with pytest.raises(RunFailedError, match=r"version-000001: the engine does not take version 1: .* not finite"):
        await weights.before_step(1)
    (tmp_path / "version-000001" / "more.txt").write_text("")  # the folder has changed, and is looked at again
    assert weights._source.newest() == (1, tmp_path / "version-000001")


async def test_weights_that_the_engine_refuses_for_a_moment_are_taken_then(tick_engine, tmp_path, caplog) -> None:
    tries = []

    class Engine(tick_engine):
        async def apply(self, update) -> None:
            tries.append(update.policy_version)
            if len(tries) < 4:
                raise EngineProtocolError("no such file or directory: 'model.safetensors'")
            await super().apply(update)

    engine = Engine(lambda rollout_id: 3)
    publish(tmp_path, 1)
    await follower(tmp_path, Publisher(engine), max_lag=0, again_seconds=(0.0, 0.0, 0.0)).before_step(1)
    assert engine.policy_version == 1
    assert tries == [1, 1, 1, 1]
