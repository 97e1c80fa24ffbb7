from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

from rollfeed.config.pictures import PictureSettings
from rollfeed.prompts.pictures import Fetcher, PictureLoader
from rollfeed.prompts.pictures.fetching import is_public
from rollfeed.prompts.pictures.picture_folder import PictureFolder
from rollfeed.types import PictureKind

Draw = Callable[..., Path]


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.jpg"])
def test_plain_files_are_sent_as_they_are(loader, store, draw: Draw, tmp_path: Path, name: str) -> None:
    path = draw(name)
    picture = loader.load(name, folder=tmp_path)
    assert store.read(picture) == path.read_bytes()
    assert (picture.width, picture.height, picture.source) == (8, 6, name)
    assert list((tmp_path / "pictures").glob("*")) == []  # read from where it is until a run keeps it
    store.keep([picture])
    assert [each.read_bytes() for each in (tmp_path / "pictures").iterdir()] == [path.read_bytes()]


@pytest.mark.parametrize(("name", "mode"), [("a.gif", "P"), ("a.bmp", "RGB"), ("a.tif", "RGB"), ("grey.png", "L")])
def test_others_become_png_of_the_same_pixels(loader, store, draw: Draw, tmp_path: Path, name: str, mode: str) -> None:
    path = draw(name, mode=mode)
    picture = loader.load(name, folder=tmp_path)
    assert picture.media_type == "image/png"
    np.testing.assert_array_equal(pixels(store.read(picture)), pixels(path.read_bytes()))


def test_a_rotated_photo_is_upright_and_transparency_is_white(loader, store, tmp_path: Path) -> None:
    rotated, exif = Image.new("RGB", (8, 6), "red"), Image.Exif()
    exif[0x0112] = 6
    rotated.save(tmp_path / "rotated.jpg", exif=exif)
    assert (loader.load("rotated.jpg", folder=tmp_path).width, rotated.width) == (6, 8)
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (pixels(store.read(loader.load("clear.png", folder=tmp_path))) == 255).all()


def test_the_same_pixels_are_one_file_whatever_brings_them(loader, store, draw: Draw, tmp_path: Path) -> None:
    content = draw("a.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    given = [uri, content, {"bytes": content, "path": None}, {"type": "image_url", "image_url": {"url": uri}}]
    assert len({loader.load(each).content_hash for each in given}) == 1
    assert len(list((tmp_path / "pictures").iterdir())) == 1
    image = Image.open(io.BytesIO(content))
    np.testing.assert_array_equal(pixels(store.read(loader.load(image))), pixels(content))


def animation(path: Path, number: int = 12) -> Path:
    frames = [Image.new("RGB", (4, 4), (20 * index, 0, 255 - 20 * index)) for index in range(number)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=10)
    return path


def test_an_animation_is_refused_or_its_first_frame_or_a_video(store, tmp_path: Path) -> None:
    animation(tmp_path / "clip.gif")
    with pytest.raises(ValueError, match=r"picture clip\.gif: it is animated \(12 frames\): set prompts\.pictures"):
        PictureLoader(store).load("clip.gif", folder=tmp_path)
    first = PictureLoader(store, limits=PictureSettings(animated="first")).load("clip.gif", folder=tmp_path)
    assert pixels(store.read(first))[0, 0].tolist() == pytest.approx([0, 0, 255], abs=8)
    frames = PictureLoader(store, limits=PictureSettings(video_frames=4)).load_video("clip.gif", folder=tmp_path)
    assert [each.source for each in frames] == [f"clip.gif#{index}" for index in (0, 4, 7, 11)]
    assert {each.kind for each in frames} == {PictureKind.FRAME}


def test_a_folder_of_frames_is_a_video(loader, draw: Draw, tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    for index in range(3):
        draw(f"clip/{index}.png", index)
    assert [Path(each.source).name for each in loader.load_video("clip", folder=tmp_path)] == [
        "0.png",
        "1.png",
        "2.png",
    ]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_megabytes": 0.0001}, r"it has \d+ bytes, more than prompts\.pictures\.max_megabytes = 0\.0001"),
        ({"max_megapixels": 0.00001}, r"it has 8 x 6 pixels, more than prompts\.pictures\.max_megapixels = 1e-05"),
    ],
)
def test_what_is_huge_is_refused_before_it_is_decoded(store, draw: Draw, tmp_path: Path, limits, message) -> None:
    draw("a.png")
    with pytest.raises(ValueError, match=message):
        PictureLoader(store, limits=PictureSettings(**limits)).load("a.png", folder=tmp_path)


def test_a_bomb_of_few_bytes_is_refused(loader, tmp_path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"picture bomb\.png: it (has|is no picture)"):
        loader.load("bomb.png", folder=tmp_path)


# URLs


@asynccontextmanager
async def web_of_pictures(content: bytes) -> AsyncIterator[tuple[str, list[str]]]:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        match request.path:
            case "/a.png":
                return web.Response(body=content, content_type="image/png")
            case "/moved":
                raise web.HTTPFound("/a.png")
            case "/inside":
                raise web.HTTPFound("http://internal.example:1/a.png")
            case "/round":
                raise web.HTTPFound("/round")
            case "/file":
                raise web.HTTPFound("file:///etc/passwd")
        raise web.HTTPNotFound

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application, host="127.0.0.1") as server:
        yield f"http://pictures.example:{server.port}", asked


