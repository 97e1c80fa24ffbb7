"""An agent that may be killed: started again it says what it said before, with the same keys, and prints its replies.

The arguments: address, key of the session, number, API, turns, whether it streams.
"""

import asyncio
import json
import sys

import aiohttp

from rollfeed.benchmarks.gateway.talks import Api, begin_talk

_RETRY_SECONDS, _TRIES = 0.1, 600
_BETWEEN_SECONDS = 0.05
"""Two turns, so that a kill may come in between."""


async def play(address: str, key: str, number: str, api: Api, num_turns: int, stream: bool) -> list[object]:
    talk, replies = begin_talk(api, "Read the parts.", f"Question {number}."), []
    async with aiohttp.ClientSession() as http:

        async def ask(turn: int) -> bytes:
            url, headers = f"{address}/v1/{api}", {"x-api-key": key, "Idempotency-Key": f"turn {turn}"}
            for _ in range(_TRIES):
                try:
                    async with http.post(url, json=talk.body(stream=stream), headers=headers) as reply:
                        if reply.status in (429, 503, 529):  # the one before is still being answered
                            await asyncio.sleep(_RETRY_SECONDS)
                            continue
                        assert reply.status == 200, await reply.text()
                        return await reply.read()
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                    await asyncio.sleep(_RETRY_SECONDS)
            raise TimeoutError(address)

        for turn in range(num_turns):
            reply = talk.read(await ask(turn), stream=stream)
            talk.take(reply, lambda arguments: f"Part {arguments['number']}.")
            replies.append(reply)
            await asyncio.sleep(_BETWEEN_SECONDS)
    return replies


if __name__ == "__main__":
    address, key, number, api, num_turns, stream = sys.argv[1:]
    print(json.dumps(asyncio.run(play(address, key, number, Api(api), int(num_turns), stream == "True"))))
