"""Whether a prompt that several responses share may be computed once for all of them, in a row with branches.

Places in such a row are no distances: a window, a recurrence or a bias that goes by the place sees something else there
than in a sequence alone. So it is tried: sequences are packed as training packs them, and scored both ways. A window is
found if the rows of the trial are longer than it; they are as long as rows with branches become, as far as the time
allows, and behind that only the configuration tells.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollfeed.config.train import TrainKind, TrainSettings
from rollfeed.errors import CheckpointError
from rollfeed.model_files.trees import attend_in_blocks
from rollfeed.model_files.trial import longest_text, refusal_of_model
from rollfeed.training.model import Policy
from rollfeed.training.packing import LONGEST_TREE, TrainSequence, pack_sequences

logger = logging.getLogger(__name__)

_BRANCH_LENGTHS = (9, 13)
_SHORTEST = 64
"""Places of the shorter trial's row; windows of tiny models are shorter."""
_MOST_OPERATIONS = 5e10
"""Of the longer trial on a CPU, where that is a second."""
_TOLERANCE = 1e-5
"""Between log-probabilities, for the largest of them."""
_WINDOW = re.compile(r"window|attention_chunk|attn_chunk|local_attention|index_topk|indexer_budget")
_NO_WINDOW = re.compile(r"layers|pattern|dropout")
_FULL = "full_attention"


def longest_tree(policy: Policy, reference: Policy | None = None, *, checkpoint: Path, settings: TrainSettings) -> int:
    """Return the most places of a row with branches; 0 where prompts are not shared, which is said.

    Models that can be asked to attend in blocks are, and so is the reference: such rows are then as long as a
    micro-batch.

    Raises:
        CheckpointError: If the model cannot be trained on sampled tokens at all.
    """
    if settings.kind is TrainKind.REWARD_MODEL:  # whose pairs are rows of their own
        return 0
    refusal = refusal_of_model(policy.model, generates=False)
    if refusal is not None:
        raise CheckpointError(f"{checkpoint}: not a model to train on what was sampled: {refusal}")
    if not settings.share_prompts:
        return 0
    longest = min(settings.micro_batch_tokens, longest_text(policy.model) or settings.micro_batch_tokens)
    # Compiled layers would be compiled again for each layout of branches.
    is_worth_it = longest > LONGEST_TREE or policy.device.type == "cpu"
    if is_worth_it and policy.pictures is None and not settings.compile:
        policies = [each for each in (policy, reference) if each is not None]
        for each in policies:
            each.attends_in_blocks = attend_in_blocks(each.model)
        if all(each.attends_in_blocks for each in policies) and refusal_to_share(policy, longest=longest) is None:
            return longest
        for each in policies:
            each.attends_in_blocks = False
    longest = min(LONGEST_TREE, longest)
    reason = refusal_to_share(policy, longest=longest)
    if reason is not None:
        logger.info("%s: prompts are computed once for each response (train.share_prompts): %s", checkpoint, reason)
        return 0
    return longest


def may_share_pictures(policy: Policy, sequences: Sequence[TrainSequence], *, longest: int, name: Path) -> bool:
    """Return whether prompts with pictures can be shared, too, in rows of up to ``longest`` places; what not is said.

    It is tried with two of the sequences that have one prompt; False where there are none, or ``longest`` is 0. Models
    whose positions depend on pictures, or in which tokens of a picture see each other, say something else then.
    """
    first_of: dict[tuple[bytes, tuple[str, ...]], TrainSequence] = {}
    for sequence in sequences if longest else ():
        seen, prompt = sequence.pictures, sequence.token_ids[: sequence.prompt_length].tobytes()
        if not seen.pictures or seen.before(sequence.prompt_length) != seen:
            continue
        other = first_of.setdefault((prompt, seen.content_hashes), sequence)
        length = other.num_inputs + sequence.num_inputs - sequence.prompt_length
        if other is sequence or length > longest:
            continue
        pair = [replace(each, family=0, sequence_id=number) for number, each in enumerate((other, sequence))]
        if not _differ(policy, pair, length):
            return True
        logger.info("%s: prompts with pictures are computed once for each response (train.share_prompts)", name)
        return False
    return False


def refusal_to_share(policy: Policy, *, longest: int) -> str | None:
    """Return why prompts cannot be shared in rows of up to ``longest`` places; None where they can."""
    model = policy.model
    config = model.config.get_text_config(decoder=True).to_dict()
    window = next((each for each in _windows(config) if each[1] < longest), None)
    if window is not None:
        return f"its attention is local ({window[0]} = {window[1]})"
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    affordable = longest if policy.device.type != "cpu" else int(_MOST_OPERATIONS / (6 * num_parameters))
    for length in sorted({min(_SHORTEST, longest), min(max(affordable, _SHORTEST), longest)}):
        try:
            differs = _differs(policy, length)
        except Exception as error:  # a model that does not take such rows says so in a way of its own
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return f"it does not take rows with branches ({reason})"
        if differs:
            return "in a row with branches it says something else of a response than alone"
    return None


def _windows(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield what a configuration bounds the reach of attention by, by name."""
    layer_types = config.get("layer_types")
    if (layer_types and set(layer_types) == {_FULL}) or config.get("use_sliding_window") is False:
        return
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _windows(value)
        elif _WINDOW.search(str(name)) and not _NO_WINDOW.search(name) and type(value) is int and value > 0:
            yield name, value


def _differs(policy: Policy, length: int) -> bool:
    """Return whether a row of ``length`` places with two branches gives other values than its two sequences."""
    branch_lengths = [min(branch_length, length // 3) for branch_length in _BRANCH_LENGTHS]
    prompt_length = length - sum(branch_lengths)
    prompt_P = np.arange(prompt_length) * 7 + 11
    sequences = []
    for number, branch_length in enumerate(branch_lengths):
        token_ids = np.concatenate([prompt_P, np.arange(branch_length + 1) * (5 + number) + 3]) % policy.vocab_size
        ids = token_ids.astype(np.int32)
        sequences.append(TrainSequence.of_tokens(ids, prompt_length=prompt_length, number=number, family=0))
    return _differ(policy, sequences, length)


def _differ(policy: Policy, sequences: list[TrainSequence], length: int) -> bool:
    """Return whether sequences of one prompt are scored otherwise in a row of ``length`` places than alone."""
    shared, alone = (_scored(policy, sequences, length, share_prompts=share) for share in (True, False))
    scale = max(1.0, float(alone.abs().max()))
    # Not "greater than": what is not a number differs too.
    return not bool(((shared - alone).abs() <= _TOLERANCE * scale).all())


def _scored(policy: Policy, sequences: list[TrainSequence], length: int, *, share_prompts: bool) -> torch.Tensor:
    """Return log-probabilities and entropies of all trained tokens, in the order of the sequences."""
    micro_batches = pack_sequences(
        sequences,
        [sequence.mask_T for sequence in sequences],
        micro_batch_tokens=max(length, *(sequence.num_inputs for sequence in sequences)),
        share_prompts=share_prompts,
        longest_tree=length,
    )
    found = policy.score_each(micro_batches, temperature=1.0, exact=True)
    return torch.cat([each.float() for number in sorted(found) for each in found[number][:2]])
