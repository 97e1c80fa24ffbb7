"""An agent that knows nothing of rollfeed: Anthropic's client, streamed. It has its answer looked over."""

from anthropic import AsyncAnthropic


async def play(task) -> None:
    client = AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    messages = [{"role": "user", "content": task.text}]
    for review in ("Look at the question again, and answer it in the same form.", None):
        async with client.messages.stream(model=task.model, max_tokens=64, messages=messages) as events:
            reply = await events.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        if review is not None:
            messages.append({"role": "user", "content": review})
    await client.close()
