"""The fastest plan of a window: placement, chunk, exchange and stages by predicted seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boost_core.plan.context.cost import AttentionLayer, Exchange, Rates
from boost_core.plan.context.figures import ContextPlan, Figures, figures
from boost_core.plan.context.placement import PLACEMENTS, place
from boost_core.plan.context.tasks import moved_tasks, own_tasks
from boost_core.plan.context.window import Window

STAGES = (2, 3, 4)
CHUNK_TOKENS = (512, 1024, 2048, 4096)
MOVED = "moved"  # tasks that are moved from a contiguous placement


@dataclass(frozen=True)
class Choice:
    """A plan and why.

    Attributes:
        how: Its placement, or ``MOVED``.
        exchange: What goes between nodes.
        plan: The plan.
        figures: What it costs.
    """

    how: str
    exchange: Exchange
    plan: ContextPlan
    figures: Figures


def choose(
    documents: Sequence[int],
    ranks: int,
    layer: AttentionLayer,
    rates: Rates,
    node_ranks: int = 1,
    chunk_tokens: Sequence[int] = CHUNK_TOKENS,
) -> Choice:
    """The way that is predicted to take least; of ways that take as long, the one that sends least.

    Args:
        documents: Tokens of each of the window's; of several windows for all their ranks, if these are dealt together.
        ranks: Over how many they are dealt.
        layer: A layer's attention.
        rates: What ranks do in a second.
        node_ranks: Context parallel ranks of a node.
        chunk_tokens: Sizes to try, of which some must give each rank as many chunks as the others.

    Raises:
        ValueError: None of these does.
    """
    found = choices(documents, ranks, layer, rates, node_ranks, chunk_tokens)
    best = min(found, key=_cost, default=None)
    if best is None:
        sizes = ", ".join(map(str, chunk_tokens))
        raise ValueError(
            f"no chunk of {sizes} tokens deals {sum(documents)} tokens evenly to {ranks} ranks; "
            "make the window a multiple of ranks times chunk"
        )
    return best


def _cost(choice: Choice) -> tuple[float, int]:
    """Seconds to six digits, so that sums in another order are no shorter; and bytes."""
    return float(f"{choice.figures.seconds:.6g}"), choice.figures.fabric_bytes


def choices(
    documents: Sequence[int],
    ranks: int,
    layer: AttentionLayer,
    rates: Rates,
    node_ranks: int = 1,
    chunk_tokens: Sequence[int] = CHUNK_TOKENS,
) -> Iterator[Choice]:
    """All ways that ``choose`` compares. Arguments as its."""
    exchanges: Sequence[Exchange] = ("keys",) if layer.rank is None else ("keys", "latents")
    for how, plan in plans(documents, ranks, chunk_tokens):
        for exchange in exchanges:
            yield Choice(how, exchange, plan, figures(plan, layer, rates, exchange, node_ranks))


def plans(documents: Sequence[int], ranks: int, chunk_tokens: Sequence[int]) -> Iterator[tuple[str, ContextPlan]]:
    """All plans of a window, by their placements; whatever the layer and the machine are."""
    for size in chunk_tokens:
        if sum(documents) % (size * ranks):
            continue
        window = Window(tuple(documents), size)
        for how in (*PLACEMENTS, MOVED):
            placement = place(window, ranks, "contiguous" if how == MOVED else how)
            tasks = moved_tasks(window, placement, ranks) if how == MOVED else own_tasks(window, placement)
            for stages in STAGES:
                yield how, ContextPlan(window, ranks, placement, tasks, stages)
