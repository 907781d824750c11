"""What a plan costs: balance, bytes by level, rounds, and seconds."""

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
    """Who has what of a window and computes what, in which stages.

    Attributes:
        window: The tokens.
        ranks: Over how many they are dealt.
        placement: The rank of each chunk.
        tasks: The attention of each chunk.
        stages: In how many the keys come, after those that are there.
    """

    window: Window
    ranks: int
    placement: Placement
    tasks: Sequence[Task]
    stages: int

    @cached_property
    def loads(self) -> Sequence[int]:
        """Pairs of query and key that each rank computes."""
        return areas(self.window, self.tasks, self.ranks)

    @cached_property
    def keys(self) -> Sequence[Transfer]:
        """Keys that are sent."""
        return key_transfers(self.tasks, self.placement)

    @cached_property
    def queries(self) -> Sequence[Transfer]:
        """Queries that are sent, and whose outputs come back."""
        return query_transfers(self.tasks, self.placement)

    @cached_property
    def key_stages(self) -> Sequence[Sequence[Transfer]]:
        """Keys by the stage that they come in."""
        return stages(self.keys, self.stages)

    @cached_property
    def stage_areas(self) -> Sequence[Sequence[int]]:
        """Of each rank, the pairs that it computes with its own keys, and with those of each stage."""
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
        rounds: Chunks of keys that the busiest rank sends or receives.
        node_bytes: Keys, moved queries and what comes back of these, of all ranks, that stay in nodes; forward.
        fabric_bytes: The same, between nodes.
        kept_bytes: That each rank keeps until the backward pass, so that it need not attend again.
        forward_seconds: Of the slowest rank.
        backward_seconds: The same.
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
    plan: ContextPlan, layer: AttentionLayer, rates: Rates, exchange: Exchange = "keys", node_ranks: int = 1
) -> Figures:
    """What a plan costs one layer.

    A rank attends to the keys of one stage while those of the next are under way, so that each stage takes the longer
    of the two. Backward keys come again and their gradients go back, and latents are projected anew. Moved queries
    come with the first keys, backward with all that their gradients take; nothing hides what comes back of them.

    Args:
        plan: The plan.
        layer: The layer.
        rates: What ranks do in a second.
        exchange: What goes between nodes.
        node_ranks: How many context parallel ranks a node has, one after the other.

    Raises:
        ValueError: Latents are to be sent of a layer that has none.
    """
    size, costs = plan.window.chunk_tokens, _Costs(layer, rates, exchange, node_ranks, plan.window.chunk_tokens)
    crossing = [[costs.crosses(transfer) for transfer in sent] for sent in (plan.keys, plan.queries)]
    keys, queries = (sum(crosses) for crosses in crossing)
    moved = size * (layer.asking_bytes(backward=False) + layer.answering_bytes(backward=False))
    traffic = _traffic(plan, costs)
    return Figures(
        imbalance=max(plan.loads) * plan.ranks / plan.window.area,
        rounds=busiest(plan.keys),
        node_bytes=(len(plan.keys) - keys) * size * layer.key_bytes + (len(plan.queries) - queries) * moved,
        fabric_bytes=keys * size * layer.sent_bytes(exchange) + queries * moved,
        kept_bytes=plan.window.tokens // plan.ranks * layer.kept_bytes,
        forward_seconds=max(
            _seconds(costs, plan.stage_areas[rank], traffic[rank], backward=False) for rank in range(plan.ranks)
        ),
        backward_seconds=max(
            _seconds(costs, plan.stage_areas[rank], traffic[rank], backward=True) for rank in range(plan.ranks)
        ),
    )


class _Costs:
    """Seconds of a chunk's ways."""

    def __init__(
        self, layer: AttentionLayer, rates: Rates, exchange: Exchange, node_ranks: int, chunk_tokens: int
    ) -> None:
        self._layer, self._rates, self._exchange, self._node_ranks = layer, rates, exchange, node_ranks
        self._tokens = chunk_tokens
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

    def moved(self, byte: float, backward: bool) -> tuple[float, float]:
        """The way of moved queries there, and of their outputs back, where a byte of each token takes so long."""
        return self._layer.asking_bytes(backward) * byte, self._layer.answering_bytes(backward) * byte

    def projected(self, transfer: Transfer) -> float:
        """Making keys and values of what has come."""
        if self._exchange == "keys" or not self.crosses(transfer):
            return 0.0
        return self._tokens * self._layer.projection_flops / self._rates.flops

    def attention(self, area: int) -> float:
        """Computing some pairs, forward."""
        return self._layer.flops(area) / self._attention_flops


@dataclass
class _Stage:
    """What a rank is sent, sends and projects in a stage, in seconds."""

    received: float = 0.0
    sent: float = 0.0
    projected: float = 0.0

    @property
    def wire(self) -> float:
        return max(self.received, self.sent)


@dataclass
class _Traffic:
    """A rank's keys by stage, and a byte of each token of its moved queries, which go there and back."""

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
    return found


def _seconds(costs: _Costs, stage_areas: Sequence[int], traffic: _Traffic, backward: bool) -> float:
    """One rank's pass.

    Backward there are two and a half times the products, twice the bytes, and projecting, the latents' gradients and
    the weights' make three times the projection.
    """
    times, ways, projections = (BACKWARD, 2, 3) if backward else (1.0, 1, 1)
    attended = [times * costs.attention(area) for area in stage_areas]
    for number, stage in enumerate(traffic.stages, start=1):
        attended[number] += projections * stage.projected
    wires = [ways * stage.wire for stage in traffic.stages]
    there, back = costs.moved(traffic.queries.wire, backward)
    wires[0] += there
    hidden = fsum(max(computed, wire) for computed, wire in zip(attended, [*wires, 0.0], strict=True))
    return hidden + back
