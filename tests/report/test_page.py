from __future__ import annotations

from html.parser import HTMLParser

import pytest

from rollfeed.config import Settings
from rollfeed.report import Curves, curves_of
from rollfeed.report.page import SETTINGS, page

NASTY = '<script>alert("&")</script>'


class Page(HTMLParser):
    """Elements, their texts, and whether they close as they open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


def test_the_page_has_name_settings_curves_and_a_table(learning: Curves) -> None:
    settings = {"model": {"checkpoint": "tiny"}, "train": {"optimizer": {"learning_rate": 1e-6}}, "seed": 3}
    shown = Page(page(learning, title="my run", settings=settings))
    assert {"my run", "tiny", "1e-06", "0.200 → 0.900 (0.826 to 0.945)"} <= set(shown.texts)
    assert shown.tags.count("svg") == 5
    assert shown.tags.count("tr") == 4
    row = shown.texts[shown.texts.index("0.502 to 0.691") - 3 :][:9]
    assert row == ["2", "sums", "0.600", "0.502 to 0.691", "0.600", "31.5", "25.0%", "100", "0"]


def test_every_evaluation_has_a_tooltip(learning: Curves) -> None:
    shown = Page(page(learning, title="run", settings={}))
    assert "sums after 2 batches: 0.600 (0.502 to 0.691)" in shown.texts
    assert "Reward of training after 3 batches: 0.600" in shown.texts


def test_the_page_needs_no_network_and_no_script(learning: Curves) -> None:
    text = page(learning, title="run", settings={})
    assert "script" not in text
    assert "://" not in text
    assert not {"src", "href", "onload"} & {name for name, _ in Page(text).attributes}
    assert "prefers-color-scheme: dark" in text


def test_texts_of_the_run_are_escaped(evaluation) -> None:
    curves = curves_of(evaluations=[evaluation(0, {NASTY: 10, "b": 20}), evaluation(2, {NASTY: 20, "b": 30})])
    shown = Page(page(curves, title=NASTY, settings={"model": {"checkpoint": NASTY}}))
    assert "script" not in shown.tags
    assert shown.texts.count(NASTY) == 6  # title, heading, setting, legend, two rows


def test_settings_that_are_shown_exist() -> None:
    for key, _ in SETTINGS:
        section = Settings
        *sections, name = key.split(".")
        for each in sections:
            section = section.model_fields[each].annotation
        assert name in section.model_fields, key


@pytest.mark.parametrize("rights", [[], [None], [0], [100], [30, None, 50]])
def test_a_page_of_little_can_be_drawn(rights, evaluation) -> None:
    curves = curves_of(evaluations=[evaluation(step, {"sums": right}) for step, right in enumerate(rights)])
    shown = Page(page(curves, title="run", settings={}))
    assert shown.tags.count("tr") == (len(rights) + 1 if rights else 0)
    assert "nan" not in " ".join(shown.texts)


def test_a_long_run_has_a_page_of_bounded_size() -> None:
    metrics = [{"step": step, "rollout/reward_mean": step % 7} for step in range(10_000)]
    text = page(curves_of(evaluations=[], metrics=metrics), title="run", settings={})
    assert text.count("<circle") <= 300
