"""An agent that knows nothing of rollfeed: OpenAI's client, and a tool."""

import json
import os
import sys

from openai import OpenAI

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds two whole numbers.", "parameters": NUMBERS}


def answer(arguments: str) -> str:
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) + int(numbers["b"]))
    except (KeyError, TypeError, ValueError):
        return "error: give two whole numbers, a and b"


client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are those of its session
messages = json.load(sys.stdin)["messages"]
tools = [{"type": "function", "function": ADD}]
for _ in range(3):
    reply = client.chat.completions.create(
        model=os.environ["ROLLFEED_MODEL"], messages=messages, tools=tools, max_tokens=64
    )
    message = reply.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        told = answer(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    if not message.tool_calls:
        break
