"""The instruction to answer in a language: told by script, and by common words where scripts are shared.

Written for yes-or-no questions about one wanted language; it does not guess among all languages of the world.
"""

from __future__ import annotations

import re
import unicodedata

from rollfeed.rewards.ifeval.arguments import ArgumentError, Arguments, text

_SCRIPTS = {
    "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC", "bn": "BENGALI", "bg": "CYRILLIC", "ru": "CYRILLIC",
    "uk": "CYRILLIC", "el": "GREEK", "gu": "GUJARATI", "he": "HEBREW", "hi": "DEVANAGARI", "mr": "DEVANAGARI",
    "ne": "DEVANAGARI", "ja": "HIRAGANA", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM", "pa": "GURMUKHI",
    "ta": "TAMIL", "te": "TELUGU", "th": "THAI", "zh": "CJK", "zh-cn": "CJK", "zh-tw": "CJK",
}  # fmt: skip
# Signs of their own for languages that share a script.
_OWN_SIGNS = {
    "fa": "\u067e\u0686\u0698\u06af\u06cc\u06a9", "ur": "\u0679\u0688\u0691\u06d2\u06ba\u06be\u06c1",
    "uk": "\u0456\u0457\u0454\u0491", "ru": "\u044b\u044d\u0451",
}  # fmt: skip
_WORDS = {
    "en": "the and of to in is that it for was with as on are this be you have not they",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als",
    "fr": "le la les et des en un du une que est pour qui dans pas sur au avec il ce",
    "es": "el la de que y en los se del las por un para con no una su al es lo",
    "it": "il di che la e un per una in non sono si da come del della più con gli le",
    "pt": "o de que e do da em um para é com não uma os no se na por mais as",
    "nl": "de het een van en in is dat op te zijn met voor niet aan er om ook als",
    "sv": "och i att det som en på är av för med den till inte ett har de om",
    "fi": "ja on ei se että hän oli mutta kun niin ovat tai myös joka mitä olla",
    "pl": "i w na się nie że do to z jest jak po co ale od za tak o",
    "tr": "ve bir bu da de için ile çok ne gibi daha olarak en var ama",
    "vi": "và của là có không được cho một trong với những này người các đã để",
    "sw": "na ya wa kwa ni katika za la kuwa hii yake watu pia sana",
    "ro": "și în de la cu pe nu este un o care să din mai pentru",
    "cs": "a v na je se že to s z do i o pro ale jako jsou",
    "hu": "a az és hogy nem egy is van ez meg de csak volt",
    "da": "og i at det er en til på som af for med ikke den de har",
    "no": "og i det er en på som til av for med at ikke den har de",
    "id": "yang dan di ini itu dengan untuk dari dalam tidak pada adalah akan",
}
_SHARE = 0.5


def response_language(response: str, arguments: Arguments) -> bool:
    """Most of the response is in the wanted language.

    Raises:
        ArgumentError: If the language is none that is known here.
    """
    language = text(arguments, "language").lower()
    if language in _SCRIPTS:
        return _is_in_script(response, language)
    if language not in _WORDS:
        raise ArgumentError(f"language = {language!r:.20} is not known")
    words = re.findall(r"[^\W\d_]+", response.lower())
    scores = {name: sum(word in common for word in words) for name, common in _COMMON.items()}
    letters = [char for char in response if char.isalpha()]
    latin = sum("LATIN" in unicodedata.name(char, "") for char in letters)
    return bool(letters) and latin > _SHARE * len(letters) and 0 < scores[language] == max(scores.values())


_COMMON = {name: frozenset(words.split()) for name, words in _WORDS.items()}


def _is_in_script(response: str, language: str) -> bool:
    names = [unicodedata.name(char, "") for char in response if char.isalpha()]
    script = _SCRIPTS[language]
    if script == "HIRAGANA":
        kana = sum(name.startswith(("HIRAGANA", "KATAKANA")) for name in names)
        return kana > 0 and kana + sum(name.startswith("CJK") for name in names) > _SHARE * len(names)
    inside = sum(name.startswith(script) for name in names)
    if script == "CJK" and any(name.startswith("HIRAGANA") for name in names):
        return False
    own = _OWN_SIGNS.get(language)
    rivals = [
        signs for other, signs in _OWN_SIGNS.items() if other != language and _SCRIPTS[other] == script and own is None
    ]
    if any(sign in response for signs in rivals for sign in signs):
        return False
    has_own = own is None or len(names) < 40 or any(sign in response.lower() for sign in own)
    return inside > _SHARE * len(names) and has_own
