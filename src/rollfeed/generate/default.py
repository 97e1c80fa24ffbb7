"""The default generate function: one question, one answer, unless an environment or tools take more turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollfeed.generate.calling import may_call
from rollfeed.generate.multi_turn import multi_turn
from rollfeed.protocols import MULTI_TURN, RolloutRequest, Services
from rollfeed.sample_builder import STATUS_OF, SampleBuilder
from rollfeed.types import Sample, SampleStatus


async def default_generate(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    """Answer the prompt once, or resume what an aborted execution left.

    A response that has no budget left is TRUNCATED without a call to the engine. Where the prompt's environment or
    tools take several turns, :func:`multi_turn` answers.
    """
    if request.prompt.metadata.get(MULTI_TURN) or may_call(request.prompt, services):
        return await multi_turn(request, services=services)
    builder = SampleBuilder(request)
    budget, resumed_at = builder.remaining_budget, builder.response_length
    if budget == 0:
        response = request.partial.response if request.partial is not None else ""
        return [builder.build(SampleStatus.TRUNCATED, response=response)]
    params = request.params
    if resumed_at or budget < max(params.max_new_tokens, params.min_new_tokens):
        min_new_tokens = min(budget, max(0, params.min_new_tokens - resumed_at))
        params = replace(params, max_new_tokens=budget, min_new_tokens=min_new_tokens)
    completion = await services.endpoint.generate(
        builder.token_ids,
        params,
        request_id=f"step{request.step}-rollout{request.rollout_id}",
        images=request.prompt.images,
    )
    builder.append_completion(completion)
    response = completion.text
    if resumed_at:
        # A character may be split between the two executions, so the two texts cannot simply be joined.
        response_ids = builder.token_ids[len(request.prompt.token_ids) :]
        response = services.tokenizer.decode(response_ids, skip_special_tokens=params.skip_special_tokens)
    return [builder.build(STATUS_OF[completion.finish_reason.kind], response=response)]
