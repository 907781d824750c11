"""The peak memory of a rank's training, as the plan counts it.

On a GPU torch's allocator tracks it. On a CPU it keeps no such count, so storages are counted as operations create
them; that slows each operation down, most while memory grows, and ends with the watched steps.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory:
    """Peak memory use of a device from now on.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages = _Storages() if device.type == "cpu" else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def watched(self) -> AbstractContextManager[object]:
        """Context manager around what is to be counted; on a GPU everything is."""
        return self._storages or nullcontext()

    def bytes(self) -> int:
        """The peak so far."""
        return torch.cuda.max_memory_allocated(self._device) if self._storages is None else self._storages.peak


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0  # live bytes, including those freed since the last sweep
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Run the operation, and count the storages it creates."""
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._at_most += storage.nbytes() - self._sizes.get(reference, 0)
                self._sizes[reference] = storage.nbytes()
        if self._at_most > self.peak:
            self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}  # type: ignore[no-untyped-call]
            self._at_most = sum(self._sizes.values())
            self.peak = max(self.peak, self._at_most)
        return result
