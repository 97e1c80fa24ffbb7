from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.engine.pictures.qwen import write_qwen
from tests.engine.pictures.seeing import png

from rollfeed.errors import RunFailedError
from rollfeed.prompts import ChatRenderer, ColumnKeys, load_prompts, load_tokenizer
from rollfeed.prompts.pictures import ModelPictures, PictureLoader
from rollfeed.prompts.pictures.picture_folder import PictureFolder
from rollfeed.types import PictureKind

Draw = Callable[..., Path]


def uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def asked(renderer: ChatRenderer, loader: PictureLoader, draw: Draw) -> Callable[..., tuple]:
    """Render a text with pictures by their seeds."""

    def ask(text: str, *seeds: int, **options: object) -> tuple:
        images = [loader.load(draw(f"{seed}.png", seed).read_bytes()) for seed in seeds]
        return renderer.render(text, apply_chat_template=True, images=images, **options)

    return ask


def test_each_place_becomes_the_tokens_of_its_picture_once(asked, pictures: ModelPictures, vision_checkpoint) -> None:
    rendered = asked("<image>red? <image>green?", 1, 2)
    single = load_tokenizer(vision_checkpoint).encode(rendered.text, add_special_tokens=False)
    per_picture = (len(rendered.token_ids) - len(single)) // 2 + 1
    assert per_picture > 1
    (first, second) = pictures.locate(rendered.token_ids, rendered.images)
    assert (first.end - first.start, second.end - second.start) == (per_picture, per_picture)
    assert first.end < second.start
    np.testing.assert_array_equal(pictures.collapse(rendered.token_ids, rendered.images), single)
    np.testing.assert_array_equal(pictures.expand(single, rendered.images), rendered.token_ids)
    with pytest.raises(ValueError, match=f"it has 2 pictures and {2 * per_picture} placeholders"):
        pictures.expand(rendered.token_ids, rendered.images)


def test_a_sampled_placeholder_is_no_place_and_a_further_picture_is(asked, pictures: ModelPictures) -> None:
    rendered = asked("<image>red?", 1)
    (place,) = pictures.locate(rendered.token_ids, rendered.images)
    tokens = rendered.token_ids[place.start : place.end]
    sampled = np.concatenate([rendered.token_ids, tokens[:1]])
    assert pictures.locate(sampled, rendered.images) == (place,)
    with pytest.raises(ValueError, match="a further place"):
        pictures.locate(np.concatenate([rendered.token_ids, tokens]), rendered.images)
    with pytest.raises(ValueError, match="no place for picture 2 of 2"):
        pictures.locate(rendered.token_ids, rendered.images * 2)


@pytest.mark.parametrize(("text", "num"), [("<image>?", 2), ("<image><image>?", 1), ("red?", 1)])
def test_more_pictures_than_places_and_the_reverse_are_refused(asked, text: str, num: int) -> None:
    with pytest.raises(ValueError, match=rf"{num} images and \d places for them"):
        asked(text, *range(num))


def test_a_text_without_pictures_may_speak_of_them(asked) -> None:
    assert asked("<image>red?").images == ()


def test_parts_bring_pictures_themselves_in_every_form_of_chat_apis(renderer, loader, draw: Draw) -> None:
    red, green = draw("red.png", 1), draw("green.png", 2)
    encoded = base64.b64encode(red.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": uri(red)}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
        {"type": "text", "text": "and"},
        {"type": "input_image", "image_url": uri(green)},
        {"type": "image", "image": red.read_bytes()},
    ]
    rendered = renderer.render([{"role": "user", "content": parts}], apply_chat_template=True)
    known = [loader.load(path.read_bytes()).content_hash for path in (red, green)]
    assert [each.content_hash for each in rendered.images] == [known[0], known[0], known[1], known[0]]
    assert rendered.messages[0]["content"] == [
        {"type": "image"}, {"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "image"}
    ]  # fmt: skip


def test_a_path_in_a_message_of_a_stranger_is_not_read(renderer: ChatRenderer, draw: Draw) -> None:
    part = {"type": "image", "image": str(draw("red.png"))}
    with pytest.raises(ValueError, match="a path is not taken here"):
        renderer.render([{"role": "user", "content": [part]}], apply_chat_template=True)


def test_a_text_without_a_template_has_places_too(renderer, loader, pictures, draw: Draw) -> None:
    image = loader.load(draw("a.png").read_bytes())
    rendered = renderer.render("<image>red?", apply_chat_template=False, images=[image])
    assert len(pictures.locate(rendered.token_ids, [image])) == 1


def test_rows_show_pictures_and_videos_beside_the_file(renderer: ChatRenderer, draw: Draw, tmp_path: Path) -> None:
    draw("a.png", 1)
    for seed in range(12):
        draw(f"clip-{seed:02}.png", seed)
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "<video>then <image>?", "image": "a.png", "video": [["clip-00.png", "clip-01.png"]]}\n'
    )
    keys = ColumnKeys(image_key="image", video_key="video")
    (prompt,) = load_prompts(str(tmp_path / "train.jsonl"), renderer=renderer, keys=keys).prompts
    assert [each.source for each in prompt.images] == ["clip-00.png", "clip-01.png", "a.png"]
    assert [each.kind for each in prompt.images] == [PictureKind.FRAME, PictureKind.FRAME, PictureKind.IMAGE]


def test_pixels_are_made_once_for_pictures_that_come_again(asked, pictures: ModelPictures) -> None:
    images = asked("<image><image>?", 1, 2).images
    made = pictures.pixels(images)
    assert len(made["pixel_values"]) == 2
    assert pictures.pixels(list(images)) is made
    assert not np.array_equal(made["pixel_values"], pictures.pixels(images[::-1])["pixel_values"])


def test_a_processor_of_which_only_the_videos_need_torchvision_prepares_pictures(store, loader, tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    folder.mkdir()
    write_qwen(folder, with_weights=False)
    pictures = ModelPictures(folder, store)
    small, large = loader.load(png(1, (28, 28))), loader.load(png(2, (112, 56)))
    (mark,) = load_tokenizer(folder).encode(pictures.mark, add_special_tokens=False)
    ids = pictures.expand(np.array([7, mark, 8, mark], np.int32), [small, large])
    np.testing.assert_array_equal(ids, [7, mark, 8, *[mark] * 8])
    pixels = pictures.pixels([small, large])
    assert pixels["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 8]]
    assert pixels["pixel_values"].shape == (4 + 32, 3 * 2 * 14 * 14)


def test_of_more_pictures_than_a_server_keeps_those_stay_that_were_wanted_last() -> None:
    kept = PictureFolder()
    loader = PictureLoader(kept)
    kept.max_temporary_bytes = 2 * 4096  # as tiny files take a block of the disk
    first, second = loader.load(png(1)), loader.load(png(2))
    kept.read(first)
    third = loader.load(png(3))
    assert [kept.has(each) for each in (first, second, third)] == [True, False, True]
    assert kept.read(loader.load(png(2))) == png(2)
    assert not kept.has(first)


def test_bytes_that_have_changed_are_not_taken(asked, pictures: ModelPictures, store) -> None:
    images = asked("<image>?", 1).images
    (file,) = (path for path in store._folder.iterdir())
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(RunFailedError, match="has changed since it was loaded"):
        pictures.pixels(images)
