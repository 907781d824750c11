"""Safetensors files that are filled in any order, without holding the model in memory.

The library can only write a file from tensors that all exist. Here a file is laid out first, according to the format
(https://huggingface.co/docs/safetensors: eight bytes of length, a JSON header, the tensors), and its tensors are views
of the memory-mapped file.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from boost_core.checkpoint.chunks import Sizes

INDEX = "model.safetensors.index.json"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


class TensorFiles:
    """The safetensors of a model, in as many files as needed, with an index if there are several.

    Args:
        folder: The folder for the files, which has none yet.
        shapes: Shapes of all tensors by name.
        dtype: Type of all tensors, fp32 or bf16.
        max_shard_size: Maximum size of a file, such as ``5GB``, unless a single tensor is larger.

    Attributes:
        tensors: The tensors, initially zero; writing to them writes to the files.

    Raises:
        OSError: There is not enough room for all of them.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, Sizes], dtype: torch.dtype, max_shard_size: str) -> None:
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        split = split_state_dict_into_shards_factory(
            sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        self.tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, mmap.mmap] = {}
        for file, names in split.filename_to_tensors.items():
            memory, begin = _laid_out(folder / file, {name: shapes[name] for name in names}, dtype)
            for name in names:
                flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shapes[name]), offset=begin)
                self.tensors[name], self._memory[name] = flat.view(shapes[name]), memory
                begin += sizes[name]
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / INDEX).write_text(json.dumps(index, indent=2))

    def release(self, name: str) -> None:
        """Free the memory of a tensor's file until it is used again."""
        self._memory[name].madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Wait until everything has been written to disk.

        Raises:
            OSError: Writing to the disk failed.
        """
        for memory in {id(memory): memory for memory in self._memory.values()}.values():
            memory.flush()


def _laid_out(path: Path, shapes: Mapping[str, Sizes], dtype: torch.dtype) -> tuple[mmap.mmap, int]:
    """Create a memory-mapped file of zeros; return it and the offset at which its tensors begin."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("x+b") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.flush()
        # Allocated in full now, because a disk that fills up while mapped memory is written would kill the process.
        os.posix_fallocate(stream.fileno(), 0, stream.tell() + end)
        return mmap.mmap(stream.fileno(), 0), stream.tell()
