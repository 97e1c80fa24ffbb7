"""A model's own processor of pictures, from its folder: how many tokens a picture is, and the arrays that it becomes.

Invariant: a picture's tokens depend on the model and on its size in pixels alone; what stands for one is put into a
prompt once, here, and engines and trainer get the same tokens.
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import COMPUTING_ERRORS, CheckpointError, RunFailedError, in_one_line
from rollfeed.prompts.pictures.decoding import as_png, import_pil, pixels_of
from rollfeed.protocols import PictureStore
from rollfeed.types import Picture, PlaceholderRange

_T = TypeVar("_T")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_NOT_PIXELS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_VIDEOS = "video_processor"
_CACHED_BYTES = 256 << 20
_MARKS = ("boi_token", "image_token")
"""Attributes that hold what stands for a picture in a text, first of models that have another in their tokens."""


def takes_pictures(folder: Path) -> bool:
    """Whether a model's folder has what a processor of pictures is made of."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


class _Recent(Generic[_T]):
    """Values that were wanted last, up to a number of bytes."""

    def __init__(self, size_of: Callable[[_T], int]) -> None:
        self._values = OrderedDict[Any, _T]()
        self._size_of, self._size = size_of, 0

    def get(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return a value, made now if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        made = self._values[key] = make()
        self._size += self._size_of(made)
        while self._size > _CACHED_BYTES and len(self._values) > 1:
            self._size -= self._size_of(self._values.popitem(last=False)[1])
        return made


class ModelPictures:
    """The processor of a model; fits :class:`rollfeed.protocols.PictureProcessor`.

    Args:
        folder: Of the model, with a processor that transformers knows.
        store: Has the bytes of pictures.
        trust_remote_code: Run Python code that lies in the folder, where the processor is defined by it.
    """

    def __init__(self, folder: Path, store: PictureStore, *, trust_remote_code: bool = False) -> None:
        self.store = store
        self._folder, self._trust_remote_code = folder, trust_remote_code
        self._loaded: Any = None
        self._mark, self._mark_id = "", -1
        self._token_ids = _Recent[NDArray[np.int32]](lambda ids: ids.nbytes)
        self._pixels = _Recent[Mapping[str, NDArray[Any]]](_num_bytes)
        self._uris = _Recent[str](len)
        self._lock = threading.RLock()

    @property
    def mark(self) -> str:
        """The text that stands for a picture. Raises CheckpointError if the processor cannot be used."""
        self._processor()
        return self._mark

    def expand(
        self, token_ids: NDArray[np.int32], pictures: Sequence[Picture], *, is_prompt: bool = True
    ) -> NDArray[np.int32]:
        self._processor()
        places = np.flatnonzero(token_ids == self._mark_id)[: None if is_prompt else len(pictures)]
        if len(places) != len(pictures):
            raise ValueError(f"it has {_counted(len(pictures), 'picture')} and {_counted(len(places), 'placeholder')}")
        pieces, end = list[NDArray[np.int32]](), 0
        for place, picture in zip(places.tolist(), pictures, strict=True):
            pieces += [token_ids[end:place], self._tokens_of(picture)]
            end = place + 1
        return np.concatenate([*pieces, token_ids[end:]]).astype(np.int32, copy=False)

    def collapse(self, token_ids: NDArray[np.int32], pictures: Sequence[Picture]) -> NDArray[np.int32]:
        """Return what :meth:`expand` was given."""
        pieces, end = list[NDArray[np.int32]](), 0
        for start, stop in self.locate(token_ids, pictures):
            pieces += [token_ids[end:start], np.array([self._mark_id], np.int32)]
            end = stop
        return np.concatenate([*pieces, token_ids[end:]]).astype(np.int32, copy=False)

    def locate(self, token_ids: NDArray[np.int32], pictures: Sequence[Picture]) -> tuple[PlaceholderRange, ...]:
        found, end = list[PlaceholderRange](), 0
        for index, picture in enumerate(pictures):
            tokens = self._tokens_of(picture)
            start = _find(token_ids, tokens, end)
            if start < 0:
                raise ValueError(f"the tokens have no place for picture {index + 1} of {len(pictures)}")
            end = start + len(tokens)
            found.append(PlaceholderRange(start, end))
        for picture in pictures:
            if len(tokens := self._tokens_of(picture)) > 1 and _find(token_ids, tokens, end) >= 0:
                raise ValueError(f"the tokens have a further place behind those of {len(pictures)} pictures")
        return tuple(found)

    def pixels(self, pictures: Sequence[Picture]) -> Mapping[str, NDArray[Any]]:
        """Return what the vision tower takes, made once for pictures that come again; as the protocol says."""
        key = tuple(picture.content_hash for picture in pictures)
        with self._lock:
            return self._pixels.get(key, lambda: self._arrays([self._decoded(picture) for picture in pictures]))

    def data_uri(self, picture: Picture) -> str:
        """Return a picture as servers are sent it, made once for those that come again."""
        with self._lock:
            return self._uris.get(picture.content_hash, lambda: _data_uri(picture.media_type, self.store.read(picture)))

    def noise(self, picture: Picture) -> str:
        pixels = np.random.default_rng(0).integers(0, 256, (picture.height, picture.width, 3), np.uint8)
        return _data_uri("image/png", as_png(import_pil().fromarray(pixels))[1])

    def _decoded(self, picture: Picture) -> Any:
        try:
            image = pixels_of(self.store.read(picture))
        except ValueError as error:
            raise RunFailedError(f"picture {picture.source or picture.content_hash}: {error}") from None
        if image.size != (picture.width, picture.height):
            raise RunFailedError(
                f"picture {picture.source}: {image.size[0]} x {image.size[1]} pixels, and {picture.width} x "
                f"{picture.height} when it was loaded"
            )
        return image

    def _arrays(self, images: Sequence[Any]) -> Mapping[str, NDArray[Any]]:
        made = self._process(images, self._mark * len(images))
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in _NOT_PIXELS}
        for array in arrays.values():
            array.setflags(write=False)
        return arrays

    def _tokens_of(self, picture: Picture) -> NDArray[np.int32]:
        """Return the tokens of a picture of this size."""
        size = (picture.width, picture.height)

        def make() -> NDArray[np.int32]:
            blank = import_pil().new("RGB", size)
            ids = np.asarray(self._process([blank], self._mark)["input_ids"], np.int32).reshape(-1)
            ids.setflags(write=False)
            return ids

        with self._lock:
            self._processor()
            return self._token_ids.get(size, make)

    def _process(self, images: Sequence[Any], text: str) -> Any:
        try:
            return self._processor()(images=[list(images)], text=[text], add_special_tokens=False, return_tensors="np")
        except (*COMPUTING_ERRORS, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            sizes = ", ".join(f"{image.size[0]} x {image.size[1]}" for image in images)
            raise RunFailedError(
                f"the model's processor fails on pictures of {sizes} pixels: {in_one_line(error)}"
            ) from error

    def _processor(self) -> Any:
        with self._lock:
            if self._loaded is None:
                self._loaded = _load(self._folder, trust_remote_code=self._trust_remote_code)
                self._mark, self._mark_id = _mark(self._loaded, self._folder)
            return self._loaded


def _load(folder: Path, *, trust_remote_code: bool) -> Any:
    import_pil()
    try:
        from transformers import AutoProcessor

        given = {"local_files_only": True, "trust_remote_code": trust_remote_code, "backend": "pil"}
        try:
            processor = AutoProcessor.from_pretrained(folder, **given)  # type: ignore[no-untyped-call]
        except ImportError:  # of what takes videos, of which there is none for Pillow: frames are pictures here
            processor = _without_videos(folder).from_pretrained(folder, **given)
    except Exception as error:  # a processor is a program of somebody else's
        raise CheckpointError(f"{folder}: its processor of pictures cannot be loaded: {in_one_line(error)}") from error
    if getattr(processor, "image_processor", None) is None:
        raise CheckpointError(f"{folder}: its processor takes no pictures")
    return processor


def _without_videos(folder: Path) -> Any:
    """Return the class of a model's processor, without the part that takes videos."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder, local_files_only=True))]
    *parts, last = kind.get_attributes()
    if last != _VIDEOS:
        raise ValueError(f"{kind.__name__} needs torchvision")
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: parts)})


def _mark(processor: Any, folder: Path) -> tuple[str, int]:
    """Return what stands for a picture in a text, and its token."""
    for name in _MARKS:
        mark = getattr(processor, name, None)
        if isinstance(mark, str) and mark:
            token_id = processor.tokenizer.convert_tokens_to_ids(mark)
            ids = processor.tokenizer.encode(mark, add_special_tokens=False)
            if isinstance(token_id, int) and ids == [token_id]:
                return mark, token_id
    raise CheckpointError(f"{folder}: its processor has no image_token that is one token of its tokenizer")


def _find(token_ids: NDArray[np.int32], tokens: NDArray[np.int32], start: int) -> int:
    """Return the first place of some tokens in others, from ``start`` on; -1 where there is none."""
    starts = np.flatnonzero(token_ids[start : len(token_ids) - len(tokens) + 1] == tokens[0]) + start
    for place in starts.tolist():
        if np.array_equal(token_ids[place : place + len(tokens)], tokens):
            return int(place)
    return -1


def _num_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + 's'}"
