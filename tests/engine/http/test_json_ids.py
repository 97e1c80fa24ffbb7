"""Ids are the numbers that a JSON reader finds, whatever their size."""

import json

import numpy as np
import pytest

from rollfeed.engine.http import json_ids


@pytest.mark.parametrize("largest", [0, 9, (1 << 14) - 1, 1 << 14, 151_935, (1 << 20) - 1, 1 << 20, (1 << 31) - 1])
@pytest.mark.parametrize("num_ids", [0, 1, 2, 100])
def test_ids_are_read_back(largest: int, num_ids: int) -> None:
    ids = np.random.default_rng(0).integers(0, largest + 1, num_ids).astype(np.int32)
    ids[num_ids // 2 : num_ids // 2 + 1] = largest
    assert json.loads(bytes(json_ids(ids))) == ids.tolist()


def test_ids_that_are_a_part_of_others_are_read_back() -> None:
    ids = np.arange(20, dtype=np.int32)[::2]
    assert json.loads(bytes(json_ids(ids))) == ids.tolist()
