"""The cost of a plan: balance, bytes by level, rounds, and seconds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from boost_core.plan.context.cost import BACKWARD, AttentionLayer, Exchange, Rates, efficiency
from boost_core.plan.context.placement import Placement
from boost_core.plan.context.tasks import Task, areas
from boost_core.plan.context.transfers import Transfer, busiest, key_transfers, query_transfers, stages
from boost_core.plan.context.window import Window


@dataclass(frozen=True)
class ContextPlan:
    """Which rank holds and computes which part of a window, in which stages.

    Attributes:
        window: The tokens.
        ranks: Number of ranks to which they are dealt.
        placement: The rank of each chunk.
        tasks: The attention of each chunk.
        stages: Number of stages in which keys arrive, after the rank's own.
    """

    window: Window
    ranks: int
    placement: Placement
    tasks: Sequence[Task]
    stages: int

    @cached_property
    def loads(self) -> Sequence[int]:
        """Query-key pairs that each rank computes."""
        return areas(self.window, self.tasks, self.ranks)

    @cached_property
    def keys(self) -> Sequence[Transfer]:
        """Keys that are sent."""
        return key_transfers(self.tasks, self.placement)

    @cached_property
    def queries(self) -> Sequence[Transfer]:
        """Queries that are sent, and whose outputs are sent back."""
        return query_transfers(self.tasks, self.placement)

    @cached_property
    def key_stages(self) -> Sequence[Sequence[Transfer]]:
        """Keys by the stage in which they arrive."""
        return stages(self.keys, self.stages)

    @cached_property
    def stage_areas(self) -> Sequence[Sequence[int]]:
        """The pairs that each rank computes with its own keys, and with those of each stage."""
        here = [[0] * (self.stages + 1) for _ in range(self.ranks)]
        for chunk, rank in enumerate(self.placement):
            here[rank][0] |= 1 << chunk
        for number, sent in enumerate(self.key_stages, start=1):
            for transfer in sent:
                here[transfer.receiver][number] |= 1 << transfer.chunk
        found = [[0] * (self.stages + 1) for _ in range(self.ranks)]
        for task in self.tasks:
            for number, chunks in enumerate(here[task.rank]):
                found[task.rank][number] += self.window.pairs(task.queries, chunks)
        return found


@dataclass(frozen=True)
class Figures:
    """What a plan costs one layer.

    Attributes:
        imbalance: The largest area of a rank over the mean.
        rounds: Number of chunks of keys that the busiest rank sends or receives.
        node_bytes: Bytes of keys, moved queries and their results, over all ranks, that stay within nodes; forward.
        fabric_bytes: The same, between nodes.
        kept_bytes: Most bytes that a rank keeps until the backward pass, so that attention is not recomputed.
        forward_seconds: Forward seconds of the slowest rank.
        backward_seconds: Its backward seconds, likewise.
    """

    imbalance: float
    rounds: int
    node_bytes: int
    fabric_bytes: int
    kept_bytes: int
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


def figures(
    plan: ContextPlan, layer: AttentionLayer, rates: Rates, exchange: Exchange = "keys", node_ranks: int = 1,
    moved: Exchange = "keys",
) -> Figures:  # fmt: skip
    """What a plan costs one layer.

    A rank attends to the keys of one stage while those of the next are in flight, so that each stage takes the longer
    of the two. In the backward pass keys are sent again and their gradients are sent back, and latents are projected
    again. Moved queries arrive with the first keys, in the backward pass together with everything that their gradients
    need; nothing hides the transfer of their results. As latents, the rank that receives them makes queries from them,
    and latents from their outputs.

    Args:
        plan: The plan.
        layer: The layer.
        rates: What ranks do in a second.
        exchange: What is sent between nodes.
        node_ranks: Number of context parallel ranks per node; they are adjacent.
        moved: What moved queries and their outputs travel as, within nodes, too.

    Raises:
        ValueError: Latents are to be sent, but the layer has none.
    """
    size = plan.window.chunk_tokens
    costs = _Costs(layer, rates, exchange, node_ranks, size, moved)
    crossing = [[costs.crosses(transfer) for transfer in sent] for sent in (plan.keys, plan.queries)]
    keys, queries = (sum(crosses) for crosses in crossing)
    a_query = size * sum(layer.moved_bytes(backward=False, moved=moved))
    foreign = max(Counter(transfer.receiver for transfer in plan.queries).values(), default=0)
    traffic = _traffic(plan, costs)
    return Figures(
        imbalance=max(plan.loads) * plan.ranks / plan.window.area,
        rounds=busiest(plan.keys),
        node_bytes=(len(plan.keys) - keys) * size * layer.key_bytes + (len(plan.queries) - queries) * a_query,
        fabric_bytes=keys * size * layer.sent_bytes(exchange) + queries * a_query,
        kept_bytes=plan.window.tokens // plan.ranks * layer.kept_bytes
        + (foreign * size * layer.foreign_bytes if moved == "latents" else 0),
        forward_seconds=max(
            _seconds(costs, plan.stage_areas[rank], traffic[rank], backward=False) for rank in range(plan.ranks)
        ),
        backward_seconds=max(
            _seconds(costs, plan.stage_areas[rank], traffic[rank], backward=True) for rank in range(plan.ranks)
        ),
    )


class _Costs:
    """Seconds to move and process a chunk."""

    def __init__(
        self, layer: AttentionLayer, rates: Rates, exchange: Exchange, node_ranks: int, chunk_tokens: int,
        moved: Exchange,
    ) -> None:  # fmt: skip
        self._layer, self._rates, self._exchange, self._node_ranks = layer, rates, exchange, node_ranks
        self._tokens, self._moved = chunk_tokens, moved
        self._attention_flops = rates.flops * (efficiency(chunk_tokens) if rates.by_piece else 1.0)

    def crosses(self, transfer: Transfer) -> bool:
        """Whether it goes to another node."""
        return transfer.sender // self._node_ranks != transfer.receiver // self._node_ranks

    def key(self, transfer: Transfer) -> float:
        """Sending it."""
        if not self.crosses(transfer):
            return self._tokens * self._layer.key_bytes / self._rates.node_bytes
        seconds = self._tokens * self._layer.sent_bytes(self._exchange) / self._rates.fabric_bytes
        if self._exchange == "latents":
            seconds += self._tokens * self._layer.gathered_bytes / self._rates.node_bytes
        return seconds

    def query(self, transfer: Transfer) -> float:
        """Sending a byte of each of its tokens."""
        return self._tokens / (self._rates.fabric_bytes if self.crosses(transfer) else self._rates.node_bytes)

    def moved(self, queries: "_Stage", backward: bool) -> tuple[float, float, float]:
        """Seconds to send moved queries, and their outputs back, and to project what a rank receives.

        Args:
            queries: Seconds for one byte of each token, and the tokens that a rank receives.
            backward: Whether this is the backward pass.
        """
        layer, moved, byte = self._layer, self._moved, queries.wire
        there, back = (size * byte for size in layer.moved_bytes(backward, moved))
        if moved == "keys":
            return there, back, 0.0
        in_node = queries.tokens / self._rates.node_bytes
        there += layer.asking_gathered_bytes(backward) * in_node
        back += layer.answering_summed_bytes * in_node
        return there, back, queries.tokens * layer.moved_flops(backward) / self._rates.flops

    def projected(self, transfer: Transfer) -> float:
        """Computing keys and values from the latents received."""
        if self._exchange == "keys" or not self.crosses(transfer):
            return 0.0
        return self._tokens * self._layer.projection_flops / self._rates.flops

    def attention(self, area: int) -> float:
        """Computing some pairs, forward."""
        return self._layer.flops(area) / self._attention_flops


@dataclass
class _Stage:
    """Seconds that a rank receives, sends and projects in a stage, and tokens of moved queries that it receives."""

    received: float = 0.0
    sent: float = 0.0
    projected: float = 0.0
    tokens: int = 0

    @property
    def wire(self) -> float:
        return max(self.received, self.sent)


@dataclass
class _Traffic:
    """A rank's keys by stage, and one byte of each token of its moved queries, there and back."""

    stages: list[_Stage]
    queries: _Stage


