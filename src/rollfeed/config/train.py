"""``[train]``: how a batch changes the policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from rollfeed.config.lora import LoraSettings
from rollfeed.config.method import Method, as_method, loss_of
from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.plugins import Plugin
from rollfeed.config.section import Free, OnPurpose, Resume, Section
from rollfeed.config.warm_up import WarmUpSettings
from rollfeed.protocols import LossFn


class Objective(StrEnum):
    """The objective: how ratios limit the gradient."""

    CLIP = "clip"
    CISPO = "cispo"
    CROSS_ENTROPY = "cross_entropy"


class RatioLevel(StrEnum):
    """The unit that has one ratio of probabilities."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Normalisation(StrEnum):
    """The divisor of the sum of the tokens' losses."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class OldLogprobs(StrEnum):
    """The policy that the ratio compares with."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Correction(StrEnum):
    """The treatment of a token that trainer and engine find unequally likely."""

    NONE = "none"
    TRUNCATE = "truncate"
    MASK = "mask"


class KLEstimator(StrEnum):
    """The estimator of the divergence from the reference, from sampled tokens."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_PLUS = "k3+"


class NonFinitePolicy(StrEnum):
    """The consequence of a loss or gradient that is not finite."""

    STOP = "stop"
    SKIP = "skip"


class TrainPrecision(StrEnum):
    """The number format of the forward and backward passes."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


class TrainKind(StrEnum):
    """The kind of model that is trained."""

    POLICY = "policy"
    REWARD_MODEL = "reward_model"


