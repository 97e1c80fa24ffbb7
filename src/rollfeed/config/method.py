"""``train.method``: combinations of settings that papers name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Method(StrEnum):
    """A combination of settings that a paper names."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    GSPO = "gspo"
    REINFORCE_PP = "reinforce_pp"
    RLOO = "rloo"
    CISPO = "cispo"


_BY_STD = {"estimator": "group_mean", "divide_by_std": True}
_PPO = {"objective": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
_METHODS: Mapping[Method, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    Method.GRPO: (_BY_STD, {**_PPO, "normalisation": "sequence"}),  # arXiv:2402.03300, equation 3
    # arXiv:2503.20783, section 3.2
    Method.DR_GRPO: ({"estimator": "group_mean", "divide_by_std": False}, {**_PPO, "normalisation": "constant"}),
    # arXiv:2503.14476, sections 3.1 and 3.3
    Method.DAPO: (_BY_STD, {**_PPO, "clip_high": 0.28, "normalisation": "token"}),
    # arXiv:2507.18071, equation 5 and section 5.1
    Method.GSPO: (
        _BY_STD,
        {**_PPO, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "normalisation": "sequence"},
    ),
    Method.REINFORCE_PP: ({"estimator": "reinforce_pp"}, {**_PPO, "normalisation": "token"}),  # arXiv:2501.03262
    # arXiv:2402.14740: a rollout is one action, its log-probability a sum that nothing divides.
    Method.RLOO: ({"estimator": "leave_one_out"}, {**_PPO, "normalisation": "constant", "constant_length": 1}),
    # arXiv:2506.13585, equations 4 and 5: no lower bound; weights up to 5 as in arXiv:2510.13786.
    Method.CISPO: (
        _BY_STD,
        {**_PPO, "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "normalisation": "token"},
    ),
}
"""Keys of ``[advantage]`` and of ``[train.loss]``."""


def as_method(name: Any) -> Method | None:
    """Return the method of a name; None for none, and for what validation will refuse."""
    return Method(name) if name in [*Method] else None


def advantage_of(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[advantage]`` with what is given on top; another estimator takes nothing from the method's."""
    own, _ = _METHODS[method]
    return {**(own if given.get("estimator", own["estimator"]) == own["estimator"] else {}), **given}


def loss_of(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[train.loss]`` with what is given on top."""
    return {**_METHODS[method][1], **given}
