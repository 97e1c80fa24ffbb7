from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollfeed.errors import ConfigError
from rollfeed.prompts import ChatRenderer, load_tokenizer


def test_rendered_chat_has_exactly_one_bos(renderer: ChatRenderer, tokenizer_folder: Path) -> None:
    bos = load_tokenizer(tokenizer_folder).encode("<bos>", add_special_tokens=False)
    text, ids, *_ = renderer.render("hi", apply_chat_template=True)
    assert text == "<bos><turn>user\nhi</turn><turn>assistant\n"
    assert ids[0] == bos[0]
    assert (ids == bos[0]).sum() == 1


def test_raw_text_has_exactly_one_bos(renderer: ChatRenderer, tokenizer_folder: Path) -> None:
    bos = load_tokenizer(tokenizer_folder).encode("<bos>", add_special_tokens=False)
    text, ids, *_ = renderer.render("hi", apply_chat_template=False)
    assert text == "hi"
    assert len(ids) == 3
    assert (ids == bos[0]).sum() == 1


def test_messages_are_rendered_as_they_are(renderer: ChatRenderer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text, *_ = renderer.render(messages, apply_chat_template=True)
    assert text == "<bos><turn>system\nBe brief.</turn><turn>user\nhi</turn><turn>assistant\n"


def test_limit_counts_tokens_not_characters(make_renderer: Callable[[int], ChatRenderer]) -> None:
    renderer = make_renderer(5)
    _, ids, *_ = renderer.render("éé", apply_chat_template=False)
    assert len(ids) == 5
    assert renderer.fits(ids)
    _, ids, *_ = renderer.render("ééé", apply_chat_template=False)
    assert not renderer.fits(ids)


def test_token_ids_are_int32_and_cannot_be_changed(renderer: ChatRenderer) -> None:
    _, ids, *_ = renderer.render("hi", apply_chat_template=True)
    assert ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_model_without_a_chat_template_is_refused_with_a_remedy(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    renderer = ChatRenderer(load_tokenizer(save_tokenizer(tmp_path, chat_template=None)), rollout_max_prompt_len=None)
    with pytest.raises(ConfigError, match="no chat template: set apply_chat_template = false"):
        renderer.render("hi", apply_chat_template=True)
    assert renderer.render("hi", apply_chat_template=False)[0] == "hi"


def test_messages_without_a_template_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(ConfigError, match="set apply_chat_template = true"):
        renderer.render([{"role": "user", "content": "hi"}], apply_chat_template=False)


def test_a_system_prompt_begins_conversations_without_one(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None, system_prompt="Be brief.")
    begun = "<bos><turn>system\nBe brief.</turn><turn>user\nhi</turn><turn>assistant\n"
    rendered = renderer.render("hi", apply_chat_template=True)
    assert rendered.text == begun
    assert rendered.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert renderer.render([{"role": "user", "content": "hi"}], apply_chat_template=True).text == begun
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hi"}]
    assert "Be brief." not in renderer.render(own, apply_chat_template=True).text


def test_a_chat_template_may_come_from_a_file(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ 'think' if thinks else '' }}")
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=path, chat_template_kwargs={"thinks": True})
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "[user] hithink"
    path.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ConfigError, match=r"model.chat_template = '.*own.jinja': cannot be read \(.*line 2\)"):
        load_tokenizer(tokenizer_folder, chat_template=path)
    with pytest.raises(ConfigError, match="No such file"):
        load_tokenizer(tokenizer_folder, chat_template=tmp_path / "none.jinja")
