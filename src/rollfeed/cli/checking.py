"""Checks all that settings name, and says what a run would do; no engine starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, NamedTuple

from rollfeed import app
from rollfeed.app.training.checks import check_trained_model, check_trained_prompts, check_training, tell_of_correction
from rollfeed.app.training.trained_checkpoints import trained_checkpoints
from rollfeed.cli.tried_reward import TriedReward, try_reward
from rollfeed.config import RolloutMode, RunSpec, Settings
from rollfeed.config.settings import flatten
from rollfeed.conversations import audit_template, call_syntax, names_in
from rollfeed.engine.embeddable import is_embeddable
from rollfeed.errors import ConfigError
from rollfeed.evaluation import EvalSet
from rollfeed.evaluation.overlap import Overlap
from rollfeed.model_files import has_weights
from rollfeed.prompts import DataLimit
from rollfeed.protocols import PromptSource, RewrittenTurns
from rollfeed.report import warn_without_drawing
from rollfeed.types.text import counted


def check(spec: RunSpec, *, name: str, tells: bool) -> dict[str, Any]:
    """Check all that settings name, and return what a run would do; ``tells`` prints it for people.

    Raises:
        ConfigError: With everything that is wrong, a line each.
    """
    settings = spec.settings
    sources = app.source_names(settings)
    checked = (_check_run if sources else _check_engine)(spec)
    model, limit = checked.model, checked.limit
    eval_sets = app.prepare_run_evaluation(spec, model).sets if settings.eval.has_sets else ()
    found = () if checked.source is None else app.overlaps(checked.source, eval_sets, settings)
    rollout, template = settings.rollout, _template_text(model, settings.rollout.rewritten_turns)
    plan: dict[str, Any] = {
        "ok": True,
        "model": str(model.checkpoint),
        "chat_template": template,
        "tools": checked.tools,
        "sources": sources,
        "eval_sets": [each.name for each in eval_sets],
        "eval_prompts": {each.name: _eval_counts(each) for each in eval_sets},
        "overlap": [{**asdict(each), "share": each.share} for each in found],
        "reward": None if checked.reward is None else asdict(checked.reward),
        "num_rollout": rollout.num_rollout if sources else 0,
        "data_limit": None if limit is None else {**asdict(limit), "most": limit.most},
        "rollout_batch_size": rollout.rollout_batch_size,
        "n_samples_per_prompt": rollout.n_samples_per_prompt,
        "deterministic": rollout.deterministic,
        "trains": bool(sources) and _can_train(settings, model),
        "training": _training(settings) if settings.trains else None,
    }
    if not tells:
        return plan
    print(f"{name}: all right")
    print(f"model    {settings.model.checkpoint} ({model.checkpoint})")
    if template is not None:
        print(f"template {template}")
    _print_prompts(sources, eval_sets, found, checked.tools)
    if checked.reward is not None:
        print(
            "\n".join(
                [f"reward   {checked.reward.describe()}", *(f"printed  {each}" for each in checked.reward.printed)]
            )
        )
    if sources:
        print(
            f"steps    {rollout.num_rollout} of {rollout.rollout_batch_size} groups x {rollout.n_samples_per_prompt} "
            f"rollouts, {rollout.first_submission} prompts submitted at first"
        )
        if limit is not None:
            print(f"data     {limit.describe(rollout.num_rollout)}")
    else:
        print("steps    none: without prompts there is only rollfeed eval")
    if sources and settings.trains:
        _print_training(settings, has_weights=plan["trains"])
    if settings.tracking.trackers:
        print(f"trackers {', '.join(settings.tracking.trackers)}; project {settings.tracking.project}")
    return plan


def _template_text(model: app.Model, rewritten: RewrittenTurns) -> str | None:
    """Return what the chat template keeps of a conversation; None where there is no template."""
    if not model.tokenizer.has_chat_template:
        return None
    try:
        audit = audit_template(model.tokenizer)
    except ConfigError as error:
        return f"takes no second question: {error}"
    if rewritten is RewrittenTurns.REFUSE and not audit.keeps_turns:
        raise ConfigError(
            f"rollout.rewritten_turns = {str(rewritten)!r}: {audit.describe()}, so that no episode can have a second "
            f"turn: set it to {str(RewrittenTurns.FORK)!r} or {str(RewrittenTurns.APPEND)!r}"
        )
    return audit.describe()


def _training(settings: Settings) -> dict[str, Any]:
    """Return what decides the loss, a method's keys and single ones resolved."""
    if settings.rollout.mode is RolloutMode.SFT:
        counts = {"objective", "normalisation", "constant_length"}
        return {"method": None, "advantage": {}, "loss": settings.train.loss.model_dump(mode="json", include=counts)}
    function = settings.plugins.advantage
    advantage = settings.advantage.model_dump(mode="json") if function is None else {"function": function}
    train = settings.train
    return {"method": train.method, "advantage": advantage, "loss": train.loss.model_dump(mode="json")}


