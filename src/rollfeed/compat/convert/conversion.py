"""From a script or flags of slime's to a settings file of ours, and the list of what it does not carry over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfeed.compat.convert.draft import Draft
from rollfeed.compat.convert.given import Flags, wrong
from rollfeed.compat.convert.rollout_rules import apply_rules, read_custom_config
from rollfeed.compat.convert.shell_scripts import read_script
from rollfeed.compat.convert.table import FLAGS
from rollfeed.compat.convert.toml_text import Setting, nested, settings_text
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError

_WITHOUT_PROMPTS = {"environments": [{"id": "core/add_numbers"}]}
_IN_SFT = (
    *("sampling.return_sampling_mask", "prompts.rollout_max_prompt_len", "plugins.prompt_source", "plugins.generate"),
    *(
        "plugins.rollout",
        "plugins.group_filters",
        "plugins.batch_filter",
        "plugins.advantage",
        "filters.",
        "advantage.",
    ),
)
_FIRST = ("seed", "model", "prompts", "rollout", "buffer", "sampling", "engine", "reward", "filters", "plugins")


@dataclass(frozen=True, slots=True)
class Left:
    """A flag, or a key of a file, that is not carried over."""

    what: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where + ': ' if self.where else ''}{self.what}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Converted:
    """A settings file."""

    settings: Mapping[str, Setting]
    """By dotted key."""
    carried: Mapping[str, tuple[str, ...]]
    """Names of flags that were given, with the keys that they became."""
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    """What could not be told, or is otherwise than it looks."""
    source: str

    @property
    def tree(self) -> dict[str, Any]:
        """The settings as nested dictionaries."""
        return nested(self.settings)

    def text(self) -> str:
        """Return the file, with what is not carried over as comments at its end."""
        parts = [f"# Converted from {self.source}.\n\n{settings_text(self.settings)}"]
        for title, lines in (("Not carried over", list(map(str, self.left))), ("To be looked at", list(self.notes))):
            if lines:
                parts.append("\n".join([f"# {title}:", *(f"#   {line}" for line in lines)]) + "\n")
        return "\n".join(parts)


def convert_script(text: str, *, source: str, folder: Path | None = None) -> Converted:
    """Convert a shell script, or flags as on a command line.

    ``source`` names it in errors and in the file; ``folder`` is where it lies, None for flags.

    Raises:
        ConfigError: If a flag is wrong, or flags contradict each other; the line names flag, file and line.
    """
    script = read_script(text, source=source, folder=folder)
    flags = Flags(script.words, in_file=folder is not None)
    draft = Draft(flags, runs_async=script.runs_async, folder=folder)
    read_custom_config(draft)
    _contradictions(flags)
    apply_rules(draft)
    for name, given in flags.items():
        if not FLAGS[name].is_direct or name in draft.left:
            continue
        (key,) = FLAGS[name].becomes
        if key.startswith("train.") and flags.value("debug-rollout-only"):
            draft.leave(name, "with --debug-rollout-only nothing is trained")
        else:
            draft.put(key, given.value, name)
    if draft.mode == "sft":
        _leave_sampling(draft)
    ordered = dict(sorted(draft.settings.items(), key=_place))
    _check(ordered, flags)
    carried = {name: _keys_of(name, ordered) for name in flags}
    left = tuple(_left(flags, draft, carried))
    notes = (*flags.notes, *script.notes, *draft.notes, *_missing(flags))
    return Converted(ordered, {name: keys for name, keys in carried.items() if keys}, left, notes, source)


def _left(flags: Flags, draft: Draft, carried: Mapping[str, tuple[str, ...]]) -> Iterator[Left]:
    for name, given in flags.items():
        flag = FLAGS[name]
        if name in draft.left:
            yield Left(str(given), given.where, draft.left[name])
        elif not carried[name]:
            is_off = not given.value or str(given.value) == flag.default
            off = (
                "as it is here"
                if is_off and flag.becomes
                else "0 is what happens here"
                if is_off and flag.has_zero
                else ""
            )
            yield Left(str(given), given.where, off or flag.text or "nothing depends on it with these flags")
    yield from (Left(str(given), given.where, reason) for given, reason in flags.others)
    yield from (Left(what, "", reason) for what, reason in draft.left_keys)


def _keys_of(name: str, settings: Mapping[str, Setting]) -> tuple[str, ...]:
    return tuple(key for key, setting in settings.items() if name in setting.flags)


def _place(item: tuple[str, Setting]) -> tuple[int, str, bool, list[tuple[int, str]]]:
    """Sort keys by table, a table's own keys before those of tables in it."""
    parts = item[0].split(".")
    first = _FIRST.index(parts[0]) if parts[0] in _FIRST else len(_FIRST)
    table = ".".join(parts[:-1])
    return (
        first,
        parts[0],
        len(parts) > 2,
        [(int(part), "") if part.isdigit() else (-1, part) for part in table.split(".")],
    )


def _leave_sampling(draft: Draft) -> None:
    for key in [key for key in draft.settings if key.startswith(_IN_SFT)]:
        del draft.settings[key]
    for name, flag in FLAGS.items():
        is_open = name in draft.flags and name not in draft.left and not _keys_of(name, draft.settings)
        if is_open and any(key.startswith(_IN_SFT) for key in flag.becomes):
            draft.leave(name, "in `sft` mode nothing is sampled")


