"""Agents that are written for ``slime.agent``: what they ask becomes samples, and nothing of them is left."""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rollfeed
from rollfeed.compat.slime_plugins import with_slime_plugins
from rollfeed.compat.slime_plugins.agent.gateway_adapters import OpenAIAdapter, flatten_content
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.config.agent import AgentSettings
from rollfeed.errors import PluginError
from rollfeed.gateway.playing import AgentPlayer
from rollfeed.generate import default_generate
from rollfeed.protocols import AgentTask, RolloutRequest, Services, TurnJournal
from rollfeed.testing import CharTokenizer, ScriptedEngine, make_prompt, make_request
from rollfeed.testing.scripted import Fault
from rollfeed.types import Sample, SampleStatus

BACKEND = "SLIME_AGENT_SANDBOX_BACKEND"
Write = Callable[[str], Path]

TALK = """
import asyncio
import aiohttp
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.misc import SingletonMeta

URL = "http://127.0.0.1:30000"
HELD = asyncio.Event()

class Service(metaclass=SingletonMeta):
    def __init__(self):
        self.adapter = OpenAIAdapter(tokenizer=None, sglang_url=URL, max_turns_per_sid=3)
        self.url = f"http://127.0.0.1:{run_app_in_thread(self.adapter.app, host='127.0.0.1').port}"

async def ask(sid, messages, **others):
    headers = {"Authorization": f"Bearer {sid}"}
    url = Service().url + "/v1/chat/completions"
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:
        async with http.post(url, json={"model": "m", "messages": messages, **others}) as response:
            return (await response.json())["choices"][0]["message"]["content"]

async def talk(sid, text, num_turns=2):
    messages = [{"role": "user", "content": text}]
    for _ in range(num_turns):
        messages += [{"role": "assistant", "content": await ask(sid, messages, temperature=0)}]
        messages += [{"role": "user", "content": "sure?"}]

async def generate(args, sample, sampling_params):
    adapter, sid = Service().adapter, f"talk-{sample.index}"
    adapter.open_session(sid, sampling_defaults=sampling_params)
    await play(sid, sample.prompt)
    return await adapter.finish_session(sid, base_sample=sample, reward=0.5, extra_metadata={"mine": 1})

play = talk
"""


def load(folder: Path) -> Any:
    """Return the generate function of ``mine.py`` as one of ours."""
    config = rollfeed.RolloutConfig(plugins=rollfeed.PluginSettings(generate="slime:mine.generate"))
    return with_slime_plugins(config, folders=[folder]).plugins.generate


def service(generate: Any) -> Any:
    return generate.call.__globals__["Service"]()


def request_of(**changes: Any) -> RolloutRequest:
    return make_request(make_prompt("2 + 2 ="), **{"max_new_tokens": 100, "max_context_length": 1000, **changes})


def services_of(
    engine: ScriptedEngine, journal: TurnJournal | None = None, *, tokenizer: CharTokenizer | None = None
) -> Services:
    return Services(
        endpoint=engine,
        tokenizer=tokenizer or CharTokenizer(),
        default=default_generate,
        journal=journal or TurnJournal(),
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)


def told(sample: Sample) -> Any:
    arrays = [each.tolist() for each in (sample.token_ids, sample.loss_mask, sample.logprobs)]
    return (*arrays, sample.version_spans, sample.status, sample.index, sample.precision, sample.response)


