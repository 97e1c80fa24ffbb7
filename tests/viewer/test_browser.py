"""The page in a real browser, served by the command in a process of its own: `make browser`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.viewer.made_runs import NASTY

from rollfeed.store import RunReader
from rollfeed.viewer import find_runs, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
try:
    from playwright.sync_api import Browser, Page, expect, sync_playwright
except ImportError:
    sync_playwright = None

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(sync_playwright is None, reason="made by `make browser`"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
WAIT_MS = 60_000
EXPECTED = ("ERR_CONNECTION_REFUSED", "422 (Unprocessable Entity)")
"""What a browser says of a viewer that has ended, and of what the page tells as an error."""
NEWER = "step => parseInt(document.querySelector('tbody tr').dataset.key) > step + 1"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def command(*words: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rollfeed", *map(str, words)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    with command("view", *folders, "--port", 0) as process:
        yield process.stdout.readline().split()[1]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens an address; in the end, nothing may have gone wrong in a page."""
    contexts, problems = [], []

    def open_at(address: str, *, size: dict[str, int] = DESK, **options: Any) -> Page:
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda told: problems.append(told.text) if told.type in ("error", "warning") else None)
        page.goto(address)
        return page

    expect.set_options(timeout=WAIT_MS)
    yield open_at
    for context in contexts:
        context.close()
    assert [problem for problem in problems if not any(each in problem for each in EXPECTED)] == []


def test_from_the_curves_to_a_token(make_run, open_page) -> None:
    with served(make_run()) as address:
        page = open_page(address)
        expect(page.locator("h1")).to_have_text("run")
        expect(page.locator("figcaption b").first).to_have_text("reward")
        expect(page.locator("table[aria-label=steps] tbody tr")).to_have_count(3)
        page.click("table[aria-label=steps] tbody tr:nth-child(2) a")
        expect(page.locator("h1")).to_have_text("step 1")
        rows = page.locator("table[aria-label=samples] tbody tr")
        expect(rows).to_have_count(8)
        expect(rows.nth(6)).to_contain_text("dropped: zero_std_0.0")
        rows.nth(1).click()
        expect(page.locator("h1")).to_have_text("group 3 of step 1")
        expect(page.locator("#response")).to_contain_text("Z[")
        expect(page.locator(".segment")).to_have_count(3)
        token = page.locator(".token").nth(2)
        grey = token.evaluate("each => each.style.background")
        assert "--grey" in grey
        page.click("[data-mode=advantage]")
        assert page.locator(".token").nth(0).evaluate("each => each.style.background") != grey
        token.hover()
        expect(page.locator("#tip")).to_contain_text("not trained, weight 0")
        expect(page.locator("#tip")).to_contain_text("policy version 4")
        page.click(".members a >> nth=2")
        expect(page.locator(".members a.picked")).to_have_text("0 ✗")


def test_what_a_run_holds_is_text(make_run, open_page) -> None:
    with served(make_run(num_steps=1)) as address:
        for place in ("#/samples/run/all", "#/sample/run/0.0.0.0"):
            page = open_page(address + place)
            expect(page.locator("main")).to_contain_text(NASTY)
            assert page.locator("img").count() == 0
            assert "broken" not in page.title()


