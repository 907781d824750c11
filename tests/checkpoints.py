"""Checkpoints that tests write in a single process."""

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint import save

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.resharding import LoadChunks, load_alone
from boost_core.checkpoint.shards import ChecksummingWriter, Chunk, SaveChunks


def save_whole(folder: CheckpointFolder, step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write whole tensors to one file, without committing the checkpoint; the checksum of each file, by name."""
    folder.prepare(step)
    writer = ChecksummingWriter(folder.step_url(step), folder.is_local, single_file=True, **folder.storage_options)
    save({}, storage_writer=writer, planner=SaveChunks(Chunk.whole(*each) for each in tensors.items()), no_dist=True)
    return writer.checksums


def load_whole(folder: CheckpointFolder, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill whole tensors from a committed checkpoint."""
    load_alone(folder, manifest, LoadChunks(Chunk.whole(*each) for each in tensors.items()))
