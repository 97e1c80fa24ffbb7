"""What a warm-up teaches, on which prompts, and what it refuses before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rollfeed import app
from rollfeed.app.training import WarmUp, prepare_warm_up
from rollfeed.app.training.warm_up import demonstrations_of
from rollfeed.cli.main import main
from rollfeed.config import RunSpec
from rollfeed.environments.builtin import ReverseText
from rollfeed.errors import ConfigError
from rollfeed.testing import END_OF_TURN, CharTokenizer
from rollfeed.types import Prompt

ALPHABET = 4
SETTINGS = """
seed = {seed}

[model]
checkpoint = "{checkpoint}"

{prompts}

[sampling]
rollout_max_response_len = 6

[engine]
context_length = 128
num_slots = 4
threads = 1

[train.warm_up]
stop_accuracy = 0.3
probe_prompts = 40
"""
WORDS = f"""
[[prompts.environments]]
id = "core/reverse_text"
level = 1
apply_chat_template = false
parameters = {{ style = "compact", alphabet_size = {ALPHABET} }}
"""
QUESTIONS = """
[[prompts.datasets]]
path = "questions.jsonl"
apply_chat_template = false
{label}
"""
LABEL = 'label_key = "label"'
FUNCTION = """
[plugins]
reward = "own_reward:by_length"
"""
OWN_SOURCE = """
[plugins]
prompt_source = "own_source:Own"
reward = "own_reward:by_length"
"""
REWARD = """
def by_length(sample, prompt):
    return float(sample.response_length)
"""
SOURCE = """
from rollfeed.testing import ListSource

class Own(ListSource):
    def __init__(self, tokenizer):
        super().__init__(["a", "b"], repeat=True)
"""


@pytest.fixture
def write(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Return a function that writes a settings file, with the modules and data that it may name beside it."""
    (tmp_path / "own_reward.py").write_text(REWARD)
    (tmp_path / "own_source.py").write_text(SOURCE)
    rows = [{"prompt": f"question {number}", "label": f"{number}"} for number in range(5)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(prompts: str = WORDS, *, seed: int = 5, checkpoint: Path = tiny_checkpoint) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(SETTINGS.format(seed=seed, checkpoint=checkpoint, prompts=prompts))
        return path

    return make


async def warm_up_of(file: Path, **changes: Any) -> WarmUp:
    spec = RunSpec.load(file, [f"{key}={value}" for key, value in changes.items()])
    made = await prepare_warm_up(app.prepare(spec))
    assert made is not None
    return made


def labelled(count: int) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=str(number),
            source="made",
            text=f"{number}?",
            token_ids=CharTokenizer().encode(f"{number}?", add_special_tokens=False),
            label=f"answer {number}",
        )
        for number in range(count)
    ]


def taught(prompts: list[Prompt], *, wrong_share: float, seed: int = 0) -> list[str]:
    """Return what is taught for each prompt, after a check of its form."""
    made = demonstrations_of(prompts, tokenizer=CharTokenizer(), wrong_share=wrong_share, random=Random(seed))
    assert [each.prompt_ids.tolist() for each in made] == [prompt.token_ids.tolist() for prompt in prompts]
    assert {each.response_ids[-1] for each in made} == {END_OF_TURN}
    return [CharTokenizer().decode(each.response_ids[:-1], skip_special_tokens=False) for each in made]


def test_every_prompt_is_taught_its_own_label_and_the_end() -> None:
    assert taught(labelled(50), wrong_share=0.0) == [f"answer {number}" for number in range(50)]


def test_a_share_of_prompts_is_taught_the_label_of_another() -> None:
    prompts = labelled(2000)
    answers = taught(prompts, wrong_share=0.6)
    num_wrong = sum(answer != prompt.label for answer, prompt in zip(answers, prompts, strict=True))
    assert 0.56 < num_wrong / 2000 < 0.64
    assert set(answers) <= {prompt.label for prompt in prompts}
    assert answers == taught(prompts, wrong_share=0.6)
    assert answers != taught(prompts, wrong_share=0.6, seed=1)


async def test_no_section_no_warm_up(write) -> None:
    path = write()
    path.write_text(path.read_text().partition("[train.warm_up]")[0])
    assert await prepare_warm_up(app.prepare(RunSpec.load(path))) is None


async def test_every_label_of_a_file_can_be_taught(write, tmp_path: Path) -> None:
    file = write(QUESTIONS.format(label=LABEL) + FUNCTION)
    with (tmp_path / "questions.jsonl").open("a") as questions:
        questions.write(json.dumps({"prompt": "?", "label": None}) + "\n")
    with pytest.raises(ConfigError, match="prompt questions/5 has no label to teach"):
        await warm_up_of(file, **{"train.warm_up.probe_prompts": 2})


