"""Curves of a run that trains, as a picture, as a page, and as characters; and advice on what a run shows."""

from rollfeed.report.advice import Advice, advice_of
from rollfeed.report.curves import Curves, Point, curves_of
from rollfeed.report.files import CURVE_PAGE, warn_without_drawing, write_curves
from rollfeed.report.reward_advice import reward_signs
from rollfeed.report.run_numbers import RunNumbers, check_port, serving_numbers
from rollfeed.report.text_chart import accuracy_lines, accuracy_report, change_text, paired_text, text_chart

__all__ = [
    "CURVE_PAGE",
    "Advice",
    "Curves",
    "Point",
    "RunNumbers",
    "accuracy_lines",
    "accuracy_report",
    "advice_of",
    "change_text",
    "check_port",
    "curves_of",
    "paired_text",
    "reward_signs",
    "serving_numbers",
    "text_chart",
    "warn_without_drawing",
    "write_curves",
]
