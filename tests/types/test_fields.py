from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, TypeVar

import numpy as np
import pytest

from rollfeed.types import Correct, Picture, Prompt, Rollout, Sample, Verdict, VersionSpan
from rollfeed.types.fields import Kind, documentation, fields_of, from_dict, to_dict

PICTURE = Picture(content_hash="ab12", media_type="image/png", width=4, height=3, source="a.png")


@pytest.mark.parametrize("record", [Prompt, Sample])
def test_every_field_of_what_users_see_is_documented(record) -> None:
    assert documentation(record).keys() == {field.name for field in fields_of(record)}


def test_durations_and_counters_of_reuse_are_what_differs_between_two_runs_of_one_seed() -> None:
    varying = {field.name for record in (Sample, Rollout) for field in fields_of(record) if field.varies}
    assert varying >= {"non_generation_seconds", "cached_tokens", "seconds"}
    assert not varying & {"reward", "response", "index", "error"}


def test_a_field_says_what_it_holds() -> None:
    by_name = {field.name: field for field in fields_of(Sample)}
    spans, mask = by_name["version_spans"], by_name["sampling_mask"]
    assert (spans.kind, spans.type, spans.is_many, spans.is_required) == (Kind.RECORD, VersionSpan, True, True)
    assert (mask.kind, mask.is_many, mask.is_optional, mask.is_required) == (Kind.RECORD, False, True, False)
    assert (by_name["label"].kind, by_name["reward"].kind) == (Kind.JSON, Kind.REWARD)
    assert (by_name["loss_mask"].type, by_name["response_length"].is_short) == (np.float32, True)


def test_a_named_type_of_arrays_is_read_as_what_it_names() -> None:
    element = TypeVar("element", bound=np.generic)

    class NamedType:
        __value__ = np.ndarray[Any, np.dtype[element]]

        def __getitem__(self, args: Any) -> GenericAlias:
            return GenericAlias(self, args)  # type: ignore[arg-type]

    @dataclass
    class Named:
        numbers: Any

    Named.__annotations__["numbers"] = NamedType()[np.int32] | None
    (field,) = fields_of(Named)
    assert (field.kind, field.type, field.is_optional) == (Kind.ARRAY, np.int32, True)


@pytest.mark.parametrize("hint", [set, bytes, list[int], int | str, Mapping[str, Any] | str])
def test_a_field_of_a_type_that_no_format_knows_is_refused_by_name(hint) -> None:
    @dataclass
    class Odd:
        odd: Any

    Odd.__annotations__["odd"] = hint
    with pytest.raises(TypeError, match=r"odd: .*values of this type cannot be stored"):
        fields_of(Odd)


def test_prompts_and_verdicts_have_a_dictionary_form() -> None:
    prompt = Prompt(
        prompt_id="p",
        source="s",
        text="t",
        token_ids=np.array([1, 2], np.int32),
        messages=({"role": "user", "content": "t"},),
        images=(PICTURE,),
    )
    again = from_dict(Prompt, json.loads(json.dumps(to_dict(prompt))))
    assert to_dict(again) == to_dict(prompt)
    assert (again.messages, again.images, again.token_ids.dtype) == (prompt.messages, prompt.images, np.int32)
    verdict = Verdict(reward={"score": np.float64(0.5)}, correct=Correct.YES, extracted="4")
    assert from_dict(Verdict, json.loads(json.dumps(to_dict(verdict)))) == verdict


def test_numbers_of_numpy_become_plain_ones() -> None:
    written = to_dict(Verdict(reward=np.float32(0.5), format_ok=np.bool_(True)))
    assert [type(written[name]) for name in ("reward", "format_ok")] == [float, bool]
