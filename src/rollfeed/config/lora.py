"""``[train.lora]``: training an adapter instead of the weights."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rollfeed.config.section import Resume, Section

ALL_LINEAR = "all-linear"


class LoraSettings(Section, resume=Resume.MODEL):
    """A low-rank adapter (LoRA, arXiv:2106.09685), made by peft: it is trained, and the weights stay as they are.

    Keys are named as in TRL and verl.
    """

    rank: int = Field(default=16, ge=1, le=4096)
    """Rows of the two matrices whose product is added to each adapted weight."""
    alpha: int = Field(default=32, ge=1, le=1_000_000)
    """That product is multiplied by this over `rank`."""
    target_modules: list[str] = Field(default=[ALL_LINEAR], min_length=1)
    """The linear layers that are adapted, by the ends of their names, such as `["q_proj", "v_proj"]`; `all-linear` is
    all of them but the output head.
    """

    @field_validator("target_modules", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _all_is_alone(cls, value: list[str]) -> list[str]:
        if ALL_LINEAR in value and len(value) > 1:
            raise ValueError(f"{ALL_LINEAR!r} are all of them: remove it, or the others")
        return value
