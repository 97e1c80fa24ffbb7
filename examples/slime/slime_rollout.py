"""An asynchronous rollout function that gives aborted groups back to the buffer.

``[plugins] rollout = "slime:slime_rollout.generate_rollout"``
"""

import asyncio

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.sglang_rollout import GenerateState, abort
from slime.utils.async_utils import run
from slime.utils.misc import load_function


async def generate_rollout_async(args, rollout_id, data_source):
    """Submit groups until the batch is full, and abort the rest."""
    state, gatherer = GenerateState(args), MetricGatherer()
    path = args.dynamic_sampling_filter_path
    dynamic_filter = None if path is None else load_function(path)
    data = []
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            decision = call_dynamic_filter(dynamic_filter, args, group)
            if not decision.keep:
                gatherer.on_dynamic_filter_drop(decision.reason)
                state.remaining_batch_size -= 1
            elif len(data) < args.rollout_batch_size:
                data.append(group)
    aborted = await abort(args, rollout_id)
    state.reset()
    data.sort(key=lambda group: group[0].index)
    return RolloutFnTrainOutput(samples=data, metrics=gatherer.collect()), aborted


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """Make one step; what was aborted goes back to the buffer."""
    output, aborted = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    data_source.add_samples(aborted)
    return output
