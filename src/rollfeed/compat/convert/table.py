"""Every flag of slime's and miles's command line, and what becomes of it: ``flags.txt``, a line a flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

_TEXTS = MappingProxyType(
    {
        "cluster": "GPUs and processes are not placed here: start SGLang servers and name them with "
        "--rollout-external-engine-addrs or --sglang-router-ip, or use the embedded engine",
        "servers": "name servers and routers in [engine.sglang], or have servers started by [engine.launch]",
        "megatron": "of slime's trainer on Megatron; [train] is a trainer of its own (docs/training.md)",
        "critic": "there is no critic",
        "replay": "train.routing_replay replays the engine's choices of experts, and no others; where trainer and "
        "engine differ, train.loss.correction weights tokens",
        "teacher": "a teacher scores the sampled tokens, and no others (docs/distillation.md)",
        "weights": "[weights] and engine.sglang.weights_transport bring weights to servers (docs/weights.md)",
        "store": "batches are handed over in memory and in the run directory",
        "gateway": "rollfeed serve gateway has the sessions of agents (docs/agents.md)",
        "lora": "[train.lora] is one adapter of peft, on the layers that the checkpoint has (docs/training.md)",
        "logging": "metrics are in metrics.jsonl (docs/metrics.md); [tracking] takes them elsewhere (docs/trackers.md)",
        "dumps": "every batch is in the run directory (docs/runs.md): rollfeed show and rollfeed lint read it",
        "replays": "a stored batch is read with rollfeed.store, not generated again",
        "tests": "a test or a measurement of slime's or miles's own processes",
        "zero": "",
    }
)
PREFIXES = MappingProxyType(
    {
        "sglang-": "an option of SGLang's server: give it to that when you start it",
        "eval-sglang-": "an option of SGLang's server: give it to that when you start it",
        "router-": "an option of SGLang's router: give it to that when you start it",
        "wandb-": _TEXTS["logging"],
        "mlflow-": _TEXTS["logging"],
        "dashboard-": _TEXTS["logging"],
        "lora-": _TEXTS["lora"],
        "ci-": _TEXTS["tests"],
        "dumper-": _TEXTS["tests"],
    }
)
"""Reasons for flags that the table does not name, by their beginning."""
UNKNOWN = "not a flag of slime's or miles's own: Megatron's, or of code of yours"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag; its name is without the dashes in front."""

    name: str
    of: str
    """Letters: s slime, m miles, g Megatron, e an earlier slime."""
    takes: str
    """What follows it: flag (nothing), bool (nothing; `--no-` turns it off), int, float, text, json, ints, texts,
    append (one text, more than once) or opt (a text or nothing).
    """
    default: str
    """As written on a command line; empty where there is none."""
    becomes: tuple[str, ...]
    """Settings; empty where it is not carried over."""
    is_direct: bool
    """Whether its value is that of the setting."""
    text: str
    """What is to be said: the reason, where it is not carried over."""
    section: str
    has_zero: bool = False
    """Whether 0 is off, and nothing is lost then."""


def _flags() -> Iterator[Flag]:
    section = ""
    for line in files(__package__).joinpath("flags.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and "|" not in line:
            section = line[2:]
        if not line.strip() or line.startswith("#"):
            continue
        name, of, takes, default, becomes, text = (part.strip() for part in line.split("|"))
        reason = becomes[1:] if becomes.startswith("@") else None
        targets = () if reason is not None or becomes == "-" else tuple(becomes.removeprefix("~").split(", "))
        yield Flag(
            name,
            of,
            takes,
            default,
            targets,
            is_direct=bool(targets) and not becomes.startswith("~"),
            text=" ".join(filter(None, [_TEXTS[reason] if reason else "", text])),
            section=section,
            has_zero=reason == "zero",
        )


FLAGS: Mapping[str, Flag] = MappingProxyType({flag.name: flag for flag in _flags()})
EVAL_FLAGS = tuple(flag for flag in FLAGS.values() if flag.becomes and flag.becomes[0].startswith("eval."))
"""Those that are keys of ``[eval]``."""
