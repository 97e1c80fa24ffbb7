"""``[tools]``: what policies may call in episodes, and the limits of these."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rollfeed.config.plugins import Plugin
from rollfeed.config.section import Free, OnPurpose, Resume, Section
from rollfeed.protocols import CallFormat


class SearchToolSettings(Section):
    """The tool `search`."""

    corpus: str = Field(min_length=1)
    """A `.jsonl` file with a passage a row (`text`, and perhaps `title`), or a folder of `.txt` and `.md` files; looked
    for beside the settings file, then in the current folder.
    """
    num_results: int = Field(default=3, ge=1, le=100)
    """Passages in an answer, at most."""
    max_passage_chars: int = Field(default=1_000, ge=1, le=1_000_000)
    """Of a longer passage only the beginning is shown."""


class FileToolSettings(Section):
    """The tools of `files`: `list_files`, `read_file` and `write_file`."""

    folder: str = Field(min_length=1)
    """What lies outside of it cannot be reached. All episodes share it."""
    is_writable: bool = False
    """Whether files may be made and replaced."""


class McpServerSettings(Section):
    """A server of tools that speaks the Model Context Protocol (`[[tools.mcp]]`); it has a command or a URL."""

    name: str = Field(min_length=1)
    """For messages."""
    command: str | None = Field(default=None, min_length=1)
    """A program that is started, once a run, and spoken to over its input and output; again when it has ended."""
    args: tuple[str, ...] = Field(default=(), strict=False)
    """Of the command; one that names a file beside the settings file is replaced by its path."""
    env: dict[str, str] = Field(default={})
    """Environment variables of the command, besides a few such as PATH."""
    url: str | None = Field(default=None, pattern="^https?://")
    """Of a server that runs already (streamable HTTP)."""
    tools: tuple[str, ...] | None = Field(default=None, strict=False)
    """Which of its tools there are; by default all."""
    start_seconds: Free[float] = Field(default=30.0, gt=0.0, le=3600.0, strict=False)
    """How long it may take to start and to say what tools it has."""

    @model_validator(mode="after")
    def _one_way(self) -> McpServerSettings:
        if (self.command is None) is (self.url is None):
            raise ValueError(f"MCP server {self.name!r} needs a command, or a url, and not both")
        return self


class ToolSettings(Section, resume=Resume.ANSWERS):
    """Tools make each prompt an episode: the policy calls, is told the answers, and goes on until it calls no more."""

    use: tuple[Plugin[Any], ...] = Field(default=(), strict=False)
    """`calculator`, `python` (programs in a sandbox, as `[reward.code]` says), `search`, `files`, tools of packages
    (entry points `rollfeed.tools`), and your own as `module:name` or `file.py:name`.
    """
    call_format: CallFormat = Field(default=CallFormat.AUTO, strict=False)
    """How calls are written: `hermes` (`<tool_call>` tags), `json`, `tags` (a tag of the tool's name), or `auto`: as
    the model's chat template shows them, and `hermes` where it shows none.
    """
    max_turns: int = Field(default=256, ge=1, le=1_000_000)
    """Turns of the policy in an episode, with tools or with an environment that answers back; it is truncated then."""
    max_seconds: float = Field(default=600.0, gt=0.0, le=604_800.0, strict=False)
    """An episode that has taken longer is truncated before its next turn. `rollout.rollout_timeout_seconds`, after
    which a rollout fails, should be above it.
    """
    timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """A call that takes longer is ended, and the policy is told so."""
    max_output_chars: int = Field(default=4_000, ge=16, le=10_000_000)
    """Of a longer answer the middle is left out, and the policy is told so."""
    search: SearchToolSettings | None = None
    """The corpus of `search`."""
    files: FileToolSettings | None = None
    """The folder of `files`."""
    mcp: OnPurpose[tuple[McpServerSettings, ...]] = Field(default=(), strict=False)
    """Servers of tools."""

    @property
    def runs_programs(self) -> bool:
        """Whether programs of the policy run in sandboxes."""
        return "python" in self.use
