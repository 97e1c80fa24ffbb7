"""slime's ``Sample``: the mutable record that its plug-ins are handed, with its fields, their defaults and methods.

Facts of slime's ``utils/types.py``. Axes: R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Self


class _Counters:
    """Numbers that replies are added to."""

    _IN_REPLIES: ClassVar[Mapping[str, str]] = {}
    """By name, what a reply calls them where that is another name."""

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add those of a reply."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + meta_info.get(self._IN_REPLIES.get(name, name), 0))

    def to_dict(self) -> dict[str, int]:
        """Return them by name."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, int]) -> Self:
        """Take those that it knows."""
        made = cls()
        vars(made).update({name: data[name] for name in vars(made) if name in data})
        return made


@dataclass
class _SpecInfo(_Counters):
    _IN_REPLIES: ClassVar[Mapping[str, str]] = {"completion_token_num": "completion_tokens"}

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted tokens among the drafted ones; 0 where none was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens a verification; 0 where there was none."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class _PrefixCacheInfo(_Counters):
    _IN_REPLIES: ClassVar[Mapping[str, str]] = {"total_prompt_tokens": "prompt_tokens"}

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Prompt tokens whose keys and values were reused among all; 0 where nothing was asked."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS_OF = {"stop": _Status.COMPLETED, "length": _Status.TRUNCATED, "abort": _Status.ABORTED}


@dataclass
class SlimeSample:
    """One answer: its prompt, tokens and reward."""

    Status = _Status
    SpecInfo = _SpecInfo
    PrefixCacheInfo = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    """The rendered text, or messages where no chat template was applied."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response together; empty before the first turn."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: Any = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    """R, with the tokens of tools."""
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """R long; None stands for ones."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    """R long; 0.0 where a token was not sampled."""
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds."""
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)

    def get_reward_value(self, args: Any) -> float:
        """Return the reward, or its entry under ``args.reward_key``."""
        return self.reward[args.reward_key] if args.reward_key else self.reward  # type: ignore[index,return-value]

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, attributes that were added included; the status as text."""
        infos = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {**vars(self), "status": self.status.value, **infos}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SlimeSample:
        """Rebuild a sample from :meth:`to_dict`; unknown keys become attributes."""
        known = {each.name for each in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["status"] = _Status(values.get("status", "pending"))
        values["spec_info"] = _SpecInfo.from_dict(values.get("spec_info", {}))
        values["prefix_cache_info"] = _PrefixCacheInfo.from_dict(values.get("prefix_cache_info", {}))
        sample = cls(**values)
        vars(sample).update({key: value for key, value in data.items() if key not in known})
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens, their weight and logprobs together.

        Raises:
            ValueError: If sampled tokens come without logprobs or others with some, or lengths do not fit.
        """
        tokens = list(map(int, () if tokens is None else tokens))
        if tokens and trainable is (log_probs is None):
            told = "sampled tokens need log_probs" if trainable else "tokens that are not trainable have no log_probs"
            raise ValueError(f"append_response_tokens: {told}")
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"append_response_tokens: {len(log_probs)} log_probs for {len(tokens)} tokens")
        if trainable and log_probs is not None and self.rollout_log_probs is None and self.response_length:
            raise ValueError("append_response_tokens: the response so far has no rollout_log_probs to go on from")
        known = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * self.response_length
        if tokens:
            mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
            self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
        self.tokens = [*self.tokens, *tokens]
        if tokens or log_probs is not None:
            self.rollout_log_probs = [*known, *map(float, [0.0] * len(tokens) if log_probs is None else log_probs)]
        self.response_length += len(tokens)
        self.response += text or ""
        self._check_lengths()
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Take counters, version and status from the end of a reply; an unknown reason leaves the status."""
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = _STATUS_OF.get(meta_info["finish_reason"]["type"], self.status)

    def _check_lengths(self) -> None:
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries, the response {self.response_length} tokens")


Sample = SlimeSample
"""As slime calls it."""
