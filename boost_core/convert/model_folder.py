"""A model in a local folder: safetensors, in one or several files, and ``config.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from boost_core.checkpoint.chunks import Sizes
from boost_core.config import ModelConfig
from boost_core.config.parsing.disk import Disk
from boost_core.config.parsing.small_files import Unreadable, read_small, refuse_irregular
from boost_core.convert.names import Tensors
from boost_core.convert.read_config import model_of

_CONFIG = "config.json"
_LARGEST_CONFIG_BYTES = 2**20
_LOCAL = Disk()
_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_ROWS = 4096  # compared at once
_DTYPES = {"F64", "F32", "F16", "BF16"}


class Source(Protocol):
    """A model's published tensors, each read on demand."""

    @property
    def shapes(self) -> Mapping[str, Sizes]:
        """Shapes of all tensors by name."""

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in fp32."""


class InMemory:
    """Tensors that are all in memory."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]


class ModelFolder:
    """A folder of safetensors; several files are read as one.

    Args:
        folder: The folder.

    Attributes:
        model: The model that its ``config.json`` describes.
        shapes: Shapes of all tensors by name.

    Raises:
        ValueError: The folder holds no readable model.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / _CONFIG).exists():
            raise ValueError(f"{folder} holds no {_CONFIG} with safetensors beside it; give the folder of a model")
        try:
            config = json.loads(read_small(_LOCAL, str(folder / _CONFIG), _LARGEST_CONFIG_BYTES))
        except Unreadable:
            raise
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{folder / _CONFIG} is not valid JSON: {error}") from error
        self.model: ModelConfig = model_of(config)
        self.shapes: dict[str, Sizes] = {}
        self._files: dict[str, Path] = {}
        for path in files:
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if name in self.shapes:
                    raise ValueError(f"{name} is in {path} and in another file of {folder}; leave one model there")
                found = file.get_slice(name)
                if found.get_dtype() not in _DTYPES:
                    raise ValueError(f"{name} is quantized ({found.get_dtype()}); give the model in fp32, fp16 or bf16")
                self.shapes[name], self._files[name] = tuple(found.get_shape()), path
        if self.model.tie_embeddings and self.shapes.pop(_HEAD, None) is not None and _TABLE in self.shapes:
            self._refuse_another_head(folder)  # some writers store it twice

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in fp32.

        Raises:
            ValueError: It holds values that are not finite.
        """
        # Reopened each time, because a file kept open and memory-mapped would keep what was read of it in memory.
        tensor: torch.Tensor = _opened(self._files[name]).get_tensor(name).float()
        if not tensor.isfinite().all():
            raise ValueError(f"{name} in {self._files[name]} holds values that are not finite; give another model")
        return tensor

    def _refuse_another_head(self, folder: Path) -> None:
        head, table = (_opened(self._files[name]).get_slice(name) for name in (_HEAD, _TABLE))
        rows = range(0, head.get_shape()[0], _ROWS)
        same = head.get_shape() == table.get_shape()
        if not (same and all(torch.equal(head[row : row + _ROWS], table[row : row + _ROWS]) for row in rows)):
            raise ValueError(
                f"{folder / _CONFIG} has tie_word_embeddings=true, but {_HEAD} and {_TABLE} differ; remove {_HEAD}, or "
                "set tie_word_embeddings to false, whichever is the model that was trained"
            )


def _opened(path: Path) -> Any:
    refuse_irregular(_LOCAL, str(path))
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from error
