"""The generate function that samples nothing: the answer of the row is the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollfeed.conversations import LossMaskType, answered_prompt
from rollfeed.conversations.pairs import PAIR, paired_answers
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.sample_builder import SampleBuilder
from rollfeed.types import Sample, SampleStatus


async def given_answer(request: RolloutRequest, *, services: Services, mask_type: LossMaskType) -> Sequence[Sample]:
    """Return what a data set says to the prompt, from the first token that is learned on; its reward is 0.

    Of a prompt with a pair of answers the first rollout is the preferred one, with a reward of 1, the second the other.

    Nobody has sampled it, so log-probabilities are 0.0; it carries the policy's present version.

    Raises:
        ConfigError: As :func:`rollfeed.conversations.answered_prompt`.
        DataError: As there.
    """
    tokenizer, reward = services.tokenizer, 0.0
    if PAIR in request.prompt.metadata:
        reward = 1.0 - request.index % 2
        shown = paired_answers(request.prompt, tokenizer=tokenizer)[request.index % 2]
    else:
        shown = answered_prompt(request.prompt, tokenizer=tokenizer, mask_type=mask_type)
    builder = SampleBuilder(replace(request, partial=None))
    version = services.endpoint.policy_version
    builder.append_inserted(shown.response_ids, policy_version=version, loss_mask=shown.response_mask)
    text = tokenizer.decode(shown.response_ids, skip_special_tokens=request.params.skip_special_tokens)
    return [replace(builder.build(SampleStatus.COMPLETED, response=text), reward=reward)]
