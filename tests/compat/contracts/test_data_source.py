"""Data sources for plug-ins that inherit from them: groups, epochs, the buffer, and the position that is saved."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.compat.slime_plugins.names.data import (
    Dataset,
    DataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    pop_first,
    read_file,
)
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.errors import DataError
from rollfeed.testing import CharTokenizer


@pytest.fixture
def make_args(tmp_path: Path, make_run: Callable[..., Any]) -> Callable[..., Namespace]:
    """Return a function that gives the arguments of a data source with five prompts."""
    make_run().tokenizer = CharTokenizer()
    rows = [{"input": f"p{number}", "label": str(number), "metadata": {"n": number}} for number in range(5)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changes: Any) -> Namespace:
        from rollfeed.compat.slime_plugins.shared_run import latest

        own = dict(vars(latest().args))
        own |= {
            "prompt_data": str(file),
            "input_key": "input",
            "label_key": "label",
            "metadata_key": "metadata",
            "tool_key": None,
            "apply_chat_template": False,
            "apply_chat_template_kwargs": {},
            "hf_checkpoint": "mine",
            "rollout_max_prompt_len": None,
            "rollout_shuffle": False,
            "buffer_filter_path": None,
            "n_samples_per_prompt": 2,
            "save": str(tmp_path),
            "load": str(tmp_path),
        }
        args = Namespace(**{**own, **changes})
        vars(latest().args)["hf_checkpoint"] = "mine"
        return args

    return make


def texts(groups: list[list[Any]]) -> list[str]:
    return [group[0].prompt for group in groups]


def test_groups_are_copies_of_a_prompt_with_places_that_go_on_over_epochs(make_args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(make_args())
    groups = source.get_samples(3) + source.get_samples(4)
    assert texts(groups) == ["p0", "p1", "p2", "p3", "p4", "p0", "p1"]
    assert [sample.group_index for group in groups for sample in group] == [n // 2 for n in range(14)]
    assert [sample.index for group in groups for sample in group] == list(range(14))
    groups[0][0].metadata["n"] = 99
    assert (groups[0][1].metadata, groups[5][0].metadata) == ({"n": 0}, {"n": 0})
    assert (len(source), source.epoch_id, groups[3][0].label) == (5, 1, "3")


def test_more_groups_than_there_are_prompts_go_through_several_epochs(make_args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(make_args())
    assert texts(source.get_samples(12)) == [f"p{number % 5}" for number in range(12)]
    assert texts(source.get_samples(1)) == ["p2"]


def test_epochs_are_shuffled_from_the_files_order_where_that_is_asked_for(make_args: Callable[..., Namespace]) -> None:
    def epochs(source: RolloutDataSource) -> list[list[str]]:
        return [texts(source.get_samples(5)) for _ in range(3)]

    first, second = (epochs(RolloutDataSource(make_args(rollout_shuffle=True))) for _ in range(2))
    assert first == second
    assert all(sorted(each) == [f"p{number}" for number in range(5)] for each in first)
    assert len({tuple(each) for each in first}) == 3
    assert epochs(RolloutDataSource(make_args(rollout_shuffle=True, rollout_seed=6))) != first
    alone = RolloutDataSource(make_args(rollout_shuffle=True))
    assert alone.dataset is not None
    alone.dataset.shuffle(2)
    assert [sample.prompt for sample in alone.dataset.samples] == first[2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_that_was_saved_is_gone_on_from(make_args: Callable[..., Namespace], shuffle: bool) -> None:
    first = RolloutDataSource(make_args(rollout_shuffle=shuffle))
    first.get_samples(7)
    first.metadata["seen"] = 1
    first.save(3)
    second = RolloutDataSource(make_args(rollout_shuffle=shuffle))
    second.load(3)
    assert second.metadata == {"seen": 1}
    ahead, again = first.get_samples(4), second.get_samples(4)
    assert [(each.prompt, each.index) for group in ahead for each in group] == [
        (each.prompt, each.index) for group in again for each in group
    ]


def test_a_position_that_is_not_there_is_the_beginning(make_args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(make_args())
    source.load(17)
    assert texts(source.get_samples(1)) == ["p0"]


def test_without_a_file_samples_are_blank(make_args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(make_args(prompt_data=None))
    ((first, second),) = source.get_samples(1)
    assert (first.prompt, first.index, second.index, len(source)) == ("", 0, 1, 0)


def test_a_source_without_a_buffer_takes_nothing_back(make_args: Callable[..., Namespace]) -> None:
    with pytest.raises(SlimeUseError, match="RolloutDataSource takes no samples back"):
        RolloutDataSource(make_args()).add_samples([])


def test_what_was_given_back_comes_first_and_new_prompts_after_it(make_args: Callable[..., Namespace]) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    first, second = source.get_samples(2)
    source.add_samples([second, first])
    assert source.get_buffer_length() == 2
    groups = source.get_samples(3)
    assert groups[0] is second
    assert groups[1] is first
    assert texts(groups[2:]) == ["p2"]
    source.update_metadata({"a": 1})
    assert (source.get_buffer_length(), source.get_metadata()) == (0, {"a": 1})


def test_a_group_of_another_size_is_not_taken_back(make_args: Callable[..., Namespace]) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    (group,) = source.get_samples(1)
    with pytest.raises(SlimeUseError, match="a group of 1, n_samples_per_prompt is 2"):
        source.add_samples([group[:1]])


def test_a_buffer_filter_chooses_what_comes_back(
    make_args: Callable[..., Namespace], write_plugins: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_plugins(
        "def last(args, rollout_id, buffer, num_samples):\n"
        "    assert rollout_id is None\n    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="mine.last"))
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert source.get_samples(2) == [groups[2], groups[1]]


def test_the_oldest_are_popped_first() -> None:
    buffer: list[Any] = [["a"], ["b"], ["c"]]
    assert (pop_first(None, None, buffer, 2), buffer) == ([["a"], ["b"]], [["c"]])
    assert (pop_first(None, None, buffer, 2), buffer) == ([["c"]], [])


def test_a_source_has_to_give_samples() -> None:
    class Incomplete(DataSource):
        pass

    with pytest.raises(TypeError, match="get_samples"):
        Incomplete()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("rows", "found"), [("@[1:3]", [1, 2]), ("@[-2:]", [3, 4]), ("@[:-3]", [0, 1]), ("@[3:9]", [3, 4])]
)
def test_a_slice_of_a_file_is_read(make_args: Callable[..., Namespace], rows: str, found: list[int]) -> None:
    assert [row["metadata"]["n"] for row in read_file(make_args().prompt_data + rows)] == found


def test_a_line_that_is_no_json_is_an_error_with_its_place(tmp_path: Path) -> None:
    """Not as in slime, which prints and skips it: a prompt that is missing changes all that come after it."""
    file = tmp_path / "broken.jsonl"
    file.write_text('{"input": "a"}\n{"input": \n')
    with pytest.raises(DataError, match=r"broken.jsonl:2"):
        list(read_file(str(file)))


def test_prompts_over_the_length_are_left_out_in_order_and_messages_are_not_measured(tmp_path: Path) -> None:
    rows = ["aaaa", "b", [{"role": "user", "content": "a" * 50}], "cc", "ddddd"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    made = Dataset(str(file), CharTokenTexts(), max_length=3)
    assert [sample.prompt for sample in made.samples] == ["b", rows[2], "cc"]


class CharTokenTexts:
    """A tokenizer of a token a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(each) for each in text]

    def apply_chat_template(self, messages: Any, **settings: Any) -> str:
        return f"{[each['content'] for each in messages]} {settings.get('tools')} {settings.get('enable_thinking')}"


@pytest.mark.parametrize("tools", [[{"name": "t"}], '[{"name": "t"}]'])
def test_tools_and_metadata_may_be_json_text_and_the_template_has_its_variables(tmp_path: Path, tools: Any) -> None:
    row = {"text": "q", "tools": tools, "metadata": '{"level": 2}', "label": 5}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    made = Dataset(
        str(tmp_path / "prompts.jsonl"),
        CharTokenTexts(),
        label_key="label",
        tool_key="tools",
        apply_chat_template=True,
        apply_chat_template_kwargs={"enable_thinking": False},
    )
    assert made[0].prompt == "['q'] [{'name': 't'}] False"
    assert (made[0].metadata, made[0].label) == ({"level": 2, "tools": [{"name": "t"}]}, 5)


def test_an_empty_file_is_refused_when_the_source_is_made(make_args: Callable[..., Namespace], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        RolloutDataSource(make_args(prompt_data=str(tmp_path / "empty.jsonl")))