def _missing(flags: Flags) -> Iterator[str]:
    if "rollout-batch-size" not in flags:
        yield "--rollout-batch-size is not given: rollout.rollout_batch_size is 4"
    if "num-rollout" not in flags and "num-epoch" not in flags:
        yield "neither --num-rollout nor --num-epoch is given: rollout.num_rollout is 10"
    if "rollout-max-response-len" not in flags and flags.value("loss-type") != "sft_loss":
        yield "--rollout-max-response-len is not given: sampling.rollout_max_response_len is 128"


def _check(settings: Mapping[str, Setting], flags: Flags) -> None:
    """Refuse what no settings file may have, by the flag that it comes from."""
    tree = nested(settings)
    prompts = tree.get("prompts", {})
    if not (prompts.get("datasets") or prompts.get("adaptive") or tree.get("plugins", {}).get("prompt_source")):
        tree["prompts"] = {**prompts, **_WITHOUT_PROMPTS}
    try:
        validate_settings(tree, where="")
    except ConfigError as error:
        lines = [_told(line.removeprefix(": "), settings, flags) for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from None


def _told(problem: str, settings: Mapping[str, Setting], flags: Flags) -> str:
    key = max((key for key in settings if key in problem), key=len, default=None)
    if key is None:
        key = next((key for key in settings if key.rpartition(".")[2] in problem), None)
    origin, names = ("", ()) if key is None else (settings[key].origin, settings[key].flags)
    where = next((f"{flags[name].where}: " for name in names if name != "eval-config" and flags[name].where), "")
    return f"{where}{origin}: {problem}" if origin else problem


Value = Callable[[str], Any]


def _contradictions(flags: Flags) -> None:
    """Refuse flags that say opposite things."""
    of = flags.value
    batch, n = of("rollout-batch-size"), of("n-samples-per-prompt")
    for name, is_wrong, problem in _CONTRADICTIONS:
        if name in flags and is_wrong(of):
            raise wrong(flags[name], problem)
    steps, size = of("num-steps-per-rollout"), of("global-batch-size")
    for name in ("num-steps-per-rollout", "global-batch-size"):
        if of(name) is not None and of(name) < 1:
            raise wrong(flags[name], "must be at least 1")
    if batch is not None and steps is not None and size is not None and size != batch * n // steps:
        raise wrong(
            flags["global-batch-size"],
            f"{batch} x {n} answers in --num-steps-per-rollout {steps} are {batch * n // steps}: remove one of them",
        )
    submitted = of("over-sampling-batch-size")
    if submitted is not None and batch is not None and submitted < batch:
        problem = f"is below --rollout-batch-size {batch}: raise it, or leave it out"
        raise wrong(flags["over-sampling-batch-size"], problem)


def _both(one: str, other: str) -> Callable[[Value], bool]:
    return lambda of: bool(of(one)) and bool(of(other))


def _fills_context(name: str) -> Callable[[Value], bool]:
    return lambda of: of("rollout-max-context-len") is not None and of(name) >= of("rollout-max-context-len")


_CONTRADICTIONS: tuple[tuple[str, Callable[[Value], bool], str], ...] = (
    ("rollout-temperature", lambda of: of("rollout-temperature") <= 0, "must be above 0: a greedy policy cannot learn"),
    ("debug-train-only", _both("debug-train-only", "debug-rollout-only"), "and --debug-rollout-only: remove one"),
    (
        "rollout-max-prompt-len",
        _fills_context("rollout-max-prompt-len"),
        "leaves no room for a response in --rollout-max-context-len: lower it",
    ),
    (
        "rollout-max-response-len",
        _fills_context("rollout-max-response-len"),
        "leaves no room for a prompt in --rollout-max-context-len: lower it",
    ),
    ("kl-coef", _both("kl-coef", "kl-loss-coef"), "and --kl-loss-coef: set one of them"),
    (
        "use-tis",
        lambda of: of("use-tis") and of("use-rollout-logprobs") and of("pg-loss-type") != "reinforce",
        "and --use-rollout-logprobs correct the same thing: remove one",
    ),
    ("fully-async", _both("fully-async", "partial-rollout"), "lets groups go on anyway: remove --partial-rollout"),
    ("fully-async", _both("fully-async", "rollout-function-path"), "and --rollout-function-path: remove one"),
    (
        "pause-generation-mode",
        lambda of: of("fully-async") and of("pause-generation-mode") == "abort",
        "would end all that --fully-async has in flight: write retract or in_place",
    ),
    ("partial-rollout", _both("partial-rollout", "use-session-server"), "and --use-session-server: remove one"),
    (
        "flush-cache-interval",
        lambda of: of("flush-cache-interval") != 1 and of("colocate"),
        "and --colocate: remove one",
    ),
    (
        "freeze-params-name-list",
        _both("only-train-params-name-list", "freeze-params-name-list"),
        "and --only-train-params-name-list: remove one",
    ),
    ("prefill-num-servers", _both("sglang-config", "prefill-num-servers"), "and --sglang-config: remove one"),
    (
        "sglang-config",
        _both("sglang-config", "rollout-external-engine-addrs"),
        "and --rollout-external-engine-addrs: remove one",
    ),
)
"""Flags that slime or miles refuse together: the flag that is named, when, and what is wrong with it."""
