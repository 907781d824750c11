"""Saving and loading the tensors of a checkpoint, on any number of ranks."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from boost_core.checkpoint.checksums import ChecksummingWriter
from boost_core.checkpoint.folder import CheckpointFolder

# Each weight's tensors (master and moments) by name, and the axis that they are split along, if they are.
WeightTensors = Mapping[str, Mapping[str, torch.Tensor]]
SplitAxes = Mapping[str, int | None]
Result = TypeVar("Result")


class SaveFailed(OSError):
    """A checkpoint could not be written; all ranks know. Nothing is committed, and what is there stays."""


def save_shards(
    folder: CheckpointFolder, step: int, tensors: WeightTensors, axes: SplitAxes, mesh: DeviceMesh
) -> dict[str, int]:
    """Write every rank's shards of a step; the checkpoint is not committed by it. All ranks call it.

    Returns:
        The checksum of each file that any rank has written, by name.

    Raises:
        SaveFailed: On all ranks, whichever failed.
    """
    on_first_rank(lambda: folder.prepare(step))
    writer = ChecksummingWriter(folder.step_url(step), sync_files=folder.is_local, **folder.STORAGE_OPTIONS)
    try:
        save(_as_whole(tensors, axes, mesh), storage_writer=writer)
    except CheckpointException as failure:  # raised on all ranks; no Exception, by torch's choice
        raise SaveFailed(_first_cause(failure)) from failure
    checksums: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(checksums, writer.checksums)
    return {name: checksum for of_rank in checksums for name, checksum in of_rank.items()}


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Do something on the first rank alone; all ranks call it and get its result.

    Raises:
        SaveFailed: On all ranks, if it failed on the first.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # stores raise types of their own
            outcome[1] = _in_words(error)
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise SaveFailed(failure)
    return cast(Result, result)


def _first_cause(failure: CheckpointException) -> str:
    rank, (cause, _) = next(iter(failure.failures.items()))
    return f"rank {rank}: {_in_words(cause)}"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def load_shards(folder: CheckpointFolder, step: int, tensors: WeightTensors, axes: SplitAxes, mesh: DeviceMesh) -> None:
    """Fill every rank's ``tensors`` in place, whatever layout wrote the checkpoint. All ranks call it.

    Raises:
        OSError: On all ranks, whichever failed.
    """
    reader = FsspecReader(folder.step_url(step), **folder.STORAGE_OPTIONS)
    try:
        load(_as_whole(tensors, axes, mesh), storage_reader=reader)
    except CheckpointException as failure:
        raise OSError(f"checkpoint {folder.step_url(step)} cannot be read: {_first_cause(failure)}") from failure


def save_whole(folder: CheckpointFolder, step: int, tensors: WeightTensors) -> dict[str, int]:
    """``save_shards`` of whole tensors, in one process."""
    folder.prepare(step)
    writer = ChecksummingWriter(folder.step_url(step), sync_files=folder.is_local, **folder.STORAGE_OPTIONS)
    save(_flat(tensors), storage_writer=writer, no_dist=True)
    return writer.checksums


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
