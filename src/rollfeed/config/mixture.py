"""``[[reward.mixture]]``: several scores as one reward."""

from __future__ import annotations

from pydantic import Field, model_validator

from rollfeed.config.section import Section

MIXTURE_RM_TYPE = "mixture"
"""The ``rm_type`` of the mixture, and the key of its sum."""


class MixturePartSettings(Section):
    """A score with its weight in the reward (`[[reward.mixture]]`); docs/reward-models.md says what is stored."""

    rm_type: str | None = Field(default=None, min_length=1)
    """Grader by name, as `reward.rm_type`."""
    function: str | None = Field(default=None, min_length=1)
    """One of `[reward.functions]`, in place of `rm_type`."""
    name: str | None = Field(default=None, min_length=1)
    """Key of this part in the stored rewards; by default `rm_type` or `function`."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6, strict=False)
    """What the score is multiplied with in the sum; 0 stores it alone."""
    reward_key: str | None = Field(default=None, min_length=1)
    """Which entry counts, where this part scores with named numbers."""

    @model_validator(mode="after")
    def _scores_once(self) -> MixturePartSettings:
        if (self.rm_type is None) is (self.function is None):
            raise ValueError("a part of the mixture has either rm_type or function: set one of them")
        if self.rm_type == MIXTURE_RM_TYPE:
            raise ValueError("a mixture is no part of itself: name another rm_type")
        if self.key == MIXTURE_RM_TYPE:
            raise ValueError(f"name = {self.key!r} is the key of the sum: choose another")
        return self

    @property
    def key(self) -> str:
        """The key of this part in the stored rewards."""
        return self.name or self.rm_type or str(self.function)
