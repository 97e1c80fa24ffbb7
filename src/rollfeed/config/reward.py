"""``[reward]``: how answers are scored."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.judge import JudgeSettings
from rollfeed.config.mixture import MIXTURE_RM_TYPE, MixturePartSettings
from rollfeed.config.plugins import Plugin, PluginSettings
from rollfeed.config.reward_model import RewardModelSettings
from rollfeed.config.section import Free, Resume, Section
from rollfeed.errors import suggestion
from rollfeed.protocols import IsolationLevel, RewardFn

JUDGE_RM_TYPE = "judge"
"""Of the judge of ``[reward.judge]``; followed by a colon and a name, of another one."""


def is_judge(rm_type: str) -> bool:
    """Whether it is a judge's."""
    return rm_type.partition(":")[0] == JUDGE_RM_TYPE


class RemoteForm(StrEnum):
    """The body that a reward server is sent."""

    RESPONSE = "response"
    PREDICTIONS = "predictions"


class RemoteRewardSettings(Section):
    """A reward server, for `rm_type = "remote_rm"`."""

    url: Free[str | None] = None
    """Where responses are sent, for example `http://10.0.0.5:11111/get_reward`."""
    api_key_env: Free[KeyVariable | None] = None
    """Name of the environment variable that holds the server's key. The key itself is stored nowhere."""
    form: RemoteForm = Field(default=RemoteForm.RESPONSE, strict=False)
    """`response` sends prompt, response and label; `predictions` sends predictions, which is the response, and answers,
    which is the label as text.
    """
    reply_key: str = Field(default="reward", min_length=1)
    """Which entry of the reply is the reward; a reply that is a number is the reward itself."""
    timeout_seconds: Free[float] = Field(default=10.0, gt=0.0, le=3600.0, strict=False)
    """For one try."""
    max_tries: Free[int] = Field(default=3, ge=1, le=100)
    """When connections fail, time runs out, or the status is 408, 429 or 5xx; anything else fails at once."""
    concurrency: Free[int] = Field(default=64, ge=1, le=100_000)
    """Requests at once; more wait."""

    @field_validator("url", mode="after")
    @classmethod
    def _url_is_one(cls, url: str | None) -> str | None:
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise ValueError(f"{url!r} is no address: write it as http://host:port/path")
        return url


class CodeRewardSettings(Section):
    """Programs of the policy, for `rm_type = "livecodebench"`; they run in sandboxes."""

    isolation: IsolationLevel | None = Field(default=None, strict=False)
    """The level to insist on, else programs are not run; by default the stronger of `bubblewrap` and `namespaces` that
    holds. `limits` is no barrier, and is taken where it is asked for only.
    """
    container_engine: str = Field(default="docker", min_length=1)
    """Command of the container engine for `isolation = "container"`; it takes Docker's command line."""
    container_image: str = Field(default="python:3.12-slim", min_length=1)
    """Image of its containers: with `sh`, the usual commands and `python3`."""
    test_timeout_seconds: float = Field(default=6.0, gt=0.0, le=3600.0, strict=False)
    """For one test, of the program's own time: on cores or asleep, without what it waits for a core. Ten times as much
    may pass; a program that has not had its time then is run once more, and is ungraded after that, not wrong.
    """
    timeout_seconds: float = Field(default=300.0, gt=0.0, le=86_400.0, strict=False)
    """For all tests of a program together, of its own time. Ten times as much may pass; more is a failed grading."""
    memory_mb: int = Field(default=1024, ge=64, le=1_048_576)
    """Of a program and all that it starts."""
    concurrency: Free[int | None] = Field(default=None, ge=1, le=4096)
    """Programs at once; by default the cores that this process may use."""


class WorkerSettings(Section):
    """The processes that grade what could hang or crash; they are started on first use."""

    num_workers: Free[int | None] = Field(default=None, ge=1, le=1024)
    """Processes; by default the cores that this process may use."""
    timeout_seconds: float = Field(default=5.0, gt=0.0, le=86_400.0, strict=False)
    """For one comparison of formulas or one verification; what takes longer is killed and fails its rollout."""
    memory_mb: int = Field(default=4096, ge=256, le=1_048_576)
    """Address space of each process."""


class OverlongSettings(Section):
    """The penalty of long responses, taken off their reward before advantages are computed.

    Soft Overlong Punishment of DAPO (arXiv:2503.14476, equation 13). Filters and metrics see rewards as they were, and
    batch files have both.
    """

    cache: int = Field(ge=1, le=100_000_000)
    """Tokens before `length` over which the penalty grows from 0 to `factor`."""
    length: int | None = Field(default=None, ge=1, le=100_000_000)
    """Response tokens from which on it is `factor`; by default `sampling.rollout_max_response_len`."""
    factor: float = Field(default=1.0, gt=0.0, le=1e6, strict=False)
    """The whole penalty."""