async def ask_twice(task: AgentTask) -> None:
    messages: list[Any] = [*task.messages]
    headers, url = {"Authorization": f"Bearer {task.api_key}"}, f"{task.openai_base_url}/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(2):
            async with http.post(url, json={"messages": messages}) as response:
                said = (await response.json())["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "sure?"}]


async def test_an_agent_has_the_sample_that_the_same_agent_has_without_slime(write_plugins: Write) -> None:
    generate = load(write_plugins(TALK))
    async with ScriptedEngine() as engine:
        (theirs,) = await generate(request_of(), services=services_of(engine))
        (ours,) = await AgentPlayer(AgentSettings(function=ask_twice), ask_twice)(
            request_of(), services=services_of(engine)
        )
    assert told(theirs) == told(ours)
    assert theirs.loss_mask.sum() == 4
    assert (theirs.reward, theirs.metadata["mine"], theirs.metadata["num_turns"]) == (0.5, 1, 2)
    assert [each.params.temperature for each in engine.requests] == [1.0] * 4
    assert engine.requests[0].params.seed == engine.requests[2].params.seed != engine.requests[1].params.seed


class Marking(CharTokenizer):
    """Renders conversations after a mark."""

    def render_chat(self, *args: Any, **others: Any) -> str:
        return f"# {super().render_chat(*args, **others)}"


async def test_adapters_outlive_a_run_its_loop_and_its_tokenizer(write_plugins: Write) -> None:
    """An adapter is made once a process, in whichever run comes first."""
    generate = load(write_plugins(TALK))

    async def once(tokenizer: CharTokenizer) -> Any:
        async with ScriptedEngine(answer=lambda _: "4") as engine:
            (sample,) = await generate(request_of(), services=services_of(engine, tokenizer=tokenizer))
            return CharTokenizer().decode(sample.token_ids, skip_special_tokens=False)

    first, second = [await asyncio.to_thread(asyncio.run, once(each())) for each in (CharTokenizer, Marking)]
    assert second == f"# {first}"


SEVERAL = """
async def play(sid, text):
    await asyncio.gather(talk(sid, text), talk(sid, "Another beginning", 1))
"""


async def test_each_context_of_a_session_is_a_sample_with_the_whole_reward(write_plugins: Write) -> None:
    generate = load(write_plugins(TALK + SEVERAL))
    async with ScriptedEngine() as engine:
        samples = await generate(request_of(), services=services_of(engine))
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert len({sample.rollout_id for sample in samples}) == 1
    assert sum(sample.loss_mask.sum() for sample in samples) == 6


@pytest.mark.parametrize(
    ("play", "status"),
    [("await talk(sid, text, 4)", 403), ("await ask('another', [{'role': 'user', 'content': 'a'}])", 401)],
)
async def test_agents_are_refused_beyond_their_turns_and_without_a_session(
    write_plugins: Write, play: str, status: int
) -> None:
    refused = f"""
async def play(sid, text):
    await talk(sid, text, 1)
    try:
        {play}
    except aiohttp.ClientResponseError as error:
        assert error.status == {status}
    else:
        raise AssertionError
"""
    generate = load(write_plugins(TALK + refused))
    async with ScriptedEngine() as engine:
        *_, sample = await generate(request_of(), services=services_of(engine))
    assert sample.metadata.get("ended_by") == ("max_turns" if status == 403 else None)
    assert sample.status is (SampleStatus.TRUNCATED if status == 403 else SampleStatus.COMPLETED)


FAILS = """
async def play(sid, text):
    await talk(sid, text, 1)
    asyncio.ensure_future(ask(sid, [{"role": "user", "content": "more"}]))
    await HOW
"""


@pytest.mark.parametrize("how", ["asyncio.sleep(0, 1 / 0)", "asyncio.Event().wait()"], ids=["fails", "is cancelled"])
async def test_nothing_is_left_of_a_function_that(write_plugins: Write, how: str) -> None:
    generate = load(write_plugins(TALK + FAILS.replace("HOW", how)))
    async with ScriptedEngine(fault_of=lambda each: Fault.HANG if len(engine.requests) > 1 else None) as engine:
        task = asyncio.ensure_future(generate(request_of(), services=services_of(engine)))
        if "Event" in how:
            await until(lambda: len(engine.requests) == 2)
            task.cancel()
        (raised,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(raised, ZeroDivisionError if "/ 0" in how else asyncio.CancelledError)
        adapter = service(generate).adapter
        assert (adapter._open, adapter._sessions.num_open) == ({}, 0)
        await until(lambda: engine._waiting == [])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await asyncio.to_thread(call, service(generate).url, "talk-0")


def call(url: str, sid: str) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "late"}]}).encode()
    headers = {"Authorization": f"Bearer {sid}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as response:
        return json.load(response)


async def test_an_aborted_agent_is_ended_and_its_turns_are_not_sampled_again(write_plugins: Write) -> None:
    generate, holds = load(write_plugins(TALK)), [True]
    engine = ScriptedEngine(
        answer=lambda _: "abcdef", fault_of=lambda _: Fault.HANG if holds[0] and len(engine.requests) > 1 else None
    )
    journal, request = TurnJournal(), request_of()
    async with engine:
        task = asyncio.ensure_future(generate(request, services=services_of(engine, journal)))
        await until(lambda: len(engine.requests) == 2)
        await engine.abort()
        (sample,) = await task
        assert task.cancelling() == 0
        assert (sample.status, sample.response_length) == (SampleStatus.ABORTED, 0)
        holds[0] = False
        (sample,) = await generate(request, services=services_of(engine, journal))
        assert (sample.status, len(engine.requests)) == (SampleStatus.COMPLETED, 3)
        assert sample.loss_mask.sum() == 14
        assert {span.policy_version for span in sample.version_spans} == {0}


TWO_SESSIONS = """
async def generate(args, sample, sampling_params):
    adapter, samples = Service().adapter, []
    for sid in ("first", "second"):
        adapter.open_session(sid, sampling_defaults=sampling_params)
        await talk(sid, sample.prompt, 1)
        samples += await adapter.finish_session(sid, base_sample=sample, reward=0.5)
    return samples
"""


async def test_the_first_session_of_a_rollout_comes_back_and_others_are_answered_anew(write_plugins: Write) -> None:
    generate, journal = load(write_plugins(TALK + TWO_SESSIONS)), TurnJournal()
    async with ScriptedEngine() as engine:
        first = await generate(request_of(), services=services_of(engine, journal))
        assert (len(first), len(engine.requests)) == (2, 2)
        again = await generate(request_of(), services=services_of(engine, journal))
    assert len(engine.requests) == 3
    assert list(map(told, again)) == list(map(told, first))


BOUNDED = """
async def generate(args, sample, sampling_params):
    adapter = Service().adapter
    adapter.open_session("s", sampling_defaults=sampling_params, max_context_tokens=40)
    await talk("s", "short", 1)
    try:
        await talk("s", 40 * "x", 1)
    except aiohttp.ClientResponseError as error:
        assert error.status == 400
    else:
        raise AssertionError
    return await adapter.finish_session("s", base_sample=sample, reward=0.5)
"""


async def test_a_session_has_no_more_context_than_it_was_opened_with(write_plugins: Write) -> None:
    generate = load(write_plugins(TALK + BOUNDED))
    async with ScriptedEngine(answer=lambda request: request.params.max_new_tokens * "9") as engine:
        (sample,) = await generate(request_of(), services=services_of(engine))
    assert (len(sample.token_ids), sample.status) == (40, SampleStatus.TRUNCATED)


@pytest.mark.parametrize(
    ("play", "told"),
    [
        ("Service().adapter.open_session(sid)", "there is a session 'talk-0' already"),
        ("OpenAIAdapter(tokenizer=None, sglang_url='http://h:1').open_session('s')", "by the run's engine"),
        ("Service().adapter.open_session('s', sampling_defaults={'regex': 'a+'})", "is not asked that way"),
        ("await Service().adapter.finish_session(sid)", "returned \\[\\]; it must return a Sample"),
    ],
)
async def test_what_adapters_do_not_do_is_said(write_plugins: Write, play: str, told: str) -> None:
    generate = load(write_plugins(f"{TALK}\nasync def play(sid, text):\n    {play}\n"))
    async with ScriptedEngine() as engine:
        with pytest.raises((SlimeUseError, ValueError, rollfeed.errors.RunFailedError), match=told):
            await generate(request_of(), services=services_of(engine))


def test_adapters_are_made_by_functions_of_a_run() -> None:
    with pytest.raises(SlimeUseError, match="OpenAIAdapter works in generate and rollout functions only"):
        OpenAIAdapter(tokenizer=None, sglang_url="http://127.0.0.1:30000")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "from slime.agent.trajectory import TrajectoryManager\n",
            r"slime\.agent\.trajectory is not supplied .*agent\.adapters.* .*mine.py:1,",
        ),
        (
            "from slime.agent.adapters import BaseAdapter\n",
            r"slime\.agent\.adapters\.BaseAdapter is not supplied .*mine.py:1",
        ),
        (
            "from slime.agent.adapters import OpenAIAdapter\n"
            "class Mine(OpenAIAdapter):\n    def _session_id(self, request, body): return 's'\n",
            r"Mine\._session_id: hooks of adapters are not supplied.* \(.*mine.py:2,",
        ),
    ],
)
def test_what_is_not_supplied_is_refused_with_file_and_line(write_plugins: Write, text: str, told: str) -> None:
    folder = write_plugins(f"{text}async def generate(args, sample, sampling_params): return sample\n")
    with pytest.raises(PluginError, match=told):
        load(folder)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        (7, "7"),
        ([{"type": "text", "text": "a"}, "b", {"type": "image_url", "image_url": {}}, 3], "a\nb\n[image omitted]\n3"),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "x"}, {"text": ""}]}, {"other": 1}], "x"),
    ],
)
def test_contents_are_flattened_to_lines(content: Any, text: str) -> None:
    assert flatten_content(content) == text


