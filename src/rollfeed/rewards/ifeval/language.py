"""The language of a text, as langdetect tells it, which IFEval itself asks."""

from __future__ import annotations

from functools import cache

from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.lang_detect_exception import LangDetectException

_CHARS_OF_EACH_END = 1_000
"""Detection takes time in proportion to the text: 11 ms for as many twice."""


def known_languages() -> frozenset[str]:
    """Return the codes of languages that are told apart; ``zh`` is Chinese in either script."""
    return frozenset([*_detectors().langlist, "zh"])


def is_in_language(text: str, language: str) -> bool:
    """Whether the beginning and the end of a text are in a language; a text without letters is in none."""
    if len(text) > 2 * _CHARS_OF_EACH_END:
        text = f"{text[:_CHARS_OF_EACH_END]} {text[-_CHARS_OF_EACH_END:]}"
    detector = _detectors().create()
    detector.append(text)
    try:
        found: str = detector.detect()
    except LangDetectException:
        return False
    return found.partition("-")[0] == language.partition("-")[0]


@cache
def _detectors() -> DetectorFactory:
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)  # what it samples of a text is the same each time
    return factory
