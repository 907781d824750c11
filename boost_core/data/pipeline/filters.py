"""Quality filters: measures of a text as plain functions, checked against the user's bounds.

The measures follow Gopher's rules (Rae et al. 2021, arXiv 2112.11446, appendix A1).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from boost_core.config.dataset import Measure, QualityFilter

_ASCII = [chr(code) for code in range(128)]
_NEITHER = "".join(each for each in _ASCII if not each.isalpha() and not each.isspace()).encode()
_SPACES = bytes(ord(" ") if chr(code).isspace() else code for code in range(256))  # Unicode has more of them


@lru_cache(maxsize=1)  # the current text, for all filters
def _split(text: str) -> list[str]:
    return text.split()


def characters(text: str) -> float:
    """Number of characters."""
    return len(text)


def words(text: str) -> float:
    """Number of words."""
    return len(_split(text))


def word_length(text: str) -> float:
    """Mean characters per word; 0 without words."""
    found = _split(text)
    return sum(map(len, found)) / len(found) if found else 0.0


def symbols(text: str) -> float:
    """Hashes and ellipses per word; a text without words counts as having one."""
    return (text.count("#") + text.count("...") + text.count("…")) / max(len(_split(text)), 1)


def letters(text: str) -> float:
    """Share of the words that contain a letter; 0 without words."""
    found = _split(text)
    if not found:
        return 0.0
    if text.isascii():  # many times as fast as word by word
        return len(text.encode().translate(_SPACES, _NEITHER).split()) / len(found)
    return sum(word.isalpha() or any(map(str.isalpha, word)) for word in found) / len(found)


def repeated_lines(text: str) -> float:
    """Share of the characters in lines that repeat earlier ones, ignoring surrounding white space; 0 if empty."""
    lines = [line for each in text.splitlines() if (line := each.strip())]
    total = sum(map(len, lines))
    return 1 - sum(map(len, set(lines))) / total if total else 0.0


MEASURES: Mapping[Measure, Callable[[str], float]] = {
    "characters": characters,
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
