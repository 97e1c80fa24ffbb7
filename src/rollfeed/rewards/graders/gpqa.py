"""Grader ``gpqa``: the chosen option of a multiple-choice question, by letter or by text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollfeed.answers import clean, final_text, find_answer
from rollfeed.rewards.graders.texts import text_key
from rollfeed.rewards.labels import LabelError, unusable
from rollfeed.types import Verdict

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DEFAULT_NUM_OPTIONS = 4
_KIND = "a letter, an index or the text of a choice"
MAX_CHARS = 5_000
"""A choice that is stated further than this from the end of the response is not found."""

# A letter on its own, maybe in brackets, markdown or LaTeX. Small letters only where nothing else can be meant.
# Every repetition is bounded, so that matching is linear in the text.
_OPEN = r"[\s*_`\"'$]{0,12}(?:\\(?:text|textbf|mathrm|mathbf|boxed|mathsf)[ ]?\{[ ]?){0,3}[*_$]{0,3}"
_LETTER = (
    rf"{_OPEN}(?:[(\[][ ]?(?P<wrapped>[A-Za-z])[ ]?[)\]]|(?P<bare>(?-i:[A-Z]))(?!\w|['’]\w)"  # noqa: RUF001
    r"|(?P<small>(?-i:[a-z]))(?=[ .)*_}$]{0,8}(?:\n|\Z)))"
)
_STATEMENT = re.compile(
    rf"""
    (?: \b(?: (?: answer | choice | option | selection | antwort | respuesta | r[ée]ponse | resposta | risposta )
        (?: [ ](?:choice|option|letter) )?
        (?: [ *_]{{0,4}} [:=] \s{{0,3}}
          | [ ] (?: is | would[ ]be | must[ ]be | should[ ]be | might[ ]be | ist | est | es ) \b [ ]? :?
        )
        (?: \s? (?: therefore | thus | clearly | definitely | probably | most[ ]likely | indeed ) \b ,? )?
        (?: \s? (?:the[ ])? (?: option | choice | letter | answer ) \b :? )?
      | (?: i[ ](?:choose|pick|select|would[ ]choose|go[ ]with|will[ ]go[ ]with) | (?:go|going)[ ]with )
        (?: [ ] (?:the[ ])? (?: option | choice | letter | answer ) )?
      | (?: so | therefore | thus | hence ) \b ,? (?: [ ] (?: it[ ]is | it's | it[ ]must[ ]be ) )?
    ) | \u7b54\u6848[ ]?(?: \u662f | \u4e3a | : ) ){_LETTER}
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LABELLED_LINE = re.compile(
    rf"^[ *_\#>-]{{0,8}}[^\W\d_]{{2,20}}[ *_]{{0,4}}:{_LETTER}[ *_.!)\]}}$\"'`]{{0,12}}$", re.MULTILINE
)
_REASONED_LINE = re.compile(rf"^{_LETTER}[)\].:,*]{{0,4}} (?:because|since)\b", re.MULTILINE)
_LETTER_LINE = re.compile(rf"^{_LETTER}[ *_.!)\]}}$\"'`]{{0,12}}$", re.MULTILINE)
_VERDICT_ON_LETTER = re.compile(
    rf"\b(?:option[ ]|choice[ ])?{_LETTER}[)\]*_]{{0,4}}[ ]is[ ](?:the[ ])?(?:\w{{1,20}}[ ])?"
    r"(?:correct|right|answer|true)\b",
    re.IGNORECASE,
)
_BOXED_LETTER = re.compile(
    r"\\boxed[ ]?\{[ ]?(?:\\(?:text|textbf|mathrm|mathbf|mathsf)[ ]?\{[ ]?)?[(\[*]{0,4}(?P<bare>[A-Za-z])[)\]*]{0,4}"
    r"(?:\}|[.:][^{}]{0,200}\}|[ ][^{}=]{0,200}\})"
)
_STATEMENTS = (_STATEMENT, _LABELLED_LINE, _VERDICT_ON_LETTER, _REASONED_LINE, _LETTER_LINE)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_CHOSEN_PLACE = re.compile(r"[)\]}:]|[ .!*$]{0,12}$")
_BEGINS_WITH_LETTER = re.compile(r"[ *]{0,4}[A-Z]\. ")
_LONE = re.compile(r"(?<![\w'’\\.-])(?P<bare>[A-Z])(?![\w'’-])(?! ?[=+^<>{\\])")  # noqa: RUF001
_DENIED_BEFORE = re.compile(
    r"(?:\bnot(?: (?:include|contain|mean|be))?|n't|\bneither|\bnor|\bexcept|\beliminate[sd]?|\brule[sd]? out|\bthan"
    r"|\bexclude[sd]?|\breject(?:s|ed)?) (?:the )?(?:option |choice |answer )?[(\[*]{0,4}$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[)\]*]{0,4} (?:is|are|was|seems|looks) (?:\w{1,20} )?"
    r"(?:not|incorrect|wrong|false|ruled|eliminated|impossible|tempting|close)\b"
    r"|[)\]*]{0,4} (?:isn't|can't|cannot|fails)\b",
    re.IGNORECASE,
)
_ANOTHER = re.compile(
    r"[)\]*}$]{0,4} ?(?:or|and|/|,|;|&|\||\+|then) ?(?:option |maybe |possibly )?[(\[*]{0,4}[A-Z](?![\w'’])"  # noqa: RUF001
)
_MORE = re.compile(r"(?:[)\]*}$]{0,4}[ .:\n-]{1,3}[(\[*]{0,4}[A-Z](?!\w)){1,25}[)\]*}$.!]{0,8}\s*(?:\n|\Z)")
"""Letters that follow a chosen one with little between them, to the end of the line: a list and no choice."""
_LISTED_BEFORE = re.compile(r"(?<!\w)(?P<bare>[A-Z])[)\]*}$]{0,4} ?(?:/|,|;|&|\||\+) ?[(\[*]{0,4}$")
_FOLLOWED_BY_WORD = re.compile(
    r"\s{1,3}(?!because|since|as\b|which|with\b|is\b|for\b|due\b|by\b|and\b|or\b|but\b)[a-z]"
)
_MARKS = re.compile(r"[*_`\"'$]{6,}")
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n[ \n]*\n")


class Question(NamedTuple):
    """A question's choices, and the right one of them."""

    letters: Sequence[str]
    """That may be chosen."""
    choices: Mapping[str, str]
    """Their texts, where the metadata has them."""
    wanted: str | None
    """The right letter; None where only a text is known to be right."""
    label: Any


def right_choice(label: Any, metadata: Mapping[str, Any]) -> Question:
    """Return the right choice and what there is to choose from.

    Args:
        label: The letter, the text of a choice, or its index; ``correct_letter`` of the metadata goes first.
        metadata: ``valid_letters`` (A to D by default) and ``choices``, a list or a mapping from letters.

    Raises:
        LabelError: If the label is none of these.
    """
    choices = _choices(metadata.get("choices"))
    letters = _valid_letters(metadata.get("valid_letters"), choices)
    wanted = _wanted_letter(metadata.get("correct_letter", label), letters, choices)
    if wanted is None and (not isinstance(label, str) or not label.strip()):
        raise unusable(label, _KIND)
    return Question(letters, choices, wanted, label)


def known_choice(label: Any, metadata: Mapping[str, Any]) -> Question:
    """Return the right choice and what there is to choose from.

    Raises:
        LabelError: If it is none of the choices, or these are no choices.
    """
    given, own_letters = metadata.get("choices"), metadata.get("valid_letters")
    if given is not None and not _choices(given):
        raise LabelError(f"choices = {given!r:.80} in the metadata must be a list, or a mapping from letters")
    if own_letters is not None and not (isinstance(own_letters, str | list | tuple) and own_letters):
        raise LabelError(f"valid_letters = {own_letters!r:.80} in the metadata must be a list of letters")
    right = metadata.get("correct_letter", label)
    question = right_choice(right, metadata)
    choices = question.choices
    if question.wanted is None and (choices or (own_letters is not None and len(right.strip()) == 1)):
        among = ", ".join(f"{letter}: {text!r:.20}" for letter, text in choices.items()) or ", ".join(question.letters)
        raise LabelError(f"the right choice is {right!r:.80}, which is not one of {among:.200}")
    return question


def compare_choice(response: str, question: Question, metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the option that the response chooses is the right one, else 0.

    The response is read after the reasoning. What it states last as its answer counts; without a statement, a letter
    alone in its last line; without a letter, the text of the right choice.
    """
    text = _BLANK_LINES.sub("\n\n", _SPACES.sub(" ", _MARKS.sub("**", final_text(response)[-MAX_CHARS:])))
    text = _ANSWER_TAG.sub(lambda tag: "\n" if tag[1] else "answer: ", text.replace("\\(", "").replace("\\)", ""))
    letter = _chosen_letter(text, question.letters)
    if letter is None:
        return _by_text(response, question)
    return Verdict.graded(letter == question.wanted, extracted=letter)


def _choices(choices: Any) -> dict[str, str]:
    if isinstance(choices, Mapping):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return {letter: str(text) for letter, text in zip(_LETTERS, choices, strict=False)}
    return {}


def _valid_letters(letters: Any, choices: Mapping[str, str]) -> list[str]:
    if isinstance(letters, str | list | tuple) and letters:
        return [str(letter).strip().upper() for letter in letters]
    return sorted(choices) or list(_LETTERS[:_DEFAULT_NUM_OPTIONS])


def _wanted_letter(label: Any, letters: Sequence[str], choices: Mapping[str, str]) -> str | None:
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    if not isinstance(label, str):
        return None
    bare = clean(label).strip("()[]. ")
    if bare.upper() in letters:
        return bare.upper()
    same = [letter for letter, text in choices.items() if text_key(text) == text_key(label)]
    return same[0] if len(same) == 1 else None


def _chosen_letter(text: str, letters: Sequence[str]) -> str | None:
    """Return the letter stated last, or the one letter of the last line if it stands in brackets or at the end."""
    found = ((match.end(), match) for pattern in _STATEMENTS for match in pattern.finditer(text))
    stated = [(end, match) for end, match in found if _is_choice(text, match)]
    stated += [(match.end(), match) for match in _BOXED_LETTER.finditer(text)]
    if stated:
        _, last = max(stated, key=lambda found: found[0])
        return None if _is_one_of_several(text, last, letters) else _letter(last)
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    lone = [match for match in _LONE.finditer(line) if match["bare"] in letters and _is_choice(line, match)]
    if any(_is_one_of_several(line, match, letters) for match in lone):
        return None
    is_chosen = _BEGINS_WITH_LETTER.match(line) or any(_CHOSEN_PLACE.match(line, match.end()) for match in lone)
    return lone[0]["bare"] if is_chosen and len({match["bare"] for match in lone}) == 1 else None


def _is_one_of_several(text: str, match: re.Match[str], letters: Sequence[str]) -> bool:
    """Whether another letter stands beside the chosen one as if it were chosen, too."""
    end = _letter_end(match)
    more = _MORE.match(text, end)
    others = set(re.findall(r"[A-Z]", more[0])) if more else set()
    if _ANOTHER.match(text, end) or others & set(letters) - {_letter(match)}:
        return True
    before = _LISTED_BEFORE.search(text[max(0, end - 20) : end - 1])
    return before is not None and before["bare"] in letters and before["bare"] != _letter(match)


def _is_choice(text: str, match: re.Match[str]) -> bool:
    """Whether a letter is chosen, not denied, and no article or pronoun."""
    end = _letter_end(match)
    letter = _letter(match)
    before = text[max(0, end - 40) : end - 1]
    if _DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text, end):
        return False
    is_bare = match.groupdict().get("wrapped") is None
    return not (is_bare and letter in "AI" and _FOLLOWED_BY_WORD.match(text, end))


def _name(match: re.Match[str]) -> str:
    """Return the name of the group that has the letter."""
    return next(name for name in ("wrapped", "bare", "small") if match.groupdict().get(name) is not None)


def _letter(match: re.Match[str]) -> str:
    return match[_name(match)].upper()


def _letter_end(match: re.Match[str]) -> int:
    return match.end(_name(match))


def _by_text(response: str, question: Question) -> Verdict:
    """Grade an answer that names no letter: it must be the text of the right choice."""
    answer = find_answer(response)
    wanted, choices = question.wanted, question.choices
    text = choices.get(wanted, "") if wanted is not None else str(question.label)
    if answer is None or not text.strip():
        return Verdict.graded(False, format_ok=False, detail="no choice found")
    given, key = text_key(answer.text), text_key(text)
    right = bool(key) and given == key
    if not right and choices:
        keys = {letter: text_key(choice) for letter, choice in choices.items()}
        right = [letter for letter, key in keys.items() if key and _contains(given, key)] == [wanted]
    return Verdict.graded(right, format_ok=right, extracted=clean(answer.text)[:500])


def _contains(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None
