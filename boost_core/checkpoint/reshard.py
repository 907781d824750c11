"""The tensors of a checkpoint in chunks: boxes of whole tensors, wherever the ranks happen to keep them.

torch's distributed checkpoint stores boxes by the name of their tensor and their position in it, and can read any other
boxes from them. So the stored state does not depend on how many ranks wrote it or along which axes they split it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor.

    Attributes:
        name: Name of the whole tensor.
        shape: Shape of the whole tensor.
        offsets: Where the box begins in the whole tensor.
        tensor: The box, which is read from and written to.
    """

    name: str
    shape: Sizes
    offsets: Sizes
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Chunk":
        """A chunk that is all of a tensor."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)

    @classmethod
    def of_shard(
        cls, name: str, shape: Sizes, offsets: Sizes, tensor: torch.Tensor, axis: int | None, rank: int, size: int
    ) -> "Chunk":
        """A box of one of ``size`` equal shards.

        Args:
            name: Name of the tensor.
            shape: Shape of the shard.
            offsets: Where the box begins in the shard.
            tensor: The box.
            axis: The axis along which the tensor is split; ``None`` if each rank has the whole tensor.
            rank: Number of the shard.
            size: Number of shards.
        """
        if axis is None:
            return cls(name, shape, offsets, tensor)
        whole, begin = list(shape), list(offsets)
        whole[axis] *= size
        begin[axis] += rank * shape[axis]
        return cls(name, tuple(whole), tuple(begin), tensor)

    @property
    def index(self) -> MetadataIndex:
        """The chunk's identity among all chunks of a checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def place(self) -> ChunkStorageMetadata:
        """The chunk's position in the whole tensor."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class TensorMissing(ValueError):
    """A checkpoint does not have a tensor; its only argument is the name."""


class SaveChunks(DefaultSavePlanner):
    """Writes this rank's chunks; a chunk that several ranks have is written by one of them.

    Args:
        chunks: This rank's chunks.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """The items that this rank could write."""
        items = [
            WriteItem(
                index=chunk.index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk.place, TensorProperties.create_from_tensor(chunk.tensor), torch.Size(chunk.shape)
                ),
            )
            for chunk in self._chunks.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor of an item."""
        return self._chunks[write_item.index].tensor.detach()


class LoadChunks(DefaultLoadPlanner):
    """Fills this rank's chunks.

    Args:
        chunks: This rank's chunks.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        """The items that this rank reads.

        Raises:
            TensorMissing: The checkpoint lacks a tensor.
            ValueError: The checkpoint has a tensor of another shape.
        """
        items: list[ReadItem] = []
        for chunk in self._chunks.values():
            stored = self.metadata.state_dict_metadata.get(chunk.name) if self.metadata else None
            if not isinstance(stored, TensorStorageMetadata):
                raise TensorMissing(chunk.name)
            if tuple(stored.size) != chunk.shape:
                raise ValueError(f"{chunk.name} is {tuple(stored.size)} in the checkpoint and {chunk.shape} here")
            items += create_read_items_for_chunk_list(chunk.name, stored, [chunk.place])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a chunk that an item fills."""
        part = self._chunks[read_item.dest_index].tensor
        for axis, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, begin, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing, because the tensor is a view."""
