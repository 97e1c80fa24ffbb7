"""slime's flags for on-policy distillation, as ``[teacher]``."""

from __future__ import annotations

from urllib.parse import urlsplit

from rollfeed.compat.convert.draft import Draft

_AT = "slime.rollout.on_policy_distillation."
TEACHER_REWARD, TEACHER_ADVANTAGE = f"{_AT}reward_func", f"{_AT}post_process_rewards"
"""slime's functions that ask its teacher: there are no other rewards with them."""


def set_teacher(draft: Draft) -> bool:
    """Set ``[teacher]``, where there is one that can be had; return whether there is."""
    if not draft.value("use-opd") or draft.mode == "sft":
        return False
    kind, name = draft.value("opd-type"), "use-opd"
    urls = draft.value("opd-teacher-urls") or [draft.value("rm-url")]
    if draft.is_restricted or "sampling.return_sampling_mask" in draft.settings:
        draft.leave(name, "policy and teacher are compared over the whole vocabulary: no --rollout-top-p, -top-k")
    elif kind == "megatron" and draft.value("opd-teacher-load"):
        draft.put("teacher.checkpoint", draft.value("opd-teacher-load"), "opd-teacher-load")
        draft.notes.append("teacher.checkpoint is read in Hugging Face layout only: name the folder that was converted")
    elif kind in (None, "sglang") and len(urls) == 1 and urls[0] and (address := _address_of(urls[0])):
        draft.put("teacher.servers", [address], "rm-url", "opd-teacher-urls")
        # Servers tell log-probabilities before any temperature, in slime too.
        draft.put("teacher.temperature", 1.0)
    else:
        draft.leave(
            name, "it needs a server (--rm-url) or a model (--opd-teacher-load): one, that sees what the policy does"
        )
    if name in draft.left:
        draft.left.setdefault("opd-type", draft.left[name])
        return False
    draft.put("teacher.use", "loss", "use-opd", "opd-type")
    draft.put("teacher.coefficient", draft.value("opd-kl-coef"), "opd-kl-coef")
    # Rewards of slime's own functions for it are 0, and so are their advantages.
    draft.put("teacher.advantage_weight", 0.0 if draft.value("custom-rm-path") == TEACHER_REWARD else 1.0)
    return True


def _address_of(url: str) -> str | None:
    """Return the server of an address with a path, or of one that a domain of prompts has; None where it is none."""
    parts = urlsplit(url.rpartition("=")[2])
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else None