class LossSettings(Section, resume=Resume.ON_PURPOSE):
    """The policy loss; `train.method` sets these keys as the paper of a method has them, and single ones on top."""

    objective: Objective = Field(default=Objective.CLIP, strict=False)
    """`clip`: tokens whose ratio has left its range have no gradient (PPO, arXiv:1707.06347); `cispo`: the ratio, cut
    to its range, weights the gradient of each token's log-probability, and every token has one (arXiv:2506.13585);
    `cross_entropy`: minus the log-probability, which `rollout.mode = "sft"` sets and nothing else takes.
    """
    ratio: RatioLevel = Field(default=RatioLevel.TOKEN, strict=False)
    """`token` clips each token's ratio (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300); `sequence` the geometric mean
    over a response (GSPO, arXiv:2507.18071; its clipping range is much smaller: 0.0003 and 0.0004 there).
    """
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0, strict=False)
    """Ratios below 1 minus this bring no gradient when they would fall further."""
    clip_high: float = Field(default=0.2, gt=0.0, le=1e6, strict=False)
    """Ratios above 1 plus this bring no gradient when they would rise further; above `clip_low` (0.28 in DAPO,
    arXiv:2503.14476) unlikely tokens can become likelier.
    """
    dual_clip: float = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """Ratios above it bring no gradient where the advantage is negative, which is not bounded otherwise (dual clip,
    arXiv:1912.09729); 0 is off. Where it is not set, it is 3.0 if `clip_low` and `clip_high` differ, and 0 for `cispo`.
    """
    normalisation: Normalisation = Field(default=Normalisation.TOKEN, strict=False)
    """`token`: all trained tokens of a batch weigh the same (DAPO); `sequence`: all rollouts (GRPO); `constant`: a
    rollout's sum is divided by `constant_length`, the same for short and long ones (Dr. GRPO, arXiv:2503.20783).
    """
    constant_length: int | None = Field(default=None, ge=1, le=100_000_000)
    """Tokens that `normalisation = "constant"` divides by; by default `sampling.rollout_max_response_len`. With 1, a
    rollout counts by the sum over its tokens (RLOO).
    """
    old_logprobs: OldLogprobs = Field(default=OldLogprobs.TRAINER, strict=False)
    """`trainer`: the ratio starts at 1, from the trainer's own log-probabilities before the batch's first update;
    `rollout`: it starts from the engine's as they were sampled, which corrects for staleness as well. Refused where
    sampling is restricted (top-p, top-k, `min_new_tokens`, `repetition_penalty`), as the engine's are of another
    distribution then.
    """
    correction: Correction = Field(default=Correction.NONE, strict=False)
    """Where it is not set, it is `truncate` in `async` and `partial` mode, unless sampling is restricted or
    `old_logprobs = "rollout"`, and `none` otherwise; one that is set is refused where sampling is restricted.
    `truncate` weights each token by the trainer's over the engine's probability, at most `correction_high` (TIS, Yao
    et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"); `mask` weights it so within
    `correction_low` to `correction_high`, and by 0 outside (IcePop, arXiv:2510.18855).
    """
    correction_level: RatioLevel = Field(default=RatioLevel.TOKEN, strict=False)
    """Of what that probability is: of each `token`, or of the whole `sequence`, the product over its trained tokens,
    which has no bias and more variance: all of a sequence is truncated or masked alike.
    """
    correction_low: float = Field(default=0.5, ge=0.0, le=1.0, strict=False)
    """Used by `mask` only."""
    correction_high: float = Field(default=2.0, ge=1.0, le=1e6, strict=False)
    """The largest weight."""
    kl_coefficient: float = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """Weight of the divergence from the reference, which is the model as training found it unless
    `reference_checkpoint` names another; 0 needs no reference in memory.
    """
    reward_kl_coefficient: float = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """What is taken from rewards for each nat of that divergence, before advantages are computed, which the trainer
    then does anew (verl's `use_kl_in_reward`, slime's `--kl-coef`; docs/training.md says how by estimator).
    """
    reward_kl_estimator: KLEstimator = Field(default=KLEstimator.K1, strict=False)
    """Of that: `k1`, whose sum over a response has no bias, `k2` or `k3`; see `kl_estimator`."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """Weight of the entropy of what predicts each trained token, which is taken off its loss: above 0 answers stay
    different (A3C, arXiv:1602.01783, section 4). Groups of equal rewards then bring a gradient, too.
    """
    router_aux_loss_coefficient: float = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """Weight of the load-balancing loss of a mixture of experts (arXiv:2101.03961, as transformers computes it from
    each micro-batch), which is added to each trained token's loss; models that have one are trained with 0.001 to 0.02.
    """
    function: Plugin[LossFn] | None = None
    """A `LossFn` of yours in the place of `objective`, by import path (docs/extending.md); what corrects for the
    engine, the divergence and the entropy are added as their keys say, and groups of equal rewards are not left out.
    """
    reference_checkpoint: Annotated[str | None, Resume.MODEL] = Field(default=None, min_length=1)
    """The reference, as `model.checkpoint` names a model, with the same vocabulary; a warm-up does not change it. Used
    where `kl_coefficient` or `reward_kl_coefficient` is above 0, and by `function`.
    """
    reference_refresh_interval: int = Field(default=0, ge=0, le=1_000_000)
    """Batches after which the reference becomes the policy as it is then, and again after as many (slime's
    `--ref-update-interval`, TRL's `ref_model_sync_steps`), also one that `reference_checkpoint` names; 0 leaves it.
    """
    reference_mixup_alpha: float = Field(default=1.0, gt=0.0, le=1.0, strict=False)
    """The policy's share of the weights of the reference then; the rest are those that it had (TR-DPO,
    arXiv:2404.09656; TRL's `ref_model_mixup_alpha`).
    """
    kl_estimator: KLEstimator = Field(default=KLEstimator.K3, strict=False)
    """As Schulman names them ("Approximating KL Divergence", 2020): `k1` is the log-ratio, `k2` half its square, `k3`
    is never negative and has little variance. As a loss, `k2` has the gradient of the divergence itself, and that of
    `k1` is 0 on average; `k3+` has the value of `k3` and the gradient of `k2`.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> LossSettings:
        if "dual_clip" not in self.model_fields_set:
            is_bounded = self.clip_low == self.clip_high or self.objective is Objective.CISPO
            object.__setattr__(self, "dual_clip", 0.0 if is_bounded else 3.0)  # it depends on others, and is frozen
        if self.reference_checkpoint is not None and not self.has_reference:
            raise ValueError(
                "reference_checkpoint has no effect with kl_coefficient = 0 and reward_kl_coefficient = 0: raise one, "
                "or leave it out"
            )
        if self.reward_kl_estimator is KLEstimator.K3_PLUS:
            raise ValueError(
                "reward_kl_estimator = 'k3+' differs from k3 in its gradient, and rewards have none: set k3"
            )
        if self.reward_kl_estimator is not KLEstimator.K1 and not self.reward_kl_coefficient:
            raise ValueError("reward_kl_estimator has no effect with reward_kl_coefficient = 0: raise that")
        if self.reference_refresh_interval and not self.has_reference:
            raise ValueError("reference_refresh_interval has no effect without a divergence: raise kl_coefficient")
        if self.reference_mixup_alpha != 1.0 and not self.reference_refresh_interval:
            raise ValueError("reference_mixup_alpha has no effect with reference_refresh_interval = 0: raise that")
        if 0.0 < self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip = {self.dual_clip:g} would clip ratios that have not risen: raise it above 1")
        if self.dual_clip and self.objective is Objective.CISPO:
            raise ValueError(f"dual_clip = {self.dual_clip:g} has no effect with objective = 'cispo': set it to 0")
        if self.correction is not Correction.NONE and self.old_logprobs is OldLogprobs.ROLLOUT:
            raise ValueError(
                f"correction = {self.correction.value!r} would count the difference to the engine twice, because "
                "old_logprobs = 'rollout' has it in the ratio: set one of them back"
            )
        return self

    @property
    def has_divergence(self) -> bool:
        """Whether the divergence from a reference counts, in the loss or in rewards."""
        return self.kl_coefficient > 0 or self.reward_kl_coefficient > 0

    @property
    def has_reference(self) -> bool:
        """Whether something compares with a reference."""
        return self.has_divergence or (self.function is not None and self.reference_checkpoint is not None)

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a sample whose advantage is 0 may bring a gradient."""
        added = (self.has_divergence, self.entropy_coefficient, self.router_aux_loss_coefficient)
        return any(added) or self.function is not None


class TrainSettings(Section):
    """The trainer of this program."""

    method: Free[Method | None] = Field(default=None, strict=False)  # what it sets has keys of its own
    """Sets `[advantage]` and keys of `[train.loss]` as the method's paper has them; keys that are set, here or with
    `--set`, stay as they are. `rollfeed check` shows what comes of it, and docs/training.md has the table.
    """
    kind: Annotated[TrainKind, Resume.MODEL] = Field(default=TrainKind.POLICY, strict=False)
    """`reward_model` trains a classifier of one label on pairs of data sets (`chosen_key`, `rejected_key`), of which
    the first should score higher; it sets `rollout.mode = "sft"` and `rollout.n_samples_per_prompt = 2`.
    """
    checkpoint: Annotated[str | None, Resume.MODEL] = Field(default=None, min_length=1)
    """The model that training begins with, as `model.checkpoint` names one, where that is in a precision that cannot be
    trained (FP8): the same model in BF16, FP16 or FP32. By default `model.checkpoint` itself.
    """
    loss: LossSettings = LossSettings()
    """What is minimised."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """How it is minimised."""
    warm_up: Annotated[WarmUpSettings | None, Resume.WARM_UP] = None
    """What comes before the first batch; by default nothing."""
    num_epochs: Annotated[int, Resume.SCHEDULE] = Field(default=1, ge=1, le=1000)
    """How often a batch is gone through."""
    num_minibatches: Annotated[int, Resume.SCHEDULE] = Field(default=1, ge=1, le=1_000_000)
    """Updates each time; a group is never split."""
    micro_batch_tokens: Free[int] = Field(default=4096, ge=2, le=100_000_000)
    """Tokens that go through the model at once, padding included: what bounds the memory. The gradient does not depend
    on it. The longest prompt and response that are allowed have to fit.
    """
    share_prompts: Free[bool] = True
    """Compute the prompt of a group once for all its responses, where the model allows it."""
    freeze_params: Annotated[list[str], Resume.MODEL] = Field(default=[])
    """Regular expressions: parameters in whose names one is found are not trained, such as `["vision_tower"]` for what
    sees to stay as it is.
    """
    lora: Annotated[LoraSettings | None, Resume.MODEL] = None
    """An adapter that is trained instead of the weights; by default none."""
    max_picture_mismatch_kl: Free[float] = Field(default=0.2, ge=0, le=1000)
    """Stop where engine and trainer disagree by more, in nats a token, about answers to prompts with pictures
    (`train/picture_mismatch_kl`): one of them has not seen the pictures, or others. An exact engine that is not behind
    is far below; one in bf16 may be at 1e-3. 0 does not look, nor does it where answers are drawn from a part of the
    vocabulary.
    """
    activation_checkpointing: Free[bool] = False
    """Compute the layers again on the way back instead of keeping what is between them: less memory, a third more
    time.
    """
    activation_offload: Free[bool] = False
    """Keep in the CPU's memory what `activation_checkpointing` keeps of each layer: for responses that are too long for
    the GPU's otherwise.
    """
    routing_replay: Free[bool] = False
    """Train a mixture of experts with the experts that its tokens were sampled with (`sampling.return_routed_experts`),
    whose gates are the trainer's own (R3, arXiv:2510.11370): where engine and trainer round differently, both compute
    with the same experts.
    """
    compile: Free[bool] = False
    """Compile the decoder's layers with torch.compile when they are first computed."""
    precision: OnPurpose[TrainPrecision] = Field(default=TrainPrecision.AUTO, strict=False)
    """`auto` is `bf16` on a GPU and `fp32` on a CPU. Weights and moments are fp32 always, but the reference's linear
    layers are held as they are computed.
    """
    head_precision: OnPurpose[TrainPrecision] = Field(default=TrainPrecision.AUTO, strict=False)
    """The head's product, from hidden states to logits: `auto` is as `precision`; `fp32` beside `bf16` brings
    log-probabilities nearer to those of an exact engine, and takes the time of a product in fp32.
    """
    threads: Free[int] = Field(default=0, ge=0, le=4096)
    """CPU threads of the trainer; 0 takes the physical cores open to this process. Sums, and with them the last bits,
    depend on it.
    """
    device: Free[str] = Field(default="auto", min_length=1)
    """`cpu`, `cuda`, `cuda:1` and so on; `auto` is the first GPU, if there is one."""
    num_processes: Free[int] = Field(default=1, ge=1, le=64)
    """Processes of this host that train together, each with a part of every weight, those of an adapter among them, and
    of gradients and moments (FSDP2): on GPUs one each, from `device` on; on CPUs they share `threads`. Losses and
    weights are those of one, but for the last bits.
    """
    process_timeout_seconds: Free[float] = Field(default=600.0, gt=0.0, le=86_400.0, strict=False)
    """With several: the longest that one waits for another before the run is ended."""
    checkpoint_interval: Free[int] = Field(default=10, ge=1, le=1_000_000)
    """Batches between two checkpoints of the trainer; a run that was killed goes back to the last one."""
    eval_interval: Free[int | None] = Field(default=None, ge=1, le=1_000_000)
    """Batches between two evaluations on the sets of `[eval]`; there is one before the first batch and one after the
    last anyway.
    """
    export_interval: Free[int] = Field(default=0, ge=0, le=1_000_000)
    """Batches between two exports of the model, in Hugging Face layout as `model/` is in the end, to
    `exports/step-000120` in the run directory after 120 batches; 0 exports at the end only.
    """
    num_exports_kept: Free[int | None] = Field(default=None, ge=1, le=1_000_000)
    """Of those, the newest that stay; by default all."""
    export_best: Free[str | None] = Field(default=None, min_length=1)
    """`accuracy`, the mean over the sets of `[eval]`, or a number of one set as trackers name it, such as
    `eval/gsm8k/accuracy`: the model of the evaluation with the highest is in `exports/best`.
    """
    on_non_finite: Free[NonFinitePolicy] = Field(default=NonFinitePolicy.STOP, strict=False)
    """A loss or gradient that is not finite ends the run (`stop`) or leaves out the update (`skip`), which changes
    nothing in both cases; earlier updates of the same batch have been made.
    """

    @field_validator("freeze_params")
    @classmethod
    def _are_patterns(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> TrainSettings:
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError("activation_offload = true has no effect without activation_checkpointing = true: set it")
        if self.routing_replay and self.compile:
            raise ValueError("routing_replay = true looks into routers while they compute: set compile = false")
        if self.loss.router_aux_loss_coefficient and self.compile:
            raise ValueError("loss.router_aux_loss_coefficient looks into routers: set compile = false, or it to 0")
        if self.num_exports_kept is not None and not self.export_interval:
            raise ValueError("num_exports_kept has no effect with export_interval = 0: raise it, or leave it out")
        if self.optimizer.offload and self.num_processes > 1:
            raise ValueError(
                "optimizer.offload = true is for num_processes = 1: several have a part of the moments each"
            )
        return self

    @model_validator(mode="after")
    def _adapts_alone(self) -> TrainSettings:
        """Refuse what an adapter does not go with."""
        if self.lora is None:
            return self
        what = "train.lora trains an adapter only: "
        if self.freeze_params:
            raise ValueError(f"{what}leave freeze_params out, and name lora.target_modules")
        if self.kind is TrainKind.REWARD_MODEL:
            raise ValueError(f"{what}kind = 'reward_model' has a head to train as well")
        loss = self.loss
        if loss.reference_refresh_interval and loss.reference_checkpoint is not None:
            raise ValueError(
                f"{what}a reference that is refreshed is its model with the adapter of then: remove "
                "loss.reference_checkpoint, or set loss.reference_refresh_interval = 0"
            )
        if loss.reference_mixup_alpha != 1.0:
            raise ValueError(f"{what}two of them cannot be mixed matrix by matrix: set loss.reference_mixup_alpha = 1")
        return self

    @model_validator(mode="before")
    @classmethod
    def _loss_of_method(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or (method := as_method(values.get("method"))) is None:
            return values
        loss = values.get("loss", {})
        given = loss.model_dump(exclude_unset=True) if isinstance(loss, LossSettings) else loss
        return {**values, "loss": loss_of(method, given)} if isinstance(given, Mapping) else values

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps that one batch brings."""
        return self.num_epochs * self.num_minibatches

    def num_updates(self, num_batches: int) -> int:
        """Return the length of the schedule of a run of ``num_batches``, in updates."""
        return self.updates_per_batch * (self.optimizer.decay_batches or num_batches)
