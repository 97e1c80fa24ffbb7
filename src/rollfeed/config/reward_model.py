"""``[reward.model]``: a model that scores texts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.paths import checked_address
from rollfeed.config.section import Free, FreeUnlessDeterministic, Section
from rollfeed.config.train import TrainPrecision

REWARD_MODEL_RM_TYPE = "reward_model"


class RewardServerKind(StrEnum):
    """A kind of server of reward models."""

    SGLANG = "sglang"
    VLLM = "vllm"
    TEI = "tei"


class RewardInput(StrEnum):
    """The form in which a reward model is given prompt and response."""

    AUTO = "auto"
    TOKEN_IDS = "token_ids"
    TEXT = "text"


class Activation(StrEnum):
    """The function that makes scores of logits."""

    AUTO = "auto"
    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class ScoredUnit(StrEnum):
    """The unit that has one score."""

    RESPONSE = "response"
    STEP = "step"
    TOKEN = "token"


class Aggregate(StrEnum):
    """The way from scores of steps to one reward."""

    MIN = "min"
    MEAN = "mean"
    LAST = "last"
    SUM = "sum"


class RewardModelSettings(Section):
    """A reward model, for `rm_type = "reward_model"`: in a process of its own here, or on servers."""

    checkpoint: str | None = Field(default=None, min_length=1)
    """Folder or hub name of a sequence or token classifier. Where servers score, its tokenizer alone is needed, which
    renders what they are sent.
    """
    servers: Free[tuple[Annotated[str, AfterValidator(checked_address)], ...]] = Field(default=(), strict=False)
    """Addresses of servers of that model, as `http://host:port`; without them the model is loaded here."""
    kind: RewardServerKind = Field(default=RewardServerKind.SGLANG, strict=False)
    """`sglang` (`/classify`), `vllm` (`/classify`, and `/pooling` for scores of steps and tokens), both sent token ids;
    `tei` (`/predict`), which is sent text.
    """
    served_name: Free[str | None] = Field(default=None, min_length=1)
    """The model's name at `vllm` servers; by default what they serve."""
    api_key_env: Free[KeyVariable | None] = None
    """Name of the environment variable that holds the servers' key. The key itself is stored nowhere."""
    input: RewardInput = Field(default=RewardInput.AUTO, strict=False)
    """`token_ids` are those of prompt and response as they were sampled, which needs the policy's own vocabulary;
    `text` renders both with the reward model's chat template, or joins them where prompts have no messages. `auto`
    takes token ids where vocabulary and chat template are the policy's.
    """
    label: int | None = Field(default=None, ge=0, le=1_000_000)
    """Which label of several is the score, counted from 0."""
    activation: Activation = Field(default=Activation.AUTO, strict=False)
    """Of the logits: `none`, `sigmoid` or `softmax`; `auto` is `none` for one label, and `softmax` for several."""
    unit: ScoredUnit = Field(default=ScoredUnit.RESPONSE, strict=False)
    """What has a score: the `response`, at its last token; each `step`; or each `token` of the response."""
    step_separator: str = Field(default="\n\n", min_length=1)
    """Text between two steps of a response; a step is scored at the token that ends its separator."""
    step_token: str | None = Field(default=None, min_length=1)
    """Text that the reward model wants behind each step in place of the separator, and at which it scores, such as
    `<extra_0>`.
    """
    aggregate: Aggregate = Field(default=Aggregate.MIN, strict=False)
    """The reward made of scores of steps or tokens: `min`, `mean`, `last` or `sum`. All of them are stored."""
    batch_tokens: Free[int] = Field(default=16_384, ge=1, le=100_000_000)
    """Tokens that go through a model that is loaded here at once, padding included; a longer text goes alone. With
    `rollout.deterministic` every text does.
    """
    device: Free[str] = Field(default="auto", min_length=1)
    """Of a model that is loaded here: `cpu`, `cuda`, `cuda:1`; `auto` is the first GPU, if there is one."""
    precision: FreeUnlessDeterministic[TrainPrecision] = Field(default=TrainPrecision.AUTO, strict=False)
    """Of a model that is loaded here: `auto` is `bf16` on a GPU and `fp32` on a CPU."""
    threads: Free[int] = Field(default=1, ge=1, le=4096)
    """CPU threads of a model that is loaded here."""
    timeout_seconds: Free[float] = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For one batch, or one try of a request; what takes longer fails its rollouts and is never a reward of 0."""
    load_timeout_seconds: Free[float] = Field(default=600.0, gt=0.0, le=86_400.0, strict=False)
    """For loading the model here."""
    max_tries: Free[int] = Field(default=3, ge=1, le=100)
    """Of a request, when connections fail, time runs out, or the status is 408, 429 or 5xx."""
    concurrency: Free[int] = Field(default=64, ge=1, le=100_000)
    """Requests at once; more wait."""

    @model_validator(mode="after")
    def _fits_together(self) -> RewardModelSettings:
        if self.servers and self.checkpoint is None:
            raise ValueError("servers need the tokenizer of their model: set checkpoint to its folder")
        if self.servers and self.unit is not ScoredUnit.RESPONSE and self.kind is not RewardServerKind.VLLM:
            raise ValueError(
                f"kind = {self.kind.value!r} scores whole texts only: set unit = 'response', or take kind = 'vllm' or "
                "no servers"
            )
        if self.servers and self.kind is RewardServerKind.TEI and self.input is RewardInput.TOKEN_IDS:
            raise ValueError("kind = 'tei' takes text only: set input = 'text'")
        if self.step_token is not None and self.unit is not ScoredUnit.STEP:
            raise ValueError("step_token is for unit = 'step': set that, or remove it")
        if self.step_token is not None and self.input is RewardInput.TOKEN_IDS:
            raise ValueError("step_token changes the text: set input = 'text'")
        return self

    @property
    def sends_text(self) -> bool:
        """Whether what is scored cannot be the tokens as they were sampled, whatever the policy is."""
        is_tei = bool(self.servers) and self.kind is RewardServerKind.TEI
        return self.input is RewardInput.TEXT or self.step_token is not None or is_tei
