"""slime's harnesses: agents that are programs of a command line, in a sandbox."""

from __future__ import annotations

import json
import os
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from rollfeed.compat.slime_plugins.agent.sandboxes import AgentSandbox, ensure_agent_user, exec_and_wait
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError

_NODE = "SLIME_AGENT_NODE_TARBALL"
_INSTALL_SECONDS = 300


@dataclass(frozen=True)
class HarnessContext:
    """One run of an agent: where it works, and how it reaches the policy."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC):
    """An agent that is a program: a class of its own installs it, writes its configuration and runs it."""

    name = ""

    @abstractmethod
    async def install_cli(self, sb: AgentSandbox) -> None: ...

    @abstractmethod
    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None: ...

    @abstractmethod
    async def launch_and_wait(
        self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int
    ) -> int: ...

    async def run(
        self, sb: AgentSandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: int, prompt: str
    ) -> int:
        """Configure and run it as the user ``agent``; return its exit code, -1 if time is up."""
        await ensure_agent_user(sb, workdir)
        context = HarnessContext(workdir, session_id, adapter_url)
        await self.write_config(sb, context)
        return await self.launch_and_wait(sb, context, prompt, time_budget_sec)


async def run_agent(
    sb: AgentSandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: int
) -> int:
    """Run a command as the user ``agent``, its output in ``.harness/trajectory.jsonl``; return its exit code."""
    await sb.exec(f"mkdir -p {shlex.quote(workdir)}/.harness", user="agent", check=True)
    code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        time_budget_sec=time_budget_sec,
        tag="agent",
        user="agent",
        env=env,
        workdir=workdir,
        out_file=f"{workdir}/.harness/trajectory.jsonl",
    )
    return code


class _NpmHarness(BaseHarness):
    """A program of npm, which may be in the sandbox already."""

    program = archive_variable = ""

    async def install_cli(self, sb: AgentSandbox) -> None:
        there, _, _ = await sb.exec(f"command -v {self.program}", user="agent")
        if there == 0:
            return
        archives = [os.environ.get(each, "") for each in (_NODE, self.archive_variable)]
        if not all(archives):
            told = f"set {_NODE} and {self.archive_variable} to archives of it"
            raise SlimeUseError(f"{self.program} is not in the sandbox: {told}")
        for path, archive in zip(("/tmp/node.tar", "/tmp/cli.tgz"), archives, strict=True):
            await sb.write_file(path, Path(archive))
        node = "mkdir -p /opt/node && tar xf /tmp/node.tar -C /opt/node --strip-components=1"
        link = "ln -sf /opt/node/bin/* /usr/local/bin"
        install = f"npm install -g --prefix=/usr/local --no-audit --no-fund /tmp/cli.tgz && {self.program} --version"
        await sb.exec(f"{node} && {link} && {install}", timeout=_INSTALL_SECONDS, check=True)

    async def _run(self, sb: AgentSandbox, ctx: HarnessContext, command: str, env: dict[str, str], seconds: int) -> int:
        """Run a command with what its two variables add: arguments, and a JSON object of variables."""
        prefix = self.archive_variable.removesuffix("TARBALL")
        added = json.loads(os.environ.get(f"{prefix}EXTRA_ENVS", "").strip() or "{}")
        command = f"{command} {os.environ.get(f'{prefix}EXTRA_ARGS', '')}".rstrip()
        env = {**env, **added}
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=seconds)


class ClaudeCodeHarness(_NpmHarness):
    """Claude Code."""

    name, program = "claude_code", "claude"
    archive_variable = "SLIME_AGENT_CC_TARBALL"

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        del ctx
        settings = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
        await sb.exec("mkdir -p /home/agent/.claude", user="agent", check=True)
        for path in ("/home/agent/.claude.json", "/home/agent/.claude/settings.json"):
            await sb.write_file(path, settings, user="agent")

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        flags = "--permission-mode bypassPermissions --output-format stream-json --include-partial-messages --verbose"
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
        return await self._run(sb, ctx, f"claude -p {shlex.quote(prompt)} {flags}", env, time_budget_sec)


class CodexHarness(_NpmHarness):
    """Codex."""

    name = program = "codex"
    archive_variable = "SLIME_AGENT_CODEX_TARBALL"

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        provider = {  # whose address is taken from this file only
            "name": "slime",
            "base_url": f"{ctx.adapter_url}/v1",
            "env_key": "OPENAI_API_KEY",
            "wire_api": "responses",
        }
        lines = [f"model = {json.dumps(ctx.model_label)}", 'model_provider = "slime"', "[model_providers.slime]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in provider.items()]
        await sb.exec("mkdir -p /home/agent/.codex", user="agent", check=True)
        await sb.write_file("/home/agent/.codex/config.toml", "\n".join(lines) + "\n", user="agent")

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        flags = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"
        env = {"OPENAI_BASE_URL": f"{ctx.adapter_url}/v1", "OPENAI_API_KEY": ctx.session_id}
        return await self._run(sb, ctx, f"codex exec {flags} {shlex.quote(prompt)}", env, time_budget_sec)


CLAUDE_CODE, CODEX = ClaudeCodeHarness(), CodexHarness()
