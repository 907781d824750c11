"""The tokens of a micro-batch that a rank computes: all of them, or those that it is dealt of a context parallel group.

The norms, the projections, the MLP and the loss are of each token by itself, so a rank may have any tokens if their
positions come with them; attention alone asks other ranks for keys.

Plans are made of the sequences as the host has them, which waits for no device: that of a step's first micro-batch,
or those of all where a pipeline has several under way, while the step before is still computed, others while the
micro-batch before is. A thread would hold the host up for as long as it plans, since both are Python.

Shape suffixes: T tokens of a micro-batch or a rank's own of them.
"""

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from boost_core.config import JobSpec
from boost_core.data.sampler import Sequences
from boost_core.nn.attention import Rotation
from boost_core.nn.sparse.attention import SparseAttention
from boost_core.nn.sparse.recall import Tally
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.attention import ContextAttention
from boost_core.parallel.context.latents import LatentRoute
from boost_core.parallel.context.pieces import integers
from boost_core.parallel.context.sparse import SparseContextAttention
from boost_core.parallel.process_groups import ProcessGroups
from boost_core.plan.context.dealt import Dealing
from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.machine import machine_for
from boost_core.train.batch import Batch, document_lengths


@dataclass(frozen=True)
class Load:
    """Pairs of query and key that a context parallel group's ranks compute of some micro-batches, one after the other.

    Attributes:
        most: On the rank that has most of each.
        mean: In the mean of the ranks.
    """

    most: float = 0.0
    mean: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.most + other.most, self.mean + other.mean)

    @property
    def imbalance(self) -> float | None:
        """The one over the other; ``None`` of none."""
        return self.most / self.mean if self.mean else None


@dataclass(frozen=True)
class OwnTokens:
    """Which tokens of a micro-batch a rank has.

    Attributes:
        rotation: Their positions, and how they attend.
        places: Where they are in the micro-batch, ``[T]``; ``None``: all, in order.
        load: What attention among them all is for those that they are dealt to.
    """

    rotation: Rotation
    places: torch.Tensor | None = None
    load: Load = Load()

    def of(self, x_T: torch.Tensor) -> torch.Tensor:
        """What they have of something that each token of the micro-batch has."""
        return x_T if self.places is None else x_T[self.places]

    def among_all(self, own_T: torch.Tensor, tokens: int, ranks: Communicator) -> torch.Tensor:
        """What each token of the micro-batch has, ``[tokens]``, from what each rank's own have. All ranks call it."""
        if self.places is None:
            return own_T
        every_T = own_T.new_zeros(tokens)
        every_T[self.places] = own_T
        return ranks.all_reduce_(every_T, "tokens of all")


class Dealer:
    """Deals the tokens of micro-batches. All ranks of a gang make one together.

    Args:
        spec: The job.
        rotation: The rotary embedding of whole sequences.
        groups: The context parallel group, and the tensor parallel one.
        device: Where the tokens are.
        end_of_document: The token that ends a document; ``None`` where documents see each other.

    Attributes:
        rotation: As given.
        load: Of the newest step.
        tally: What sparse attention has kept of the newest step's; of this rank's heads.
    """

    def __init__(
        self, spec: JobSpec, rotation: Rotation, groups: ProcessGroups, device: torch.device,
        end_of_document: int | None,
    ) -> None:  # fmt: skip
        self.rotation, self._ranks, self._device = rotation, groups.context, device
        self.load, self.tally, self._end = Load(), Tally(), end_of_document
        self._sparse = spec.training.attention
        self._planned: dict[tuple[int, ...], ContextPlan] = {}  # of micro-batches to come, by their documents
        self._newest: tuple[tuple[tuple[int, ...], bool], OwnTokens] | None = None  # and whether all densely
        machine = machine_for(spec.resources, spec.training.precision)
        self._dealing = Dealing.of(spec, machine)
        nodes = _nodes_of_latents(spec, self._dealing, groups.context, device)
        self._route = LatentRoute(nodes, groups.tensor, self._at) if nodes else None

    def begin_step(self) -> None:
        """Count a step anew."""
        self.load, self.tally = Load(), Tally()
        if self._sparse is not None:  # attention counts what it keeps
            self._newest = None

    def deal(self, batch: Batch, sequences: Sequences) -> OwnTokens:
        """This rank's of a micro-batch; the layers and the backward pass share what it takes to attend to others'.

        Without gradients attention is dense: the last tokens of a document choose what sparse attention sees, which
        tells of what follows, and text that is being made has none yet.

        Args:
            batch: The micro-batch.
            sequences: The same on the host, ``[b, t]``.
        """
        densely = self._sparse is None or not torch.is_grad_enabled()
        if self._ranks.size == 1 and densely:
            return OwnTokens(self.rotation.with_documents(batch.starts))
        documents = document_lengths(sequences, self._end)
        if self._ranks.size == 1 and self._sparse is not None:
            attention = SparseAttention(self._sparse, documents, self._device, self.tally)
            return OwnTokens(self.rotation.attending(attention))
        if self._newest is None or self._newest[0] != (documents, densely):
            self._newest = None  # first, as the next ones need room, too
            self._newest = (documents, densely), self._own(self._plan(documents, densely))
        return self._newest[1]

    def foresee(self, micro_batches: Sequence[Sequences]) -> None:
        """Plan those that come next, on the host alone."""
        if self._ranks.size > 1:
            ahead = {document_lengths(sequences, self._end) for sequences in micro_batches}
            self._planned = {documents: self._plan(documents, self._sparse is None) for documents in ahead}

    def _plan(self, documents: tuple[int, ...], densely: bool) -> ContextPlan:
        ahead = self._planned.get(documents) if densely == (self._sparse is None) else None
        return ahead or self._dealing.plan(documents, densely)

    def _own(self, plan: ContextPlan) -> OwnTokens:
        attention = self._attention(plan)
        places = self._places(attention.chunks)
        load = Load(max(plan.loads), sum(plan.loads) / plan.ranks)
        return OwnTokens(self.rotation.of_tokens(places % self.rotation.sequence_length, attention), places, load)

    def _attention(self, plan: ContextPlan) -> ContextAttention:
        if self._sparse is None or plan.window.sparse_from is None:
            return ContextAttention(plan, self._ranks, self._device, self._route)
        return SparseContextAttention(plan, self._sparse, self._ranks, self._device, self.tally)

    def _at(self, chunks: Sequence[int]) -> Rotation:
        """The rotation of the tokens of some chunks."""
        return self.rotation.of_tokens(self._places(chunks) % self.rotation.sequence_length)

    def _places(self, chunks: Sequence[int]) -> torch.Tensor:
        """Where their tokens are in the micro-batch."""
        size = self._dealing.chunk
        first_n = integers(list(chunks), torch.int64, self._device) * size
        return (first_n.unsqueeze(1) + torch.arange(size, device=self._device)).flatten()


def _nodes_of_latents(
    spec: JobSpec, dealing: Dealing, ranks: Communicator, device: torch.device
) -> Sequence[int] | None:
    """The node of each context parallel rank, between which latents go; ``None`` where they go nowhere."""
    if ranks.size == 1 or dealing.exchange == "keys":
        return None
    if spec.parallelism.context.exchange == "latents":
        return range(ranks.size)
    here = torch.tensor([[zlib.crc32(socket.gethostname().encode())]], device=device)
    nodes: list[int] = ranks.all_gather(here, "nodes").flatten().tolist()
    return nodes if len(set(nodes)) > 1 else None
