"""Sequences in the form a model takes.

Shape suffixes: b sequences of s positions, and t = s + 1 tokens; T = b·s tokens; n places for documents in a sequence.
"""

import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap

import numpy as np
import torch

from boost_core.config import JobSpec
from boost_core.context.attention import ContextAttention
from boost_core.context.exchange import LatentRoute, token_places
from boost_core.context.plan import ContextPlan
from boost_core.context.selection import ContextPlanner
from boost_core.context.sparse import SparseAttention, Tally
from boost_core.context.sparse_parallel import SparseContextAttention
from boost_core.data.corpus import Sequences
from boost_core.model.attention import Rotation
from boost_core.parallel.mesh import ProcessGroups
from boost_core.plan.machine import machine_for


def most_documents(sequences: Sequences, end_of_document: int | None) -> int:
    """Return the most documents in any of ``[b, t]`` sequences on the host, plus one if its last document ends."""
    if end_of_document is None:
        return 1
    return 1 + int((sequences[:, :-1] == end_of_document).sum(axis=1).max())


def document_lengths(sequences: Sequences, end_of_document: int | None) -> tuple[int, ...]:
    """Return the tokens of each document of ``[b, t]`` sequences on the host, one sequence after the other.

    A sequence without a document end is one document; the last token of each sequence is left out, as nothing is
    predicted after it.
    """
    count, length = len(sequences), sequences.shape[1] - 1
    if end_of_document is None:
        return (length,) * count
    ends = np.flatnonzero(sequences[:, :-1] == end_of_document) + 1
    borders = np.union1d(ends, np.arange(0, (count + 1) * length, length))
    return tuple(np.diff(borders).tolist())


@dataclass(frozen=True)
class Batch:
    """Tokens of some sequences, one after the other.

    Attributes:
        tokens: Their ids, ``[T]``, as are the next two.
        targets: The token that follows each.
        counts: Whether its loss counts: 0 where the next token starts another document, and documents are apart.
        starts: Where each document begins in its sequence, ``[b, n]``, 32 bits, in order, and s in unused places;
            ``None`` where all tokens see all others.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor | None

    @classmethod
    def of(cls, sequences: Sequences, end_of_document: int | None, device: torch.device) -> "Batch":
        """Make the batch of ``[b, t]`` sequences on the host; see ``of_tokens``."""
        places = most_documents(sequences, end_of_document)
        return cls.of_tokens(torch.from_numpy(sequences).to(device), end_of_document, places)

    @classmethod
    def of_tokens(cls, token_bt: torch.Tensor, end_of_document: int | None, places: int) -> "Batch":
        """Make the batch of ``[b, t]`` sequences on the device where it is to live.

        Args:
            token_bt: The sequences.
            end_of_document: The token that ends a document and belongs to it; ``None`` to let documents see each
                other.
            places: At least ``most_documents``; shapes then depend on this alone.
        """
        token_bs, target_bs = token_bt[:, :-1], token_bt[:, 1:]
        ends_bs, start_bn = torch.zeros_like(token_bs), None
        if end_of_document is not None:
            count, length = token_bs.shape
            ends_bs = (token_bs == end_of_document).to(torch.int64)
            # Tokens that end no document are written to an extra last place, which is never read.
            place_bs = ends_bs.cumsum(dim=1).masked_fill(ends_bs == 0, places)
            after_bs = torch.arange(1, length + 1, dtype=torch.int32, device=ends_bs.device).expand_as(place_bs)
            start_bn = torch.full((count, places + 1), length, dtype=torch.int32, device=ends_bs.device)
            start_bn.scatter_(1, place_bs, after_bs)
            start_bn[:, 0].zero_()
            start_bn = start_bn[:, :places]
        counts_T = (1.0 - ends_bs.reshape(-1)).float()
        return cls(token_bs.reshape(-1), target_bs.reshape(-1), counts_T, start_bn)

    def micro_batches(self, count: int) -> Iterator["Batch"]:
        """Split the batch into equal parts."""
        flat = [tensor.chunk(count) for tensor in (self.tokens, self.targets, self.counts)]
        starts = [None] * count if self.starts is None else self.starts.chunk(count)
        return starmap(Batch, zip(*flat, starts, strict=True))


# The tokens of a micro-batch that a rank computes: all of them, or its part in a context parallel group.
#
# Norms, projections, the MLP and the loss treat each token by itself, so a rank may have any tokens if their positions
# come with them; only attention needs keys of other ranks. With ``split_micro_batch``, each half is partitioned by
# itself.
#
# Plans are made from the sequences on the host, without waiting for a device: the plan of a step's first micro-batch,
# or of all in a pipeline with several in flight, while the previous step is still computed; others during the previous
# micro-batch. A thread would hold up the host for as long as it plans, since both are Python.
#
# Shape suffixes: T tokens of a micro-batch or a rank's own of them.

Documents = tuple[int, ...]  # tokens of each


@dataclass(frozen=True)
class Load:
    """Query-key pairs that a context parallel group's ranks compute, summed over what is partitioned at a time.

    Attributes:
        most: Pairs on the rank with most in each micro-batch, or half of one.
        mean: Mean pairs per rank.
    """

    most: float = 0.0
    mean: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.most + other.most, self.mean + other.mean)

    @property
    def imbalance(self) -> float | None:
        """``most`` divided by ``mean``; ``None`` without pairs."""
        return self.most / self.mean if self.mean else None


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of a micro-batch that a rank has.

    Attributes:
        rotation: Their positions, and how they attend.
        places: Where they are in the micro-batch, ``[T]``; ``None`` for all, in order.
        load: The micro-batch's attention over the ranks that share it.
    """

    rotation: Rotation
    places: torch.Tensor | None = None
    load: Load = Load()

    def of(self, x_T: torch.Tensor) -> torch.Tensor:
        """Their part of values that each token of the micro-batch has."""
        return x_T if self.places is None else x_T[self.places]


