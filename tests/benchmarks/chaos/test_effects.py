from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from rollfeed.benchmarks.chaos.effects import count_effects, num_open_episodes
from rollfeed.benchmarks.chaos.job import DONE, LOST, RUN, ChaosJob, effects_file, make_job


@pytest.fixture
def job(tmp_path: Path) -> ChaosJob:
    addresses = ["http://127.0.0.1:1"]
    return make_job(tmp_path, num_kills=1, mode="sync", deterministic=True, seed=0, addresses=addresses, agents=True)


def write(job: ChaosJob, *, lines: Sequence[str], told: Sequence[str]) -> Path:
    """Write what one sample of one prompt was told, and the lines of the tool."""
    out = job.folder / RUN
    tokenizer = Tokenizer.from_file(str(job.folder / "model" / "tokenizer.json"))
    token_ids, mask = [7, 8], []
    for text in told:
        inserted = tokenizer.encode(text).ids
        token_ids += [1000, 1001, *inserted]
        mask += [1.0, 1.0, *[0.0] * len(inserted)]
    row = {
        "prompt_id": "prompts/0@e0",
        "index": job.group_size + 2,
        "prompt_token_ids": [7, 8],
        "token_ids": [*token_ids, 1002],
        "loss_mask": [*mask, 1.0],
    }
    (out / "batches").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([row]), out / "batches" / "step-000000.parquet")
    effects_file(out).write_text("".join(f"{line}\n" for line in lines) + "prompts/0@e0 2 1 is cut o")
    return out


FIRST, SECOND = "prompts/0@e0 2 0", "prompts/0@e0 2 1"


@pytest.mark.parametrize(
    ("lines", "told", "counts"),
    [
        ([FIRST, SECOND], [DONE, DONE], (2, 0, 0, 0)),
        ([FIRST, SECOND, FIRST], [DONE, DONE], (3, 1, 0, 0)),
        ([FIRST], [DONE, DONE], (1, 0, 1, 0)),
        ([FIRST], [DONE, LOST], (1, 0, 0, 1)),
        ([FIRST, SECOND], [DONE, LOST], (2, 0, 0, 1)),
    ],
)
def test_lines_are_compared_with_what_samples_were_told(
    job: ChaosJob, lines: list[str], told: list[str], counts: tuple[int, ...]
) -> None:
    effects = count_effects(write(job, lines=lines, told=told), job)
    assert (effects.num_done, len(effects.repeated), len(effects.missing), effects.num_unsure) == counts
    assert effects.problems == []


def test_a_call_that_no_sample_knows_and_a_sample_without_its_calls_are_told(job: ChaosJob) -> None:
    effects = count_effects(write(job, lines=[FIRST, SECOND, "prompts/1@e0 0 0"], told=[DONE]), job)
    assert effects.problems == [
        f"prompts/0@e0 2: was told {[DONE]}",
        "prompts/0@e0 2 1: no sample was told of it",
        "prompts/1@e0 0 0: no sample was told of it",
    ]


def test_an_episode_is_open_between_its_first_call_and_its_last() -> None:
    assert num_open_episodes({"a 0 0": 1, "a 0 1": 1, "a 1 0": 1, "b 0 0": 2, "b 0 1": 1}) == 1
