"""The parts of nanotron in use, imported by working around what prevents its import."""

import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Modules:
    """Parts of nanotron.

    Attributes:
        tensor_metadata: The class of a shard's metadata.
        slices_pair: The class for the position of a part of a shard in the whole.
        checkpoint_version: The checkpoint version that it writes.
        parallel_context: The class of its process groups; on a CPU it sets no device.
        tensor_parallel: Its tensor parallel layers.
        parameters: Its parameters.
        weights: Saving and loading of weights.
    """

    tensor_metadata: Any
    slices_pair: Any
    checkpoint_version: Any
    parallel_context: Any
    tensor_parallel: ModuleType
    parameters: ModuleType
    weights: ModuleType


@cache
def modules() -> Modules:
    """Import nanotron.

    Raises:
        ValueError: nanotron is not installed.
    """
    try:
        import nanotron.distributed
    except ImportError as error:
        raise ValueError("nanotron is not installed; run: pip install 'boost-service[nanotron]'") from error
    _import_logging()
    import nanotron.config  # noqa: F401  # before its parallel layers, which import it circularly
    from nanotron.constants import CHECKPOINT_VERSION
    from nanotron.parallel import ParallelContext, parameters
    from nanotron.parallel.tensor_parallel import nn as tensor_parallel
    from nanotron.serialize import weights
    from nanotron.serialize.metadata import TensorMetadata

    class Context(ParallelContext):  # type: ignore[misc]
        def set_device(self) -> None:
            if torch.cuda.is_available():
                super().set_device()

    return Modules(
        TensorMetadata, parameters.SlicesPair, CHECKPOINT_VERSION, Context, tensor_parallel, parameters, weights
    )


def _import_logging() -> None:
    """Import nanotron's logging, which circularly imports its configuration, with placeholders for the latter."""
    placeholders: dict[str, Any] = {name: ModuleType(name) for name in ("nanotron.config", "nanotron.config.config")}
    for module in placeholders.values():
        module.LoggingArgs = object
    sys.modules.update(placeholders)
    try:
        import nanotron.logging  # noqa: F401
    finally:
        for name in placeholders:
            del sys.modules[name]
