"""What the named methods set: loss, normalisation and advantage together, each as its paper has them."""

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

ADVANTAGES: Mapping[Method, Mapping[str, Any]] = {
    Method.GRPO: _BY_STD,
    Method.DR_GRPO: {"estimator": "group_mean", "divide_by_std": False},
    Method.DAPO: _BY_STD,
    Method.GSPO: _BY_STD,
    Method.REINFORCE_PP: {"estimator": "reinforce_pp"},
    Method.RLOO: {"estimator": "leave_one_out"},
    Method.CISPO: _BY_STD,
}
"""Keys of ``[advantage]``."""

LOSSES: Mapping[Method, Mapping[str, Any]] = {
    Method.GRPO: {**_PPO, "normalisation": "sequence"},  # arXiv:2402.03300, equation 3
    Method.DR_GRPO: {**_PPO, "normalisation": "constant"},  # arXiv:2503.20783, section 3.2
    Method.DAPO: {**_PPO, "clip_high": 0.28, "normalisation": "token"},  # arXiv:2503.14476, sections 3.1 and 3.3
    # arXiv:2507.18071, equation 5 and section 5.1
    Method.GSPO: {**_PPO, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "normalisation": "sequence"},
    Method.REINFORCE_PP: {**_PPO, "normalisation": "token"},  # arXiv:2501.03262
    # arXiv:2402.14740: a rollout is one action, its log-probability a sum that nothing divides.
    Method.RLOO: {**_PPO, "normalisation": "constant", "constant_length": 1},
    # arXiv:2506.13585, equations 4 and 5: no lower bound; weights up to 5 as in arXiv:2510.13786.
    Method.CISPO: {**_PPO, "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "normalisation": "token"},
}
"""Keys of ``[train.loss]``."""


def advantage_of(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[advantage]`` with what is given on top; another estimator takes nothing from the method's."""
    own = ADVANTAGES[method]
    return {**(own if given.get("estimator", own["estimator"]) == own["estimator"] else {}), **given}


def loss_of(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[train.loss]`` with what is given on top."""
    return {**LOSSES[method], **given}


def as_method(name: Any) -> Method | None:
    """Return the method of a name; None for none, and for what validation will refuse."""
    return Method(name) if name in [*Method] else None
