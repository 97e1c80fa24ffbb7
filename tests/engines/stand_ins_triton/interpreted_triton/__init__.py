"""A backend of Triton by the name of ``cpu``, which compiles nothing: ``TRITON_INTERPRET=1`` has kernels interpreted.

vLLM asks for one before it takes its second model runner, which alone returns the experts of tokens.
"""


def register() -> None:
    """Have vLLM choose the likeliest tokens without Triton: that kernel loops as its interpreter cannot."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