def _traffic(plan: ContextPlan, costs: _Costs) -> Sequence[_Traffic]:
    found = [_Traffic([_Stage() for _ in range(plan.stages)], _Stage()) for _ in range(plan.ranks)]
    for number, sent in enumerate(plan.key_stages):
        for transfer in sent:
            seconds = costs.key(transfer)
            found[transfer.sender].stages[number].sent += seconds
            found[transfer.receiver].stages[number].received += seconds
            found[transfer.receiver].stages[number].projected += costs.projected(transfer)
    for transfer in plan.queries:
        found[transfer.sender].queries.sent += costs.query(transfer)
        found[transfer.receiver].queries.received += costs.query(transfer)
        found[transfer.receiver].queries.tokens += plan.window.chunk_tokens
    return found


def _seconds(costs: _Costs, stage_areas: Sequence[int], traffic: _Traffic, backward: bool) -> float:
    """Seconds of one rank's pass.

    The backward pass has two and a half times the products and twice the bytes; projecting again, the latents'
    gradients and the weights' are three times the projection.
    """
    times, ways, projections = (BACKWARD, 2, 3) if backward else (1.0, 1, 1)
    attended = [times * costs.attention(area) for area in stage_areas]
    for number, stage in enumerate(traffic.stages, start=1):
        attended[number] += projections * stage.projected
    wires = [ways * stage.wire for stage in traffic.stages]
    there, back, made = costs.moved(traffic.queries, backward)
    wires[0] += there
    hidden = fsum(max(computed, wire) for computed, wire in zip(attended, [*wires, 0.0], strict=True))
    return hidden + back + made
