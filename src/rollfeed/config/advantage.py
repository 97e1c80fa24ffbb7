"""``[advantage]``: how rewards become advantages."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from rollfeed.config.section import Resume, Section


class AdvantageEstimator(StrEnum):
    """The estimator that makes advantages of a batch's rewards."""

    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"


class AdvantageSettings(Section, resume=Resume.ON_PURPOSE):
    """The advantages of a batch; they are computed before it is stored, and stored."""

    estimator: AdvantageEstimator = Field(default=AdvantageEstimator.GROUP_MEAN, strict=False)
    """`group_mean`: reward minus the group's mean (GRPO, Dr. GRPO); `leave_one_out`: minus the mean of the others
    (RLOO, arXiv:2402.14740); `reinforce_pp`: whitened over the trained tokens of the batch, without regard to groups
    (REINFORCE++, arXiv:2501.03262); `reinforce_pp_baseline`: minus the group's mean, then whitened so.
    """
    divide_by_std: bool = False
    """With `group_mean`: divide by the group's standard deviation (of n - 1) as GRPO does (arXiv:2402.03300); `false`
    is Dr. GRPO (arXiv:2503.20783).
    """

    @model_validator(mode="after")
    def _fits_together(self) -> AdvantageSettings:
        if self.divide_by_std and self.estimator is not AdvantageEstimator.GROUP_MEAN:
            raise ValueError(
                f"divide_by_std = true has no effect with estimator = {self.estimator.value!r}: set it to false, or "
                "estimator = 'group_mean'"
            )
        return self
