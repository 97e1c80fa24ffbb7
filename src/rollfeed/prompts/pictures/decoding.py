"""From bytes of any common format to those that are sent: the same pixels for every engine and for the trainer.

A file that is plain RGB in PNG, JPEG or WebP is sent as it is. Everything else (palettes, grey, transparency, a
camera's rotation, the first frame of an animation) becomes a PNG of RGB pixels here, since engines would treat it in
ways of their own.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollfeed.config.pictures import Animated, PictureSettings
from rollfeed.errors import ConfigError, in_one_line
from rollfeed.types import Picture, PictureKind

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Of those that Pillow reads, what needs no other program."""
_SENT_AS_THEY_ARE = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_ORIENTATION = 0x0112
_NEEDED = "pictures need Pillow, which is not installed: pip install 'rollfeed[pictures]'"


def decoded(content: bytes, *, limits: PictureSettings, source: str = "") -> tuple[Picture, bytes]:
    """Return a picture, and the bytes of it that are sent; all of it has been decoded once.

    Raises:
        ValueError: If it is no picture, is broken, too large or animated.
        ConfigError: If Pillow is not installed.
    """
    image = _opened(content, limits)
    frames = 1 if image.format == "MPO" else _num_frames(image)  # a photo with a thumbnail or a second eye
    if frames > 1 and limits.animated is Animated.REFUSE:
        raise ValueError(
            f"it is animated ({frames} frames): set prompts.pictures.animated = 'first' to take its first frame, or "
            "give it as a video"
        )
    pixels = _as_rgb(image)
    is_plain = image.mode == "RGB" and frames == 1 and image.getexif().get(_ORIENTATION, 1) == 1
    if is_plain and (media_type := _SENT_AS_THEY_ARE.get(image.format or "")):
        return _picture(content, media_type, pixels, PictureKind.IMAGE, source), content
    return as_png(pixels, source=source)


def frames_of(content: bytes, *, limits: PictureSettings, source: str = "") -> Iterator[tuple[Picture, bytes]]:
    """Yield pictures of an animation, ``limits.video_frames`` at most, evenly over its length; raises as `decoded`."""
    image = _opened(content, limits)
    for index in chosen_frames(_num_frames(image), limits.video_frames):
        with _refusing(f"its frame {index} cannot be decoded"):
            image.seek(index)
        yield as_png(_as_rgb(image), kind=PictureKind.FRAME, source=f"{source}#{index}")


def chosen_frames(number: int, most: int) -> list[int]:
    """Return which of a video's frames are taken: all, or ``most`` of them evenly from the first to the last."""
    if number <= most:
        return list(range(number))
    return [0] if most == 1 else [round(index * (number - 1) / (most - 1)) for index in range(most)]


def as_png(image: Image, *, kind: PictureKind = PictureKind.IMAGE, source: str = "") -> tuple[Picture, bytes]:
    """Return an object of PIL as a picture, and as the bytes of a PNG."""
    file, pixels = io.BytesIO(), _as_rgb(image)
    pixels.save(file, "PNG")
    content = file.getvalue()
    return _picture(content, "image/png", pixels, kind, source), content


def pixels_of(content: bytes) -> Image:
    """Return bytes that were made here as an object of PIL in RGB.

    Raises:
        ValueError: If they are none.
    """
    return _as_rgb(_opened(content, None))


def _opened(content: bytes, limits: PictureSettings | None) -> Image:
    pil = import_pil()
    with _refusing("it is no picture that can be read"), warnings.catch_warnings():
        warnings.simplefilter("ignore", pil.DecompressionBombWarning)  # its size is looked at below
        try:
            image: Image | None = pil.open(io.BytesIO(content), formats=_FORMATS)
        except pil.UnidentifiedImageError:
            image = None
    if image is None:
        raise ValueError(f"it is no picture in {', '.join(_FORMATS)}")
    if limits is not None:
        check_size(image.size, limits)
    return image


def _num_frames(image: Image) -> int:
    with _refusing("its frames cannot be counted"):
        return getattr(image, "n_frames", 1)


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Raise ValueError for whatever decoders raise: of bytes that nobody vouches for they raise anything."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{problem}: {in_one_line(error)}") from None


def check_size(size: tuple[int, int], limits: PictureSettings) -> None:
    """Raise ValueError if a picture of width and height has too many pixels, or none."""
    width, height = size
    if not width * height:
        raise ValueError(f"it has no pixels ({width} x {height})")
    if width * height > limits.max_pixels:
        raise ValueError(
            f"it has {width} x {height} pixels, more than prompts.pictures.max_megapixels = {limits.max_megapixels:g}"
        )


def _as_rgb(image: Image) -> Image:
    """Return pixels upright and in RGB, transparent ones on white."""
    from PIL import ImageOps

    pil = import_pil()
    with _refusing("it is broken"):
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "RGB":
            upright.load()
            return upright
        if upright.has_transparency_data:
            with_alpha = upright.convert("RGBA")
            white = pil.new("RGBA", with_alpha.size, "white")
            flat: Image = pil.alpha_composite(white, with_alpha).convert("RGB")
            return flat
        if upright.mode.startswith("I;16") or upright.mode == "I":
            upright = upright.point(lambda value: value / 256).convert("L")  # 16 bits, which `convert` would clip
        converted: Image = upright.convert("RGB")
        return converted


def _picture(content: bytes, media_type: str, pixels: Image, kind: PictureKind, source: str) -> Picture:
    digest, (width, height) = hashlib.sha256(content).hexdigest(), pixels.size
    return Picture(content_hash=digest, media_type=media_type, width=width, height=height, kind=kind, source=source)


def import_pil() -> Any:
    """Return Pillow's module of images. Raises ConfigError if it is not installed."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ConfigError(_NEEDED) from None
    return Image
