"""The page of `rollfeed view` in Chromium: a run of a million samples, and a sample of 32,768 tokens.

Both runs are written by the store. Given are seconds from the change of the address to the page as it is drawn, the
median of three pages that nothing was asked of before (``open`` with a viewer that has just started), what a choice of
the long sample on an open page takes, how long the browser draws it when it has its answer, and reports of both, with
their size and the seconds they take. Its tokens are random, of 48,000, so that most are decoded for the first time.

::

    make browser
    PYTHONPATH=$(echo .venv-browser/lib/python3.*/site-packages) python bench/viewer.py --output bench/viewer.json
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, sync_playwright

from rollfeed.benchmarks.machine import machine
from rollfeed.store import RunDirectory
from rollfeed.testing import sample_of
from rollfeed.types import (
    Correct,
    Group,
    LedgerCounts,
    Prompt,
    Rollout,
    RunState,
    StepCommit,
    TrainBatch,
    Verdict,
    VersionSpan,
)

MEMBERS, LONG = 8, 32_768
METRICS = ("rollout/reward_mean", "rollout/response_length_mean", *(f"rollout/other_{number}" for number in range(60)))
DRAW = """async id => {
  const sample = await ask("sample", { run: "long", id }), started = performance.now();
  document.querySelector("main").replaceChildren(tokenPane(sample).element);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return (performance.now() - started) / 1000;
}"""


def write_run(path: Path, *, num_steps: int, num_groups: int, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    chance = random.Random(0)
    settings = {"seed": 1, "model": {"checkpoint": "smollm2-135m-instruct"}}
    with RunDirectory.open(path, settings=settings, identity={"seed": 1}, overwrite=False) as run:
        for step in range(num_steps):
            first = step * num_groups
            groups = tuple(_group(first + place, num_tokens, rng) for place in range(num_groups))
            batch = TrainBatch(
                step=step,
                policy_version=step,
                groups=groups,
                advantages_S=np.zeros(MEMBERS * num_groups, np.float32),
                metrics={name: chance.random() for name in METRICS},
            )
            state = RunState(next_step=step + 1, next_group_index=first + num_groups, source={}, ledger=LedgerCounts())
            run.commit(StepCommit(batch=batch, dropped=(), wasted_tokens={}, state=state), reward_key=None)
        run.finish()


def _group(index: int, num_tokens: int, rng: np.random.Generator) -> Group:
    question = f"What is {index} + 1?"
    message = {"role": "user", "content": question}
    prompt = Prompt(
        prompt_id=f"sums/{index}",
        source="sums",
        text=question,
        token_ids=np.arange(20, 30, dtype=np.int32),
        messages=(message,),
        label=str(index + 1),
    )
    rollouts = []
    for member in range(MEMBERS):
        number = MEMBERS * index + member
        sample = sample_of(
            prompt.token_ids,
            rng.integers(20, 48_000, num_tokens),
            logprobs=-rng.exponential(1.0, num_tokens).astype(np.float32),
            loss_mask=(np.arange(num_tokens) % 3_000 < 2_600).astype(np.float32),
            version_spans=(VersionSpan(0, num_tokens, 0),),
            group_index=index,
            index=number,
            rollout_id=number,
            response=f"It is {index + member}.",
        )
        reward = float(rng.integers(2))
        verdict = Verdict(reward=reward, correct=Correct.YES if reward else Correct.NO)
        rollouts.append(Rollout(rollout_id=number, samples=(sample,)).with_reward(verdict))
    return Group(group_index=index, prompt=prompt, rollouts=tuple(rollouts))


@contextmanager
def viewer(path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "rollfeed", "view", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


def seconds_to_open(page: Page, address: str, place: str) -> float:
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(address + place)
    page.wait_for_function("place => document.body.dataset.ready?.startsWith(place)", arg=place)
    return time.perf_counter() - started


def seconds_to_follow(page: Page, place: str) -> float:
    """Return what a choice on the open page takes."""
    started = time.perf_counter()
    page.evaluate("place => { location.hash = place }", place)
    page.wait_for_function("place => document.body.dataset.ready?.startsWith(place)", arg=place)
    return time.perf_counter() - started


def median_of(page: Page, address: str, places: Sequence[str]) -> float:
    return round(statistics.median(seconds_to_open(page, address, place) for place in places), 3)


def report_of(path: Path, out: Path) -> dict[str, float]:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "rollfeed", "report", str(path), "--out", str(out)], check=True)
    return {"seconds": round(time.perf_counter() - started, 1), "megabytes": round(out.stat().st_size / 1e6, 2)}


def measure(folder: Path, *, num_steps: int) -> dict[str, Any]:
    million, long = folder / "million", folder / "long"
    write_run(million, num_steps=num_steps, num_groups=125, num_tokens=6)
    write_run(long, num_steps=1, num_groups=2, num_tokens=LONG)
    found: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        opened = []
        for _ in range(3):
            with viewer(million) as address:
                opened.append(seconds_to_open(page, address, "#/run/million"))
        found["open"] = round(statistics.median(opened), 3)
        with viewer(million) as address:
            steps = (num_steps // 4, num_steps // 2, num_steps - 1)
            found["step"] = median_of(page, address, [f"#/samples/million/{step}" for step in steps])
            found["worst"] = median_of(page, address, ["#/samples/million/all?order=worst"] * 3)
            found["wrong"] = median_of(page, address, ["#/samples/million/all?only=wrong"] * 3)
        with viewer(long) as address:
            found["first sample, with the tokenizer"] = round(
                seconds_to_open(page, address, "#/sample/long/0.0.0.0"), 3
            )
            found["sample"] = median_of(page, address, [f"#/sample/long/0.0.{n}.{n}" for n in (1, 2, 3)])
            followed = [seconds_to_follow(page, f"#/sample/long/0.1.{n}.{MEMBERS + n}") for n in (4, 5, 6)]
            found["sample, chosen on the page"] = round(statistics.median(followed), 3)
            drawn = [page.evaluate(DRAW, f"0.1.{n}.{MEMBERS + n}") for n in range(3)]
            found["sample, drawn"] = round(statistics.median(drawn), 3)
        browser.close()
    reports = {path.name: report_of(path, folder / f"{path.name}.html") for path in (million, long)}
    return {"seconds": found, "reports": reports, "samples": num_steps * 125 * MEMBERS, "tokens": LONG}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000, help="of 1,000 samples each (default 1000)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), num_steps=arguments.steps)
    arguments.output.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
