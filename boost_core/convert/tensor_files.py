"""Safetensors files that are filled in any order, without the model in memory.

The library writes a file from tensors that are all there. Here a file is laid out first, by the format's own rules
(https://huggingface.co/docs/safetensors: eight bytes of length, a JSON header, the tensors), and its tensors are views
of it, mapped into memory.
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
    """The safetensors of a model, in as many files as it takes, with an index if there are several.

    Args:
        folder: Where they go; there are none yet.
        shapes: Of all tensors, by name.
        dtype: Of all tensors, fp32 or bf16.
        max_shard_size: The largest size of a file, such as ``5GB``, unless a single tensor is larger.

    Attributes:
        tensors: The tensors, zeros at first; what is written to them is in the files.

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
        """Have the file of a tensor take none of this process's memory until it is used again."""
        self._memory[name].madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Wait until all is on the disk.

        Raises:
            OSError: The disk does not take it.
        """
        for memory in {id(memory): memory for memory in self._memory.values()}.values():
            memory.flush()


def _laid_out(path: Path, shapes: Mapping[str, Sizes], dtype: torch.dtype) -> tuple[mmap.mmap, int]:
    """A file of zeros in memory, and where its tensors begin."""
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
        # All of it now: a disk that is full while its memory is written to would kill the process.
        os.posix_fallocate(stream.fileno(), 0, stream.tell() + end)
        return mmap.mmap(stream.fileno(), 0), stream.tell()
