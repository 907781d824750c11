"""The tensor parallel strategies: along which axis each splits every role, and what its ranks exchange.

========  ==============================  =================================
strategy  all-reduced forward             contents
========  ==============================  =================================
fullrank  2d                              attention and MLP output
vanilla   5d + 2f (4d → GQA's widths)     the wide output of all seven pairs
btp       7r                              the latents of all seven pairs
========  ==============================  =================================

Counts are elements per block and token, with hidden size d, MLP size f and rank r (BOOST, arXiv 2512.12131). btp also
exchanges the norms' sums of squares: as an extra column of a latent's payload (``fused``, this project's own) or in
separate collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from boost_core.architecture.families import reads_input
from boost_core.architecture.projections import ProjectionGroup, projection_groups
from boost_core.architecture.roles import Role, SplitAxes
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import TRAITS, ParallelismConfig, RecomputeMode
from boost_core.config.strategy import StrategyName, chosen_strategy


@dataclass(frozen=True)
class Payload:
    """What one all-reduce carries per token.

    Attributes:
        elements: Elements of activations or their gradients: wide vectors or latents.
        statistics: Sums of squares for a norm.
    """

    elements: int
    statistics: int = 0

    @property
    def total(self) -> int:
        """Elements and statistics together."""
        return self.elements + self.statistics


class Exchanges(NamedTuple):
    """All-reduces, forward and backward."""

    forward: Sequence[Payload]
    backward: Sequence[Payload]


@dataclass(frozen=True, eq=False)
class Sharding:
    """How a strategy splits a model.

    Attributes:
        name: Name of the strategy.
        axes: The axis along which each role is split.
        exchanges: The exchanges of a model's projection group.
    """

    name: StrategyName
    axes: SplitAxes
    exchanges: Callable[[ModelConfig, ProjectionGroup, ParallelismConfig], Exchanges]

    @property
    def residual(self) -> bool:
        """Whether the residual, like the norms' scales, is sharded over the ranks; otherwise each rank has it whole."""
        return self.axes[Role.CHANNELS] is not None

    @property
    def latents(self) -> bool:
        """Whether each rank has a slice of every latent."""
        return self.axes.get(Role.DOWN_PROJECTION) == 2

    @property
    def wide(self) -> bool:
        """Whether each rank has some of the heads and part of the MLP."""
        return 2 in (self.axes.get(Role.UP_PROJECTION), self.axes.get(Role.DENSE_IN))


def chosen_sharding(model: ModelConfig, parallelism: ParallelismConfig) -> Sharding:
    """The sharding that a job uses."""
    return _SHARDINGS[chosen_strategy(model, parallelism)]


def block_exchanges(model: ModelConfig, parallelism: ParallelismConfig) -> Exchanges:
    """The exchanges of one block."""
    exchanges = chosen_sharding(model, parallelism).exchanges
    both = zip(*(exchanges(model, group, parallelism) for group in projection_groups(model)), strict=True)
    return Exchanges(*(list(chain.from_iterable(payloads)) for payloads in both))


def micro_batch_payloads(model: ModelConfig, parallelism: ParallelismConfig, mode: RecomputeMode) -> Sequence[Payload]:
    """One block's all-reduces per micro-batch: forward, backward, and forward again under full recomputation."""
    exchanges = block_exchanges(model, parallelism)
    again = exchanges.forward if TRAITS[mode].again == "all" else ()
    return [*exchanges.forward, *exchanges.backward, *again]


def kept_latents(model: ModelConfig, parallelism: ParallelismConfig, crossed: bool) -> Sequence[int]:
    """Elements per token of each whole latent that a block receives between two exchanges.

    Args:
        model: The model.
        parallelism: How it is split; its strategy is btp.
        crossed: Whether latents of the previous block cross into it.
    """
    rank, grouped = model.rank or 0, parallelism.group_projections
    groups = projection_groups(model)
    own = [len(product) * rank for group in groups for product in group.products(grouped)]
    return own + [len(piece) * rank for group in groups if crossed for piece in group.pieces(grouped)]


def _btp(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:
    """Latents with the preceding norm's statistic; backward, their gradients.

    The statistic's gradient follows from theirs, except under ``sync``, and where it scales more than latents.
    """
    products = group.products(parallelism.group_projections)
    latents = [Payload(len(product) * model.bottleneck_rank) for product in products]
    if group.norm is None:
        return Exchanges(latents, latents)
    apart = latents + [Payload(0, 1) for _ in products]
    together = [Payload(latent.elements, 1) for latent in latents]
    sent = parallelism.norm == "sync" or reads_input(model, group)
    return Exchanges(together if parallelism.norm == "fused" else apart, apart if sent else latents)


def _vanilla(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:  # noqa: ARG001
    """Wide outputs, those of equal width together; backward, the gradient of each product's wide input."""
    pieces = group.pieces(parallelism.group_projections)
    return Exchanges(
        [Payload(len(piece) * group.wide_outs[piece.start]) for piece in pieces],
        [Payload(group.wide_in) for _ in group.products(parallelism.group_projections)],
    )


def _fullrank(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:  # noqa: ARG001
    """What is added to the residual; backward, the gradient of what was read from it."""
    if group.norm is None:
        return Exchanges([Payload(sum(group.wide_outs))], [])
    return Exchanges([], [Payload(group.wide_in)])


BTP = Sharding(
    "btp",
    {
        Role.EMBEDDING: 1, Role.DOWN_PROJECTION: 0, Role.UP_PROJECTION: 2, Role.CHANNELS: 0, Role.LATENT: None,
        Role.HEAD_CHANNELS: None, Role.HEAD: 1,
    },
    _btp,
)  # fmt: skip
VANILLA = Sharding(
    "vanilla",
    {Role.EMBEDDING: 0, Role.DOWN_PROJECTION: 2, Role.UP_PROJECTION: 1, Role.CHANNELS: None, Role.HEAD: 1},
    _vanilla,
)
FULLRANK = Sharding(
    "fullrank",
    {
        Role.EMBEDDING: 0, Role.DENSE_IN: 2, Role.DENSE_OUT: 0, Role.CHANNELS: None, Role.HEAD_CHANNELS: None,
        Role.HEAD: 1,
    },
    _fullrank,
)  # fmt: skip
_SHARDINGS = {sharding.name: sharding for sharding in (BTP, VANILLA, FULLRANK)}
