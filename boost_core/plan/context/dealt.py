"""How the trainer deals the tokens of a micro-batch to the ranks of a context parallel group."""

from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.placement import place
from boost_core.plan.context.tasks import own_tasks
from boost_core.plan.context.window import Window

_PLACEMENT, _STAGES = "near", 2


def plan_of(documents: tuple[int, ...], chunk: int, sees: int | None, ranks: int) -> ContextPlan:
    """The plan of a micro-batch, the same on all ranks.

    Args:
        documents: Tokens of each, sequence after sequence.
        chunk: Tokens of a chunk.
        sees: How many tokens of its document each sees; ``None`` for all before it.
        ranks: Of the group.
    """
    window = Window(documents, chunk, sees)
    placement = place(window, ranks, _PLACEMENT)
    return ContextPlan(window, ranks, placement, own_tasks(window, placement), _STAGES)
