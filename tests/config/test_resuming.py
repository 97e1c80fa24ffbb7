"""Every setting is placed once: free to change, changed on purpose, or fixed, with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from rollfeed.config import Settings, chosen_keys, validate_settings
from rollfeed.config.load import is_named
from rollfeed.config.resuming import refusal_of_changes
from rollfeed.config.section import Resume, section_in
from rollfeed.config.settings import flatten
from rollfeed.errors import ConfigError
from rollfeed.store import RunDirectory

COMMON: dict[str, Any] = {"prompts": {"environments": [{"id": "core/copy_text"}]}, "engine": {"context_length": 2048}}
JUDGE = {"servers": ["http://a:1/v1"], "model": "judge", "rubric": "{response}"}
TREES: dict[str, dict[str, Any]] = {
    "embedded": {
        **COMMON,
        "filters": {"over_sampling": {"name": "reward_std", "num_extra": 4}},
        "train": {
            "warm_up": {"stop_accuracy": 0.5},
            "micro_batch_tokens": 4096,
            "activation_checkpointing": True,
            "loss": {"kl_coefficient": 0.1, "reward_kl_coefficient": 0.1, "reference_refresh_interval": 2},
        },
        "eval": {"environments": [{"id": "core/copy_text"}]},
        "reward": {"functions": {"mine": "module:function"}, "overlong": {"cache": 50}},
        "sampling": {"rollout_max_response_len": 100},
        "plugins": {"reward": "module:function"},
        "tools": {
            "search": {"corpus": "texts"},
            "files": {"folder": "files"},
            "mcp": [{"name": "server", "url": "http://a:1"}],
        },
    },
    "plain": COMMON,
    "trained": {**COMMON, "train": {"export_interval": 10}},
    "adapter": {**COMMON, "train": {"lora": {}}},
    "experts": {**COMMON, "sampling": {"return_routed_experts": True}},
    "partial": {**COMMON, "rollout": {"mode": "partial", "mask_offpolicy_in_partial_rollout": True}},
    "over-sampled": {**COMMON, "rollout": {"over_sampling_batch_size": 8}},
    "async": {**COMMON, "rollout": {"mode": "async"}},
    "own source": {"engine": {"context_length": 2048}, "plugins": {"prompt_source": "module:source"}},
    "given answers": {"prompts": {"datasets": [{"path": "x.jsonl"}]}, "rollout": {"mode": "sft"}},
    "adaptive": {
        "prompts": {"adaptive": {"policy": "rlve", "environment_list": ["core/copy_text"]}},
        "engine": {"context_length": 2048},
    },
    "directory": {**COMMON, "weights": {"source": "directory", "directory": "/weights"}},
    "sglang": {
        **COMMON,
        "engine": {"sglang": {"workers": ["http://a:1"], "weights_transport": "delta"}, "context_length": 2048},
        "sampling": {"rollout_top_k": 20},
    },
    "judge": {**COMMON, "reward": {"judge": JUDGE}},
    "judge's file": {**COMMON, "reward": {"judge": {"servers": ["http://a:1"], "model": "j", "rubric_file": "a.txt"}}},
    "judge's tool": {**COMMON, "reward": {"judge": {**JUDGE, "reply": "tool", "choices": {"A": 1.0}}}},
    "panel": {**COMMON, "reward": {"judge": {"panel": ["a", "b"]}, "judges": dict.fromkeys("abc", JUDGE)}},
    "launch": {**COMMON, "engine": {"openai": {}, "launch": {}, "context_length": 2048}},
    "router": {**COMMON, "engine": {"sglang": {"router": "http://a:1"}, "context_length": 2048}},
    "teacher": {**COMMON, "teacher": {"checkpoint": "teacher"}},
    "served teacher": {**COMMON, "teacher": {"servers": ["http://a:1"], "temperature": 1.0}},
    "reward model": {**COMMON, "reward": {"model": {"checkpoint": "a"}}},
    "scored steps": {**COMMON, "reward": {"model": {"checkpoint": "a", "unit": "step"}}},
    "agent": {**COMMON, "agent": {"command": ["python"]}},
    "openai": {
        **COMMON,
        "engine": {"openai": {"base_url": "http://a:1", "weights_transport": "delta"}, "context_length": 2048},
    },
}
TREES["all given"] = validate_settings(COMMON, where="all given").model_dump(mode="json")
BASES = {name: validate_settings(tree, where=name) for name, tree in TREES.items()}
VALUES: tuple[Any, ...] = (
    *(True, False, 0, 1, 2, 3, 7, 64, 100, 1000, 0.25, 0.5, 0.75, 1.5, 5.0),
    *("cpu", "round_robin", "cuda:1", "module:other", "http://b:2", "2026-01-31", "qwen3", "{x}"),
    *(JUDGE, {"other": JUDGE}, ["b", "c"], [0.0, 5.0]),
    *([], ["x"], ["trackio"], [7], ["http://b:2"], {"x": 1}, {"x": "y"}, [[0]]),
    *({"cache": 20}, {"stop_accuracy": 0.25}, {"name": "reward_std", "num_extra": 3}, {"workers": ["http://b:2"]}),
    *({"corpus": "others"}, {"folder": "others"}, {"checkpoint": "another"}, [{"name": "other", "url": "http://b:2"}]),
    {"rank": 8},
    *([{"rm_type": "math"}], [{"rm_type": "math", "weight": 2.0}, {"rm_type": "f1"}]),
    *({"environment_list": ["x"]}, {"core/copy_text": {"words": 1}}),
    *({"base_url": "http://b:2"}, [{"id": "core/compare_max"}], [{"path": "x.jsonl"}], [{"name": "reward_std"}]),
)
"""Of these one is another for every setting, whatever it means."""


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield all keys of a section; what may be a table or missing is a key itself, a list of tables one key."""
    for name, info in section.model_fields.items():
        inner = section_in(info.annotation)
        if inner is None or str(info.annotation).startswith(("tuple", "dict")):
            yield f"{prefix}{name}"
            continue
        if info.default is None:
            yield f"{prefix}{name}"
        yield from keys_of(inner, f"{prefix}{name}.")


