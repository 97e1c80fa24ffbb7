"""A step that ends aborts what is under way, at the servers themselves, behind routers of both dialects."""

import asyncio
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
HELD = {**WHOLE, "delay_seconds": 600.0, "num_tokens_when_aborted": 2}
REST = {"output_ids": [67, 68], "finish_reason": "length"}
PLUGINS = """
from slime.rollout.sglang_rollout import abort, generate
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
import asyncio
from pathlib import Path
FOLDER = Path(__file__).parent
async def f(args, sample, sampling_params):
    # Others are asked for when group 2 has reached the servers, and those of the next step when it has ended.
    waited_for = [] if sample.group_index == 2 else ["held"] if sample.group_index < 2 else [8, 9, 10, 11]
    while not all((FOLDER / str(each)).exists() for each in waited_for):
        await asyncio.sleep(0.01)
    made = await generate(args, sample, sampling_params)
    if made.group_index == 2 and made.status is not made.Status.ABORTED:
        (FOLDER / str(made.index)).touch()
    return made
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
    return [*held, *rest, *[WHOLE] * 40]


@pytest.mark.parametrize("dialect", ["old", "new"])
@pytest.mark.parametrize(
    "plugins", [{"generate": "slime:mine.f"}, {"generate": "slime:mine.f", "rollout_fn": "slime:mine.step"}]
)
async def test_what_is_under_way_is_aborted_kept_and_gone_on_with(
    write_plugins: Callable[[str], Path], make_batches: Callable[..., Any], dialect: str, plugins: Any
) -> None:
    folder = write_plugins(PLUGINS)

    async def tell_that_it_is_held() -> None:
        num_asked = 0
        while num_asked < 4:
            asked = [(await fakes.stats(worker))["requests"] for worker in (0, 1)]
            num_asked = sum(each.get("/generate", 0) for each in asked)
        (folder / "held").touch()

    async with serve_fake_sglang(mode="scripted", num_workers=2, router=dialect, script=script()) as fakes:
        telling = asyncio.create_task(tell_that_it_is_held())
        engine = ServerEngine(
            SGLang(SGLangSettings(router=fakes.router_address, concurrency=64)),
            context_length=4096,
            tokenizer=CharTokenizer(),
            vocab_size=2**31,
            transport=DiskTransport(None),
        )
        first, second = await make_batches(
            2,
            folder=folder,
            engine=engine,
            reward_fn=lambda sample, prompt: 1.0,
            rollout={"mode": "partial", "rollout_batch_size": 2, "over_sampling_batch_size": 3, "max_staleness": None},
            max_response_len=4,
            **plugins,
        )
        await telling
        stats = [await fakes.stats(worker) for worker in (0, 1)]
    assert [group.group_index for group in first.groups] == [0, 1]
    assert second.groups[0].group_index == 2
    for sample in second.groups[0].samples:
        assert sample.token_ids[-4:].tolist() == [65, 66, 67, 68]
        assert (sample.response_length, sample.loss_mask.tolist()) == (4, [1.0] * 4)
        assert sample.metadata["start_rollout_id"] == 0
    assert all(each["requests"].get("/abort_request", 0) for each in stats)
