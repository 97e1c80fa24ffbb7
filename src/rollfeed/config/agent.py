"""``[agent]``: programs that speak to an API, and answer prompts with the policy's help."""

from __future__ import annotations

from pydantic import Field, model_validator

from rollfeed.config.plugins import Plugin
from rollfeed.config.section import Free, Resume, Section
from rollfeed.protocols import AgentFn, Matching


class AgentSettings(Section, resume=Resume.ANSWERS):
    """An agent of your own answers each prompt; what it asks of the policy becomes the samples (docs/gateway.md)."""

    function: Plugin[AgentFn] | None = None
    """A function that does one task, as `module:name` or `file.py:name`."""
    command: tuple[str, ...] = Field(default=(), strict=False)
    """A program that does one, with its arguments; those that name a file beside the settings file are replaced by its
    path. It runs in an empty folder, finds the gateway in `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
    `ANTHROPIC_API_KEY` and `ROLLFEED_MODEL`, and the question as JSON on standard input and, unless it is longer than
    100 kB, as with pictures, in `ROLLFEED_QUESTION`.
    """
    metadata_keys: tuple[str, ...] = Field(default=(), strict=False)
    """What the agent is told of the prompt's metadata; labels and answers are not for it."""
    models: tuple[str, ...] = Field(default=("policy",), min_length=1, strict=False)
    """Names by which the agent may ask for the policy."""
    matching: Matching = Field(default=Matching.LENIENT, strict=False)
    """When a turn in a history is one that was sampled: `lenient`, also where white space around it, empty contents,
    ids of calls, the order of arguments or thoughts are otherwise; or `strict`.
    """
    max_turns: int = Field(default=256, ge=1, le=1_000_000)
    """Turns of the policy in a rollout; then its calls are refused, and it is truncated."""
    max_seconds: float = Field(default=600.0, gt=0.0, le=604_800.0, strict=False)
    """An agent that takes longer is ended, and its rollout fails. `rollout.rollout_timeout_seconds` should be above
    it.
    """
    max_running: Free[int | None] = Field(default=None, ge=1, le=1_000_000)
    """Agents at once; by default one for each rollout under way."""
    max_body_mb: Free[int] = Field(default=32, ge=1, le=1024)
    """Of a request of an agent; larger ones are refused."""
    host: Free[str] = "127.0.0.1"
    """The gateway listens there, for agents on this machine."""
    port: Free[int] = Field(default=0, ge=0, le=65535)
    """Of the gateway; 0 takes a free one."""

    @model_validator(mode="after")
    def _one_way(self) -> AgentSettings:
        if self.function is not None and self.command:
            raise ValueError("an agent is a function or a command: set one of them")
        if not self.answers and self.changed_values():
            raise ValueError("there is no agent: set function or command")
        return self

    @property
    def answers(self) -> bool:
        return self.function is not None or bool(self.command)
