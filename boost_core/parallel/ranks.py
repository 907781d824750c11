"""The groups of ranks that a rank is in."""

from dataclasses import dataclass

import torch.distributed as dist

from boost_core.parallel.collectives import Collectives
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Ranks:
    """Collectives over each dimension of the mesh and over all ranks.

    Attributes:
        tensor: The tensor parallel group.
        pipeline: The pipeline parallel group.
        data: The data parallel group, the replicas.
        ends: The first and the last pipeline rank of a column, where they share weights; else this rank alone.
        gang: All ranks.
    """

    tensor: Collectives
    pipeline: Collectives
    data: Collectives
    ends: Collectives
    gang: Collectives

    @classmethod
    def of(cls, mesh: ParallelMesh, ends_share: bool, ledger: CommunicationLedger) -> "Ranks":
        """Those of a mesh, counted by a ledger."""
        tensor, pipeline, data = (Collectives(mesh.group(along), along, ledger) for along in ("tp", "pp", "dp"))
        ends = Collectives(mesh.ends() if ends_share and pipeline.size > 1 else None, "pp", ledger)
        return cls(tensor, pipeline, data, ends, Collectives(dist.group.WORLD, "all", ledger))
