"""An agent that asks ``<search>...</search>`` and is told what is known.

``[plugins] generate = "slime:slime_search.generate"``
"""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

KNOWN = {"capital of France": "Paris", "capital of Peru": "Lima"}
QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)


def look_up(query: str) -> str:
    """Return what is known of a query."""
    return KNOWN.get(query.strip(), "nothing found")


async def generate(args, sample: Sample, sampling_params: dict, evaluation: bool = False) -> Sample:
    """Let the policy speak and search in turn, at most ``args.max_turns`` times."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if not sample.tokens:
        sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for _ in range(args.max_turns):
        budget = args.rollout_max_response_len - sample.response_length
        if budget <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": {**sampling_params, "max_new_tokens": budget, "stop": ["</search>"]},
            "return_logprob": True,
        }
        output = await post(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, _ in pairs],
            log_probs=[value for value, _, _ in pairs],
            trainable=True,
            meta_info=output["meta_info"],
            text=output["text"],
        )
        queries = QUERY.findall(sample.response)
        if sample.status != Sample.Status.COMPLETED or not output["text"].rstrip().endswith("</search>"):
            break
        told = f"<information>{look_up(queries[-1])}</information>"
        ids = state.tokenizer(told, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=told)
    return sample