class RewardSettings(Section, resume=Resume.REWARDS):
    """Graders for prompts that bring none of their own; `[plugins]` has custom functions."""

    rm_type: str | None = Field(default=None, min_length=1)
    """Grader by name; docs/rewards.md lists them. Prompts of environments name their own."""
    reward_key: str | None = Field(default=None, min_length=1)
    """Which entry of a reward dictionary is the reward."""
    timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """A reward function that takes longer fails its rollout; it is never a reward of 0."""
    concurrency: Free[int | None] = Field(default=None, ge=1, le=1_000_000)
    """Calls of reward functions at once, in this process; by default as many async ones as there are samples that wait
    for a reward.
    """
    override_environments: bool = False
    """Functions of `[plugins]` score the prompts of environments too, which verify their own otherwise."""
    mixture: tuple[MixturePartSettings, ...] = Field(default=(), strict=False)
    """Scores whose weighted sum is the reward, each stored: `rm_type = "mixture"`, which is the default with them, and
    `reward_key = "mixture"`.
    """
    verifier: str | None = Field(default=None, min_length=1)
    """Grader by name that looks at answers to prompts with a label, whatever scores them, and says which are right:
    what accuracies and `reward/label_agreement` are of. It changes no reward.
    """
    functions: dict[str, Plugin[RewardFn]] = Field(default={})
    """Reward functions, each as `name = "module:name"`, that prompts choose with the `reward_fn` of their metadata."""
    pure: Annotated[bool | None, Resume.FREE] = None
    """Whether the same answer always has the same reward, which `rollfeed replay` relies on; by default that is
    believed of all that scores but reward servers and functions that are async.
    """
    functions_in_workers: bool = True
    """Run reward functions that are not async in processes that can be killed; `false` runs them in threads of this
    process, for functions that keep a state or use a GPU.
    """
    workers: WorkerSettings = WorkerSettings()
    """Processes that can be killed."""
    code: CodeRewardSettings = CodeRewardSettings()
    """Programs and their tests."""
    remote: RemoteRewardSettings = RemoteRewardSettings()
    """A reward server."""
    judge: JudgeSettings | None = None
    """The judge of `rm_type = "judge"`; docs/judges.md."""
    judges: dict[str, JudgeSettings] = Field(default={})
    """Further judges, each a table `[reward.judges.NAME]` with the keys of `[reward.judge]`, for `rm_type =
    "judge:NAME"` and for panels.
    """
    model: RewardModelSettings = RewardModelSettings()
    """A reward model."""
    overlong: OverlongSettings | None = None
    """A penalty for long responses; by default none."""

    def judge_of(self, rm_type: str | None) -> JudgeSettings | None:
        """Return the judge of an ``rm_type``, of a panel its first; None where that is no judge's."""
        kind, _, name = (rm_type or "").partition(":")
        found = None if kind != JUDGE_RM_TYPE else self.judges.get(name) if name else self.judge
        return self.judges[found.panel[0]] if found is not None and found.panel else found

    @model_validator(mode="after")
    def _judges_are_there(self) -> Self:
        by_key = {f"judges.{name}": judge for name, judge in self.judges.items()}
        by_key |= {} if self.judge is None else {"judge": self.judge}
        for key, judge in by_key.items():
            members = [self.judges[name] for name in judge.panel if name in self.judges]
            if unknown := [name for name in judge.panel if name not in self.judges]:
                remedy = suggestion(unknown[0], self.judges, otherwise="add it")
                raise ValueError(f"{key}.panel: there is no [reward.judges.{unknown[0]}]; {remedy}")
            if any(each.panel for each in members):
                raise ValueError(f"{key}.panel: a judge of a panel cannot be one itself")
            if len({each.compares_group for each in members}) > 1:
                raise ValueError(f"{key}.panel: its judges must all compare the answers of a group, or none")
        for rm_type in filter(is_judge, self.rm_types):
            if (found := self.judge_of(rm_type)) is None:
                table = rm_type.replace("judge:", "judges.", 1)
                raise ValueError(f"rm_type = {rm_type!r}: there is no [reward.{table}]; add it")
            if found.compares_group and rm_type in (self.verifier, *(part.rm_type for part in self.mixture)):
                raise ValueError(f"{rm_type!r} compares the answers of a group: neither mixtures nor verifiers do")
        return self

    @model_validator(mode="after")
    def _mixes(self) -> RewardSettings:
        if not self.mixture:
            return self
        if self.rm_type in (None, MIXTURE_RM_TYPE):  # the section is frozen, and these depend on others
            object.__setattr__(self, "rm_type", MIXTURE_RM_TYPE)
            object.__setattr__(self, "reward_key", self.reward_key or MIXTURE_RM_TYPE)
            keys = [MIXTURE_RM_TYPE, *(part.key for part in self.mixture)]
            if self.reward_key not in keys:
                raise ValueError(f"reward_key = {self.reward_key!r}: the mixture has the keys {', '.join(keys)}")
        return self

    @property
    def rm_types(self) -> tuple[str, ...]:
        """All that the settings name: of prompts without one, of parts of the mixture, and the verifier."""
        named = (self.rm_type, *(part.rm_type for part in self.mixture), self.verifier)
        return tuple(name for name in named if name is not None)


class ScoringSettings(Section):
    """The tables of a settings file that say how responses are scored."""

    reward: RewardSettings = RewardSettings()
    """Graders, and functions that rows choose."""
    plugins: PluginSettings = PluginSettings()
    """Functions that score what names none."""
