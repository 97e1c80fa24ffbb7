from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from rollfeed.engine.checkpoint import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.prompts import LocalTokenizer, load_tokenizer


def test_encoding_and_decoding_keep_the_text(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    ids = tokenizer.encode("Grüße , 42 .", add_special_tokens=False)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Grüße , 42 ."


def test_incomplete_utf8_becomes_a_replacement_character(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    assert tokenizer.decode(tokenizer.encode("é", add_special_tokens=False)[:1], skip_special_tokens=False) == "\ufffd"


def assert_threads_agree(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)

    def work(number: int) -> tuple[list[int], str, str]:
        text = f"Prompt {number}: wie viele Äpfel? " * 20
        ids = tokenizer.encode(text, add_special_tokens=number % 2 == 0)
        rendered = tokenizer.render_chat([{"role": "user", "content": text}])
        assert text.strip() in rendered
        return ids.tolist(), rendered, tokenizer.decode(ids, skip_special_tokens=True)

    expected = [work(number) for number in range(640)]
    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(work, range(640))) == expected


def test_64_threads_encode_render_and_decode_at_once(tokenizer_folder: Path) -> None:
    assert_threads_agree(tokenizer_folder)


@pytest.mark.model
def test_64_threads_use_the_tokenizer_of_a_real_model_at_once() -> None:
    assert_threads_agree(resolve_checkpoint(DEFAULT_MODEL))


def with_post_processor(folder: Path, save_tokenizer: Callable[..., Path], template: str) -> LocalTokenizer:
    """A tokenizer that puts special tokens around a text as ``template`` says."""
    save_tokenizer(folder)
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = [name for name in ("<bos>", "<eos>", "<turn>") if name in template]
    core.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, core.token_to_id(name)) for name in names]
    )
    core.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", ["hi", "<bos>hi"])
@pytest.mark.parametrize("template", ["<bos> $A", "<bos> $A <eos>"])
def test_raw_text_has_one_bos_and_nothing_that_ends_it(
    tmp_path: Path, save_tokenizer: Callable[..., Path], template: str, text: str
) -> None:
    tokenizer = with_post_processor(tmp_path, save_tokenizer, template)
    whole = tokenizer.encode("<bos>hi", add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=True).tolist() == whole.tolist()


def test_raw_text_that_begins_with_all_that_is_put_before_it_gets_nothing_more(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = with_post_processor(tmp_path, save_tokenizer, "<bos> <turn> $A")
    whole = tokenizer.encode("<bos><turn>hi", add_special_tokens=False).tolist()
    for text in ("hi", "<bos><turn>hi"):
        assert tokenizer.encode(text, add_special_tokens=True).tolist() == whole


def test_a_tokenizer_that_only_ends_a_text_adds_nothing_to_a_prompt(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = with_post_processor(tmp_path, save_tokenizer, "$A <eos>")
    ids = tokenizer.encode("hi", add_special_tokens=True)
    assert ids.tolist() == tokenizer.encode("hi", add_special_tokens=False).tolist()


def test_half_of_a_surrogate_pair_is_encoded_as_a_replacement_character(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    cut, replaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("a\ud83d", "a\ufffd"))
    assert cut.tolist() == replaced.tolist()


def test_end_ids_come_from_the_tokenizer_and_both_configurations(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    folder = save_tokenizer(tmp_path, generation_config={"eos_token_id": [7, 8]}, config={"eos_token_id": 9})
    own = load_tokenizer(folder).encode("<eos>", add_special_tokens=False)[0]
    assert load_tokenizer(folder).eos_token_ids == (own, 7, 8, 9)


def test_end_id_may_be_missing_in_the_configuration(tmp_path: Path, save_tokenizer: Callable[..., Path]) -> None:
    folder = save_tokenizer(tmp_path, generation_config={"eos_token_id": None})
    assert len(load_tokenizer(folder).eos_token_ids) == 1


def test_broken_generation_config_is_named(tmp_path: Path, save_tokenizer: Callable[..., Path]) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        load_tokenizer(folder)


def test_missing_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        load_tokenizer(tmp_path / "nothing")
    assert "\n" not in str(caught.value)


def test_folder_without_a_tokenizer_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_tokenizer_file_is_an_error(tmp_path: Path, save_tokenizer: Callable[..., Path]) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="cannot load a tokenizer"):
        load_tokenizer(folder)


def test_tokenizer_that_needs_its_own_code_names_the_setting(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    folder = save_tokenizer(tmp_path, tokenizer_config={"tokenizer_class": "OwnTokenizer", "auto_map": auto_map})
    ran = tmp_path / "ran"
    (folder / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(CheckpointError, match="set trust_remote_code = true"):
        load_tokenizer(folder)
    assert not ran.exists()


def test_chat_template_that_refuses_messages_is_a_config_error(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    folder = save_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="refuses the messages: roles must alternate"):
        load_tokenizer(folder).render_chat([{"role": "user", "content": "hi"}])


def test_tools_reach_the_chat_template(tokenizer_folder: Path) -> None:
    text = load_tokenizer(tokenizer_folder).render_chat([{"role": "user", "content": "hi"}], tools=[{"name": "search"}])
    assert '"search"' in text


def test_tokenizer_loads_without_torch(tokenizer_folder: Path) -> None:
    program = f"""
        import sys
        sys.modules["torch"] = None
        from pathlib import Path
        from rollfeed.prompts import load_tokenizer
        tokenizer = load_tokenizer(Path({str(tokenizer_folder)!r}))
        ids = tokenizer.encode("hi", add_special_tokens=True)
        print(tokenizer.render_chat([{{"role": "user", "content": "hi"}}]), len(ids))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith("<turn>assistant\n 3\n")


def test_a_tokenizer_that_is_whole_in_one_file_gives_what_the_general_loader_gives(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(tokenizer_folder), AutoTokenizer.from_pretrained(str(tokenizer_folder))
    text = "Grüße, 12 + 30 = 42!\n\n  <|im_start|> end"
    for special in (False, True):
        assert ours.encode(text, add_special_tokens=special).tolist() == theirs.encode(text, add_special_tokens=special)
    messages = [{"role": "user", "content": text}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == rendered


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"]
)
def test_a_pointer_or_a_broken_link_in_place_of_a_tokenizers_file_is_named(
    tmp_path: Path, save_tokenizer: Callable[..., Path], name: str
) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    with pytest.raises(CheckpointError, match=f"{name} is a Git LFS pointer, not the file itself: run git lfs pull"):
        load_tokenizer(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("../blobs/1")
    with pytest.raises(CheckpointError, match=f"{name} is a link to a file that is not there"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_says_what_to_put_there(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer: put the model's tokenizer\.json"):
        load_tokenizer(folder)
