"""An HTTP verifier: ``{"predictions", "answers"}`` in, ``{"reward"}`` out.

``[plugins] reward = "slime:slime_verifier.verify"``
"""

from slime.utils.http_utils import post
from slime.utils.types import Sample


async def verify(args, sample: Sample, **kwargs) -> float:
    """Ask the server at ``rm_url`` about one answer."""
    reply = await post(args.rm_url, {"predictions": sample.response, "answers": str(sample.label)}, max_retries=3)
    return float(reply["reward"])


async def verify_group(args, samples: list[Sample], **kwargs) -> list[float]:
    """Ask once for a whole group."""
    payload = {
        "predictions": [sample.response for sample in samples],
        "answers": [str(sample.label) for sample in samples],
    }
    reply = await post(args.rm_url, payload, max_retries=3)
    return [float(reward) for reward in reply["reward"]]