class Partitioner:
    """Partitions the tokens of micro-batches over ranks. All ranks of a gang create one together.

    Args:
        spec: The job.
        rotation: The rotary embedding of whole sequences.
        groups: Has the context and tensor parallel groups.
        device: Where the tokens are.
        end_of_document: The token that ends a document; ``None`` if documents see each other.

    Attributes:
        rotation: As given.
        load: The load of the newest step.
        tally: How much attention sparse attention has kept in the newest step, over this rank's heads.
    """

    def __init__(
        self, spec: JobSpec, rotation: Rotation, groups: ProcessGroups, device: torch.device,
        end_of_document: int | None,
    ) -> None:  # fmt: skip
        self.rotation, self._ranks, self._device = rotation, groups.context, device
        self.load, self.tally, self._end = Load(), Tally(), end_of_document
        self._sparse, self._halves = spec.training.attention, spec.parallelism.split_micro_batch
        self._planned: dict[Documents, ContextPlan] = {}  # for coming micro-batches, by their documents
        self._newest: tuple[tuple[Sequence[Documents], bool], LocalTokens] | None = None  # and whether all densely
        self._planner = ContextPlanner.of(spec, machine_for(spec.resources, spec.training.precision))
        self._places = partial(token_places, chunk_tokens=self._planner.chunk, device=device)
        # How latents travel between nodes; ``None`` if none do, or all ranks are on one node.
        self._route: LatentRoute | None = None
        sends_latents, moves_latents = self._planner.exchange != "keys", self._planner.moves_latents
        if self._ranks.size > 1 and (sends_latents or moves_latents):
            nodes: Sequence[int] = range(self._ranks.size)
            if spec.parallelism.context.exchange != "latents":
                here = torch.tensor([[zlib.crc32(socket.gethostname().encode())]], device=device)
                nodes = self._ranks.all_gather(here, "nodes").flatten().tolist()
            spread = len(set(nodes)) > 1
            if spread or moves_latents:  # tasks move as latents within a node, too, as they are planned
                of_keys = nodes if spread and self._planner.exchange == "latents" else None
                self._route = LatentRoute(
                    of_keys, moves_latents, groups.tensor,
                    lambda chunks: rotation.of_tokens(self._places(chunks) % rotation.sequence_length),
                )  # fmt: skip

    def begin_step(self) -> None:
        """Reset the counts for a new step."""
        self.load, self.tally = Load(), Tally()
        if self._sparse is not None:  # attention counts what it keeps
            self._newest = None

    def partition(self, batch: Batch, sequences: Sequences) -> LocalTokens:
        """This rank's tokens of a micro-batch; layers and the backward pass share what attending to others' needs.

        Without gradients attention is dense: what sparse attention sees is chosen by a document's last tokens, which
        reveals something of what follows, and text being generated has no last tokens yet.

        Args:
            batch: The micro-batch.
            sequences: The same on the host, ``[b, t]``.
        """
        densely = self._sparse is None or not torch.is_grad_enabled()
        if self._ranks.size == 1 and densely:
            return LocalTokens(self.rotation.with_documents(batch.starts))
        if self._ranks.size == 1 and self._sparse is not None:
            whole = SparseAttention(self._sparse, document_lengths(sequences, self._end), self._device, self.tally)
            return LocalTokens(self.rotation.attending(whole))
        parts = self._partitioned_at_a_time(sequences)
        if self._newest is None or self._newest[0] != (parts, densely):
            self._newest = None  # first, as the next ones need memory, too
            rotations, places, load, begin = [], [], Load(), 0
            for documents in parts:
                plan = self._planned.get(documents) if densely == (self._sparse is None) else None
                plan = plan or self._planner.plan(documents, densely)
                if self._sparse is None or plan.window.sparse_from is None:
                    attention = ContextAttention(plan, self._ranks, self._device, self._route, self._halves)
                else:
                    attention = SparseContextAttention(plan, self._sparse, self._ranks, self._device, self.tally)
                place_T = self._places(attention.chunks)
                position_T = place_T % self.rotation.sequence_length
                rotations.append(self.rotation.of_tokens(position_T, attention.for_layer()))
                places.append(place_T + begin if begin else place_T)
                load += Load(max(plan.loads), sum(plan.loads) / plan.ranks)
                begin += sum(documents)
            local = LocalTokens(rotations[0], places[0], load)
            if self._halves:
                local = LocalTokens(self.rotation.attending(None, parts=rotations), torch.cat(places), load)
            self._newest = (parts, densely), local
        return self._newest[1]

    def plan_ahead(self, micro_batches: Sequence[Sequences]) -> None:
        """Plan the next micro-batches, on the host alone."""
        if self._ranks.size > 1:
            ahead = {documents for sequences in micro_batches for documents in self._partitioned_at_a_time(sequences)}
            plan, densely = self._planner.plan, self._sparse is None
            self._planned = {each: self._planned.get(each) or plan(each, densely) for each in ahead}

    def _partitioned_at_a_time(self, sequences: Sequences) -> Sequence[Documents]:
        """The documents of a micro-batch, or of each of its halves, split as ``Rotation.splits`` does."""
        middle = -(-len(sequences) // 2) if self._halves else len(sequences)
        return [document_lengths(part, self._end) for part in (sequences[:middle], sequences[middle:]) if len(part)]
