"""The device mesh of a gang: (dp, pp, cp, tp), tensor parallel ranks innermost so that they share a node."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from boost_core.config import Layout
from boost_core.config.parallelism import ParallelismConfig
from boost_core.parallel.communicator import CommunicationLedger, Communicator


@dataclass(frozen=True)
class ParallelMesh:
    """One rank's place in the gang.

    Attributes:
        device: Where this rank computes.
        mesh: torch's mesh, which has ``cp`` only if there are several context parallel ranks.
    """

    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def build(cls, parallelism: ParallelismConfig, device: torch.device) -> "ParallelMesh":
        """Lay the process group out as a mesh.

        Raises:
            ValueError: The number of processes is not tp · cp · pp · dp.
        """
        layout = Layout.of(parallelism)
        if dist.get_world_size() != layout.world_size:
            raise ValueError(
                f"the job asks for {layout} = {layout.world_size} processes, but "
                f"{dist.get_world_size()} are running; start {layout.world_size}, or change parallelism"
            )
        sizes = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        if layout.cp == 1:
            del sizes["cp"]
        return cls(device, init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


# The groups of ranks that a rank belongs to.


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
        names = "tp", "pp", "cp", "dp"
        groups = {name: mesh.mesh.get_group(name) for name in mesh.mesh.mesh_dim_names or ()}
        tensor, pipeline, context, replicas = (communicator(groups.get(name), name, ledger) for name in names)

        # New groups, which all ranks create in the same order. That of ranks with the same weights, along ``dp`` and
        # ``cp``, replica by replica, is a separate one even with one replica, because collectives of one group wait for
        # each other.
        data, shared = replicas, None
        if context.size > 1:
            same = group_of_this_rank(mesh.mesh.mesh.permute(1, 3, 0, 2).flatten(2).flatten(0, 1).tolist())
            data = communicator(same, "dp", ledger)
        if embedding_is_shared and pipeline.size > 1:
            columns = mesh.mesh.mesh.movedim(1, -1).flatten(0, -2).tolist()
            shared = group_of_this_rank([[column[0], column[-1]] for column in columns])
        embedding, gang = communicator(shared, "pp", ledger), communicator(dist.group.WORLD, "all", ledger)
        return cls(tensor, pipeline, context, replicas, data, embedding, gang)


def group_of_this_rank(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create disjoint groups of ranks, and return the one that this rank is in, if any. All ranks call this."""
    if (gang := dist.group.WORLD) is not None and gang.bound_device_id is not None:
        # All at once: one by one, NCCL would split the gang's communicator once for each of the groups, on all ranks.
        return dist.split_group(split_ranks=[list(ranks) for ranks in groups])
    created = [(dist.new_group(list(ranks)), ranks) for ranks in groups]
    return next((group for group, ranks in created if dist.get_rank() in ranks), None)