KEYS = sorted(keys_of(Settings))


TABLES = {key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)}
"""Those that may be missing; they are tried where they are."""


def has(tree: Any, key: str) -> bool:
    name, _, rest = key.partition(".")
    return isinstance(tree, dict) and name in tree and (not rest or has(tree[name], rest))


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    return {**tree, name: with_value(tree.get(name) or {}, rest, value) if rest else value}


def enums_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    for name, info in section.model_fields.items():
        inner = section_in(info.annotation)
        if inner is not None:
            yield from enums_of(inner, f"{prefix}{name}.")
            continue
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, Enum):
                yield f"{prefix}{name}", [member.value for member in kind]


WITH_OTHERS: dict[str, dict[str, Any]] = {
    "weights.source": {"source": "directory", "directory": "/weights"},
    "engine.launch": {"openai": {}, "launch": {}, "context_length": 2048},
}
"""Tables with another value of a key that asks for more."""
ENUMS = dict(enums_of(Settings))


def find_other(name: str, key: str) -> tuple[Settings | None, bool]:
    """Return the settings of a base with another value of a key, and whether no other key differs."""
    before = flatten(BASES[name].model_dump(mode="json"))
    fallback = None
    for value in ENUMS.get(key, VALUES):
        try:
            table = WITH_OTHERS.get(key)
            tree = with_value(TREES[name], key, value) if table is None else {**TREES[name], key.split(".")[0]: table}
            other = validate_settings(tree, where="changed")
        except ConfigError:
            continue
        after = flatten(other.model_dump(mode="json"))
        differing = {each for each in before.keys() | after.keys() if before.get(each) != after.get(each)}
        if differing == {key}:
            return other, True
        if any(each == key or each.startswith(f"{key}.") for each in differing):
            fallback = fallback or other
    return fallback, False


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return run directories of all bases."""
    made = {name: tmp_path_factory.mktemp(name) for name in BASES}
    for name, out in made.items():
        settings = BASES[name]
        dumped = settings.model_dump(mode="json")
        RunDirectory.open(out, settings=dumped, identity=settings.identity(), overwrite=False).close()
    return made


def problem(out: Path, settings: Settings, chosen: frozenset[str] = frozenset()) -> str:
    found = RunDirectory.problem(out, identity=settings.identity(), overwrite=False, chosen=chosen)
    return "" if found is None else found


def changed(key: str) -> tuple[str, Settings]:
    """Return a base, and its settings with another value of a key, and of no other where that is possible."""
    fallback = None
    for name, base in BASES.items():
        tree = base.model_dump(mode="json")
        if not has(tree, key) or (key in TABLES and flatten(tree).get(key, "a table") is not None):
            continue
        other, is_alone = find_other(name, key)
        if other is not None and is_alone:
            return name, other
        fallback = fallback or (None if other is None else (name, other))
    if fallback is None:
        pytest.fail(f"no value of VALUES changes {key}: add one, or a base that it fits")
    return fallback


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_is_placed_and_keeps_to_it_where_a_run_is_gone_on_with(key: str, runs: dict[str, Path]) -> None:
    resume = Settings.resume_of(key)
    assert resume is not None, f"{key} is new: annotate it with a Resume, or its section"
    name, other = changed(key)
    refusal = problem(runs[name], other)
    if resume in (Resume.FREE, Resume.FREE_UNLESS_DETERMINISTIC):
        assert refusal == ""
        return
    assert key in refusal
    chosen = frozenset({*flatten(other.model_dump(mode="json")), key})
    if resume is not Resume.ON_PURPOSE:
        assert resume.value in refusal
        assert "choose another --out" in refusal
        assert key in problem(runs[name], other, chosen)
    else:
        assert f"--set {key}=" in refusal
        assert "change it on purpose" in refusal
        assert problem(runs[name], other, chosen) == ""


def test_a_key_says_it_for_itself_before_its_section_and_that_before_what_holds_it() -> None:
    assert Settings.resume_of("reward.rm_type") is Resume.REWARDS
    assert Settings.resume_of("reward.functions.mine") is Resume.REWARDS
    assert Settings.resume_of("reward.remote.form") is Resume.REWARDS
    assert Settings.resume_of("reward.remote.url") is Resume.FREE
    assert Settings.resume_of("engine.sglang") is Resume.ANSWERS
    assert Settings.resume_of("engine.sglang.workers") is Resume.FREE
    assert Settings.resume_of("engine.openai.purpose") is Resume.ANSWERS


@pytest.mark.parametrize("key", [key for key in KEYS if Settings.resume_of(key) is Resume.FREE_UNLESS_DETERMINISTIC])
def test_what_changes_the_rounding_of_answers_is_fixed_in_a_deterministic_run(key: str, tmp_path: Path) -> None:
    name, other = changed(key)
    before, after = (
        validate_settings(with_value(each.model_dump(mode="json"), "rollout.deterministic", True), where="x")
        for each in (BASES[name], other)
    )
    dumped = before.model_dump(mode="json")
    RunDirectory.open(tmp_path, settings=dumped, identity=before.identity(), overwrite=False).close()
    assert "rollout.deterministic = true promises their bytes" in problem(tmp_path, after)


def test_a_key_that_nobody_has_placed_is_fixed() -> None:
    assert Settings.resume_of("train.brand_new") is None
    refusal = refusal_of_changes({"train.brand_new": "1"}, {"train.brand_new": "2"}, chosen=())
    assert refusal is not None
    assert "train.brand_new decides what the run is" in refusal


def test_keys_of_a_section_that_is_new_are_told_with_their_reason_once() -> None:
    there, here = {"train.lora": "null"}, {"train.lora.rank": "4", "train.lora.alpha": "8", "seed": "1"}
    assert refusal_of_changes({**there, "seed": "2"}, here, chosen=()) == (
        "seed = 2 there, 1 here; train.lora.alpha = unset there, 8 here; train.lora.rank = unset there, 4 here; choose "
        "another --out, or replace it with --overwrite (seed decides all that is random; each of train.lora.alpha, "
        "train.lora.rank decides which model samples and learns)"
    )


@pytest.mark.parametrize(
    ("key", "override", "expected"),
    [
        ("train.loss.clip_high", "train.loss.clip_high=0.3", True),
        ("train.loss.clip_high", "train . loss={clip_high = 0.3}", True),
        ("prompts.environments", "prompts.environments.0.level=3", True),
        ("train.loss.clip_high", "train.loss.clip_low=0.3", False),
        ("train.loss.clip_high", "train.loss.clip=0.3", False),
    ],
)
def test_what_is_set_on_purpose_is_found_by_its_name(key: str, override: str, expected: bool) -> None:
    assert is_named(key, [override]) is expected


def test_what_equals_the_file_is_chosen_when_it_is_named() -> None:
    overrides = ["train.optimizer.learning_rate=1e-6", "train.loss.kl_coefficient=0.1"]
    settings = validate_settings(COMMON, where="x", overrides=overrides)
    chosen = chosen_keys(COMMON, overrides, settings)
    assert chosen == {"train.optimizer.learning_rate", "train.loss.kl_coefficient"}
    assert json.loads(json.dumps(sorted(chosen))) == sorted(chosen)
