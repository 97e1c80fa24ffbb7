"""The forms in which questions are asked, and the marks in which answers are asked for.

The words are rollfeed's own: what a model learned in another wording, a data set of whole texts asks it in that.
"""

from __future__ import annotations

from rollfeed.protocols import AnswerMarker, PromptPreprocessor

_DIALOGUE = (
    "A user asks a question and an assistant answers it. The assistant first thinks about it between <think> and "
    "</think>, and then gives the answer between <answer> and </answer>.\nUser: {question}\nAssistant: <think>"
)
_ASKS_FOR = {
    AnswerMarker.BOXED: "Put the final answer into \\boxed{}.",
    AnswerMarker.TAGS: "Put the final answer between <answer> and </answer>.",
}


def asked(question: str, preprocessor: PromptPreprocessor | None, marker: AnswerMarker | None) -> str:
    """Return a question in its form; the dialogue of ``TinyZero`` asks for its marks itself."""
    if preprocessor is PromptPreprocessor.TINY_ZERO:
        return _DIALOGUE.replace("{question}", question)
    return question if marker is None else f"{question}\n{_ASKS_FOR[marker]}"
