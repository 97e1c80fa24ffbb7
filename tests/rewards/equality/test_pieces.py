"""Formulas that are the same where one looks, and not elsewhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.rewards.equality.numeric import equals_any
from rollfeed.rewards.graders.mathematics import EQUALS_ANY, grade_equality
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.types import Correct, Outcome, Verdict

DIFFERENT = [
    (r"\max(x,-1000)", "x"),
    (r"|x+100|-100", "x"),
    ("n!", r"\max(n!,5)"),
    (r"\min(x,10^{30})", "x"),
    (r"\max(x,-10^{50})", "x"),
    (r"\sqrt{(x+100)^2}-100", "x"),
    (r"\sqrt{x^2+200x+10000}-100", "x"),
    (r"((x+50)^4)^{1/4}-50", "x"),
    (r"\lfloor x/1000 \rfloor + x", "x"),
    (r"\lceil \frac{x}{10^5} \rceil", "1"),
    (r"\frac{|x+1000|}{x+1000}", "1"),
    (r"x\frac{x-777}{|x-777|}", "-x"),
    (r"x + \max(0, 1-10^9|x-12345|)", "x"),
    (r"x + \max(0, 1-10^9|x^2-2|)", "x"),
    (r"x + \max(0, |x|-10^4)", "x"),
    (r"\min(n!, 10^9)", "n!"),
    (r"\min(\binom{n}{3}, 10^9)", r"\binom{n}{3}"),
    (r"\max(x+y,-500)", "x+y"),
    (r"|x+y+300|-300", "x+y"),
    ("0", "10^{-7}"),
    ("0", "0.0000001"),
    ("0", "1e-7"),
]
SAME = [
    (r"\max(x^2,-1)", "x^2"),
    (r"|x|^2", "x^2"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\max(x,y)", r"\frac{x+y+|x-y|}{2}"),
    (r"\min(x,y)", r"-\max(-x,-y)"),
    (r"|x-y|", "|y-x|"),
    (r"|x||y|", "|xy|"),
    (r"\lfloor x \rfloor + \lfloor x+\frac{1}{2} \rfloor", r"\lfloor 2x \rfloor"),
    (r"\lceil x \rceil", r"-\lfloor -x \rfloor"),
    (r"\max(e^x,0)", "e^x"),
    (r"\ln|x|", r"\ln x"),  # where both are defined
    (r"\sqrt{x^2+1}-x", r"\frac{1}{\sqrt{x^2+1}+x}"),
    (r"\sqrt{x}\sqrt{x}", "x"),
    (r"\frac{n!}{(n-1)!}+|n|-n", "n"),
    (r"|x-100|", r"\max(x-100, 100-x)"),
]


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_x31_what_is_equal_at_ordinary_points_only_is_wrong(answer: str, label: str) -> None:
    assert equals_any(answer, [label]) is False
    assert equals_any(label, [answer]) is False


@pytest.mark.parametrize(("answer", "label"), SAME)
def test_x31_what_is_equal_everywhere_stays_right(answer: str, label: str) -> None:
    assert equals_any(answer, [label]) is True
    assert equals_any(label, [answer]) is True


@settings(max_examples=25, deadline=None)
@given(
    edge=st.integers(10, 10**9) | st.integers(1, 40).map(lambda power: 10**power),
    label=st.sampled_from(["x", "x^3+x", r"\sin x", r"\frac{x}{x^2+1}"]),
    form=st.sampled_from(
        [
            r"{label}+\max(0,x-{edge})",
            r"{label}+\max(0,-x-{edge})",
            r"{label}+|x+{edge}|-x-{edge}",
            r"{label}+\lfloor x^2/{edge}^3 \rfloor",
            r"{label}\cdot\frac{{|x-{edge}|}}{{{edge}-x}}",
            r"{label}+\sqrt{{(x-{edge})^2}}+x-{edge}",
            r"{label}+\min(0,x+{edge})",
        ]
    ),
)
def test_x31_a_piece_that_begins_at_any_number_is_found(edge: int, label: str, form: str) -> None:
    assert equals_any(form.format(label=label, edge=edge), [label]) is False


LOGARITHMS = "+".join(rf"\log({number}+\sqrt{{2}})" for number in range(2, 72))
HOSTILE = [
    rf"{LOGARITHMS}+2^{{60000}}+\log(-5)",
    rf"({LOGARITHMS})\cdot 3^{{30000}}\cdot\ln(-7)",
    "+".join(rf"\sin(\cos(\tan(x^{{{number}}})))" for number in range(1, 90)),
    r"\max(" + ",".join(rf"|x-{number}|^{{\pi}}" for number in range(100)) + ")",
    "+".join(rf"\frac{{n!}}{{{number}}}^{{\sqrt{{2}}}}" for number in range(1, 60)),
]


@pytest.mark.parametrize("answer", HOSTILE)
@pytest.mark.parametrize("label", ["5", "x+1"])
def test_x30_an_answer_that_spends_the_budget_is_wrong_and_no_failure(answer: str, label: str) -> None:
    found = grade_equality(answer, [label])
    if isinstance(found, IsolatedCall):
        assert found.function_path == EQUALS_ANY
        found = found.finish(json.loads(json.dumps(equals_any(*found.args))))
    assert (found.outcome, found.reward, found.correct) == (Outcome.OK, 0.0, Correct.NO)


def test_x30_a_spent_budget_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollfeed.rewards.equality.numeric.MAX_CPU_SECONDS", 0.0)
    reason = equals_any(r"\sin^2 x + \cos^2 x", ["1"])
    assert "0 s of processor time" in str(reason)
    found = grade_equality(r"\sin^2 x + \cos^2 x", ["1"])
    assert isinstance(found, IsolatedCall)
    verdict = found.finish(reason)
    assert verdict == Verdict.graded(False, extracted=verdict.extracted, detail=str(reason))
    monkeypatch.setattr("rollfeed.rewards.equality.numeric.MAX_CPU_SECONDS", 1.0)
    assert equals_any(r"\sin^2 x + \cos^2 x", ["1"]) is True
