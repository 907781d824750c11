"""Quality filters: measures of a text as plain functions, checked against the user's bounds.

The measures follow Gopher's rules (Rae et al. 2021, arXiv 2112.11446, appendix A1).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from boost_core.config.training import Measure, QualityFilter

_ASCII = [chr(code) for code in range(128)]
_NEITHER = "".join(each for each in _ASCII if not each.isalpha() and not each.isspace()).encode()
_SPACES = bytes(ord(" ") if chr(code).isspace() else code for code in range(256))  # Unicode has more of them

# Scripts written without spaces between words: Han and kana, those of UAX #14's class SA (Thai, Lao, Burmese, Khmer
# and Tai), and Tibetan, whose tsheg separates syllables.
_WITHOUT_SPACES = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua9e0-\ua9ff\uaa60-\uaadf"
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_ANY_WITHOUT_SPACES = re.compile(f"[{_WITHOUT_SPACES}]")
_WORD = re.compile(rf"[{_WITHOUT_SPACES}][^\w\s]*|[^\s{_WITHOUT_SPACES}]+")


def split_words(text: str) -> list[str]:
    """The words of a text: what white space separates.

    In scripts written without spaces, as Chinese, Japanese and Thai are, a character with the marks and the punctuation
    that follow it counts as a word.
    """
    if text.isascii() or not _ANY_WITHOUT_SPACES.search(text):
        return text.split()
    return _WORD.findall(text)


_split = lru_cache(maxsize=1)(split_words)  # the current text, for all filters


def words(text: str) -> float:
    """Number of words."""
    return len(_split(text))


def word_length(text: str) -> float:
    """Mean characters per word; 0 without words."""
    parts = _split(text)
    return sum(map(len, parts)) / len(parts) if parts else 0.0


def symbols(text: str) -> float:
    """Hashes and ellipses per word; a text without words counts as having one."""
    return (text.count("#") + text.count("...") + text.count("…")) / max(len(_split(text)), 1)


def letters(text: str) -> float:
    """Share of the words that contain a letter; 0 without words."""
    parts = _split(text)
    if not parts:
        return 0.0
    if text.isascii():  # many times as fast as word by word
        return len(text.encode().translate(_SPACES, _NEITHER).split()) / len(parts)
    return sum(word.isalpha() or any(map(str.isalpha, word)) for word in parts) / len(parts)


def repeated_lines(text: str) -> float:
    """Share of the characters in lines that repeat earlier ones, ignoring surrounding white space; 0 if empty."""
    lines = [line for each in text.splitlines() if (line := each.strip())]
    total = sum(map(len, lines))
    return 1 - sum(map(len, set(lines))) / total if total else 0.0


MEASURES: Mapping[Measure, Callable[[str], float]] = {
    "characters": len,
    "words": words,
    "word_length": word_length,
    "symbols": symbols,
    "letters": letters,
    "repeated_lines": repeated_lines,
}


def refusing(text: str, filters: Sequence[QualityFilter]) -> Measure | None:
    """The measure of the first filter that drops a text; ``None`` if it is kept."""
    for each in filters:
        value = MEASURES[each.measure](text)
        if (each.min is not None and value < each.min) or (each.max is not None and value > each.max):
            return each.measure
    return None
