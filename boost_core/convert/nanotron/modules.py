"""What is used of nanotron, imported around what keeps it from being imported."""

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
        tensor_metadata: What a shard says about itself, a class.
        slices_pair: Where a part of a shard lies in the whole, a class.
        checkpoint_version: The version that it writes.
        parallel_context: Its process groups, a class; on a CPU it sets no device.
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
        ValueError: It is not installed.
    """
    try:
        import nanotron.distributed
    except ImportError as error:
        raise ValueError("nanotron is not installed; run: pip install 'boost-service[nanotron]'") from error
    _import_logging()
    import nanotron.config  # noqa: F401  # before its parallel layers, which are in a circle with it
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
    """Its logging wants its configuration, which wants its logging: placeholders stand in for the first."""
    placeholders: dict[str, Any] = {name: ModuleType(name) for name in ("nanotron.config", "nanotron.config.config")}
    for module in placeholders.values():
        module.LoggingArgs = object
    sys.modules.update(placeholders)
    try:
        import nanotron.logging  # noqa: F401
    finally:
        for name in placeholders:
            del sys.modules[name]
