"""Sparse attention over context parallel ranks, simulated: ``python -m tests.benchmarks.context_sparse``.

Writes docs/figures/context_sparse.md: one document of 512K tokens on 32 ranks under drawn verticals and slashes, as
this project sends and computes it, as a striped ring that sends all keys around does, and densely. Everything is
counted or simulated, and nothing is run; it takes a minute.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from boost_core.config.model import BLOCK
from boost_core.config.parallelism import chunk_tokens
from boost_core.context.placement import Window, place
from boost_core.context.plan import BACKWARD, AttentionLayer, Exchange, Rates, figures
from boost_core.context.selection import STAGES, ContextPlanner, head_groups
from tests.benchmarks.context import FABRICS, FLOPS, LAYERS, NODE
from tests.benchmarks.figures import FIGURES, provenance, table

TOKENS, RANKS = 2**19, 32
BLOCKS = TOKENS // BLOCK
LINKS = (*FABRICS, NODE)
STRIPE = 1  # blocks: MTraining's stripes have 64 to 128 tokens
SINK, NEAR = 30, 3  # tokens, blocks
MIXES = {"mostly verticals": (0.022, 0.006), "both": (0.014, 0.014), "mostly slashes": (0.006, 0.022)}

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Mask:
    """A head's lines: distances in blocks, and places of keys."""

    slashes: Integers
    verticals: Integers

    @classmethod
    def drawn(cls, generator: np.random.Generator, by_verticals: float, by_slashes: float) -> "Mask":
        """Lines that see about these shares of all pairs: verticals anywhere, slashes the rarer the further."""
        verticals = generator.choice(TOKENS, int(by_verticals * TOKENS), replace=False)
        far = np.exp(generator.uniform(np.log(NEAR), np.log(BLOCKS), 8 * BLOCKS)).astype(np.int64)
        order = np.unique(far, return_index=True)
        distances = order[0][np.argsort(order[1])]
        pairs = np.cumsum(BLOCKS - distances)
        taken = distances[: int(np.searchsorted(pairs, by_slashes * BLOCKS**2 / 2))]
        return cls(
            np.sort(np.concatenate([np.arange(NEAR), taken])), np.unique(np.concatenate([np.arange(SINK), verticals]))
        )

    def work(self, rank_n: Integers, ranks: int) -> Integers:
        """Pairs of each rank's queries with each rank's keys, block by block: ``[ranks, ranks]``."""
        found = np.zeros((ranks, ranks), dtype=np.int64)
        for distance in self.slashes:
            np.add.at(found, (rank_n[distance:], rank_n[: BLOCKS - distance]), BLOCK**2)
        after = np.zeros((BLOCKS + 1, ranks), dtype=np.int64)  # blocks of each rank from one on
        after[:-1][np.arange(BLOCKS), rank_n] = 1
        after = after[::-1].cumsum(axis=0)[::-1]
        block_v, count_v = np.unique(self.verticals // BLOCK, return_counts=True)
        for block, count in zip(block_v, count_v, strict=True):
            covered = np.bincount(rank_n[block + self.slashes[self.slashes < BLOCKS - block]], minlength=ranks)
            found[:, rank_n[block]] += BLOCK * count * (after[block] - covered)
        return found

    def seen(self, rank_n: Integers, ranks: int) -> Flags:
        """Whether each rank's queries see each key, ``[ranks, tokens]``; those of its own tokens, too."""
        found = np.zeros((ranks, BLOCKS), dtype=np.bool_)
        for distance in self.slashes:
            found[rank_n[distance:], np.arange(BLOCKS - distance)] = True
        by_key = found.repeat(BLOCK, axis=1)
        last = np.array([np.flatnonzero(rank_n == rank)[-1] for rank in range(ranks)])
        by_key[:, self.verticals] |= self.verticals // BLOCK <= last[:, None]
        return by_key


@dataclass(frozen=True)
class Simulated:
    """One layer.

    Attributes:
        density: The share of causal pairs that is seen.
        work: Of each group of heads, our pairs of each rank, ``[groups, ranks]``.
        keys: Of each group of heads, keys of a head that each rank is sent, ``[groups, ranks]``.
        ring: Pairs of each step of a striped ring and each rank, ``[ranks, ranks]``.
    """

    density: float
    work: Integers
    keys: Integers
    ring: Integers


def simulated(layer: AttentionLayer, key_heads: int, mix: tuple[float, float]) -> Simulated:
    """Draw all heads of a layer."""
    generator, share = np.random.default_rng(1), layer.heads // key_heads
    size = chunk_tokens(TOKENS, RANKS)
    ours = np.array(place(Window((TOKENS,), size), RANKS, "heap")).repeat(size // BLOCK)
    striped = np.arange(BLOCKS) // STRIPE % RANKS
    work, keys = np.zeros((STAGES, RANKS), dtype=np.int64), np.zeros((STAGES, RANKS), dtype=np.int64)
    ring, own = np.zeros((RANKS, RANKS), dtype=np.int64), ours.repeat(BLOCK) == np.arange(RANKS)[:, None]
    for group in (number for number, heads in enumerate(head_groups(key_heads)) for _ in heads):
        seen = np.zeros((RANKS, TOKENS), dtype=np.bool_)
        for _ in range(share):
            mask = Mask.drawn(generator, *mix)
            work[group] += mask.work(ours, RANKS).sum(axis=1)
            seen |= mask.seen(ours, RANKS)
            of_pairs = mask.work(striped, RANKS)
            for step in range(RANKS):  # in which a rank has the keys of the one so many before it
                ring[step] += of_pairs[np.arange(RANKS), (np.arange(RANKS) - step) % RANKS]
        keys[group] += (seen & ~own).sum(axis=1)
    causal = layer.heads * TOKENS * (TOKENS + 1) // 2
    return Simulated(float(work.sum() / causal), work, keys, ring)


def seconds(found: Simulated, layer: AttentionLayer, key_heads: int, fabric: float) -> tuple[float, float]:
    """Ours and a striped ring's, forward and backward, of the slowest rank."""
    of_pair, of_key = 4 * layer.hidden_size / layer.heads / FLOPS, layer.key_bytes / key_heads / fabric
    index = 4 * 2 * layer.heads * TOKENS / RANKS + 2 * layer.heads * (TOKENS + BLOCKS) / 8  # sums of keys, and lines
    mine = ring = 0.0
    for times, ways in ((1.0, 1), (BACKWARD, 2)):
        attended, sent = times * of_pair * found.work, of_key * found.keys
        # The first keys are waited for; backward the last gradients, too.
        stages = sent[0] + sum(np.maximum(attended[each], ways * sent[min(each + 1, STAGES - 1)]) for each in range(3))
        mine += float((stages + attended[-1] + (ways - 1) * sent[-1]).max())
        wire = ways * of_key * key_heads * TOKENS / RANKS
        for number, step in enumerate(found.ring, start=1):  # after the last no keys go on, but gradients do
            goes = wire if number < RANKS else wire * (ways - 1) / ways
            ring += max(float(times * of_pair * step.max()), goes)
    return mine + index / fabric, ring


def dense_seconds(layer: AttentionLayer, fabric: float) -> float:
    """Ours without a mask, with what takes less on the wire, as ``exchange: auto`` has it."""
    rates = Rates(FLOPS, NODE, fabric)
    exchanges: Sequence[Exchange] = ("keys", "latents") if layer.rank else ("keys",)
    found = []
    for exchange in exchanges:
        plan = ContextPlanner(RANKS, chunk_tokens(TOKENS, RANKS), None, layer, rates, exchange).plan((TOKENS,))
        found.append(figures(plan, layer, rates, exchange).seconds)
    return min(found)


def rows() -> Iterator[list[str]]:
    """Of each layer, mix of lines and fabric, the times over ours."""
    for (name, layer), (mix, shares) in ((each, of) for each in LAYERS.items() for of in MIXES.items()):
        key_heads = layer.key_size * layer.heads // layer.hidden_size
        found = simulated(layer, key_heads, shares)
        uneven = found.work.sum(axis=0).max() / statistics.mean(found.work.sum(axis=0).tolist())
        sent = found.keys.sum(axis=0).max() / (key_heads * TOKENS * (RANKS - 1) / RANKS)
        over = []
        for fabric in LINKS:
            mine, ring = seconds(found, layer, key_heads, fabric)
            over += [f"{dense_seconds(layer, fabric) / mine:.1f}", f"{ring / mine:.1f}"]
        yield [name, mix, f"{found.density:.3f}", f"{uneven:.2f}", f"{sent:.2f}", *over]


def main() -> None:
    """Simulate it all, and write the page."""
    header = ["layer", "lines", "density", "max/mean work", "keys received"] + [
        f"{of}, {fabric / 1e9:.0f} GB/s" for fabric in LINKS for of in ("dense / ours", "ring / ours")
    ]
    found = table(header, list(rows()))
    text = """# Sparse attention over context parallel ranks, simulated

Counted and simulated; nothing was run on a GPU. `python -m tests.benchmarks.context_sparse` writes this page.

One document of 512K tokens on 32 ranks, with links of 50 and 25 GB/s, as between nodes, and of 400 GB/s, as within one.
Each head has its own verticals, anywhere, and its own slashes, which are rarer the more distant they are. Keys: the
share of all keys that the busiest rank receives. Times are forward and backward of one layer's attention, relative to
ours: dense attention, sending keys or latents, whichever is faster; and a ring of stripes of 64 tokens that computes
the same pairs and sends all keys around in lock-step. Attention runs at 400 TFLOP/s whatever the mask; of choosing the
mask, only the bytes are counted.
"""
    (FIGURES / "context_sparse.md").write_text("\n".join([text, *found, "", provenance(), ""]))


if __name__ == "__main__":
    main()
