"""An agent of openai-agents with a tool. The arguments: chat or responses, whole or stream, tokens of an answer."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def main(form: str, way: str, max_tokens: str = "1000") -> None:
    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if form == "chat" else OpenAIResponsesModel
    model = kind(model="policy", openai_client=AsyncOpenAI())
    settings = ModelSettings(max_tokens=int(max_tokens))
    agent = Agent(name="adder", instructions="Add with the tool.", model=model, tools=[add], model_settings=settings)
    if way == "stream":
        result = Runner.run_streamed(agent, "17 + 25 + 3?", max_turns=4)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "17 + 25 + 3?", max_turns=4)
    print(result.final_output)


asyncio.run(main(*sys.argv[1:]))
