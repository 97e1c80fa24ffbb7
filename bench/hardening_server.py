"""Random bodies at every route of the engine server, beside clients that leave, abort, and send half a request.

    python bench/hardening_server.py --bodies 100000 --output bench/hardening_server.json

The server is a process of its own with the tiny model. It must be alive in the end, answer a question as it did in the
beginning, bit for bit, have answered nothing with 500, and have the memory that it had after the first tenth.
Exit code 1 if not.

Its memory is told apart: what the allocator has given out, what it keeps, and the objects of Python. What the allocator
kept is seen once more when it has given back what it can, and is next to nothing with ``MALLOC_ARENA_MAX=1`` in the
environment: its arenas are one a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from rollfeed.base.serving import check_structure
from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint

NUM_CLIENTS = 12
NUM_HALF_SENT = 40
MOST_GROWTH_BYTES = 24 << 20
"""From the first tenth to the end; a byte kept of every body would be more than that with long ones."""
_TELLING = """
import ctypes, gc, json, signal, sys
from rollfeed.cli.main import entry_point

class Held(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("main", "_1", "_2", "_3", "mapped", "_4", "_5", "given_out", "kept", "_6")]

def tell(number, _):
    gc.collect()
    if number == signal.SIGUSR2:
        libc.malloc_trim(0)
    held = libc.mallinfo2()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    rss, files = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "RssFile"))
    sizes = {"rss_mb": rss, "of_it_files_mb": files}
    sizes |= {"malloc_mb": held.given_out + held.mapped, "malloc_kept_mb": held.kept}
    told = {name: round(size / 2**20, 1) for name, size in sizes.items()}
    print("memory " + json.dumps({**told, "python_objects": sys.getallocatedblocks()}), file=sys.stderr, flush=True)

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Held
signal.signal(signal.SIGUSR1, tell)
signal.signal(signal.SIGUSR2, tell)
entry_point()
"""
"""The command line, in a process that tells of its memory when it is asked by a signal."""
CONTEXT_LENGTH = 128

EDGES = [sign * 2**power + more for power in (31, 53, 63, 64, 70) for sign in (1, -1) for more in (-1, 0, 1)]
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2**40,
    10**30,
    0.5,
    -3.5,
    1e300,
    1e-320,
    "",
    "x",
    "\x00",
    "<|im_end|>",
]
ODD += [
    "é\U0001f600" * 25,
    "a" * 3000,
    [],
    [1],
    ["x"],
    [[]],
    [None],
    [True],
    [1, "x"],
    [[1, 2], [3]],
    {},
    {"x": 1},
    [{}],
]
ODD += [[{"max_new_tokens": 1}]]
SAMPLING = [
    *("max_new_tokens", "n", "temperature", "top_p", "top_k", "min_new_tokens", "repetition_penalty", "min_p", "stop"),
    *("stop_token_ids", "sampling_seed", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias", "regex"),
]
GENERATE = [
    *(
        "input_ids",
        "text",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "rid",
        "stream",
    ),
    *("image_data", "lora_path", "return_sampling_mask"),
]
CHAT = [
    *("model", "messages", "input", "instructions", "system", "tools", "tool_choice", "thinking", "thread", "prompt"),
    *(
        "max_tokens",
        "max_output_tokens",
        "min_tokens",
        "n",
        "stop",
        "stop_sequences",
        "stream",
        "stream_options",
        "text",
    ),
    *("include", "reasoning", "seed", "rid", "previous_response_id", "parallel_tool_calls", "output_config", "store"),
    *("metadata", "chat_template_kwargs", "logprobs", "top_logprobs", "echo", "response_format", "temperature"),
]
PART = [
    *("type", "role", "content", "text", "tool_calls", "call_id", "name", "arguments", "input", "output"),
    "tool_use_id",
]
TOOL = ["type", "name", "function", "parameters", "input_schema", "description", "format", "tools"]
KINDS = [
    *("message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "tool_use", "tool_result"),
    *("thinking", "text", "input_text", "image", "function", "custom", "namespace"),
]
CONTROL = [
    *("rid", "abort_all", "mode", "new_version", "name", "truncate_size", "abort_all_requests", "flush_cache", "path"),
    *("model_path", "weight_version", "serialized_named_tensors", "load_format", "group_name", "names", "dtypes"),
    *("shapes", "master_address", "backend", "world_size", "rank_offset"),
]
ROUTES = {
    "/generate": 30,
    "/v1/completions": 10,
    "/v1/chat/completions": 10,
    "/v1/responses": 8,
    "/v1/messages": 8,
    "/v1/messages/count_tokens": 3,
    **dict.fromkeys(["/abort_request", "/pause_generation", "/continue_generation", "/flush_cache"], 2),
    **dict.fromkeys(["/update_weights_from_disk", "/update_weight_version", "/get_weights_by_name"], 2),
    **dict.fromkeys(["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"], 2),
    **dict.fromkeys(["/update_weights_from_distributed", "/destroy_weights_update_group"], 1),
    "/prepare_weights_from_delta": 1,
    "/no/such/route": 1,
}
"""And how often each is asked."""
USUAL: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/responses": {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 3},
}
CHATS = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
QUESTION = {"input_ids": list(range(5, 25)), "sampling_params": {"max_new_tokens": 12, "temperature": 0.0}}
QUESTION |= {"return_logprob": True}


def odd(random: Random) -> Any:
    choice = random.random()
    if choice < 0.6:
        return random.choice(ODD)
    return random.choice(EDGES) if choice < 0.9 else random.uniform(-1, 1) * 10 ** random.randrange(-320, 308)


def some(random: Random, names: list[str], most: int = 3) -> dict[str, Any]:
    return {name: odd(random) for name in random.sample(names, random.randrange(1, most + 1))}


def body_of(random: Random, path: str) -> bytes:
    """Return a body that is nearly right, or bytes that are no JSON."""
    if path == "/generate":
        body = json.loads(json.dumps(USUAL[path]))
        body["sampling_params"] |= some(random, SAMPLING, 2) if random.random() < 0.6 else {}
        body |= some(random, GENERATE, 2) if random.random() < 0.3 else {}
    elif path.startswith("/v1/"):
        body = {**USUAL.get(path, CHATS), **(some(random, CHAT + SAMPLING, 2) if random.random() < 0.7 else {})}
        if random.random() < 0.3:
            part = {"type": random.choice(KINDS), "role": "user", **some(random, PART)}
            messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}, part]
            body["messages"] = body["input"] = random.sample(messages, 2)
        if random.random() < 0.2:
            body["tools"] = [{"type": random.choice(KINDS), **some(random, TOOL)}]
    else:
        body = some(random, CONTROL)
    content = json.dumps(body).encode()
    choice = random.random()
    if choice < 0.05:
        return content[: random.randrange(len(content))]
    if choice < 0.1:
        place = random.randrange(len(content))
        return content[:place] + random.randbytes(random.randrange(1, 9)) + content[place:]
    return content


class Server:
    """An engine server in a process, what it has answered, and what it has logged."""

    def __init__(
        self, process: asyncio.subprocess.Process, address: str, session: aiohttp.ClientSession, model: Path
    ) -> None:
        self.model = model
        self.process = process
        self.address = address
        self.session = session
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        """Of weights out of the model's folder."""
        self.log: list[str] = []
        self._memory: asyncio.Queue[dict[str, float]] = asyncio.Queue()

    async def read_log(self) -> None:
        """Take what it logs until it ends."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if line.startswith(b"memory "):
                self._memory.put_nowait(json.loads(line[7:]))
            else:
                self.log.append(line.decode(errors="replace"))

    async def memory(self, *, is_trimmed: bool = False) -> dict[str, float]:
        """Return the memory that its process has, and what for; ``is_trimmed`` has the allocator give back first."""
        self.process.send_signal(signal.SIGUSR2 if is_trimmed else signal.SIGUSR1)
        return await asyncio.wait_for(self._memory.get(), 60)

    async def post(self, path: str, body: bytes, *, leaves_after: float = math.inf) -> bytes:
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=min(leaves_after, 300.0))
        try:
            async with self.session.post(self.address + path, data=body, headers=headers, timeout=timeout) as reply:
                content = await reply.read()
                self.statuses[str(reply.status)] += 1
                if reply.status >= 500:
                    self.failures.append(f"{path} {body[:300]!r}: {reply.status} {content[:200]!r}")
                return content
        except TimeoutError:
            if leaves_after == math.inf:
                raise
            self.statuses["left"] += 1
            return b""

    async def answer(self) -> Any:
        """Return what it says to the question, with the weights that it began with."""
        await self.post("/end_weight_update", b"{}")
        await self.post("/continue_generation", b"{}")
        reply = json.loads(await self.post("/generate", json.dumps(QUESTION).encode()))
        return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]


@asynccontextmanager
async def serving(model: Path) -> AsyncIterator[Server]:
    command = ["-c", _TELLING, "serve", "engine", "--model", str(model), "--port", "0", "--threads", "1"]
    command += ["--num-slots", "8", "--context-length", str(CONTEXT_LENGTH), "--max-waiting", "64"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    line = ""
    while not line.startswith("serving "):
        line = (await process.stderr.readline()).decode()
        assert line, "it ended before it served"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        server = Server(process, line.split()[-1], session, model)
        reading = asyncio.create_task(server.read_log())
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await reading
            await process.wait()


def decoding_seconds() -> dict[str, float]:
    """Return what bodies at the bounds take of a core while they are decoded, when the loop waits: the best of five."""
    many = (1 << 18) - 1
    object_of_8 = json.dumps(dict.fromkeys("abcdefgh", 1)).encode()
    bodies = {
        "262,144 lists": b"[%b]" % b",".join([b"[]"] * many),
        "262,144 objects of a number": b"[%b]" % b",".join([b'{"a":1}'] * many),
        "262,144 objects of eight numbers": b"[%b]" % b",".join([object_of_8] * many),
        "two million texts": b"[%b]" % b",".join([b'"a"'] * ((1 << 21) - 1)),
        "ten million numbers": b"[%b]" % b",".join([b"12"] * 10_000_000),
    }
    found = {}
    for name, body in bodies.items():
        check_structure(body)
        tries = []
        for _ in range(5):
            started = time.process_time()
            msgspec.json.decode(body)
            tries.append(time.process_time() - started)
        found[name] = round(min(tries), 3)
    return found


async def client(server: Server, random: Random, left: list[int]) -> None:
    paths, weights = list(ROUTES), list(ROUTES.values())
    while left[0] > 0:
        left[0] -= 1
        (path,) = random.choices(paths, weights)
        body = body_of(random, path)
        if path == "/update_weights_from_disk" and random.random() < 0.5:  # the same weights under another name
            body = json.dumps({"model_path": str(server.model), "weight_version": str(random.random())}).encode()
        await server.post(path, body, leaves_after=0.02 if random.random() < 0.02 else math.inf)
        if path == "/pause_generation":  # the others would wait for its end
            await server.post("/continue_generation", b"{}")


async def half_sender(server: Server, random: Random) -> None:
    """Hold connections that bring half a request, and leave them for others."""
    host, _, port = server.address.removeprefix("http://").partition(":")
    head = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    held: list[asyncio.StreamWriter] = []
    try:
        while True:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head[: random.randrange(len(head))])
            held.append(writer)
            if len(held) > NUM_HALF_SENT:
                held.pop(0).close()
            await asyncio.sleep(0.5)
    finally:
        for writer in held:
            writer.close()


async def attack(server: Server, num_bodies: int, seed: int) -> dict[str, Any]:
    """Send bodies to a server, and return what became of it."""
    started, left = time.monotonic(), [num_bodies]
    tasks = [asyncio.create_task(client(server, Random(f"{seed}-{number}"), left)) for number in range(NUM_CLIENTS)]
    tasks.append(asyncio.create_task(half_sender(server, Random(seed))))
    memory: dict[str, dict[str, float]] = {}
    for tenth in range(1, 11):
        while left[0] > num_bodies * (10 - tenth) // 10:
            await asyncio.sleep(0.2)
            for task in tasks:
                if task.done():
                    task.result()
        memory[f"after {10 * tenth} %"] = await server.memory()
        print(f"{tenth}0 %: {memory[f'after {10 * tenth} %']}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    await asyncio.gather(*tasks[:-1])
    tasks[-1].cancel()
    await asyncio.wait(tasks)
    growth_mb = round(memory["after 100 %"]["rss_mb"] - memory["after 10 %"]["rss_mb"], 1)
    is_alive = server.process.returncode is None
    return {
        "bodies": num_bodies,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "statuses": dict(sorted(server.statuses.items())),
        "server_errors": server.failures[:20],
        "log": server.log[-3:],
        "memory": memory,
        "growth_mb": growth_mb,
        "alive": is_alive,
        "holds": is_alive and not server.failures and growth_mb * 2**20 < MOST_GROWTH_BYTES,
    }


async def measure(num_bodies: int, seed: int) -> dict[str, Any]:
    async with serving(tiny_checkpoint(TinyModelSettings(), seed=0)) as server:
        before = await server.answer()
        found = await attack(server, num_bodies, seed)
        is_same = await server.answer() == before
        found["memory"]["after malloc_trim"] = await server.memory(is_trimmed=True)
        return {
            **found,
            "same_answer": is_same,
            "holds": found["holds"] and is_same,
            "decoding_seconds": decoding_seconds(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
            "command": f"python bench/hardening_server.py --bodies {num_bodies} --seed {seed}",
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.bodies, arguments.seed))
    text = json.dumps(found, indent=2) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
