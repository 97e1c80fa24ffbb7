"""vLLM, and other servers that speak OpenAI's completions."""

from rollfeed.engine.dialects.vllm.vllm import VLLM

__all__ = ["VLLM"]
