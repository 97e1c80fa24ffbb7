"""Rollouts for the plain trainer: TRL's shapes, its weights, its settings, rewards, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.app.inside_trl.trainers import Rows, Trainer

from rollfeed.compat.trl import RolloutFunc, rollout_func, rollout_reward
from rollfeed.config import (
    EngineSettings,
    PluginSettings,
    RewardSettings,
    RolloutConfig,
    RolloutSettings,
    SamplingSettings,
)
from rollfeed.config.teacher import TeacherSettings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.types import Prompt, Sample

ENGINE = EngineSettings(num_slots=8, context_length=64, threads=1)
Answered = dict[str, list[Any]]


@pytest.fixture
def make(tiny_checkpoint: Path, chats: Rows) -> Iterator[Callable[..., tuple[RolloutFunc, Trainer]]]:
    made: list[RolloutFunc] = []

    def make_one(
        config: RolloutConfig | None = None, *, rows: Rows = chats, keys: dict[str, str] | None = None, **arguments: Any
    ) -> tuple[RolloutFunc, Trainer]:
        made.append(RolloutFunc(config, engine=ENGINE, **(keys or {})))
        return made[-1], Trainer(tiny_checkpoint, rows, **arguments)

    yield make_one
    for function in made:
        function.close()


def asked(rows: Rows, numbers: Sequence[int] = (0, 1), times: int = 3) -> list[Any]:
    return [rows[number]["prompt"] for number in numbers for _ in range(times)]


def worst(trainer: Trainer, answered: Answered) -> float:
    rows = zip(answered["prompt_ids"], answered["completion_ids"], answered["logprobs"], strict=True)
    return max(float(np.abs(trainer.logprobs(ids, said) - logprobs).max()) for ids, said, logprobs in rows)


def letters(sample: Sample, prompt: Prompt) -> float:
    return len(sample.response) + 100.0 * float(prompt.label or 0)


def test_every_prompt_is_answered_as_trl_tokenises_it(make: Any, chats: Rows) -> None:
    function, trainer = make()
    answered = function(asked(chats), trainer)
    assert answered.keys() == {"prompt_ids", "completion_ids", "logprobs"}
    for ids, number in zip(answered["prompt_ids"], (0, 0, 0, 1, 1, 1), strict=True):
        said = chats[number]["prompt"]
        assert ids == trainer.processing_class.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    for said, logprobs in zip(answered["completion_ids"], answered["logprobs"], strict=True):
        assert 1 <= len(said) == len(logprobs) <= trainer.args.max_completion_length
    assert len({tuple(said) for said in answered["completion_ids"]}) > 3, "answers of a prompt have seeds of their own"
    assert worst(trainer, answered) < 1e-4


def test_texts_are_answered_without_a_chat_template(make: Any) -> None:
    rows = Rows([{"prompt": "one and"}, {"prompt": "two and"}])
    function, trainer = make(rows=rows)
    answered = function(asked(rows), trainer)
    assert answered["prompt_ids"][3] == trainer.processing_class(text="two and")["input_ids"]


@pytest.mark.parametrize("leaves_a_trace", [True, False])
def test_answers_come_from_the_weights_that_the_trainer_has_now(make: Any, chats: Rows, leaves_a_trace: bool) -> None:
    import torch

    function, trainer = make()
    before, generator = function(asked(chats), trainer), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            changed = parameter if leaves_a_trace else parameter.data
            changed += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer.state.global_step += not leaves_a_trace
    after = function(asked(chats), trainer)
    assert worst(trainer, before) > 1e-2
    assert worst(trainer, after) < 1e-4


class Adapted:
    """What a model with an adapter has, as far as it is used."""

    prefix, is_merged, can_merge = "lora_", False, True

    def __init__(self, model: Any) -> None:
        self._weight = next(model.parameters())
        model.prefix, model.merge_adapter, model.unmerge_adapter = self.prefix, self.merge, self.unmerge

    def merge(self) -> None:
        self.is_merged = True
        self._add(0.5)
        if not self.can_merge:
            raise MemoryError("in the middle")

    def unmerge(self) -> None:
        self.is_merged = False
        self._add(-0.5)

    def _add(self, value: float) -> None:
        import torch

        with torch.no_grad():
            self._weight += value


def test_an_adapter_is_merged_once_a_step_and_never_left_so(make: Any, chats: Rows) -> None:
    rollouts, trainer = make()
    adapted = Adapted(trainer.model)
    for _ in range(2):
        rollouts(asked(chats), trainer)
    assert rollouts._answers._version == 1
    adapted.can_merge, trainer.state.global_step = False, 1
    with pytest.raises(MemoryError):
        rollouts(asked(chats), trainer)
    assert not adapted.is_merged


def test_seeds_are_of_the_step_and_evaluations_change_nothing(make: Any, chats: Rows) -> None:
    found = []
    for evaluates in (False, True):
        function, trainer = make(num_generations_eval=2)
        if evaluates:
            trainer.model.eval()
            evaluated = function(asked(chats, times=2), trainer)["completion_ids"]
            trainer.model.train()
        found.append([function(asked(chats), trainer)["completion_ids"] for _ in range(2)])
        trainer.state.global_step = 1
        found[-1].append(function(asked(chats), trainer)["completion_ids"])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1] != found[0][2] != found[0][0]
    assert [*evaluated[:2], *evaluated[2:]] != [*found[0][0][:2], *found[0][0][3:5]]
    assert len(evaluated) == 4


def test_rollfeed_scores_with_labels_of_the_data_set(make: Any, chats: Rows) -> None:
    config = RolloutConfig(plugins=PluginSettings(reward=letters))
    function, trainer = make(config, keys={"label_key": "label"})
    answered = function(asked(chats, (4, 2)), trainer)
    rewards = rollout_reward(prompts=[], completions=[], **answered)
    assert [reward // 100 for reward in rewards] == [4, 4, 4, 2, 2, 2]


def test_graders_score_by_rm_type(make: Any, chats: Rows) -> None:
    function, trainer = make(RolloutConfig(reward=RewardSettings(rm_type="math")), keys={"label_key": "label"})
    assert set(function(asked(chats), trainer)["rollfeed_reward"]) <= {0.0, 1.0}


def test_rollout_reward_says_that_nothing_scored() -> None:
    with pytest.raises(ConfigError, match="not scored: give RolloutFunc a config"):
        rollout_reward(prompts=[], completions=[])


async def half_inserted(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    (sample,) = await services.default(request, services=services)
    mask, logprobs = sample.loss_mask.copy(), sample.logprobs.copy()
    mask[0] = logprobs[0] = 0.0
    return [replace(sample, loss_mask=mask, logprobs=logprobs)]


def test_inserted_tokens_are_masked(make: Any, chats: Rows) -> None:
    function, trainer = make(RolloutConfig(plugins=PluginSettings(generate=half_inserted)))
    answered = function(asked(chats), trainer)
    for mask, said in zip(answered["env_mask"], answered["completion_ids"], strict=True):
        assert mask == [0] + [1] * (len(said) - 1)


async def failing(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    raise OSError("no such tool")


async def twice(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    return [*await services.default(request, services=services)] * 2


@pytest.mark.parametrize(("generate", "told"), [(failing, "no such tool"), (twice, "has 2 sequences")])
def test_an_answer_that_cannot_be_made_ends_the_training(make: Any, chats: Rows, generate: Any, told: str) -> None:
    function, trainer = make(RolloutConfig(plugins=PluginSettings(generate=generate)))
    with pytest.raises(RunFailedError, match=told):
        function(asked(chats), trainer)


def test_the_engine_ends_with_the_training_and_starts_again_when_asked(make: Any, chats: Rows) -> None:
    before = set(threading.enumerate())
    function, trainer = make()
    function(asked(chats), trainer)
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"rollfeed-trl", "rollfeed-engine"}
    trainer.end()
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"rollfeed-trl", "rollfeed-engine"}
    assert worst(trainer, function(asked(chats), trainer)) < 1e-4


def test_another_trainer_gets_an_engine_of_its_own(make: Any, chats: Rows, tiny_checkpoint: Path) -> None:
    function, trainer = make()
    function(asked(chats), trainer)
    other = Trainer(tiny_checkpoint, chats, max_completion_length=2)
    answered = function(asked(chats), other)
    assert max(map(len, answered["completion_ids"])) <= 2


def test_one_line_is_enough(tiny_checkpoint: Path, chats: Rows) -> None:
    trainer = Trainer(tiny_checkpoint, chats)
    try:
        assert worst(trainer, rollout_func(asked(chats), trainer)) < 1e-4
    finally:
        trainer.end()


IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"use_vllm": True}, "use_vllm = True: TRL would start or ask vLLM besides"),
        ({"min_p": 0.1}, "min_p = 0.1: rollfeed does not sample with it"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs = .*: they are for the trainer's own generation"),
        ({"use_transformers_continuous_batching": True}, "the trainer's own generation is not used"),
        ({"temperature": 0.0}, "SimpleNamespace: rollout_temperature = 0.0: input should be greater than 0"),
        ({"num_generations": 2}, r"a prompt of the 6 of this process stands there 1 times, no multiple of num_generat"),
        ({"max_completion_length": 60}, "context_length = 64: the longest prompt and max_completion_length are"),
    ],
)
def test_arguments_of_trl_that_cannot_be_had(make: Any, chats: Rows, changed: dict[str, Any], told: str) -> None:
    function, trainer = make(**changed)
    with pytest.raises(ConfigError, match=told):
        function(asked(chats), trainer)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (RolloutConfig(seed=3), "seed: seed of TRL says it"),
        (RolloutConfig(teacher=TeacherSettings(checkpoint="x")), "teacher: .* GKDTrainer distils: remove"),
        (RolloutConfig(rollout=RolloutSettings(n_samples_per_prompt=8)), "num_generations of TRL says it"),
        (RolloutConfig(sampling=SamplingSettings(rollout_top_k=5)), "rollout_top_k: top_k of TRL says it"),
        (RolloutConfig(plugins=PluginSettings(prompt_source=dict)), "train_dataset of TRL says it"),
        (RolloutConfig(plugins=PluginSettings(group_filters=[len])), r"plugins.group_filters has no effect: TRL wants"),
    ],
)
def test_settings_that_are_trls_to_say(make: Any, chats: Rows, config: RolloutConfig, told: str) -> None:
    function, trainer = make(config)
    with pytest.raises(ConfigError, match=told):
        function(asked(chats), trainer)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (Rows([{"prompt": IMAGE}]), "row 0: 0 images and 1 places for them"),
        (
            Rows([{"prompt": "what is it", "image": "cat.png"}]),
            "train_dataset has a column 'image': prompts with images",
        ),
        (Rows([{"prompt": "a", "label": "1"}, {"prompt": "a", "label": "2"}]), "have the same prompt"),
        (Rows([{"prompt": "a", "label": "1"}, {"prompt": "b", "label": None}]), "no label in column 'label'"),
        (Rows([{"prompt": "another", "label": "1"}]), "a prompt is in no data set of the trainer"),
        (Rows([]), "give a Dataset with rows"),
        (iter([{"prompt": "a"}]), "is a list_iterator: give a Dataset with rows"),
    ],
)
def test_rows_that_cannot_be_used(make: Any, rows: Any, told: str) -> None:
    config = RolloutConfig(reward=RewardSettings(rm_type="math"))
    keys = {"label_key": "label"} if "label" in getattr(rows, "column_names", ()) else {}
    function, trainer = make(config, rows=rows, keys=keys)
    with pytest.raises(ConfigError, match=told):
        function([[{"role": "user", "content": "hm"}]] * 3, trainer)


def test_trainers_that_cannot_be_answered(make: Any, chats: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    function, trainer = make()
    trainer.tools = [len]
    with pytest.raises(ConfigError, match="the trainer's tools: TRL answers for them by itself"):
        function(asked(chats), trainer)
    trainer.tools = []
    next(trainer.model.parameters()).ds_id = 0
    with pytest.raises(ConfigError, match="this process has only a part of it"):
        function(asked(chats), trainer)
    del next(trainer.model.parameters()).ds_id
    trainer.processing_class = SimpleNamespace(tokenizer=trainer.processing_class)
    with pytest.raises(ConfigError, match="prompts with images cannot be answered, give a tokenizer"):
        function(asked(chats), trainer)
    trainer.accelerator.num_processes = 2
    servers = EngineSettings.model_validate({"sglang": {"workers": ["http://127.0.0.1:9"]}})
    with pytest.raises(ConfigError, match="2 processes train, and each would give the servers weights"):
        RolloutFunc(engine=servers)(asked(chats), trainer)
    del trainer.args.top_k
    with pytest.raises(ConfigError, match=r"SimpleNamespace has no top_k: install trl==1\.16\.\*"):
        function(asked(chats), trainer)


def test_a_missing_trl_and_another_one(make: Any, chats: Rows, monkeypatch: Any, caplog: Any, tmp_path: Path) -> None:
    function, trainer = make()
    other = tmp_path / "trl-2.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 2.0.0\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        function(asked(chats), trainer)
    assert "TRL 2.0.0 is installed, and rollfeed.compat.trl is written for 1.16.*" in caplog.text
    function.close()
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if "stand_in" not in entry])
    with pytest.raises(ConfigError, match="TRL is not installed: pip install"):
        function(asked(chats), trainer)
