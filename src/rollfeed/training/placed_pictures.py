"""Pictures among the tokens that are trained on.

Axes: B rows, L places in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError
from rollfeed.protocols import PictureProcessor
from rollfeed.types import Picture, PlaceholderRange, Sample


class PlacedPictures(NamedTuple):
    """Pictures of a sequence, and which of its tokens stand for them."""

    pictures: tuple[Picture, ...] = ()
    places: tuple[PlaceholderRange, ...] = ()

    @property
    def content_hashes(self) -> tuple[str, ...]:
        """The hash of each picture, in order."""
        return tuple(picture.content_hash for picture in self.pictures)

    def before(self, num_tokens: int) -> PlacedPictures:
        """Return those among the first tokens."""
        num_kept = sum(place.end <= num_tokens for place in self.places)
        return PlacedPictures(self.pictures[:num_kept], self.places[:num_kept])


NO_PICTURES = PlacedPictures()


def pictures_of_sample(sample: Sample, processor: PictureProcessor | None) -> PlacedPictures:
    """Return the pictures of a sample with their places.

    Raises:
        ConfigError: If the model that is trained takes none, or they do not fit the sample's tokens.
    """
    if not sample.images:
        return NO_PICTURES
    return placed(sample.token_ids, sample.images, processor, what=f"sample {sample.index}")


def placed(
    token_ids: NDArray[np.int32], pictures: Sequence[Picture], processor: PictureProcessor | None, *, what: str
) -> PlacedPictures:
    """Return pictures with their places among tokens; raises as :func:`pictures_of_sample`."""
    if not pictures:
        return NO_PICTURES
    if processor is None:
        raise ConfigError(
            f"{what} has pictures, and the model that is trained takes text only: name one that sees, with the files "
            "of its processor, or, where it sees and trains on another node, set cluster.trainer = 'driver'"
        )
    try:
        return PlacedPictures(tuple(pictures), processor.locate(token_ids, pictures))
    except ValueError as error:
        raise ConfigError(f"{what}: its tokens and its pictures do not go together: {error}") from error


def pixels_of_rows(rows: Sequence[Sequence[Picture]], processor: PictureProcessor) -> Mapping[str, NDArray[Any]]:
    """Return what the model takes of the pictures of several rows, those of each made once however often it comes.

    Raises:
        ConfigError: If the arrays of rows cannot be joined.
    """
    found = [processor.pixels(pictures) for pictures in rows if pictures]
    try:
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"pictures of several samples do not go through the model at once ({error}): lower "
            "train.micro_batch_tokens, so that each has a micro-batch of its own"
        ) from error
