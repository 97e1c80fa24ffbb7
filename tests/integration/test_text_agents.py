"""Agents that speak text, through a router with a span cache, to a server with the real tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import urllib.error
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.routed_processes import RouterProcess, ServingProcess, ask, generate
from tests.integration.slime_caller import SIZE, Source, arguments

from rollfeed.app.inside_slime import slime_process
from rollfeed.compat.slime_rollout import generate_rollout
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer

HOT = {"temperature": 1.0, "max_new_tokens": 12}
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real tokenizer over weights that know nothing: any token may follow, half characters and special ones too."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    real, folder = resolve_checkpoint(DEFAULT_MODEL), tmp_path_factory.mktemp("untrained") / "untrained"
    config = LlamaConfig(
        vocab_size=json.loads((real / "config.json").read_text())["vocab_size"],
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in _FILES:
        if (real / name).exists():
            shutil.copy(real / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> LocalTokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    words = ("engine", "--model", str(checkpoint), "--port", "0", "--threads", "1", "--num-slots", "8")
    process = ServingProcess(*words, says="serving ")
    try:
        yield process.address()
    finally:
        process.end()


@pytest.fixture(scope="module")
def router(server: str, checkpoint: Path) -> Iterator[str]:
    words = ("--span-cache", "100000", "--span-cache-versions", "8", "--tokenizer", str(checkpoint))
    process = RouterProcess(server, *words)
    try:
        yield process.address()
    finally:
        process.end()


def say(router: str, text: str, *, seed: int, **sampling: Any) -> Any:
    body = {"text": text, "sampling_params": {**HOT, "sampling_seed": seed, **sampling}, "return_logprob": True}
    return json.loads(ask(router, "/generate", body))


def retrieve(router: str, text: str) -> Any:
    return json.loads(ask(router, "/retrieve_from_text", {"text": text, "return_logp": True}))


def test_conversations_in_text_are_trained_as_they_were_sampled(router: str, tokenizer: LocalTokenizer) -> None:
    """Branches of conversations whose client repeats the end of a turn as chat templates do, or goes on without it."""
    chance = random.Random(0)
    begun = tokenizer.render_chat([{"role": "user", "content": "Write a long word, odd and new."}])
    known: dict[str, list[tuple[int, int, float]]] = {
        begun: [(token, 0, 0.0) for token in tokenizer.encode(begun, add_special_tokens=False).tolist()]
    }
    texts = [begun]
    num_changed = 0
    for number in range(10):
        before = begun if number < 2 else chance.choice(texts)
        asked = before if before == begun else f"{before}\n({number}) More:"
        reply = say(router, asked, seed=number, ignore_eos=True, skip_special_tokens=False)
        rest = tokenizer.encode(asked[len(before) :], add_special_tokens=False).tolist()
        rows = known[before] + [(token, 0, 0.0) for token in rest]
        assert reply["meta_info"]["prompt_tokens"] == len(rows)
        rows += [(token, 1, logprob) for logprob, token, _ in reply["meta_info"]["output_token_logprobs"]]
        text = asked + reply["text"]
        known[text] = rows
        texts.append(text)
        num_changed += tokenizer.encode(text, add_special_tokens=False).tolist() != [row[0] for row in rows]
    assert num_changed > 0, "all of it could have been tokenised again"
    for text in texts[1:]:
        got = retrieve(router, text)
        told = list(zip(got["tokens"], got["loss_mask"], strict=True))
        assert told == [row[:2] for row in known[text]]
        assert got["rollout_logp"] == pytest.approx([row[2] for row in known[text]], abs=1e-6)
        assert {span["version"] for span in got["weight_versions"]} == {"0"}
    last = retrieve(router, texts[-1])
    scored = generate(router, input_ids=last["tokens"], logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    told = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]]
    for at, mask in enumerate(last["loss_mask"]):
        assert last["rollout_logp"][at] == (pytest.approx(told[at], abs=1e-3) if mask else 0)
    with pytest.raises(urllib.error.HTTPError) as refused:
        retrieve(router, begun)
    with refused.value:
        assert refused.value.code == 404
        assert "nothing of this text is known to be sampled" in refused.value.read().decode()
    numbers = ask(router, "/metrics")
    assert "rollfeed_router_span_cache_rewritten_total 10.0" in numbers


async def text_agent(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A generate function as a slime user writes it who has text only: two turns, and the router knows the tokens."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    text = sample.prompt
    for turn in range(2):
        if turn:
            text += "\nAnd shorter:"
        reply = await asyncio.to_thread(
            say, router, text, seed=10 * sample.index + turn, max_new_tokens=5, skip_special_tokens=False
        )
        text += reply["text"]
    got = await asyncio.to_thread(retrieve, router, text)
    first = got["loss_mask"].index(1)
    sample.tokens = got["tokens"]
    sample.response = text[len(sample.prompt) :]
    sample.response_length = len(got["tokens"]) - first
    sample.loss_mask = got["loss_mask"][first:]
    sample.rollout_log_probs = got["rollout_logp"][first:]
    sample.weight_versions = [span["version"] for span in got["weight_versions"]]
    sample.status = type(sample).Status.COMPLETED
    return sample


def test_a_generate_function_of_slimes_that_has_text_only_trains_what_was_sampled(
    router: str, checkpoint: Path, tokenizer: LocalTokenizer
) -> None:
    args = arguments(
        router,
        checkpoint,
        rollout_batch_size=1,
        over_sampling_batch_size=1,
        custom_generate_function_path=f"{__name__}.text_agent",
    )
    try:
        output = generate_rollout(args, 0, Source())
    finally:
        slime_process.end()
    (group,) = output.samples
    assert len(group) == SIZE
    for sample in group:
        assert sample.loss_mask[0] == 1
        assert 0 in sample.loss_mask
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert [logprob == 0.0 for logprob in sample.rollout_log_probs] == [not mask for mask in sample.loss_mask]
        prompt = sample.tokens[: -sample.response_length]
        assert prompt == tokenizer.encode(sample.prompt, add_special_tokens=False).tolist()
        got = retrieve(router, sample.prompt + sample.response)
        assert (got["tokens"], got["loss_mask"][-sample.response_length :]) == (sample.tokens, sample.loss_mask)
