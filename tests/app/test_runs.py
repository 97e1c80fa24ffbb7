from __future__ import annotations

import json
import socket
from pathlib import Path

import aiohttp
import pytest

from rollfeed.app import prepare, run
from rollfeed.config import RunSpec, Settings
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError
from rollfeed.types import Prompt, Sample


def settings_for(checkpoint: Path, folder: Path, **reward: object) -> Settings:
    rows = [{"q": "add", "a": {"inputs": ["1"], "outputs": ["2"]}} for _ in range(4)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return validate_settings(
        {
            "model": {"checkpoint": str(checkpoint)},
            "prompts": {"datasets": [{"path": "tasks.jsonl", "input_key": "q", "label_key": "a"}]},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "sampling": {"rollout_max_response_len": 4},
            "engine": {"threads": 1, "num_slots": 4, "context_length": 256},
            "reward": reward,
        },
        where="test",
    )


async def test_run_that_grades_programs_stores_its_isolation_level(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="livecodebench")
    summary = await run(prepare(RunSpec(settings, (tmp_path,))), out=tmp_path / "run")
    assert summary.num_steps == 1
    stored = json.loads((tmp_path / "run" / "isolation.json").read_text())
    assert stored["level"] in ("bubblewrap", "namespaces", "limits")
    assert stored["detail"]


async def test_run_whose_isolation_level_does_not_hold_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="livecodebench", code={"isolation": "container"})
    with pytest.raises(ConfigError, match="isolation level container"):
        await run(prepare(RunSpec(settings, (tmp_path,))), out=tmp_path / "run")


def test_function_that_prompts_may_choose_is_imported_beforehand(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="exact", functions={"one": "no_module_of_that_name:f"})
    with pytest.raises(ConfigError, match=r"reward\.functions\.one = 'no_module_of_that_name:f'"):
        prepare(RunSpec(settings, (tmp_path,)))


def test_graders_without_labels_need_none(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="remote_rm", remote={"url": "http://127.0.0.1:1/"})
    dataset = settings.prompts.datasets[0].model_copy(update={"label_key": None})
    prompts = settings.prompts.model_copy(update={"datasets": (dataset,)})
    assert (
        prepare(RunSpec(settings.model_copy(update={"prompts": prompts}), (tmp_path,))).settings.reward.rm_type
        == "remote_rm"
    )


async def test_prometheus_reads_the_numbers_while_the_run_goes_on(tiny_checkpoint: Path, tmp_path: Path) -> None:
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))  # and not listened on: nobody else is given it
    port = kept.getsockname()[1]
    seen: list[str] = []

    async def reward(sample: Sample, prompt: Prompt) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reply:
            seen.append(await reply.text())
        return 0.5

    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="exact").model_dump(mode="json", exclude_unset=True)
    del settings["reward"]
    settings["rollout"]["num_rollout"] = 2
    settings |= {"plugins": {"reward": reward}, "metrics": {"port": port}}
    with kept:
        await run(prepare(RunSpec(validate_settings(settings, where="test"), (tmp_path,))), out=tmp_path / "run")
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"http://127.0.0.1:{port}/metrics")
    assert 'rollfeed_groups_total{state="submitted"} 1.0' in seen[0].splitlines()
    assert "rollfeed_rollout_reward_mean" not in seen[0]
    last = seen[-1].splitlines()
    assert {"rollfeed_step 1.0", "rollfeed_last_step 0.0", "rollfeed_rollout_reward_mean 0.5"} <= set(last)
    assert any(line.startswith('rollfeed_sources_reward_mean{name="tasks') for line in last)


def test_a_port_that_is_in_use_is_told_before_a_run(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="exact").model_dump(mode="json", exclude_unset=True)
    with socket.create_server(("127.0.0.1", 0)) as used:
        settings["metrics"] = {"port": (port := used.getsockname()[1])}
        with pytest.raises(ConfigError, match=rf"^metrics\.port = {port}: cannot listen on 127\.0\.0\.1:{port}"):
            prepare(RunSpec(validate_settings(settings, where="test"), (tmp_path,)))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"n_samples_per_prompt": 1}, "filters": {"dynamic_sampling": [{"name": "reward_std"}]}},
            "reward_std drops every group of one rollout",
        ),
        (
            {
                "rollout": {"n_samples_per_prompt": 3},
                "filters": {"dynamic_sampling": [{"name": "all_wrong"}, {"name": "at_least_half_correct"}]},
            },
            "at_least_half_correct and all_wrong together drop every group of 3",
        ),
        (
            {"filters": {"dynamic_sampling": [{"name": "response_length", "minimum": 5}]}},
            "response_length with minimum = 5 drops every group",
        ),
    ],
)
def test_filters_that_drop_every_group_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, sections: dict[str, dict[str, object]], message: str
) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, rm_type="livecodebench")
    tree = settings.model_dump(mode="json", exclude_unset=True)
    changed = {**tree, **{name: {**tree.get(name, {}), **section} for name, section in sections.items()}}
    with pytest.raises(ConfigError, match=f"filters.dynamic_sampling: {message}"):
        prepare(RunSpec(validate_settings(changed, where="test"), (tmp_path,)))
