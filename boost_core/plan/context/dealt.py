"""How the trainer deals the tokens of a micro-batch to the ranks of a context parallel group.

It uses the one of three placements with which attention is predicted to be fastest: ``near``, which is balanced;
``loose``, which sends less; ``contiguous``, which sends least. Which one that is depends on the documents, whose
lengths no job knows in advance, so it is decided for each micro-batch; ``docs/figures/context_rule.md`` compares this
with a choice at the job's start. If a job lets tasks move, each placement is considered with and without moved tasks.
All ranks find the same one: the seconds come from nominal figures, by sums, products and quotients in a fixed order,
which are identical on every machine.

With sparse attention the keys that long documents need are known only once their heads have chosen, in each layer. Work
then grows from a document's start to its end, or in steps where slashes begin, and ``heap``, which deals neighbours to
different ranks, balances both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from boost_core.config.chunks import chunk_tokens
from boost_core.config.job import JobSpec
from boost_core.plan.context.between import attention_layer, moved_as, sent_between_nodes
from boost_core.plan.context.cost import AttentionLayer, Exchange, Rates
from boost_core.plan.context.figures import ContextPlan, Figures, figures
from boost_core.plan.context.placement import place
from boost_core.plan.context.tasks import moved_tasks, own_tasks
from boost_core.plan.context.window import Window
from boost_core.plan.machine import Machine

STAGES = 4
_PLACEMENTS = ("near", "loose", "contiguous")
_SPARSE_PLACEMENTS = ("heap",)
_MOVED = 4  # at most one in this many of a rank's chunks is computed elsewhere, and as many of others' chunks by it


def head_groups(key_heads: int) -> Sequence[range]:
    """The groups of key heads that arrive together under sparse attention, where each stage is a group of heads."""
    groups = min(STAGES, key_heads)
    ends = [key_heads * number // groups for number in range(groups + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def most_moved(chunks: int) -> int:
    """The most tasks that a rank with this many chunks may hand over, and may take on."""
    return max(1, chunks // _MOVED)


@dataclass(frozen=True)
class Dealing:
    """How one job's micro-batches are dealt.

    Attributes:
        ranks: Number of ranks of the context parallel group.
        chunk: Tokens of a chunk.
        sees: Number of tokens of its document that each token sees; ``None`` for all before it.
        layer: A layer's attention.
        rates: What ranks do per second.
        exchange: What is sent between nodes.
        node_ranks: Number of context parallel ranks per node, and of those that send each other keys.
        sparse_from: Tokens from which documents use sparse attention in training; ``None``: none does.
        sparse_share: Share of their pairs that is expected to be seen.
        moves_tasks: Whether attention may be computed by ranks other than those that hold the tokens.
        moved: What their queries and outputs then travel as.
    """

    ranks: int
    chunk: int
    sees: int | None
    layer: AttentionLayer
    rates: Rates
    exchange: Exchange = "keys"
    node_ranks: int = 1
    sparse_from: int | None = None
    sparse_share: float = 1.0
    moves_tasks: bool = False
    moved: Exchange = "keys"

    @classmethod
    def of(cls, job: JobSpec, machine: Machine) -> "Dealing":
        """Return the dealing of a job at its layout, for the machine that its ranks run on."""
        parallelism, levels, length = job.parallelism, machine.cluster.levels, job.training.sequence_length
        ranks, window = parallelism.context_parallel_size, job.model.sliding_window
        _, row = machine.cluster.rows([parallelism.tensor_parallel_size, ranks])
        # Within a kernel's call short pieces lose little, and what does not depend on the placement need not be
        # counted.
        rates = Rates(
            machine.profile.attention_flops, levels[0].link.bytes_per_second, levels[-1].link.bytes_per_second,
            by_piece=False,
        )  # fmt: skip
        return cls(
            ranks, chunk_tokens(length, ranks), None if window is None or window >= length else window,
            attention_layer(job), rates, sent_between_nodes(job, machine.cluster),
            1 if parallelism.context.exchange == "latents" else row[0],
            job.training.attention.from_length if job.training.attention else None, job.training.attended_share,
            parallelism.context.pool == "tasks", moved_as(job, machine.cluster),
        )  # fmt: skip

    @property
    def moves_latents(self) -> bool:
        """Whether tasks move, and their queries and outputs travel as latents."""
        return self.moves_tasks and self.moved == "latents"

    def figures(self, plan: ContextPlan) -> Figures:
        """What a plan costs one layer."""
        return figures(plan, self.layer, self.rates, self.exchange, self.node_ranks, self.moved)

    def plan(self, documents: Sequence[int], densely: bool = False) -> ContextPlan:
        """The plan of a micro-batch of these documents, sequence after sequence; the same on all ranks.

        Args:
            documents: Tokens of each.
            densely: Whether all use dense attention, as outside of training.
        """
        sparse_from = None if densely else self.sparse_from
        window = Window(tuple(documents), self.chunk, self.sees, sparse_from, self.sparse_share)
        some_sparsely = any(window.is_sparse(tokens) for tokens in documents)
        placements = _SPARSE_PLACEMENTS if some_sparsely else _PLACEMENTS
        return min((plan for how in placements for plan in self._placed(window, how)), key=self._seconds)

    def _placed(self, window: Window, how: str) -> Iterator[ContextPlan]:
        placement = place(window, self.ranks, how)
        own = ContextPlan(window, self.ranks, placement, own_tasks(window, placement), STAGES)
        yield own
        if self.moves_tasks:
            most = most_moved(window.chunks // self.ranks)
            moved = replace(own, tasks=moved_tasks(window, placement, self.ranks, most=most))
            if moved.queries:
                yield moved

    def _seconds(self, plan: ContextPlan) -> float:
        return self.figures(plan).seconds
