"""A coding agent: a program in a sandbox that has the policy write a function, tries it, and has it mended.

``[plugins] generate = "slime:slime_coding.generate"``, with ``SLIME_AGENT_SANDBOX_BACKEND=local`` in the environment
for sandboxes of this machine; ``slime_args = {agent_api = "anthropic"}`` has it speak that API instead of OpenAI's.
"""

import asyncio

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import BaseHarness
from slime.agent.harness.common import run_agent
from slime.agent.sandbox import exec_and_wait, make_sandbox
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

WORKDIR = "/workspace/task"
SECONDS = 120
TRY = "python3 -c 'from solution import *' && grep -c . solution.py"
AGENT = """
import json, os, subprocess, sys, urllib.request

task, messages = sys.argv[1], []
is_openai = "OPENAI_BASE_URL" in os.environ
base = os.environ["OPENAI_BASE_URL" if is_openai else "ANTHROPIC_BASE_URL"]
url = base + ("/chat/completions" if is_openai else "/v1/messages")
key = os.environ["OPENAI_API_KEY"] if is_openai else os.environ["ANTHROPIC_AUTH_TOKEN"]
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def ask():
    body = json.dumps({"model": "any", "max_tokens": 64, "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    reply = json.load(direct.open(urllib.request.Request(url, body, headers)))
    if is_openai:
        return reply["choices"][0]["message"]["content"]
    return "".join(block["text"] for block in reply["content"] if block["type"] == "text")

told = task
for _ in range(2):
    messages.append({"role": "user", "content": told})
    said = ask()
    messages.append({"role": "assistant", "content": said})
    open("solution.py", "w").write(said)
    tried = subprocess.run(["python3", "solution.py"], capture_output=True, text=True)
    if tried.returncode == 0:
        break
    told = "It failed: " + (tried.stderr.strip().splitlines() or ["?"])[-1]
"""


class ScriptedHarness(BaseHarness):
    """The agent above."""

    name = "scripted"

    async def install_cli(self, sb) -> None:
        """Write the program."""
        await sb.write_file("/home/agent/agent.py", AGENT, user="agent")

    async def write_config(self, sb, ctx) -> None:
        """Have no files of settings."""

    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec) -> int:
        """Run it; the variables say which API it speaks."""
        await sb.write_file(f"{ctx.workdir}/TASK", prompt, user="agent")
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd='python3 /home/agent/agent.py "$(cat TASK)"',
            env=self.env(ctx),
            time_budget_sec=time_budget_sec,
        )

    def env(self, ctx) -> dict:
        """Return how it reaches the policy."""
        return {"OPENAI_BASE_URL": f"{ctx.adapter_url}/v1", "OPENAI_API_KEY": ctx.session_id}


class AnthropicHarness(ScriptedHarness):
    """The agent above, speaking Anthropic's API."""

    def env(self, ctx) -> dict:
        """Return how it reaches the policy."""
        return {"ANTHROPIC_BASE_URL": ctx.adapter_url, "ANTHROPIC_AUTH_TOKEN": ctx.session_id}


class Service(metaclass=SingletonMeta):
    """The adapters of the process, each at an address of its own."""

    def __init__(self, args) -> None:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.of = {}
        for name, adapter, harness in (
            ("openai", OpenAIAdapter, ScriptedHarness),
            ("anthropic", AnthropicAdapter, AnthropicHarness),
        ):
            made = adapter(tokenizer=tokenizer, sglang_url=url)
            handle = run_app_in_thread(made.app, host="127.0.0.1", thread_name=f"{name}-adapter")
            self.of[name] = made, f"http://127.0.0.1:{handle.port}", harness()


async def solve(sample: Sample, sid: str, adapter_url: str, harness) -> tuple[float, int]:
    """Have the agent work in a sandbox; return the reward of what it leaves, and its exit code."""
    async with make_sandbox("any") as sb:
        await harness.install_cli(sb)
        code = await harness.run(
            sb,
            workdir=WORKDIR,
            session_id=sid,
            adapter_url=adapter_url,
            time_budget_sec=SECONDS,
            prompt=sample.prompt,
        )
        wrong, _ = await exec_and_wait(sb, cmd=TRY, time_budget_sec=SECONDS, tag="try", workdir=WORKDIR)
    return float(wrong == 0), code


async def generate(args, sample: Sample, sampling_params: dict) -> list[Sample]:
    """Return what the agent asked of the policy, with the reward of its work."""
    adapter, url, harness = Service(args).of[getattr(args, "agent_api", "openai")]
    sid = f"coding-{sample.index}"
    adapter.open_session(sid, sampling_defaults=sampling_params)
    try:
        async with asyncio.timeout(2 * SECONDS):
            reward, code = await solve(sample, sid, url, harness)
        made = {"agent_exit_code": code}
        samples = await adapter.finish_session(sid, base_sample=sample, reward=reward, extra_metadata=made)
    finally:
        await adapter.drop_session(sid)
    if not samples:
        raise RuntimeError(f"the agent has asked nothing; its exit code is {code}")
    return samples
