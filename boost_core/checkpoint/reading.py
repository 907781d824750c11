"""Reading checkpoints that somebody else may have put there.

torch keeps its index of the shards as a pickle, and whoever loads one does what it says. A job may name any folder to
start from, so here an index may consist of nothing but torch's own descriptions of tensors and files beside it.
"""

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *((descriptions.__name__, name) for name in _CLASSES),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)


class CarefulReader(FsspecReader):
    """torch's reader of shards over fsspec that takes an index for data."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index.

        Raises:
            ValueError: It has what no index of ours has.
        """
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            index: Metadata = _Unpickler(stream).load()
        for file in index.storage_data.values():
            if "/" in file.relative_path:
                raise ValueError(f"the index in {self.path} names a file of another folder; do not load it")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"the checkpoint's index would run {module}.{name}; it is none of ours, do not load it")
        return super().find_class(module, name)
