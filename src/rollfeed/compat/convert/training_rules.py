"""slime's flags for advantages, loss and optimiser, as ``[advantage]`` and ``[train]``."""

from __future__ import annotations

from rollfeed.compat.convert.draft import Draft
from rollfeed.compat.convert.table import FLAGS
from rollfeed.compat.convert.teacher_rules import TEACHER_ADVANTAGE
from rollfeed.compat.convert.toml_text import Setting

_ESTIMATORS = {
    "grpo": "group_mean",
    "gspo": "group_mean",
    "cispo": "group_mean",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_LOSS_FLAGS = frozenset(
    name for name, flag in FLAGS.items() if any(key.startswith(("train.loss.", "advantage.")) for key in flag.becomes)
) - {"calculate-per-token-loss"}


def set_advantages(draft: Draft) -> None:
    """Set ``[advantage]``, which divides by the standard deviation as slime does."""
    estimator, path = draft.value("advantage-estimator"), draft.value("custom-reward-post-process-path")
    if path == TEACHER_ADVANTAGE and "teacher.use" in draft.settings:
        draft.leave("custom-reward-post-process-path", "what it does is what [teacher] does")
        path = None
    if path:
        draft.put("plugins.advantage", f"slime:{path}", "custom-reward-post-process-path")
        for name in ("disable-grpo-std-normalization", "disable-rewards-normalization"):
            draft.leave(name, "the function of --custom-reward-post-process-path makes the advantages")
    if draft.mode == "sft":
        return
    if estimator not in _ESTIMATORS:
        draft.leave("advantage-estimator", f"there is no {estimator} here, as there is no critic; group_mean is set")
    ours = _ESTIMATORS.get(estimator, "group_mean")
    if not path:
        whitening = () if ours == "group_mean" else ("normalize-advantages",)
        draft.put("advantage.estimator", ours, "advantage-estimator", *whitening)
    if ours == "group_mean":
        std = not draft.value("disable-grpo-std-normalization") and not draft.value("disable-rewards-normalization")
        if not path:
            divides = std and draft.value("n-samples-per-prompt") > 1
            draft.put("advantage.divide_by_std", divides, "disable-grpo-std-normalization")
        if "normalize-advantages" in draft.flags:
            draft.leave("normalize-advantages", "advantages of group_mean are not whitened over a batch")
    elif "disable-grpo-std-normalization" in draft.flags:
        draft.leave("disable-grpo-std-normalization", f"{ours} does not divide by that of a group")


def set_tracking(draft: Draft) -> None:
    """Set ``tracking.trackers``."""
    if names := [name for name in ("wandb", "tensorboard", "mlflow") if draft.value(f"use-{name}")]:
        draft.put("tracking.trackers", names, *(f"use-{name}" for name in names))


def set_training(draft: Draft) -> None:
    """Set ``[train]``."""
    at = "train.loss."
    if draft.mode == "sft":
        for name in _LOSS_FLAGS & draft.flags.keys():
            draft.leave(name, "in `sft` mode the loss is the cross entropy")
    else:
        _loss(draft, at)
    _adapter(draft)
    _routing(draft)
    per_token = draft.value("calculate-per-token-loss")
    draft.put(f"{at}normalisation", "token" if per_token else "sequence", "calculate-per-token-loss")
    answers = (draft.value("rollout-batch-size") or 4) * draft.value("n-samples-per-prompt")
    if draft.value("num-steps-per-rollout") is not None:
        draft.put(
            "train.num_minibatches",
            draft.value("num-steps-per-rollout"),
            "num-steps-per-rollout",
            "global-batch-size",
        )
    elif draft.value("global-batch-size") is not None:
        draft.put("train.num_minibatches", max(1, answers // draft.value("global-batch-size")), "global-batch-size")
    per_gpu, names = draft.value("max-tokens-per-gpu"), ("max-tokens-per-gpu", "use-dynamic-batch-size")
    if per_gpu is not None:
        draft.put("train.micro_batch_tokens", max(per_gpu, draft.context_length), *names)
    elif draft.context_length > 4096:
        draft.settings["train.micro_batch_tokens"] = Setting(draft.context_length, "what the longest sample takes")
    if draft.value("save-hf") and draft.value("save-interval"):
        draft.put("train.export_interval", draft.value("save-interval"), "save-hf", "save-interval")
    elif "save-hf" in draft.flags:
        draft.leave(
            "save-hf", "without --save-interval the model is exported at the end, to model/ in the run directory"
        )
    rate = "train.optimizer."
    draft.put(f"{rate}weight_decay", draft.value("weight-decay"), "weight-decay")
    draft.put(f"{rate}max_grad_norm", draft.value("clip-grad") or 1e9, "clip-grad")
    style = draft.value("lr-decay-style").lower()
    if style in ("constant", "linear", "cosine"):
        draft.put(f"{rate}schedule", style, "lr-decay-style")
    else:
        draft.leave("lr-decay-style", "train.optimizer.schedule has constant, linear and cosine")
    if "min-lr" in draft.flags and style in ("linear", "cosine"):
        draft.put(f"{rate}final_learning_rate_ratio", min(1.0, draft.value("min-lr") / draft.value("lr")), "min-lr")
    elif "min-lr" in draft.flags:
        draft.leave("min-lr", "the learning rate does not fall")


def _loss(draft: Draft, at: str) -> None:
    high, estimator = draft.value("eps-clip-high"), draft.value("advantage-estimator")
    draft.put(f"{at}clip_high", draft.value("eps-clip") if high is None else high, "eps-clip-high", "eps-clip")
    if estimator == "gspo":
        draft.put(f"{at}ratio", "sequence", "advantage-estimator")
    elif estimator == "cispo":
        draft.put(f"{at}objective", "cispo", "advantage-estimator")
    draft.put(f"{at}dual_clip", draft.value("eps-clip-c") or 0.0, "eps-clip-c")
    _divergence(draft, at, estimator)
    restricted = "sampling is restricted (--rollout-top-p, --rollout-top-k): its probabilities are not the trainer's"
    if draft.value("use-rollout-logprobs"):
        if draft.is_restricted:
            draft.leave("use-rollout-logprobs", restricted)
        else:
            draft.put(f"{at}old_logprobs", "rollout", "use-rollout-logprobs")
    if draft.value("use-tis") and not draft.is_restricted:
        draft.put(f"{at}correction", "truncate", "use-tis")
        draft.put(f"{at}correction_high", draft.value("tis-clip"), "tis-clip")
    else:
        draft.put(f"{at}correction", "none")
        for name in ("use-tis", "tis-clip"):
            draft.leave(name, restricted if draft.value("use-tis") else "it counts with --use-tis")


def _adapter(draft: Draft) -> None:
    if not draft.value("lora-rank"):
        for name in ("lora-alpha", "target-modules"):
            draft.leave(name, "without --lora-rank all weights are trained")
        return
    draft.put("train.lora.rank", draft.value("lora-rank"), "lora-rank")
    draft.put("train.lora.alpha", draft.value("lora-alpha"), "lora-alpha")
    modules = [each.strip() for each in (draft.value("target-modules") or "all-linear").split(",")]
    if any(each.startswith("linear_") for each in modules):
        draft.leave("target-modules", "names of Megatron's layers: name the checkpoint's, as q_proj; all are adapted")
        modules = ["all-linear"]
    draft.put("train.lora.target_modules", modules, "target-modules")


def _routing(draft: Draft) -> None:
    name = "use-rollout-routing-replay"
    if draft.value(name) and draft.mode == "sft":
        draft.leave(name, "in `sft` mode nothing is sampled")
    elif draft.value(name):
        draft.put("sampling.return_routed_experts", True, name)
        draft.put("train.routing_replay", True, name)


def _divergence(draft: Draft, at: str, estimator: str) -> None:
    """Set the divergence from the reference: of the loss, or of rewards."""
    of_loss = bool(draft.value("use-kl-loss") and draft.value("kl-loss-coef"))
    of_rewards = bool(draft.value("kl-coef")) and estimator == "reinforce_plus_plus"
    kind = "k3" if draft.value("kl-loss-type") == "low_var_kl" else draft.value("kl-loss-type")
    if of_loss:
        draft.put(f"{at}kl_coefficient", draft.value("kl-loss-coef"), "use-kl-loss", "kl-loss-coef")
        draft.put(f"{at}kl_estimator", kind, "kl-loss-type")
    if of_rewards:
        draft.put(f"{at}reward_kl_coefficient", draft.value("kl-coef"), "kl-coef")
        draft.put(f"{at}reward_kl_estimator", kind, "kl-loss-type")
    else:
        draft.leave("kl-coef", "it counts with --advantage-estimator reinforce_plus_plus; slime's grpo takes no notice")
    without = "without a weight (--kl-coef, or --use-kl-loss with --kl-loss-coef above 0) there is no divergence"
    for name in () if of_loss else ("use-kl-loss", "kl-loss-coef"):
        draft.leave(name, without)
    if not (of_loss or of_rewards):
        draft.leave("kl-loss-type", without)
        draft.leave("ref-update-interval", without)
    elif draft.value("ref-update-interval"):
        draft.put(f"{at}reference_refresh_interval", draft.value("ref-update-interval"), "ref-update-interval")