def test_the_keyboard_is_enough(make_run, open_page) -> None:
    with served(make_run()) as address:
        page = open_page(address)
        expect(page.locator("tbody tr")).to_have_count(3)
        for key in ("j", "ArrowDown", "k", "Enter"):
            page.keyboard.press(key)
        expect(page.locator("h1")).to_have_text("step 2")
        page.keyboard.press("/")
        page.keyboard.type("reward>0.1, right")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(3)
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("group 6 of step 2")
        page.keyboard.press("j")
        expect(page.locator("h1")).to_have_text("group 7 of step 2")
        page.keyboard.press("2")
        expect(page.locator("[data-mode=logprob]")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("Escape")
        expect(page.locator("h1")).to_have_text("step 2")
        expect(page.locator("tr.picked")).to_have_count(1)
        page.keyboard.press("?")
        expect(page.locator("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("t")
        expect(page.locator("html")).to_have_class("dark")
        page.reload()
        expect(page.locator("html")).to_have_class("dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(make_run, open_page, scheme) -> None:
    make_run("a-run-with-a-name-of-some-length/learning_rate=0.00001,seed=1")
    make_run("second", seed=2)
    with served(make_run("third").parent) as address:
        name = "a-run-with-a-name-of-some-length%2Flearning_rate%3D0.00001%2Cseed%3D1"
        for place in (
            "",
            f"#/run/{name}",
            f"#/samples/{name}/0",
            f"#/sample/{name}/0.0.0.0",
            f"#/compare/{name}/second",
        ):
            page = open_page(address + place, size=PHONE, color_scheme=scheme)
            expect(page.locator("h1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place
            is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            assert is_dark == (scheme == "dark")


def test_two_runs_lie_over_each_other(make_run, open_page) -> None:
    make_run("one")
    with served(make_run("two", seed=7).parent) as address:
        page = open_page(address)
        for name in ("one", "two"):
            page.check(f"[aria-label='compare {name}']")
        page.click("text=compare two")
        expect(page.locator("figure").first.locator("path.curve")).to_have_count(2)
        expect(page.locator("#differing tbody tr")).to_have_text(["seed17"])
        expect(page.locator("#figures tbody tr").nth(3)).to_have_text("reward0.4 → 0.60.4 → 0.6")


def test_a_run_that_goes_on_is_followed_and_the_place_kept(tiny_checkpoint, tmp_path, open_page) -> None:
    settings, out = tmp_path / "run.toml", tmp_path / "run"
    settings.write_text(
        f'[model]\ncheckpoint = "{tiny_checkpoint}"\n[[prompts.environments]]\nid = "core/copy_text"\n'
        "[rollout]\nnum_rollout = 100000\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n"
        "[sampling]\nrollout_max_response_len = 8\n[engine]\nthreads = 1\nnum_slots = 4\ncontext_length = 384\n"
    )
    with command("run", settings, "--out", out, "--quiet") as process:
        while not has_steps(out, 2):
            assert process.poll() is None
            time.sleep(0.2)
        with served(out) as address:
            page = open_page(address)
            expect(page.locator(".line").first).to_contain_text("running")
            rows = page.locator("table[aria-label=steps] tbody tr")
            expect(rows.nth(1)).to_be_attached()
            page.keyboard.press("j")
            picked = page.locator("tr.picked").get_attribute("data-key")
            newest = int(rows.first.get_attribute("data-key"))
            page.wait_for_function(NEWER, arg=newest)
            assert page.locator("tr.picked").get_attribute("data-key") == picked
            page.click("text=all samples")
            row = page.locator("table[aria-label=samples] tbody tr").first
            newest = int(row.get_attribute("data-key").split(".")[0])
            page.wait_for_function(NEWER, arg=newest)
            page.go_back()
            process.send_signal(signal.SIGTERM)
            expect(page.locator(".line").first).to_contain_text("interrupted")


def has_steps(out: Path, num: int) -> bool:
    if not (out / "journal.sqlite").exists():
        return False
    with RunReader(out) as reader:
        return len(reader.steps()) >= num


def test_of_a_long_response_only_what_is_near_is_made(make_run, open_page) -> None:
    with served(make_run(num_steps=1, num_groups=1, num_tokens=32_768)) as address:
        page = open_page(f"{address}#/sample/run/0.0.0.0")
        expect(page.locator("#response")).to_contain_text("Z[")
        assert page.evaluate("document.querySelector('#response').textContent.length") == 32_768
        assert 0 < page.locator(".token").count() < 10_000
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(
            page.locator("#response > span:last-child .token, .segment:last-child > span:last-child .token").first
        ).to_be_attached()


def test_a_report_needs_no_server(make_run, tmp_path, open_page) -> None:
    out = tmp_path / "report.html"
    write_report(find_runs([make_run(num_tokens=300)]), out)
    write_report(find_runs([tmp_path / "runs"]), out, most_bytes=out.stat().st_size - 50_000)
    page = open_page(out.as_uri())
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    expect(page.locator("tbody tr")).to_have_count(3)
    page.click("text=worst samples")
    expect(page.locator("main")).to_contain_text("of 24 samples")
    first, second = (page.locator(f"tbody tr:nth-child({number}) td").first.inner_text() for number in (1, 2))
    assert float(first) <= float(second)
    page.click("tbody tr >> nth=0")
    expect(page.locator("#response .token").first).to_be_visible()
    assert asked == []


def test_a_wrong_condition_is_told_where_it_stands(make_run, open_page) -> None:
    with served(make_run(num_steps=1)) as address:
        page = open_page(f"{address}#/samples/run/all?text=rewrd<1")
        expect(page.locator("[role=alert]")).to_contain_text("no field 'rewrd'; did you mean reward?")
        page.fill("input[type=search]", "reward>0.1")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(3)


def test_a_report_tells_of_a_damaged_run_what_is_wrong(make_run, tmp_path, open_page) -> None:
    (make_run("damaged") / "steps.jsonl").write_text("{")
    out = tmp_path / "report.html"
    write_report(find_runs([make_run("whole").parent]), out)
    page = open_page(f"{out.as_uri()}#/run/damaged")
    expect(page.locator("[role=alert]")).to_contain_text("steps.jsonl: is damaged")


def test_the_scale_of_a_chart_ends_where_numbers_are_too_large_for_it(make_run, open_page) -> None:
    with served(make_run(num_steps=1)) as address:
        page = open_page(address)
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("ticks(0, 60, 4)") == [0, 20, 40, 60]
        assert page.evaluate("ticks(1e17, 1e17 + 16, 6).length") < 20


def test_a_report_finds_wrong_samples_and_texts_as_the_viewer_does(make_run, tmp_path, open_page) -> None:
    out, run = tmp_path / "report.html", make_run(num_steps=1, says_correct=False, checkpoint="/nowhere/gone")
    write_report(find_runs([run]), out)
    with served(run) as address:
        for query, num in (("only=wrong", 6), ("only=right", 2), ("text=is+1.", 2), ("text=constructor", 0)):
            for place in (address, out.as_uri()):
                page = open_page(f"{place}#/samples/run/all?{query}")
                expect(page.locator("h1")).to_be_visible()
                assert page.locator("tbody tr").count() == num, (place, query)
