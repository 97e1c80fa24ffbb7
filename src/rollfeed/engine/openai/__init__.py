"""A server with OpenAI's completions, vLLM above all, as an engine."""

from rollfeed.engine.openai.counters import Counters
from rollfeed.engine.openai.engine import OpenAIEngine

__all__ = ["Counters", "OpenAIEngine"]
