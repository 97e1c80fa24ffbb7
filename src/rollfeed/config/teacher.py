"""``[teacher]``: the model that a policy is distilled from."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.engine import is_device
from rollfeed.config.paths import checked_address
from rollfeed.config.section import Free, FreeUnlessDeterministic, OnPurpose, Resume, Section


class TeacherUse(StrEnum):
    """The place where the teacher's log-probabilities count."""

    LOSS = "loss"
    REWARD = "reward"


class TeacherServerKind(StrEnum):
    """The API of a teacher's servers."""

    SGLANG = "sglang"
    OPENAI = "openai"


class Reduction(StrEnum):
    """The way from a number a token to one a response."""

    MEAN = "mean"
    SUM = "sum"


class TeacherSettings(Section, resume=Resume.REWARDS):
    """Another model scores what the policy samples (docs/distillation.md): `checkpoint` or `servers`."""

    use: TeacherUse = Field(default=TeacherUse.LOSS, strict=False)
    """`loss`: each token's advantage is the teacher's minus the policy's log-probability, an estimate of minus the
    gradient of the reverse divergence (Thinking Machines, "On-Policy Distillation", 2025); `reward`: that, taken
    together over a response, is its reward.
    """
    coefficient: OnPurpose[float] = Field(default=1.0, gt=0.0, le=1e6, strict=False)
    """What that is multiplied by (slime's `--opd-kl-coef`)."""
    advantage_weight: OnPurpose[float] = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """With `loss`: weight of the advantages of `[advantage]`, which are added. 0 learns from the teacher alone, 1 is
    what slime does.
    """
    reduction: Reduction = Field(default=Reduction.MEAN, strict=False)
    """Of the reward over the trained tokens of a response: `mean` or `sum`. Prompts that nothing else scores have this
    reward with `use = "loss"`, too.
    """
    temperature: float | None = Field(default=None, gt=0.0, le=100.0, strict=False)
    """Of the teacher's distribution; by default `sampling.rollout_temperature`, that of the policy's. Servers tell
    log-probabilities before any temperature: with `servers` it has to be 1.
    """
    checkpoint: str | None = Field(default=None, min_length=1)
    """The teacher as `model.checkpoint` names a model; the embedded engine computes it, in this process."""
    servers: Free[tuple[Annotated[str, AfterValidator(checked_address)], ...]] = Field(default=(), strict=False)
    """Addresses of servers that have the teacher, for example `["http://10.0.0.5:30000"]`."""
    server_kind: Free[TeacherServerKind] = Field(default=TeacherServerKind.SGLANG, strict=False)
    """`sglang`: SGLang, or `rollfeed serve engine`; `openai`: vLLM."""
    model: str | None = Field(default=None, min_length=1)
    """The name of the teacher at servers of kind `openai`; by default the only one that they list."""
    api_key_env: Free[KeyVariable | None] = None
    """Name of the environment variable that holds the servers' key. The key itself is stored nowhere."""
    timeout_seconds: Free[float] = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For one try to score a response, its place in a server's queue included."""
    max_tries: Free[int] = Field(default=3, ge=1, le=100)
    """Of one response, each at another server where there are several; then its rollout has failed."""
    concurrency: Free[int] = Field(default=64, ge=1, le=100_000)
    """Responses that are scored at once, all servers together."""
    startup_timeout_seconds: Free[float] = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For every server to be healthy when the run starts."""
    threads: FreeUnlessDeterministic[int] = Field(default=0, ge=0, le=4096)
    """As `engine.threads`, with `checkpoint`."""
    device: FreeUnlessDeterministic[str] = Field(default="cpu", min_length=1)
    """As `engine.device`, with `checkpoint`."""

    @model_validator(mode="after")
    def _fits_together(self) -> TeacherSettings:
        if (self.checkpoint is None) is not bool(self.servers):
            which = "one of checkpoint and servers" if self.servers else "checkpoint, or servers = [addresses]"
            raise ValueError(f"there is to be one teacher: give {which}")
        if self.use is TeacherUse.REWARD and self.advantage_weight:
            raise ValueError("advantage_weight has no effect with use = 'reward': remove it")
        if len(set(self.servers)) != len(self.servers):
            raise ValueError("servers: an address is given twice; remove one")
        if not is_device(self.device):
            raise ValueError(f"device = {self.device!r} is not a device: write cpu, or cuda:0 for the first GPU")
        return self
