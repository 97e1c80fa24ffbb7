"""The tokenizer without transformers does as transformers does, or is not made."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.config import TinyModelSettings
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.errors import CheckpointError
from rollfeed.prompts import load_tokenizer
from rollfeed.prompts.plain_tokenizer import PlainTokenizer

PARTS = [
    "Ein Wort",
    " and",
    "\n\n",
    "  ",
    "é",
    "日本",
    "🙂",
    "<bos>",
    "<|im_start|>",
    "<end>",
    "123",
    "-",
    "\x00",
    "<turn>",
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> & 'you'"}],
    [
        {"role": "system", "content": "Be ü."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b\n"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
]
TEMPLATES = [
    "{% for m in messages %}\n  {%- if loop.index0 > 5 %}{% break %}{% endif %}\n<turn>{{ m.role }}: {{ m['content'] }}"
    "\n{% endfor %}\n{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.tool_calls %}"
    "{{ m.tool_calls | tojson }}{% endif %}{{ m.reasoning_content or '' }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ ns.n }}{% if add_generation_prompt %}<turn>{% endif %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
    "{{ m.content | upper }}{% endfor %}",
]


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return str(tokenizer.render_chat(messages, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_the_same(folder: Path, **options: Any) -> None:
    plain, theirs = load_tokenizer(folder, samples=False, **options), load_tokenizer(folder, **options)
    assert isinstance(plain._tokenizer, PlainTokenizer)
    assert not isinstance(theirs._tokenizer, PlainTokenizer)
    assert plain.eos_token_ids == theirs.eos_token_ids
    assert plain.has_chat_template == theirs.has_chat_template
    assert plain._tokenizer.special_tokens_map == theirs._tokenizer.special_tokens_map
    draw = random.Random(5)
    for number in range(60):
        text = "".join(draw.choices(PARTS, k=number % 12))
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert plain.encode(text, add_special_tokens=special).tolist() == ids.tolist()
            assert plain.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    ours, whose = plain.encode_with_offsets("a bé <bos>"), theirs.encode_with_offsets("a bé <bos>")
    assert [each.tolist() for each in ours] == [each.tolist() for each in whose]
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            for opens in (True, False):
                options = {"tools": tools, "add_generation_prompt": opens}
                assert rendered(plain, messages, **options) == rendered(theirs, messages, **options)


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_it_does_as_transformers_does(
    save_tokenizer: Callable[..., Path], tmp_path: Path, template: str | None
) -> None:
    folder = save_tokenizer(tmp_path / "model", chat_template=template)
    assert_the_same(folder)
    (tmp_path / "own.jinja").write_text(TEMPLATES[0])
    assert_the_same(folder, chat_template=tmp_path / "own.jinja")


def test_so_it_does_for_the_model_that_is_made_on_the_spot(tmp_path: Path) -> None:
    assert_the_same(tiny_checkpoint(TinyModelSettings(), seed=1, cache_directory=tmp_path))


@pytest.mark.model
def test_so_it_does_for_the_default_model() -> None:
    assert_the_same(resolve_checkpoint(DEFAULT_MODEL))


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": True},
        {"split_special_tokens": True},
        {"pad_token": "<new>"},
        {"extra_special_tokens": ["<turn>"]},
        {"chat_template": "{{ strftime_now('%Y') }}"},
        {"chat_template": "{%generation%}x{%endgeneration%}"},
        {"chat_template": "{%- generation -%}x{%- endgeneration -%}"},
        {"chat_template": [{"name": "default", "template": "x"}]},
    ],
)
def test_it_is_not_made_where_transformers_does_more(
    save_tokenizer: Callable[..., Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = save_tokenizer(tmp_path, chat_template=None)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert not isinstance(load_tokenizer(folder, samples=False)._tokenizer, PlainTokenizer)


def test_a_template_that_is_none_is_told_as_without_it(save_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, chat_template="{% for %}")
    with pytest.raises(CheckpointError, match=r"the model's chat template cannot be read: .* \(line 1\)"):
        load_tokenizer(folder, samples=False)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_an_encoding_that_transformers_refuses_is_refused(
    save_tokenizer: Callable[..., Path], tmp_path: Path, encoding: str, samples: bool
) -> None:
    path = save_tokenizer(tmp_path, chat_template=None) / "tokenizer_config.json"
    path.write_text(path.read_text(), encoding=encoding)
    with pytest.raises(CheckpointError, match="cannot load a tokenizer from it"):
        load_tokenizer(path.parent, samples=samples)


def test_a_template_that_is_no_text_is_told(save_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, chat_template=None) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": 5}))
    with pytest.raises(CheckpointError, match=r"chat template is 5, not a text; mend it in the checkpoint's folder"):
        load_tokenizer(path.parent)


def test_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\ncheckpoint = "tiny"\n[train]\n'
        '[[prompts.environments]]\nid = "core/reverse_text"\napply_chat_template = false\n'
    )
    code = (
        "import sys; from rollfeed.cli.main import main; code = main(['check', 'run.toml']); "
        "print(code, sorted({'torch', 'transformers', 'aiohttp'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 []", ran.stdout + ran.stderr
