"""The groups of ranks that a rank belongs to."""

from dataclasses import dataclass

import torch.distributed as dist

from boost_core.parallel.communicator import Communicator
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class ProcessGroups:
    """Communicators over each dimension of the mesh and over all ranks.

    Attributes:
        tensor: The tensor parallel group.
        pipeline: The pipeline parallel group.
        context: The context parallel group, whose ranks share the tokens of the same sequences.
        replicas: The data parallel group, one rank of each replica.
        data: Ranks with the same weights, over all replicas and their context parallel ranks.
        embedding: The first and last pipeline ranks of a column if they share weights; else this rank alone.
        gang: All ranks.
    """

    tensor: Communicator
    pipeline: Communicator
    context: Communicator
    replicas: Communicator
    data: Communicator
    embedding: Communicator
    gang: Communicator

    @classmethod
    def of(
        cls, mesh: ParallelMesh, embedding_is_shared: bool, ledger: CommunicationLedger,
        communicator: type[Communicator] = Communicator,
    ) -> "ProcessGroups":  # fmt: skip
        """The groups of a mesh, counted by a ledger; ``communicator`` is the class to use."""
        tensor, pipeline, replicas = (communicator(mesh.group(along), along, ledger) for along in ("tp", "pp", "dp"))
        context = communicator(mesh.context_group(), "cp", ledger)
        data = replicas if context.size == 1 else communicator(mesh.group_of_same_weights(), "dp", ledger)
        shared = mesh.embedding_group() if embedding_is_shared and pipeline.size > 1 else None
        embedding = communicator(shared, "pp", ledger)
        gang = communicator(dist.group.WORLD, "all", ledger)
        return cls(tensor, pipeline, context, replicas, data, embedding, gang)
