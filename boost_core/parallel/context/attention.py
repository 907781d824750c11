"""Attention of a window whose tokens are dealt to the ranks of a context parallel group.

Each rank attends to its own keys while the first stage's are in flight, then to each stage's while the next stage's
are, and combines the parts by their log-sum-exps (``sums``). The forward pass keeps only the inputs, the output and its
log-sum-exps: in the backward pass, the keys, or the latents they are computed from, come again in the same stages, and
their gradients go back to their owners while the next stage's are computed.

The queries of moved tasks, or the latents that they are made from, arrive while a rank attends with its own queries to
its own keys. They attend to all the keys that it has or receives, and their outputs go back at the end.

Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; n tokens that come in a stage,
m of a piece or of queries that have come; s = 2, keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from boost_core.nn.attention import KeyMaker, QueryLatents, TaskMaker
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.arrivals import Arrivals
from boost_core.parallel.context.latents import LatentRoute
from boost_core.parallel.context.layer import LayerAttention
from boost_core.parallel.context.moved import (
    Attended,
    Foreign,
    ForeignGradients,
    MovedQueries,
    MovedRows,
    MovedTasks,
    OutputGradients,
    OwnQueries,
    Returning,
    TaskGradients,
)
from boost_core.parallel.context.moved_latents import MovedLatents
from boost_core.parallel.context.stage import BothAttentions, Own, OwnGradients, Stage
from boost_core.parallel.context.sums import AttentionSum, GradientSum
from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.pieces import RankWork, rank_work


@dataclass(frozen=True)
class InFlight:
    """What a rank has started to send and receive for one layer's forward pass.

    Attributes:
        queries: Waits for the queries of moved tasks; ``None`` if none move.
        keys: Keys.
    """

    queries: Callable[[], Foreign] | None
    keys: Arrivals


@dataclass(frozen=True)
class ReturningGradients:
    """Gradients of what a rank sent to others, of which those of the last stage may be under way.

    Attributes:
        gradients: The gradients so far.
        add: Waits for the rest, and adds it; ``None`` if all are there.
        of_tasks: Gradients of what moved tasks were computed from, if they travelled as latents.
    """

    gradients: OwnGradients
    add: Callable[[], None] | None
    of_tasks: TaskGradients | None = None

    def whole(self) -> OwnGradients:
        """All gradients; to be called once."""
        if self.add:
            self.add()
        return self.gradients


class ContextAttention:
    """Causal attention of documents whose tokens are dealt to ranks by a plan; a model's layers share it.

    Args:
        plan: The plan for all sequences of a micro-batch, or of a half, the same on all ranks.
        communicator: The context parallel group.
        device: Where this rank's tokens are.
        route: How latents travel; ``None`` if none do.
        of_a_half: Whether the other half of the micro-batch computes meanwhile, so that all stages are sent at once.

    Attributes:
        plan: As given.
        chunks: The window's chunks on this rank; its tokens are theirs, chunk by chunk.
        tokens: Number of its tokens.
        of_a_half: As given.

    Raises:
        ValueError: The plan is for another number of ranks.
    """

    def __init__(
        self, plan: ContextPlan, communicator: Communicator, device: torch.device, route: LatentRoute | None = None,
        of_a_half: bool = False,
    ) -> None:  # fmt: skip
        if plan.ranks != communicator.size:
            raise ValueError(
                f"the plan deals tokens to {plan.ranks} ranks and the group has {communicator.size}; plan for the group"
            )
        work, window = rank_work(plan, communicator.rank, route.nodes if route else None), plan.window
        self.plan, self.chunks, self._route, self.of_a_half = plan, work.chunks, route, of_a_half
        self.tokens = len(work.chunks) * window.chunk_tokens
        self._own = BothAttentions.of(work, window.sees, device)
        self._moved = _moved_tasks(work, communicator, device, route)
        self._stages = [Stage(stage, window, communicator, route, device) for stage in work.stages]

    @property
    def sends_latents(self) -> bool:
        """Whether a call has to pass the latents of keys and values."""
        return self._route is not None and self._route.nodes is not None

    @property
    def moves_latents(self) -> bool:
        """Whether a call has to pass the latents of queries, whether or not this plan moves tasks."""
        return self._route is not None and self._route.moves

    def for_layer(self) -> LayerAttention:
        """Return what a layer calls, in its forward pass and its recomputation."""
        return LayerAttention(self)

    def own(
        self, keys_Tsje: torch.Tensor, maker: KeyMaker | None, task_maker: TaskMaker | None,
        latents_Tr: Sequence[torch.Tensor], backward: bool,
    ) -> Own:  # fmt: skip
        """What this rank has to send: keys and values, its share of both their latents, and the queries' latents.

        Args:
            keys_Tsje: The keys and values.
            maker: Makes them from latents, if these are sent.
            task_maker: Makes queries from latents, if these are sent.
            latents_Tr: The latents that are sent, those of queries last.
            backward: Whether gradients come back.
        """
        share_Tc = self._route.share(*latents_Tr[:2]) if self._route and maker else None
        of_queries = QueryLatents(latents_Tr[-1], task_maker) if task_maker else None
        return Own(keys_Tsje, share_Tc, maker, backward, of_queries)

    def send(self, own: Own) -> Arrivals:
        """Start to send what a rank has, and to receive what the others have."""
        return Arrivals(own, self._own, self._stages, len(self._stages) if self.of_a_half else 1)

    def start(self, query_The: torch.Tensor, own: Own) -> InFlight:
        """Start what ``forward`` needs."""
        return InFlight(self._moved.ask(OwnQueries(query_The, own.of_queries)) if self._moved else None, self.send(own))

    def forward(self, query_The: torch.Tensor, in_flight: InFlight) -> tuple[Attended, Returning | None]:
        """The output, ``[T, h, e]``, with log-sum-exps, ``[T, h]`` in fp32 at least; and its latents on their way."""
        come, mine = in_flight.queries, AttentionSum.begin(query_The)
        foreign: Foreign | None = None
        for _, attention, came in in_flight.keys:
            mine.attend(attention.own, came)
            if come:
                foreign = foreign or come()
                foreign.attention.attend(attention.foreign, came)
        out_The, lse_Th = mine.out.to(query_The.dtype), mine.lse
        kept, returning = foreign.answer(out_The, lse_Th) if foreign else ((), None)
        return Attended(out_The, lse_Th, kept), returning

    def backward(
        self, of_outputs: OutputGradients, query_The: torch.Tensor, keys: Arrivals, attended: Attended
    ) -> tuple[torch.Tensor, ReturningGradients]:
        """Gradients of the queries, and of what the rank sent to others.

        Args:
            of_outputs: Gradients of the output.
            query_The: The queries.
            keys: The keys, on their way again.
            attended: What the forward pass has kept.
        """
        own, dtype = keys.own, attended.lse.dtype
        queries = OwnQueries(query_The, own.of_queries)
        come = self._moved.ask_for_gradients(queries, attended, of_outputs) if self._moved else None
        mine = GradientSum.begin(query_The, of_outputs.dout, attended.out, attended.lse)
        foreign: ForeignGradients | None = None
        gradients = OwnGradients.none_yet(own, dtype)
        add_returned: Callable[[], None] | None = None
        for stage, attention, came in keys:
            dkeys_nsje = torch.zeros_like(came.keys, dtype=dtype) if stage else gradients.keys
            mine.add(attention.own, came, dkeys_nsje)
            if come:
                foreign = foreign or come()
                foreign.gradients.add(attention.foreign, came, dkeys_nsje)
            if add_returned:
                add_returned()
            if stage:
                add_returned = stage.start_back(came, dkeys_nsje, gradients)
        dquery_The = mine.dquery.to(query_The.dtype)
        of_tasks = foreign.answer(dquery_The) if foreign else None
        return dquery_The, ReturningGradients(gradients, add_returned, of_tasks)

    def gradients_of_latents(
        self, gradients: OwnGradients, maker: KeyMaker | None, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Gradients of both latents, ``[T, r]``, if there are any; those of the weights are passed on."""
        if self._route is None or maker is None or gradients.latents is None:
            return ()
        gradients.latents.give_weights(maker)
        return self._route.in_place(gradients.latents.share.to(dtype), 2)


def _moved_tasks(
    work: RankWork, communicator: Communicator, device: torch.device, route: LatentRoute | None
) -> MovedTasks | None:
    """What moves a plan's tasks; ``None`` if none move."""
    if work.queries is None:
        return None
    rows = MovedRows(work.queries, work.window.chunk_tokens, communicator, device)
    return MovedLatents(rows, route, work.foreign) if route and route.moves else MovedQueries(rows)
