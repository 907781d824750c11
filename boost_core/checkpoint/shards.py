"""Saving and loading the tensors of a checkpoint, on any number of ranks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from boost_core.checkpoint.checksums import ChecksummingWriter
from boost_core.checkpoint.folder import CheckpointFolder, StoredFile

# Each weight's tensors (master and moments) by name, and the axis that they are split along, if they are.
WeightTensors = Mapping[str, Mapping[str, torch.Tensor]]
SplitAxes = Mapping[str, int | None]


def save_shards(
    folder: CheckpointFolder, step: int, tensors: WeightTensors, axes: SplitAxes, mesh: DeviceMesh
) -> dict[str, StoredFile]:
    """Write every rank's shards of a step and say what was written by all of them.

    All ranks call it; the checkpoint is not committed by it.
    """
    if dist.get_rank() == 0:
        folder.prepare(step)
    dist.barrier()
    writer = ChecksummingWriter(folder.step_url(step), sync_files=folder.is_local, **folder.STORAGE_OPTIONS)
    save(_as_whole(tensors, axes, mesh), storage_writer=writer)
    checksums: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(checksums, writer.checksums)
    return folder.stored_files(step, {name: crc for of_rank in checksums for name, crc in of_rank.items()})


def load_shards(folder: CheckpointFolder, step: int, tensors: WeightTensors, axes: SplitAxes, mesh: DeviceMesh) -> None:
    """Fill every rank's ``tensors`` in place, whatever layout wrote the checkpoint. All ranks call it."""
    reader = FsspecReader(folder.step_url(step), **folder.STORAGE_OPTIONS)
    load(_as_whole(tensors, axes, mesh), storage_reader=reader)


def save_whole(folder: CheckpointFolder, step: int, tensors: WeightTensors) -> dict[str, StoredFile]:
    """Write whole tensors in one process and say what was written; the checkpoint is not committed by it."""
    folder.prepare(step)
    writer = ChecksummingWriter(folder.step_url(step), sync_files=folder.is_local, **folder.STORAGE_OPTIONS)
    save(_flat(tensors), storage_writer=writer, no_dist=True)
    return folder.stored_files(step, writer.checksums)


def load_whole(folder: CheckpointFolder, step: int, tensors: WeightTensors) -> None:
    """Fill whole tensors in place, in one process."""
    reader = FsspecReader(folder.step_url(step), **folder.STORAGE_OPTIONS)
    load(_flat(tensors), storage_reader=reader, no_dist=True)


def _flat(tensors: WeightTensors) -> dict[str, Any]:
    return {f"{name}.{kind}": tensor for name, kinds in tensors.items() for kind, tensor in kinds.items()}


def _as_whole(tensors: WeightTensors, axes: SplitAxes, mesh: DeviceMesh) -> dict[str, Any]:
    """The local shards as views of whole tensors, which is what makes a checkpoint independent of its layout."""
    whole = {}
    for name, kinds in tensors.items():
        axis = axes[name]
        placements = (Replicate(), Replicate(), Replicate() if axis is None else Shard(axis))
        for kind, tensor in kinds.items():
            whole[f"{name}.{kind}"] = DTensor.from_local(tensor, mesh, placements, run_check=False)
    return whole