def _print_prompts(
    sources: Sequence[str], eval_sets: Sequence[EvalSet], found: Sequence[Overlap], tools: dict[str, Any] | None
) -> None:
    if tools is not None:
        shown = "shown by the chat template" if tools["shows_tools"] else "told in the first message"
        print(f"tools    {', '.join(tools['names'])}; {shown}, called as {tools['call_format']}")
    if sources:
        print(f"prompts  {', '.join(sources)}")
    if eval_sets:
        print(f"eval     {', '.join(map(_eval_text, eval_sets))}")
    for each in found:
        print(f"overlap  {each.describe()}")


def _print_training(settings: Settings, *, has_weights: bool) -> None:
    shown = [f"{key} = {value}" for key, value in flatten(_training(settings)).items() if value is not None]
    print(f"method   {', '.join(shown)}")
    if not has_weights:
        print("train    only rollfeed run: the model's weights are not here, and rollfeed train needs them")


class _Checked(NamedTuple):
    model: app.Model
    functions: app.Functions
    source: PromptSource | None = None
    limit: DataLimit | None = None
    reward: TriedReward | None = None

    @property
    def tools(self) -> dict[str, Any] | None:
        """Names of what the policy may call, and how its chat template has it call; None without tools."""
        box = self.functions.services.toolbox
        names = list(names_in(box.definitions))
        return {"names": names, **asdict(call_syntax(self.model.tokenizer, box.call_format))} if names else None


def _can_train(settings: Settings, model: app.Model) -> bool:
    """Whether the weights are here: servers answer without them, and a ``[train]`` is not in the way of that."""
    is_here = settings.engine.is_embedded or settings.train.checkpoint is not None or has_weights(model.checkpoint)
    return settings.trains and is_here


def _check_run(spec: RunSpec) -> _Checked:
    """Check what ``rollfeed run`` needs, and what ``rollfeed train`` needs where there is a ``[train]``."""
    settings, prepared = spec.settings, app.prepare(spec, starts=False)
    app.check_adaptive_environments(prepared.source, settings)
    if prepared.rows.runs_programs or settings.tools.runs_programs:
        asyncio.run(app.check_isolation(settings.reward.code))
    if settings.trains:
        check_training(settings)
        tell_of_correction(settings)
        if find_spec("matplotlib") is None:  # whether it fits is told when a training begins: it takes long to import
            warn_without_drawing()
        asyncio.run(app.prepare_warm_up(prepared))
    if _can_train(settings, prepared.model):
        start, _ = trained_checkpoints(settings, prepared.model.checkpoint)
        check_trained_model(settings, start)
        takes_pictures = prepared.model.pictures is not None
        check_trained_prompts(settings, prepared.dataset_prompts, start, takes_pictures=takes_pictures)
    tried = try_reward(prepared)
    return _Checked(prepared.model, prepared.functions, prepared.source, prepared.data_limit, tried)


def _check_engine(spec: RunSpec) -> _Checked:
    settings = spec.settings
    app.load_trackers(settings, folders=spec.folders)
    model = app.load_settings_model(settings, samples=False)
    if not (settings.engine.is_embedded and is_embeddable(model.checkpoint, settings.engine)):
        app.build_engine(model, settings.engine, deterministic=settings.rollout.deterministic, folders=spec.folders)
    return _Checked(model, app.load_functions(settings, folders=spec.folders))


def _eval_counts(eval_set: EvalSet) -> dict[str, int]:
    counted_too = ("num_missing", "num_repeats", "num_over_length")
    return {"num_prompts": len(eval_set.prompts), **{name: getattr(eval_set, name) for name in counted_too}}


def _eval_text(eval_set: EvalSet) -> str:
    counts = [counted(len(eval_set.prompts), "prompt")]
    if eval_set.num_missing:
        counts.append(f"{eval_set.num_missing} fewer than asked for: there are no more that differ")
    if eval_set.num_repeats:
        counts.append(f"{eval_set.num_repeats} repeats left out")
    return f"{eval_set.name} ({'; '.join(counts)})"
