"""Agents of one's own as generate functions: what they ask of the policy becomes the samples of their rollouts."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollfeed.config.agent import AgentSettings
from rollfeed.errors import AgentError
from rollfeed.gateway.playing import AgentPlayer
from rollfeed.generate import default_generate
from rollfeed.protocols import AgentTask, RolloutRequest, Services, TurnJournal
from rollfeed.routing import Affinity, current_affinity
from rollfeed.store.turns import TurnFile
from rollfeed.testing import CharTokenizer, ScriptedEngine, make_prompt, make_request
from rollfeed.testing.scripted import Fault
from rollfeed.types import Completion, Sample, SampleStatus


async def ask(task: AgentTask, messages: list[Any], **others: Any) -> str:
    headers = {"Authorization": f"Bearer {task.api_key}"}
    url = f"{task.openai_base_url}/chat/completions"
    body = {"model": task.model, "messages": messages, **others}
    session = aiohttp.ClientSession(headers=headers, raise_for_status=True)
    async with session as http, http.post(url, json=body) as response:
        return str((await response.json())["choices"][0]["message"]["content"])


async def two_turns(task: AgentTask) -> None:
    messages: list[Any] = [*task.messages]
    for _ in range(2):
        messages += [{"role": "assistant", "content": await ask(task, messages, temperature=0)}]
        messages += [{"role": "user", "content": "sure?"}]


def request_of(**changes: Any) -> RolloutRequest:
    prompt = make_prompt("2 + 2 =", metadata={"repo": "r", "answer": 4})
    return make_request(prompt, **{"max_new_tokens": 100, "max_context_length": 1000, **changes})


def services_of(engine: ScriptedEngine, journal: TurnJournal | None = None) -> Services:
    return Services(
        endpoint=engine, tokenizer=CharTokenizer(), default=default_generate, journal=journal or TurnJournal()
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)


def play(
    agent: Callable[[AgentTask], Any] | None = None,
    *,
    engine: ScriptedEngine | None = None,
    request: RolloutRequest | None = None,
    **settings: Any,
) -> list[Sample]:
    async def main() -> list[Sample]:
        made = AgentSettings(function=agent, **settings)
        async with engine or ScriptedEngine() as entered:
            return list(await AgentPlayer(made, agent)(request or request_of(), services=services_of(entered)))

    return asyncio.run(main())


def test_an_agent_s_calls_belong_to_one_session() -> None:
    told: list[Affinity] = []

    class Told(ScriptedEngine):
        async def generate(self, *args: Any, **others: Any) -> Completion:
            told.append(current_affinity())
            return await super().generate(*args, **others)

    play(two_turns, engine=Told())
    first, second = told
    assert first == second
    assert first.session


def test_an_agent_s_calls_are_the_samples_of_its_rollout_sampled_as_the_run_says() -> None:
    engine = ScriptedEngine()
    (sample,) = play(two_turns, engine=engine)
    assert sample.status is SampleStatus.COMPLETED
    assert sample.metadata["num_turns"] == 2
    assert sample.loss_mask.sum() == 4
    assert sample.label == "4"
    assert sample.response == CharTokenizer().decode(sample.token_ids[-2:-1], skip_special_tokens=False)
    assert [request.params.temperature for request in engine.requests] == [1.0, 1.0]
    assert engine.requests[0].params.seed != engine.requests[1].params.seed


def test_a_function_that_is_not_async_has_a_thread_of_its_own() -> None:
    def one_turn(task: AgentTask) -> None:
        body = json.dumps({"messages": list(task.messages)}).encode()
        sent = urllib.request.Request(
            f"{task.openai_base_url}/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(sent) as response:
            assert json.load(response)["choices"]

    (sample,) = play(one_turn)
    assert sample.metadata["num_turns"] == 1


PROGRAM = """
import json, os, sys, urllib.request
asked = json.loads(os.environ["ROLLFEED_QUESTION"])
assert asked == json.load(sys.stdin)
assert asked["metadata"] == {"repo": "r"} and "4" not in os.environ["ROLLFEED_QUESTION"], asked
assert not os.listdir(".")
assert os.environ["no_proxy"].endswith("127.0.0.1")
body = json.dumps({"model": asked["model"], "max_tokens": 9, "messages": asked["messages"]}).encode()
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers)
print(json.load(urllib.request.urlopen(request))["content"])
"""


def test_a_program_finds_the_question_and_the_gateway_and_not_the_answer(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = (sys.executable, str(tmp_path / "agent.py"))
    (sample,) = play(command=command, metadata_keys=("repo",))
    assert sample.metadata["num_turns"] == 1


LONG = """
import json, os, sys, urllib.request
text = json.load(sys.stdin)["text"]
assert len(text.encode()) >= 80_000 and "ROLLFEED_QUESTION" not in os.environ
body = json.dumps({"messages": [{"role": "user", "content": "short"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request).read()
"""


@pytest.mark.parametrize("text", ["x" * 200_000, "\u044f" * 40_000], ids=["ASCII", "two bytes each"])
def test_a_question_that_no_variable_has_room_for_comes_by_standard_input(text: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(LONG)
    request = make_request(make_prompt(text), max_new_tokens=10, max_context_length=1000)
    (sample,) = play(command=(sys.executable, str(tmp_path / "agent.py")), request=request)
    assert sample.metadata["num_turns"] == 1


async def raises(_: AgentTask) -> None:
    raise KeyError("lost")


async def hangs(task: AgentTask) -> None:
    await ask(task, [*task.messages])
    await asyncio.Event().wait()


async def says_nothing(_: AgentTask) -> None:
    return


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"agent": raises}, r"KeyError: 'lost' \(.*test_playing.py"),
    "hangs": ({"agent": hangs, "max_seconds": 0.3}, "not ended within agent.max_seconds = 0.3"),
    "asks nothing": ({"agent": says_nothing}, "without asking"),
    "a program that fails": (
        {"command": (sys.executable, "-c", "import sys; print('no luck'); sys.exit(3)")},
        "code 3: no luck",
    ),
    "a program that is none": ({"command": ("/nowhere/agent",)}, "No such file"),
}


@pytest.mark.parametrize("case", FAILING)
def test_an_agent_that_goes_wrong_fails_its_rollout_and_says_why(case: str) -> None:
    given, message = FAILING[case]
    with pytest.raises(AgentError, match=message):
        play(**given)


@pytest.mark.usefixtures("leaves_no_process")
def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    script = f"""
import subprocess
process = subprocess.Popen(["sleep", "600"])
open({str(started)!r}, "w").write(str(process.pid))
process.wait()
"""
    for max_seconds in (2.0, 8.0, 32.0, 128.0):  # until it had time to start
        with pytest.raises(AgentError, match="not ended within"):
            play(command=(sys.executable, "-c", script), max_seconds=max_seconds)
        if started.exists():
            return
    raise AssertionError("it has never started")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="the system cannot end a process with its parent")
def test_a_program_ends_when_the_process_of_its_run_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    agent = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid()) + ' '); time.sleep(600)"
    script = f"from tests.gateway.test_playing import play; play(command=({sys.executable!r}, '-c', {agent!r}))"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    asyncio.run(until(lambda: (started.exists() and started.read_text().endswith(" ")) or run.poll() is not None))
    run.kill()
    run.wait()
    asyncio.run(until(lambda: not is_running(int(started.read_text()))))


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # also while it is read
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("bounds", "request_changes", "ended_by"),
    [
        ({"max_turns": 1}, {}, "max_turns"),
        ({}, {"max_new_tokens": 2}, "max_tokens"),
        ({}, {"max_context_length": 30}, "max_context"),
    ],
)
def test_an_agent_that_is_refused_a_turn_and_gives_up_is_truncated(
    bounds: dict[str, Any], request_changes: dict[str, Any], ended_by: str
) -> None:
    (sample,) = play(two_turns, request=request_of(**request_changes), **bounds)
    assert (sample.status, sample.metadata["ended_by"]) == (SampleStatus.TRUNCATED, ended_by)


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "on the disk"])
def test_what_a_killed_agent_asks_again_is_answered_from_the_journal_and_the_rest_is_dropped(
    stored: bool, tmp_path: Path
) -> None:
    is_killed = [True]

    async def agent(task: AgentTask) -> None:
        messages: list[Any] = [*task.messages]
        for question in ("sure?", "and now?" if is_killed[0] else "and then?", "good"):
            messages += [{"role": "assistant", "content": await ask(task, messages)}]
            messages += [{"role": "user", "content": question}]
        if is_killed[0]:
            await asyncio.Event().wait()

    async def main() -> None:
        request, path = request_of(), tmp_path / "turns"
        first = TurnFile(path, None) if stored else TurnJournal()
        async with ScriptedEngine() as engine:
            player = AgentPlayer(AgentSettings(function=agent), agent)
            task = asyncio.ensure_future(player(request, services=services_of(engine, first)))
            await until(lambda: len(first.turns(request)) == 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert len(engine.requests) == 3
            is_killed[0] = False
            again = TurnFile(path, None) if stored else first
            player = AgentPlayer(AgentSettings(function=agent), agent)
            (sample,) = await player(request, services=services_of(engine, again))
            assert len(engine.requests) == 4
            assert sample.loss_mask.sum() == 6
            assert player._sessions is not None
            counts = player._sessions.totals.counts
            assert (counts["replayed_requests"], counts["dropped_turns"]) == (2, 1)
            for journal in (first, again):
                if isinstance(journal, TurnFile):
                    journal.close()

    asyncio.run(main())


def test_an_aborted_agent_is_ended_and_its_turn_gone_on_with() -> None:
    holds = [True]
    engine = ScriptedEngine(
        answer=lambda _: "abcdef", fault_of=lambda each: Fault.HANG if holds[0] and len(engine.requests) > 1 else None
    )

    async def main() -> None:
        journal, request = TurnJournal(), request_of()
        async with engine:
            player = AgentPlayer(AgentSettings(function=two_turns), two_turns)
            task = asyncio.ensure_future(player(request, services=services_of(engine, journal)))
            await until(lambda: len(engine.requests) == 2)
            await engine.abort()
            (sample,) = await task
            assert sample.status is SampleStatus.ABORTED
            assert sample.loss_mask.sum() == 7
            holds[0] = False
            (sample,) = await player(request, services=services_of(engine, journal))
            assert sample.status is SampleStatus.COMPLETED
            assert len(engine.requests) == 3

    asyncio.run(main())
