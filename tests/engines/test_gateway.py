"""The gateway in front of a real vLLM and a real SGLang on the CPU: what agents are told is what was sampled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from tests.engines.conftest import Score
from tests.engines.servers import RealServer, sglang_server, vllm_server

from rollfeed.types import Sample
from rollfeed.types.fields import from_dict

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

CLOSE = {"vllm": 2e-4, "sglang": 0.03}
"""Between the server and transformers in fp32; SGLang serves fp16 here."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    work = tmp_path_factory.mktemp(kind)
    with (vllm_server if kind == "vllm" else sglang_server)(policy, work) as running:
        yield running


@contextmanager
def gateway(server: RealServer, kind: str, policy: Path, folder: Path) -> Iterator[str]:
    options = ["--engine", server.address, "--engine-kind", kind, "--model", str(policy), "--folder", str(folder)]
    command = [
        sys.executable,
        "-m",
        "rollfeed",
        "serve",
        "gateway",
        *options,
        "--port",
        "0",
        "--context-length",
        "1000",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert process.stdout is not None
        told = next(found for line in process.stdout if (found := re.search(r"at (http://\S+)", line)))
        yield told[1]
    finally:
        process.terminate()
        process.communicate()


def posted(address: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_what_an_agent_asks_of_a_server_becomes_samples_with_its_tokens(
    server: RealServer, kind: str, policy: Path, score: Score, tmp_path: Path
) -> None:
    with gateway(server, kind, policy, tmp_path) as address:
        opened = posted(f"{address}/sessions", {"metadata": {"task": 1}})
        ask = openai.OpenAI(base_url=opened["openai_base_url"], api_key="-", timeout=300)
        messages: list[Any] = [{"role": "user", "content": "look around"}]
        told = []
        for _ in range(3):
            stream = ask.chat.completions.create(
                model=policy.name, messages=messages, tools=[TOOL], max_tokens=20, stream=True
            )
            told.append("".join(each.choices[0].delta.content or "" for each in stream if each.choices))
            messages += [{"role": "assistant", "content": told[-1]}, {"role": "user", "content": "go on"}]
        other = anthropic.Anthropic(base_url=opened["anthropic_base_url"], api_key="-", timeout=300)
        message = other.messages.create(
            model=policy.name, max_tokens=20, messages=[{"role": "user", "content": "something else"}]
        )
        assert message.stop_reason in ("max_tokens", "end_turn")
        samples = [
            from_dict(Sample, each) for each in posted(f"{address}/sessions/{opened['id']}/finish", {})["samples"]
        ]
    assert [int(np.diff(sample.loss_mask, prepend=0.0).clip(0).sum()) for sample in samples] == [3, 1]
    for sample in samples:
        trained = sample.loss_mask > 0
        scored = score(policy, sample.token_ids[: sample.prompt_length], sample.response_token_ids)
        assert np.abs(sample.logprobs - scored)[trained].max() < CLOSE[kind]
    linted = subprocess.run(
        [sys.executable, "-m", "rollfeed", "lint", str(tmp_path), "--tokenizer", str(policy), "--json"],
        capture_output=True,
        text=True,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert json.loads(linted.stdout)["findings"] == []
