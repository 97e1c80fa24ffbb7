"""A solver, a critic and a second solver: each speaks in a sample of its own.

``[plugins] generate = "slime:slime_agents.generate"``
"""

import copy

from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def speak(args, sample: Sample, prompt: str, sampling_params: dict) -> Sample:
    """Have the policy answer a prompt in a new sample."""
    said = copy.deepcopy(sample)
    ids = GenerateState(args).tokenizer(prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args, "default"), payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    said.tokens = ids + [token for _, token, _ in pairs]
    said.rollout_log_probs = [value for value, _, _ in pairs]
    said.response_length, said.response = len(pairs), output["text"]
    said.update_from_meta_info(args, output["meta_info"])
    return said


async def generate(args, sample: Sample, sampling_params: dict) -> list[Sample]:
    """Return what all three said; they share the reward of the last."""
    solved = await speak(args, sample, sample.prompt, sampling_params)
    if solved.status == Sample.Status.ABORTED:
        return solved
    criticised = await speak(args, sample, f"Is it right? {sample.prompt}{solved.response}", sampling_params)
    again = f"{sample.prompt}{solved.response}\n{criticised.response}\nOnce more: {sample.prompt}"
    return [solved, criticised, await speak(args, sample, again, sampling_params)]
