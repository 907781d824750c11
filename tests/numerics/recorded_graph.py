"""A CUDA graph's stand-in on CPU: takes a piece of work down, operation by operation, and replays it without its code.

What the host did meanwhile, such as counting, branching and writing numbers, is not done again; operations read and
write the same memory again. What no capture allows is refused: reading a number, finding out a shape, and numbers out
of the host's memory. Once the work is taken down, all memory that it took is filled with rubbish.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NOT_REPLAYED = {"profiler"}  # namespaces of operations without work for the device
FROM_THE_HOST = {"lift_fresh"}
RUBBISH = 255  # each byte: NaN, or -1


class Refused(RuntimeError):
    """No capture allows this."""


class RecordedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # alive, so that no other gets their numbers
        self.read: set[int] = set()  # addresses of memory that is not of the work's own taking
        self.replays = 0  # with those of the ones beside it
        self._first = self

    def beside(self) -> "RecordedGraph":
        other = type(self)()
        other._first = self
        return other

    def warm(self, work: Callable[[], Any]) -> Any:
        return work()

    def capture(self, work: Callable[[], Any]) -> Any:
        with self:
            values = work()
        for storage in self._made.values():
            storage.fill_(RUBBISH)
        return values

    @torch.no_grad()
    def replay(self) -> None:
        self._first.replays += 1
        for function, arguments, keywords, results in self.operations:
            again = done(function, arguments, keywords)
            inputs = set(storages((arguments, keywords)))
            for there, here in zip(tensors(results), tensors(again), strict=True):
                if there.untyped_storage()._cdata not in inputs:
                    there.copy_(here)

    def reset(self) -> None:
        self.operations, self._made = [], {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        refuse(function, arguments)
        results = done(function, arguments, keywords)
        if function.namespace in NOT_REPLAYED:
            return results
        inputs = storages((arguments, keywords))
        self.read |= {storage.data_ptr() for number, storage in inputs.items() if number not in self._made}
        made = {number: storage for number, storage in storages(results).items() if number not in inputs}
        self._made |= made
        if made or function._schema.is_mutable or function.namespace == "c10d":  # else it gives a view
            # Without what autograd knows of them, which would keep all of its memory.
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, (arguments, keywords, results))
            self.operations.append((function, *kept))
        return results


def done(function: Any, arguments: Any, keywords: Any) -> Any:
    """What an operation gives; a collective is waited for, as gloo does a part of some only then."""
    results = function(*arguments, **keywords)
    if function.namespace != "c10d":
        return results
    Work.unbox(results[-1]).wait()
    return (*results[:-1], FakeWork().boxed())


def refuse(function: Any, arguments: Any) -> None:
    name = function.overloadpacket.__name__
    by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in arguments[1])
    shape = torch.Tag.dynamic_output_shape in function.tags and name != "index"
    if by_mask or shape or torch.Tag.data_dependent_output in function.tags or name in FROM_THE_HOST:
        raise Refused(f"{function} makes the host wait")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors(tree)}