async def test_its_words_are_those_of_training_and_none_that_is_held_out(write) -> None:
    warm_up = await warm_up_of(write())
    drawn = await warm_up.source.draw(600)
    probed = warm_up.evaluation.sets[0].prompts
    assert len(probed) == 40
    environment = ReverseText(style="compact", alphabet_size=ALPHABET)
    held_out = [
        prompt.text for prompt in (*drawn, *probed) if environment.is_held_out(prompt.metadata["params"]["text"])
    ]
    assert held_out == []
    assert all(prompt.text == f"rev:{prompt.label[::-1]}=" for prompt in (*drawn, *probed))
    words = {"".join((a, b, c)) for a in "abcd" for b in "abcd" for c in "abcd" if a != c}
    allowed = {word for word in words if not environment.is_held_out(word)}
    assert 0 < len(allowed) < len(words)
    assert {prompt.label for prompt in drawn} == allowed


async def test_its_prompts_are_the_same_for_the_same_seed_and_not_those_of_the_first_batch(write) -> None:
    first, again, other = await warm_up_of(write()), await warm_up_of(write()), await warm_up_of(write(seed=6))
    texts = [[prompt.text for prompt in await each.source.draw(30)] for each in (first, again, other)]
    probes = [[prompt.text for prompt in each.evaluation.sets[0].prompts] for each in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert probes[0] == probes[1] != probes[2]
    assert probes[0][:30] != texts[0]
    batch = [prompt.text for prompt in await app.prepare(RunSpec.load(write())).source.draw(30)]
    assert batch not in (texts[0], probes[0][:30])


async def test_answers_are_sampled_as_in_training(write) -> None:
    warm_up = await warm_up_of(write(), **{"sampling.rollout_temperature": 0.7, "rollout.n_samples_per_prompt": 8})
    plan = warm_up.evaluation.sets[0].plan
    assert (plan.params.temperature, plan.params.max_new_tokens, plan.n_samples_per_prompt) == (0.7, 6, 1)


@pytest.mark.parametrize(
    ("prompts", "grader"),
    [
        (WORDS, "environment"),
        (WORDS + FUNCTION, "environment"),
        (QUESTIONS.format(label=LABEL) + FUNCTION, None),
        (QUESTIONS.format(label=LABEL) + '[reward]\nrm_type = "exact"\n', "exact"),
        (WORDS + QUESTIONS.format(label=LABEL) + FUNCTION, None),
        (WORDS + QUESTIONS.format(label=LABEL) + '[reward]\nrm_type = "exact"\n', "exact"),
    ],
)
async def test_a_grader_says_what_is_right_where_every_prompt_has_one(write, prompts: str, grader: str | None) -> None:
    plan = (await warm_up_of(write(prompts))).evaluation.sets[0].plan
    assert (plan.rm_type, plan.has_own_grader) == (grader, grader is not None)


async def test_a_data_set_that_ends_in_training_does_not_end_in_the_warm_up(write) -> None:
    file = write(QUESTIONS.format(label=LABEL) + FUNCTION)
    warm_up = await warm_up_of(file, **{"prompts.num_epoch": 1})
    assert len(warm_up.evaluation.sets[0].prompts) == 40
    drawn = await warm_up.source.draw(64)
    assert len(drawn) == 64
    assert {prompt.label for prompt in drawn} == set("01234")


def without_end_token(checkpoint: Path, folder: Path) -> Path:
    copy = shutil.copytree(checkpoint, folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (copy / name).exists():
            stored = json.loads((copy / name).read_text())
            stored.pop("eos_token_id", None)
            stored.pop("eos_token", None)
            (copy / name).write_text(json.dumps(stored))
    return copy


CASES = {
    "no label": (
        QUESTIONS.format(label="") + FUNCTION,
        ["train.warm_up: prompt", "has no label to teach", "label_key"],
    ),
    "own source": (OWN_SOURCE, ["train.warm_up: takes its prompts from [prompts]", "remove one of them"]),
    "no end": (WORDS, ["train.warm_up: the tokenizer names no token that ends a response"]),
}


@pytest.fixture(params=CASES)
def bad(request: pytest.FixtureRequest, write, tiny_checkpoint: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A settings file that cannot be warmed up with, and what has to be said of it."""
    prompts, expected = CASES[request.param]
    if request.param == "no end":
        return write(prompts, checkpoint=without_end_token(tiny_checkpoint, tmp_path / "endless")), expected
    return write(prompts), expected


async def test_what_cannot_be_taught_is_refused(bad: tuple[Path, list[str]]) -> None:
    file, expected = bad
    with pytest.raises(ConfigError) as caught:
        await warm_up_of(file)
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize("command", ["check", "train"])
def test_commands_refuse_it_before_anything_starts(
    bad: tuple[Path, list[str]], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, expected = bad
    assert main([command, str(file), "--out", str(tmp_path / "never")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rollfeed: ")]
    assert len(lines) == 1
    for part in expected:
        assert part in lines[0]
    assert not (tmp_path / "never").exists()