def fetcher(max_bytes: int = 1 << 20) -> Fetcher:
    """As the real one, but for names: one is this machine, which counts as public here, another a private address."""
    hosts = {"pictures.example": "127.0.0.1", "internal.example": "10.0.0.7"}

    def resolve(host: str, port: int) -> list[str]:
        return [hosts[host]]

    return Fetcher(
        max_bytes=max_bytes,
        timeout_seconds=60.0,
        resolve=resolve,
        may_reach=lambda address: address == "127.0.0.1" or is_public(address),
    )


async def test_a_url_is_fetched_once_and_redirects_are_followed(store, draw: Draw) -> None:
    content = draw("a.png").read_bytes()
    loader = PictureLoader(store, fetcher=fetcher())
    async with web_of_pictures(content) as (address, asked):
        first = await asyncio.to_thread(loader.load, f"{address}/moved")
        again = await asyncio.to_thread(loader.load, f"{address}/moved")
        await asyncio.to_thread(loader.load, f"{address}/a.png")
    assert first == again
    assert store.read(first) == content
    assert asked == ["/moved", "/a.png", "/a.png"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/inside", r"it leads to internal\.example, 10\.0\.0\.7, which is no public address"),
        ("/round", "over 5 redirects"),
        ("/file", "which is neither http:// nor https://"),
        ("/none", "it answers HTTP 404"),
    ],
)
async def test_a_url_that_leads_astray_is_refused(store, draw: Draw, path: str, message: str) -> None:
    loader = PictureLoader(store, fetcher=fetcher())
    async with web_of_pictures(draw("a.png").read_bytes()) as (address, _):
        with pytest.raises(ValueError, match=message):
            await asyncio.to_thread(loader.load, f"{address}{path}")


async def test_an_answer_that_is_too_large_is_left(store, draw: Draw) -> None:
    async with web_of_pictures(draw("a.png").read_bytes()) as (address, _):
        with pytest.raises(ValueError, match=r"more bytes than prompts\.pictures\.max_megabytes"):
            await asyncio.to_thread(fetcher(max_bytes=20).fetch, f"{address}/a.png")


def test_a_server_that_sends_a_byte_now_and_then_is_left() -> None:
    """Each read has its byte in time; all of them together would take for ever."""
    ended = threading.Event()

    def drip() -> None:
        connected, _ = listener.accept()
        with connected, suppress(OSError):
            connected.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not ended.wait(0.05):
                connected.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=drip)
        serving.start()
        slow = Fetcher(max_bytes=1 << 20, timeout_seconds=0.5, may_reach=lambda address: True)
        try:
            with pytest.raises(ValueError, match=r"it was not there in 0\.5 s"):
                slow.fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/a.png")
        finally:
            ended.set()
            serving.join()


async def test_secrets_of_a_url_are_in_no_record(store, draw: Draw) -> None:
    loader = PictureLoader(store, fetcher=fetcher())
    async with web_of_pictures(draw("a.png").read_bytes()) as (address, _):
        told = address.replace("http://", "http://user:password@")
        picture = await asyncio.to_thread(loader.load, f"{told}/a.png?signature=secret#secret")
        with pytest.raises(
            ValueError, match=r"^picture http://pictures\.example:\d+/none\?\.\.\.: it answers HTTP 404$"
        ):
            await asyncio.to_thread(loader.load, f"{told}/none?signature=secret")
    assert picture.source == f"{address}/a.png?..."


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
    ],
)
def test_addresses_that_are_not_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_an_own_server_is_not_reached(store) -> None:
    with pytest.raises(ValueError, match="which is no public address"):
        PictureLoader(store).load("http://localhost:1/a.png")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.gif", "a.tif", "a.bmp"])
def test_bytes_that_are_broken_anywhere_are_a_picture_or_refused(store, draw: Draw, name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    how = {} if name in ("a.gif", "a.bmp") else {"exif": exif}
    content, random = draw(name, mode="P" if name == "a.gif" else "RGB", **how).read_bytes(), np.random.default_rng(0)
    loader, refused = PictureLoader(store), 0
    for _ in range(150):
        broken = bytearray(content)
        for place in random.integers(0, len(content), random.integers(1, 9)):
            broken[place] = random.integers(256)
        try:
            loader.load(bytes(broken[: random.integers(1, len(broken) + 1)] if random.random() < 0.5 else broken))
        except ValueError:
            refused += 1
    assert refused


def test_a_pipe_is_not_read(loader, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"^picture a\.png: it is no file$"):
        loader.load("a.png", folder=tmp_path)


# The folder


def test_a_folder_takes_over_what_came_before_it_was_there(draw: Draw, tmp_path: Path) -> None:
    store = PictureFolder()
    content = draw("a.png").read_bytes()
    picture = PictureLoader(store).load(content)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".half.png.tmp").write_bytes(b"half")
    store.open(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert store.read(picture) == content
    store.keep([picture])
    assert PictureFolder(tmp_path / "run").read(picture) == content
