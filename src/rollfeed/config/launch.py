"""``[engine.launch]``: servers that a run starts itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from rollfeed.config.section import Resume, Section

_MOST = 64


class LaunchSettings(Section, resume=Resume.FREE):
    """SGLang servers (of an `[engine.sglang]` without addresses) or vLLM's (`[engine.openai]`), started here."""

    num_servers: int = Field(default=1, ge=1, le=_MOST)
    """Servers of the whole model each; requests go to the least busy one."""
    gpus_per_server: int | None = Field(default=None, ge=1, le=_MOST)
    """GPUs that one server splits the model over: the first server has the first ones that this process sees, and so
    on. Without it a server sees all, and uses one.
    """
    gpus: tuple[Annotated[tuple[int, ...], Field(strict=False)], ...] = Field(default=(), strict=False)
    """Instead of both: a list of GPU numbers for each server, such as `[[0, 1], [2, 3]]`."""
    command: tuple[str, ...] = Field(default=(), strict=False)
    """First words of a server's command line, such as `["/venvs/vllm/bin/vllm", "serve"]` or
    `["/venvs/sglang/bin/python", "-m", "sglang.launch_server"]`; by default these programs of this Python's
    environment, or of PATH.
    """
    port: int | None = Field(default=None, ge=1, le=65_535)
    """Port of the first server, on 127.0.0.1; the others have the next ones. By default free ones."""
    flags: dict[str, Any] = Field(default={})
    """Further flags by their names without `--`, passed on as they are, such as
    `{ dtype = "bfloat16", enforce-eager = true }`. A list is several words, a table is JSON, and `false` takes out one
    that is passed by default.
    """
    env: dict[str, str] = Field(default={})
    """Environment variables of the servers, besides those of this process."""
    startup_timeout_seconds: float = Field(default=900.0, gt=0.0, le=86_400.0, strict=False)
    """For a server to be healthy after its start."""
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Starts again of one server, within `restart_window_seconds`; then it stays out, and a run whose servers are all
    out ends.
    """
    restart_window_seconds: float = Field(default=1800.0, gt=0.0, le=604_800.0, strict=False)
    """After which a death counts no more."""
    colocate: bool = False
    """Whether trainer and servers share GPUs: servers give up their memory while `rollfeed train` computes an update.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> LaunchSettings:
        numbers = [number for group in self.gpus for number in group]
        if self.gpus and (self.num_servers > 1 or self.gpus_per_server is not None):
            raise ValueError("gpus says how many servers there are, of how many GPUs: remove the other keys")
        if not all(self.gpus) or min(numbers, default=0) < 0 or len(set(numbers)) < len(numbers):
            raise ValueError("gpus: each server needs one GPU at least, and none may have that of another: [[0], [1]]")
        if self.port is not None and self.port + self.count - 1 > 65_535:
            raise ValueError(f"port = {self.port}: {self.count} servers need as many ports from there: lower it")
        if self.command == ("",) or any("\0" in word for word in self.command):
            raise ValueError("command: give the words that start a server, the program first")
        for name, value in self.flags.items():
            if not isinstance(value, str | int | float | dict) and not _is_words(value):
                raise ValueError(f"flags.{name} = {value!r}: give text, a number, true or false, a list or a table")
        return self

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self.gpus) or self.num_servers


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str | int | float) for word in value)
