r"""From the text of an answer, LaTeX or plain, to tokens.

Linear in the text. What LaTeX uses for looks only (``\left``, ``\,``, ``$``) leaves no token.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rollfeed.answers import normalize
from rollfeed.rewards.equality.notation.units import is_unit
from rollfeed.rewards.equality.tree import NotMathError, TooComplexError

MAX_CHARS = 2_000
MAX_TOKENS = 800

FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log",
    "lg", "exp", "sqrt", "abs", "floor", "ceil", "gcd", "lcm", "max", "min", "binom", "factorial", "root", "det",
])  # fmt: skip
GREEK = frozenset([
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota",
    "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi",
    "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega", "ell",
])  # fmt: skip
_ASCII_GREEK = frozenset(["alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "sigma", "omega", "phi"])
_ASCII_NAMES = {"pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty"}
_SEPARATORS = frozenset(["or", "and"])

# Unicode signs, as the LaTeX command that means the same.
_SIGNS = {
    "π": "pi", "∞": "infty", "√": "sqrt", "\u222a": "cup", "∩": "cap", "±": "pm", "∓": "mp", "≤": "le", "≥": "ge",
    "≠": "ne", "×": "times", "÷": "div", "·": "cdot", "⋅": "cdot", "∙": "cdot", "∗": "cdot", "∈": "in",  # noqa: RUF001
    "∅": "emptyset", "°": "circ", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon",  # noqa: RUF001
    "θ": "theta", "λ": "lambda", "μ": "mu", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega",  # noqa: RUF001
    "∖": "setminus", "∧": "land", "∨": "lor", "→": "to", "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil", "⌉": "rceil",  # noqa: RUF001
    "Γ": "Gamma", "Δ": "Delta", "∆": "Delta", "Θ": "Theta", "Λ": "Lambda", "Σ": "Sigma", "Φ": "Phi",
    "Ψ": "Psi", "Ω": "Omega", "ζ": "zeta", "η": "eta", "κ": "kappa", "ξ": "xi", "χ": "chi", "ψ": "psi",
    "≈": "approx", "∠": "angle",
}  # fmt: skip
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "varnothing": "emptyset", "ast": "cdot",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lbrace": "{", "rbrace": "}", "degree": "circ",
    "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "bullet": "cdot", "arctg": "arctan", "tg": "tan",
    "ctg": "cot", "cosec": "csc", "setminus": "setminus", "backslash": "setminus", "wedge": "land", "vee": "lor",
    "imath": "i", "langle": "(", "rangle": ")", "infin": "infty",
}  # fmt: skip
_LOOKS = frozenset([
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr",
    "displaystyle", "textstyle", "limits", "quad", "qquad", "hfill", "enspace", "thinspace",
    "nonumber", "nolimits", "middle", "rm", "bf", "it", "angle", "triangle",
])  # fmt: skip
_TEXT_COMMANDS = (
    "text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|mathbb|mathcal|boldsymbol"
    "|bm|mbox|hbox|operatorname|emph|underline"
)

_GROUP_MARK = "\u2063"
REPEATING_MARK = "\u2064"
"""In the text of a number, between its first decimals and those that repeat for ever."""
_SURE_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}(?:\\!)?|,?\\[,!;: ]|\\thinspace[ ]?)(?=[0-9]{3}(?![0-9]))")
_COMMA_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])"
COMMA_GROUPED = re.compile(rf"(?<![0-9.,]){_COMMA_GROUPED}")
_TRAILING_SPACING = re.compile(r"(?:\\\\|\\)$")

_TOKEN = re.compile(
    rf"""
    (?P<space> \s+ | ~ | \\[,;:!\ ] | \\(?:hspace|vspace|h?phantom)\*?\{{[^{{}}]{{0,20}}\}} | \\[()\[\]] | \$ )
  | (?P<currency> \\\$ | [€£¥] | \\(?:pounds|euro|yen)(?![A-Za-z]) | (?:USD|EUR|GBP)\ ?(?=[0-9.]) )
  | (?P<row> \\\\ (?: \[[^\]]{{0,10}}\] )? )
  | \\begin\s?\{{ (?P<begin> [A-Za-z]{{1,12}}\*? ) \}} (?: \{{ [clr|\ ]{{0,20}} \}} )?
  | \\end\s?\{{ (?P<end> [A-Za-z]{{1,12}}\*? ) \}}
  | \\(?:{_TEXT_COMMANDS})\s?\{{ (?P<words> [^{{}}]* ) \}}
  | \\(?P<command> [A-Za-z]+ )
  | \\(?P<escaped> [{{}}%|\#&_] )
  | (?P<number>
        (?: [0-9]*\.[0-9]*{REPEATING_MARK}[0-9]+ | [0-9]{{1,3}}(?:{_GROUP_MARK}[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?
          | [0-9]+\.[0-9]+ | [0-9]+ | \.[0-9]+ )
        (?: [eE][-+]?[0-9]{{1,5}}(?![A-Za-z0-9.]) )?
    )
  | (?P<letters> [A-Za-z]+ )
  | (?P<operator> \*\* | <= | >= | != | == | [-+*/^_=<>!%|(){{}}\[\],;:&'\u2032.] )
    """,
    re.VERBOSE,
)
_REPEATING = re.compile(r"([0-9]*\.[0-9]*)\s?\\(?:overline|bar|dot)\s?\{\s?([0-9]{1,50})\s?\}")
_REALS = re.compile(r"\\mathbb\s?(?:\{\s?R\s?\}|R)|\\R(?![A-Za-z])")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s?[xX]\s?(?=10\s?\^)")
_PLAIN_TEXT = re.compile(r"\(?[A-Za-z]\)?|[-+]?[0-9][0-9.,/ ]*(?:%|[A-Za-z][A-Za-z ]*)?")


class Token(NamedTuple):
    """A piece of the text."""

    kind: str
    """``number``, ``name`` (a command or a known word), ``letters``, ``words``, ``begin``, ``end``, or itself."""
    text: str
    spaced: bool
    """Whether space stands before it."""


def tokenize(text: str, *, comma_groups_digits: bool) -> list[Token]:
    """Return the tokens of an answer, in which ``1,234`` is one number where ``comma_groups_digits``, and else two.

    Raises:
        TooComplexError: If the text is longer than any answer.
        NotMathError: If it holds a character that mathematics has no use for.
    """
    if len(text) > MAX_CHARS:
        raise TooComplexError(f"longer than {MAX_CHARS} characters")
    text = (
        _TRAILING_SPACING.sub("", _REALS.sub(r"(-\\infty,\\infty)", normalize(text)).strip()).strip().removesuffix(".")
    )
    text = _TIMES_TEN.sub(r"\\times ", text)
    text = _REPEATING.sub(rf"\1{REPEATING_MARK}\2", text)
    text = _SURE_GROUPING.sub(_GROUP_MARK, text)
    if comma_groups_digits:
        text = COMMA_GROUPED.sub(lambda match: match[0].replace(",", _GROUP_MARK), text)
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            sign = _SIGNS.get(text[position])
            if sign is None:
                raise NotMathError(f"{text[position]!r:.20} is no mathematics")
            tokens += _command(sign, spaced)
            position, spaced = position + 1, False
            continue
        position = match.end()
        new = _tokens_of(match, spaced, after_value=bool(tokens) and _ends_value(tokens[-1]))
        spaced = spaced if match.lastgroup == "currency" else not new
        tokens += new
        if len(tokens) > MAX_TOKENS:
            raise TooComplexError(f"more than {MAX_TOKENS} tokens")
    return tokens


def _ends_value(token: Token) -> bool:
    return token.kind in ("number", "}", ")") or token.text == "pi"


def _tokens_of(match: re.Match[str], spaced: bool, *, after_value: bool) -> list[Token]:
    kind, text = match.lastgroup or "", match[match.lastgroup or 0]
    match kind:
        case "space" | "currency":
            return []
        case "number":
            return [Token("number", text.replace(_GROUP_MARK, ""), spaced)]
        case "command":
            return _command(text, spaced)
        case "letters":
            return _letters(text, spaced)
        case "words":
            if after_value and is_unit(text.strip()):
                return [Token("words", text.strip(), spaced)]
            return _words(text, spaced)
        case "escaped":
            return [Token("set" + text if text in "{}" else text, text, spaced)]
        case "operator":
            return [Token({"**": "^", "==": "=", "\u2032": "'"}.get(text, text), text, spaced)]
        case _:
            return [Token(kind, text, spaced)]


def _command(name: str, spaced: bool) -> list[Token]:
    name = _RENAMED.get(name, name)
    if name in _LOOKS:
        return []
    if name in ("land", "lor"):
        return [Token("or", name, spaced)]
    if name in ("{", "}"):
        return [Token("set" + name, name, spaced)]
    if not name.isalpha():
        return [Token(name, name, spaced)]
    return [Token("letters", name, spaced)] if name == "i" else [Token("name", name, spaced)]


def _letters(run: str, spaced: bool) -> list[Token]:
    if run in _SEPARATORS:
        return [Token("or", run, spaced)]
    if run in FUNCTIONS or run in _ASCII_GREEK:
        return [Token("name", run, spaced)]
    if run in _ASCII_NAMES:
        return [Token("name", _ASCII_NAMES[run], spaced)]
    for cut in (len(run) - 1, len(run) - 2):
        if cut >= 2 and run[:cut] in FUNCTIONS and run[:cut] not in ("min", "max"):
            return [Token("name", run[:cut], spaced), Token("letters", run[cut:], False)]
    return [Token("letters", run, spaced)]


def _words(content: str, spaced: bool) -> list[Token]:
    bare = content.strip().removesuffix(".")
    if bare in _SEPARATORS or bare in (",", "or", "and"):
        return [Token("or", bare, spaced)]
    if bare in FUNCTIONS:
        return [Token("name", bare, spaced)]
    if _PLAIN_TEXT.fullmatch(bare):
        return [token._replace(spaced=spaced or token.spaced) for token in tokenize(bare, comma_groups_digits=True)]
    return [Token("words", " ".join(content.split()), spaced)] if bare else []
