"""What generate functions may use beside the engine: made for them, started by their first use, ended with the run."""

import pytest
from tests.rewards.judging.conftest import judge_server

from rollfeed import RolloutConfig, open_rollouts
from rollfeed.app.rewards import RewardServices
from rollfeed.config import RewardSettings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.generate import default_generate
from rollfeed.protocols import ExecLimits, Services
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine


async def no_reward(sample, prompt) -> float:
    return 0.0


async def test_environments_workers_and_sandboxes_are_there_when_they_are_used() -> None:
    found = {}

    async def generate(request, *, services):
        if not request.group_index:
            found["environment"] = services.environments.get("core/copy_text").environment_id
            found["worker"] = await services.workers.call("math.sqrt", [49], deadline_seconds=30.0)
            async with services.sandboxes.open() as sandbox:
                ran = await sandbox.exec(["python3", "-c", "print(6 * 7)"], limits=ExecLimits())
                found["sandbox"] = ran.stdout
        return await services.default(request, services=services)

    config = RolloutConfig(
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 1},
        plugins={"generate": generate, "reward": no_reward},
    )
    source = ListSource(["a"], repeat=True)
    async with open_rollouts(config, source=source, engine=ScriptedEngine(), tokenizer=CharTokenizer()) as rollouts:
        await rollouts.generate_batch()
    assert found == {"environment": "core/copy_text", "worker": 7.0, "sandbox": b"42\n"}


async def test_a_service_that_is_not_there_says_so_when_it_is_used() -> None:
    services = Services(endpoint=ScriptedEngine(), tokenizer=CharTokenizer(), default=default_generate)
    for use in (
        lambda: services.workers.call("math.sqrt", [4], deadline_seconds=1.0),
        lambda: services.sandboxes.open(),
        lambda: services.environments.get("core/copy_text"),
    ):
        with pytest.raises(RunFailedError, match=r"services\.\w+ is not there: this run was made without"):
            use()


async def test_what_was_opened_is_closed_where_the_next_part_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async with judge_server(lambda text: "") as server:
        judge = {"servers": [server.url], "model": "j", "rubric": "{response}"}
        services = RewardServices(RewardSettings.model_validate({"rm_type": "judge", "judge": judge}), rm_types=[])
        leave = services.judges.__aexit__

        class Toolbox:
            async def __aenter__(self) -> None:
                raise ConfigError("no such tool server")

            async def __aexit__(self, *exc_info: object) -> None: ...

        async def left(self: object, *exc_info: object) -> None:
            closed.append(len(server.bodies))
            await leave(*exc_info)

        monkeypatch.setattr(type(services.judges), "__aexit__", left)
        services.toolbox = Toolbox()
        with pytest.raises(ConfigError, match="no such tool server"):
            await services.__aenter__()
    assert closed == [1]
