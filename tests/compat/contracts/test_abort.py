"""A step that ends aborts what is under way, at the servers themselves, behind routers of both dialects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.weights import DiskTransport

WHOLE = {"output_ids": [65, 66, 67, 68], "finish_reason": "length"}
HELD = {**WHOLE, "delay_seconds": 60.0, "num_tokens_when_aborted": 2}
REST = {"output_ids": [67, 68], "finish_reason": "length"}
PLUGINS = """
from slime.rollout.sglang_rollout import abort, generate
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
import asyncio
async def f(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)
async def step(args, rollout_id, data_source, evaluation=False):
    state, kept, groups = GenerateState(args), [], data_source(args.over_sampling_batch_size)
    state.submit_generate_tasks(groups)
    while len(kept) < args.rollout_batch_size:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        kept += [task.result() for task in done]
    aborted = await abort(args, rollout_id)
    assert state.aborted
    data_source.add_samples([*aborted, *kept[args.rollout_batch_size:]])
    return sorted(kept[:args.rollout_batch_size], key=lambda group: group[0].index)
"""


def script() -> list[dict[str, Any]]:
    """Return replies: group 2 is held in its first step, and its rest asked for in the next."""
    held = [{**HELD, "rid_prefix": f"step0-rollout{index}"} for index in (8, 9, 10, 11)]
    rest = [{**REST, "rid_prefix": f"step1-rollout{index}"} for index in (8, 9, 10, 11)]
    # The others take until group 2 has reached the servers.
    others = [{**WHOLE, "delay_seconds": 2.0, "rid_prefix": f"step0-rollout{index}"} for index in range(8)]
    # And those of the next step until its rest is there.
    later = [{**WHOLE, "delay_seconds": 2.0, "rid_prefix": f"step1-rollout{index}"} for index in range(12, 20)]
    return [*held, *rest, *others, *later, *[WHOLE] * 24]


@pytest.mark.parametrize("dialect", ["old", "new"])
@pytest.mark.parametrize(
    "plugins", [{"generate": "slime:mine.f"}, {"generate": "slime:mine.f", "rollout_fn": "slime:mine.step"}]
)
async def test_what_is_under_way_is_aborted_kept_and_gone_on_with(
    write_plugins: Callable[[str], Path], make_batches: Callable[..., Any], dialect: str, plugins: Any
) -> None:
    async with serve_fake_sglang(mode="scripted", num_workers=2, router=dialect, script=script()) as fakes:
        engine = ServerEngine(
            SGLang(SGLangSettings(router=fakes.router_address, concurrency=64)),
            context_length=4096,
            tokenizer=CharTokenizer(),
            vocab_size=2**31,
            transport=DiskTransport(None),
        )
        first, second = await make_batches(
            2,
            folder=write_plugins(PLUGINS),
            engine=engine,
            reward_fn=lambda sample, prompt: 1.0,
            rollout={"mode": "partial", "rollout_batch_size": 2, "over_sampling_batch_size": 3, "max_staleness": None},
            max_response_len=4,
            **plugins,
        )
        stats = [await fakes.stats(worker) for worker in (0, 1)]
    assert [group.group_index for group in first.groups] == [0, 1]
    assert second.groups[0].group_index == 2
    for sample in second.groups[0].samples:
        assert sample.token_ids[-4:].tolist() == [65, 66, 67, 68]
        assert (sample.response_length, sample.loss_mask.tolist()) == (4, [1.0] * 4)
        assert sample.metadata["start_rollout_id"] == 0
    assert all(each["requests"].get("/abort_request", 0) for each in stats)
