"""Document lengths to plan for: two measured sets, and two made ones.

``length_quantiles.json`` has 401 quantiles and more of the tail of the lengths that DistCA ships with its code
(github.com/hao-ai-lab/DistCA at 2afd219, arXiv 2510.18121): ``wlbllm``, 99,519 documents to 125K tokens, and
``prolong``, 77,932 of ProLong to 340K. Lengths between two quantiles are on the line between them.
"""

import json
import random
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

QUANTILES: dict[str, list[tuple[float, int]]] = json.loads(
    Path(__file__).with_name("length_quantiles.json").read_text()
)
LONGEST = 2**19


def _of_quantiles(kind: str) -> Callable[[random.Random], int]:
    shares, lengths = zip(*QUANTILES[kind], strict=True)

    def draw(chance: random.Random) -> int:
        share = chance.random()
        place = max(bisect_left(shares, share), 1)
        low, high = lengths[place - 1], lengths[place]
        return round(low + (high - low) * (share - shares[place - 1]) / (shares[place] - shares[place - 1]))

    return draw


def _lognormal(chance: random.Random) -> int:
    """A median of 8K and one in a thousand at 512K, where it ends."""
    return min(LONGEST, max(1, round(chance.lognormvariate(9.01, 1.345))))


def _bimodal(chance: random.Random) -> int:
    """Half of the tokens in documents of 2K, half in such of 256K."""
    return 2**18 if chance.random() < 1 / 129 else 2**11


MEASURED = {kind: _of_quantiles(kind) for kind in QUANTILES}
LENGTHS: dict[str, Callable[[random.Random], int]] = {"lognormal": _lognormal, "bimodal": _bimodal, **MEASURED}


def documents_of(kind: str, tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths of a window's documents; its end cuts the last."""
    chance, found, left = random.Random(f"{kind} {seed}"), [], tokens
    while left:
        found.append(min(LENGTHS[kind](chance), left))
        left -= found[-1]
    return tuple(found)


def triangle(tokens: int) -> int:
    """Query-key pairs of a document of this many tokens."""
    return tokens * (tokens + 1) // 2
