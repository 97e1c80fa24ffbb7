"""``[prompts.pictures]``: bounds of the pictures that are loaded."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rollfeed.config.section import Free, Resume, Section


class Animated(StrEnum):
    """The ways to treat a picture that has several frames, where one is wanted."""

    REFUSE = "refuse"
    FIRST = "first"


class PictureSettings(Section, resume=Resume.PROMPTS):
    """Bounds of pictures in prompts, turns and tools' results (`[prompts.pictures]`); see docs/pictures.md."""

    max_megabytes: float = Field(default=20.0, gt=0.0, le=1024.0, strict=False)
    """Of a file, or of what a URL answers, in MiB."""
    max_megapixels: float = Field(default=40.0, gt=0.0, le=1000.0, strict=False)
    """Of a picture, in millions; looked at before it is decoded."""
    timeout_seconds: Free[float] = Field(default=30.0, gt=0.0, le=3600.0, strict=False)
    """For a URL, redirects included."""
    animated: Animated = Field(default=Animated.REFUSE, strict=False)
    """An animation where a picture is wanted: `refuse`, or take its `first` frame."""
    video_frames: int = Field(default=8, ge=1, le=10_000)
    """Frames of a video, evenly over its length; one with fewer has all of them."""

    @property
    def max_bytes(self) -> int:
        """The first of them in bytes."""
        return int(self.max_megabytes * (1 << 20))

    @property
    def max_pixels(self) -> int:
        """The second in pixels."""
        return int(self.max_megapixels * 1e6)