def code(request: Any) -> str:
    """Write a program that fails at first, and is mended."""
    text = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
    return "x = 1" if "It failed" in text else "raise KeyError"


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_a_coding_agent_in_a_sandbox_is_trained_on_what_it_said(
    make_batches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    monkeypatch.setenv(BACKEND, "local")
    (batch,) = await make_batches(
        1,
        engine=ScriptedEngine(answer=code),
        generate="slime:slime_coding.generate",
        slime_args={"agent_api": api, "hf_checkpoint": "any"},
        max_response_len=64,
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 2},
    )
    assert len(batch.samples) == 2
    for sample in batch.samples:
        text = CharTokenizer().decode(
            sample.token_ids[sample.prompt_length :][sample.loss_mask > 0], skip_special_tokens=True
        )
        assert text == "raise KeyErrorx = 1"
        assert "It failed: KeyError" in CharTokenizer().decode(sample.token_ids, skip_special_tokens=True)
        assert (sample.reward, sample.metadata["agent_exit_code"], sample.status) == (1.0, 0, SampleStatus.COMPLETED)


NODE = "ROLLFEED_AGENTS_NODE"
PROGRAM = """
from pathlib import Path
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import ClaudeCodeHarness, CodexHarness
from slime.agent.sandbox import make_sandbox

async def generate(args, sample, sampling_params):
    adapter, harness = (AnthropicAdapter, ClaudeCodeHarness) if args.name == "claude" else (OpenAIAdapter, CodexHarness)
    adapter = adapter(tokenizer=None, sglang_url="http://127.0.0.1:30000")
    handle = run_app_in_thread(adapter.app, host="127.0.0.1")
    adapter.open_session("sid", sampling_defaults=sampling_params)
    async with make_sandbox("any") as sb:
        await sb.write_file(f"/home/agent/bin/{args.name}", Path(args.program))
        await sb.exec("chmod +x ~/bin/*", check=True)
        code = await harness().run(
            sb, workdir="/workspace/task", session_id="sid", adapter_url=f"http://127.0.0.1:{handle.port}",
            time_budget_sec=300, prompt="Write one into made.txt.",
        )
        made = {"code": code, "made": await sb.read_file("/workspace/task/made.txt"),
                "log": await sb.read_file("/workspace/task/.harness/trajectory.jsonl")}
    handle.stop()
    return await adapter.finish_session("sid", base_sample=sample, reward=1.0, extra_metadata=made)
"""


