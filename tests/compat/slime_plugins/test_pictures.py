"""Pictures in what a slime plug-in sends to ``/generate``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollfeed.compat.slime_plugins.names.engine_calls import _with_pictures
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.types import Picture

PICTURE = Picture(content_hash="ab", media_type="image/png", width=1, height=1)


class Seeing:
    """A picture is two tokens 9, its placeholder one."""

    def load(self, given: Any) -> Picture:
        assert given == "data:,x"
        return PICTURE

    def locate(self, ids: Any, images: Any) -> None:
        if (np.asarray(ids) == 9).sum() != 2 * len(images):
            raise ValueError("no place")

    def expand(self, ids: Any, images: Any, *, is_prompt: bool) -> Any:
        return np.array([each for token in ids for each in [token] * (2 if token == 9 else 1)], np.int32)


def work(picture_input: Any) -> Any:
    return SimpleNamespace(services=SimpleNamespace(picture_input=picture_input))


@pytest.mark.parametrize("given", ["data:,x", PICTURE])
@pytest.mark.parametrize("ids", [[1, 9, 2], [1, 9, 9, 2]])
def test_a_prompt_has_the_tokens_of_its_pictures_once(given: Any, ids: list[int]) -> None:
    seeing = work(SimpleNamespace(loader=Seeing(), pictures=Seeing()))
    sent, images = _with_pictures(np.array(ids, np.int32), [given], seeing)
    assert (sent.tolist(), images) == ([1, 9, 9, 2], (PICTURE,))


def test_a_model_that_reads_text_is_sent_none() -> None:
    with pytest.raises(SlimeUseError, match="the model takes text only"):
        _with_pictures(np.array([1], np.int32), ["data:,x"], work(None))
