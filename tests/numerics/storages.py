"""Which memory a computation takes, counted storage by storage."""

import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNCHANGED_LOOKS = 10


class Made(TorchDispatchMode):
    """Remembers every storage that is made, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def alive_bytes(self) -> int:
        """What lives on, once the threads of collectives have let go of what they held."""
        seen = [self._alive_now()]
        while len(seen) < UNCHANGED_LOOKS or seen[-1] != seen[-UNCHANGED_LOOKS]:
            time.sleep(0.02)
            seen.append(self._alive_now())
        return seen[-1]

    def _alive_now(self) -> int:
        return sum(size for storage, size in self.sizes.items() if not storage.expired())

    def largest_bytes(self) -> int:
        return max(self.sizes.values())