@pytest.mark.soak
@pytest.mark.skipif(NODE not in os.environ, reason=f"{NODE} is a folder node_modules with codex and claude-code")
@pytest.mark.parametrize(
    ("name", "variable", "place", "tool", "argument"),
    [
        ("codex", "CODEX", "openai/codex-linux-x64/vendor/*/bin/codex", "exec_command", "cmd"),
        ("claude", "CC", "anthropic-ai/claude-code-linux-x64/claude", "Bash", "command"),
    ],
)
async def test_a_known_agent_works_in_a_sandbox_and_is_trained_on(
    write_plugins: Write,
    make_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    variable: str,
    place: str,
    tool: str,
    argument: str,
) -> None:
    monkeypatch.setenv(BACKEND, "local")
    monkeypatch.setenv(f"SLIME_AGENT_{variable}_EXTRA_ENVS", '{"PATH": "/home/agent/bin:/usr/bin:/bin"}')
    call = json.dumps({"name": tool, "arguments": {argument: "echo one > made.txt; echo made-''it"}})
    call = f"\n<tool_call>\n{call}\n</tool_call>"

    def answer(request: Any) -> str:
        text = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
        return "All done." if "made-it" in text else call

    (program,) = glob(f"{os.environ[NODE]}/@{place}")
    (batch,) = await make_batches(
        1,
        folder=write_plugins(PROGRAM),
        engine=ScriptedEngine(answer=answer),
        generate="slime:mine.generate",
        slime_args={"name": name, "program": program},
        max_response_len=200,
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 1},
    )
    *_, sample = batch.samples
    assert (sample.metadata["code"], sample.metadata["made"]) == (0, "one\n"), sample.metadata["log"]
    assert sample.metadata["num_tool_calls"] == 1
    said = sample.response_token_ids[sample.loss_mask > 0]
    assert CharTokenizer().decode(said, skip_special_tokens=True) == f"{call}All done."
