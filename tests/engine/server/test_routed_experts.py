"""Experts on SGLang's wire: our server answers as SGLang does, and our client reads it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        TinyModelSettings(hidden_size=32, num_layers=2),
        seed=1,
        cache_directory=tmp_path_factory.mktemp("moe"),
        has_experts=True,
    )


async def test_experts_are_returned_in_int32_where_they_are_asked_for(serving: Any, moe: Path) -> None:
    async with serving(checkpoint=moe) as client:
        asked = {"return_routed_experts": True}
        reply = await client.generate([3, 4, 5, 6], max_new_tokens=5, ignore_eos=True, top=asked)
        without = await client.generate([3, 4, 5, 6], max_new_tokens=5)
    numbers = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(8, 2, 2)
    assert 0 <= numbers.min() < numbers.max() < 8
    assert (numbers[..., 0] != numbers[..., 1]).all()
    assert "routed_experts" not in without["meta_info"]
