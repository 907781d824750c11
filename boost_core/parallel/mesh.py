"""The device mesh of a gang: (dp, pp, tp), tensor parallel ranks innermost so that they share a node."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from boost_core.config import Layout
from boost_core.config.parallelism import ParallelismConfig

DIMENSIONS = ("dp", "pp", "tp")


@dataclass(frozen=True)
class ParallelMesh:
    """One rank's place in the gang.

    Attributes:
        device: Where this rank computes.
        mesh: The three-dimensional torch mesh.
    """

    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def build(cls, parallelism: ParallelismConfig, device: torch.device) -> "ParallelMesh":
        """Lay the process group out as a mesh.

        Raises:
            ValueError: The number of processes is not tp · pp · dp.
        """
        layout = Layout.of(parallelism)
        if dist.get_world_size() != layout.world_size:
            raise ValueError(
                f"the job asks for {layout} = {layout.world_size} processes, but "
                f"{dist.get_world_size()} are running; start as many, or change parallelism"
            )
        sizes = layout.dp, layout.pp, layout.tp
        return cls(device, init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS))

    def size(self, dimension: str) -> int:
        """Number of ranks along ``dp``, ``pp`` or ``tp``."""
        return self.mesh[dimension].size()

    def rank(self, dimension: str) -> int:
        """This rank's place along ``dp``, ``pp`` or ``tp``."""
        return self.mesh[dimension].get_local_rank()

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The process group along ``dp``, ``pp`` or ``tp``."""
        return self.mesh.get_group(dimension)

    def embedding_group(self) -> dist.ProcessGroup | None:
        """The group of the first and the last pipeline rank of this rank's column; ``None`` for one between them.

        All ranks call it, in the same order among other groups.
        """
        mine = None
        for column in self.mesh.mesh.transpose(1, 2).flatten(0, 1).tolist():
            pair = [column[0], column[-1]]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                mine = group
        return mine
