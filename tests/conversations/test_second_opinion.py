"""What we read off templates, the package ``renderers`` knows by heart for some families: both say the same.

It has requirements of its own, and so an environment of its own, which ``make renderers`` makes.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.conversations.test_turns import conversation, follow_up, said_by, turn
from tests.conversations.zoo.families import FAMILIES, load
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from rollfeed.conversations import Conversation, LossMaskType, conversation_tokens
from rollfeed.prompts import LocalTokenizer, load_tokenizer
from rollfeed.protocols import RewrittenTurns
from rollfeed.testing import make_prompt

PYTHON = Path(__file__).parents[2] / ".venv-renderers" / "bin" / "python"
pytestmark = [pytest.mark.soak, pytest.mark.skipif(not PYTHON.exists(), reason="made by `make renderers`")]
RENDERERS = {"qwen3": "renderers.qwen3:Qwen3Renderer", "llama3": "renderers.llama_3:Llama3Renderer"}
FURTHER_TOKENS = {
    "qwen3": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "llama3": ("<|end_of_text|>",),
}
"""Which their renderers want to be tokens."""
NUM_CONVERSATIONS = 200


def tokenizer_of(name: str, folder: Path) -> LocalTokenizer:
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(load(name)._tokenizer.backend_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in FURTHER_TOKENS[name]])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.ends[0],
        bos_token=family.bos,
        additional_special_tokens=[*family.ends, *family.specials],
        chat_template=family.template,
    ).save_pretrained(folder)
    ids = [tokenizer.token_to_id(token) for token in family.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return load_tokenizer(folder)


def ask(name: str, folder: Path, **asked: Any) -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("ask_renderers.py"), folder],
        input=json.dumps({"renderer": RENDERERS[name], **asked}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", RENDERERS)
def test_tokens_and_masks_are_those_of_a_renderer_that_knows_the_family(name: str, tmp_path: Path) -> None:
    tokenizer, random = tokenizer_of(name, tmp_path), Random(name)
    conversations = [conversation(FAMILIES[name], random) for _ in range(NUM_CONVERSATIONS)]
    answer = ask(name, tmp_path, conversations=conversations, turns=[])
    for messages, theirs in zip(conversations, answer["learned"], strict=True):
        ids, mask = conversation_tokens(tokenizer, messages, mask_type=LossMaskType.QWEN3)
        assert ids.tolist() == theirs["token_ids"], messages
        assert mask.tolist() == theirs["mask"], messages


@pytest.mark.parametrize("name", RENDERERS)
def test_what_is_sent_next_is_what_such_a_renderer_sends(name: str, tmp_path: Path) -> None:
    family, random, tokenizer = FAMILIES[name], Random(name), tokenizer_of(name, tmp_path)
    (end,) = tokenizer.encode(family.ends[0], add_special_tokens=False).tolist()
    turns, ours = [], []
    for _ in range(NUM_CONVERSATIONS):
        messages = [*conversation(family, random)[:-1]] or [{"role": "user", "content": "?"}]
        message = turn(family, random)
        said = tokenizer.encode(said_by(family, message), add_special_tokens=False).tolist()
        told = follow_up(message, random)
        text = tokenizer.render_chat(messages)
        sent = tokenizer.encode(text, add_special_tokens=False)
        prompt = make_prompt(text, token_ids=sent, messages=tuple(messages))
        talk = Conversation(prompt, tokenizer, rewritten=RewrittenTurns.APPEND)
        suffix = talk.follow_up([*said, end], told, forms=[message]).token_ids
        ours.append([*sent.tolist(), *said, end, *suffix.tolist()])
        turns.append({"sent": sent.tolist(), "said": [*said, end], "told": told})
    theirs = ask(name, tmp_path, conversations=[], turns=turns)["next"]
    # Where it would render anew, it says nothing.
    compared = [(each, other) for each, other in zip(ours, theirs, strict=True) if other is not None]
    assert len(compared) > NUM_CONVERSATIONS / 4
    for each, other in compared:
        assert each == other
