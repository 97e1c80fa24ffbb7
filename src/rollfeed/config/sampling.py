"""``[sampling]``: how the policy answers."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollfeed.config.section import Resume, Section
from rollfeed.types import SamplingParams

_LARGEST_SAMPLING_MASK = 4096
"""What SGLang returns at most, unless it is told otherwise."""


def _keeps_tokens(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("0 keeps no token: use -1 to keep all")
    return top_k


TopK: TypeAlias = Annotated[int, AfterValidator(_keeps_tokens)]


class SamplingSettings(Section, resume=Resume.ANSWERS):
    """Sampling parameters of training rollouts."""

    rollout_temperature: float = Field(default=1.0, gt=0.0, le=100.0, strict=False)
    """Above 0: a greedy policy has no distribution to train."""
    rollout_top_p: float = Field(default=1.0, gt=0.0, le=1.0, strict=False)
    """Nucleus sampling; 1 is off."""
    rollout_top_k: TopK = Field(default=-1, ge=-1, le=10_000_000)
    """Keep the k likeliest tokens; -1 is off."""
    rollout_max_response_len: int = Field(default=128, ge=1, le=10_000_000)
    """Tokens of a response."""
    rollout_max_context_len: int | None = Field(default=None, ge=2, le=100_000_000)
    """Tokens of prompt and response together; by default what the engine allows."""
    rollout_stop: tuple[str, ...] = Field(default=(), strict=False)
    """Strings that end a response; they stay in it."""
    rollout_stop_token_ids: tuple[int, ...] = Field(default=(), strict=False)
    """Token ids that end a response, besides the model's own."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response's text; its ids are not touched."""
    min_new_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """A response cannot end before this many tokens."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0, strict=False)
    """Above 1 makes tokens that occurred less likely; 1 is off."""
    return_sampling_mask: bool = False
    """Have the engine return, for each token, the tokens that top-k, top-p and `min_new_tokens` left, store them, and
    train on probabilities among these ("Keep Sampling Mask" of DeepSeek-V3.2, arXiv:2512.02556). For the embedded
    engine and SGLang from 0.5.23 on; needs `rollout_top_k` of at most 4096, which bounds what a token takes.
    """

    return_routed_experts: bool = False
    """Have the engine return the experts that each token was computed with, in each layer of a mixture of experts, and
    store them, a byte each (two where there are more than 256), for `train.routing_replay`. For the embedded engine,
    and servers that are started to return them.
    """

    @property
    def params(self) -> SamplingParams:
        """The parameters of every request; each rollout has a seed besides."""
        return SamplingParams(
            max_new_tokens=self.rollout_max_response_len,
            temperature=self.rollout_temperature,
            top_p=self.rollout_top_p,
            top_k=self.rollout_top_k,
            min_new_tokens=self.min_new_tokens,
            repetition_penalty=self.repetition_penalty,
            stop=self.rollout_stop,
            stop_token_ids=self.rollout_stop_token_ids,
            skip_special_tokens=self.rollout_skip_special_tokens,
            return_sampling_mask=self.return_sampling_mask,
            return_routed_experts=self.return_routed_experts,
        )

    @property
    def restrictions(self) -> tuple[str, ...]:
        """The settings with which tokens come from a distribution that a trainer cannot compute.

        Sampling masks tell what was left out, and not by how much a penalty changed the rest.
        """
        restricts = {
            "rollout_top_p": self.rollout_top_p < 1.0 and not self.return_sampling_mask,
            "rollout_top_k": self.rollout_top_k != -1 and not self.return_sampling_mask,
            "min_new_tokens": self.min_new_tokens > 0 and not self.return_sampling_mask,
            "repetition_penalty": self.repetition_penalty != 1.0,
        }
        return tuple(f"sampling.{name} = {getattr(self, name)}" for name, is_set in restricts.items() if is_set)

    @field_validator("rollout_stop")
    @classmethod
    def _stop_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("an empty string would stop everything: remove it")
        return value

    @field_validator("rollout_stop_token_ids")
    @classmethod
    def _stop_ids_not_negative(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(token_id < 0 for token_id in value):
            raise ValueError("token ids are not negative: remove those that are")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SamplingSettings:
        if self.min_new_tokens > self.rollout_max_response_len:
            raise ValueError(
                f"min_new_tokens = {self.min_new_tokens} is above rollout_max_response_len = "
                f"{self.rollout_max_response_len}: lower it"
            )
        if self.return_sampling_mask and not 1 < self.rollout_top_k <= _LARGEST_SAMPLING_MASK:
            raise ValueError(
                f"return_sampling_mask stores what each token was drawn from, and rollout_top_k = {self.rollout_top_k} "
                f"does not bound it: set rollout_top_k from 2 to {_LARGEST_SAMPLING_MASK}"
            )
        if self.rollout_max_context_len is not None and self.rollout_max_context_len <= self.rollout_max_response_len:
            raise ValueError(
                f"rollout_max_context_len = {self.rollout_max_context_len} leaves no room for a prompt beside "
                f"rollout_max_response_len = {self.rollout_max_response_len}: raise it"
            )
        return self
