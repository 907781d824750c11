"""A step's gradients, summed up over micro-batches as they come off the weights, and over replicas while they come."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from boost_core.optim.group import Group
from boost_core.parallel.collectives import Collectives
from boost_core.parallel.ledger import Pending


class Gradients:
    """Takes the gradients of all groups.

    How often a weight's gradient comes up in a step is learnt in the first one. From the second on, a bucket is sent as
    soon as its last gradient is in, while the rest of the backward pass goes on. Buckets go in one order, from the last
    to the first, because all replicas must agree on it.

    Args:
        weights: The model's weights by name.
        groups: The groups that they are in.
        replicas: The data parallel group.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], groups: Sequence[Group], replicas: Collectives) -> None:
        self._groups, self._replicas = groups, replicas
        self._buckets = [(group, bucket) for group in groups for bucket in reversed(range(len(group.buckets)))]
        self._sums = {name: view for group in groups for name, view in group.gradients.items()}
        self._places = {
            name: [self._buckets.index((group, bucket)) for bucket in group.buckets_of(name)]
            for group in groups
            for name in group.gradients
        }
        self._arrivals: Counter[str] = Counter()
        self._expected: list[int] | None = None
        self._missing: list[int] = []
        self._under_way: list[Pending] = []
        self._sent = 0
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(partial(self._take, name))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step."""
        for group in self._groups:
            group.clear_gradients()
        self._arrivals.clear()
        self._missing, self._sent = list(self._expected or ()), 0

    def finish(self) -> None:
        """Wait until every replica has its part of the sums over all of them."""
        if self._expected is None:
            self._learn()
        elif any(self._missing):
            raise AssertionError(f"gradients of {self._incomplete()} did not come up as often as in the first step")
        self._send(len(self._buckets))
        while self._under_way:
            self._under_way.pop().wait()

    def _take(self, name: str, weight: torch.Tensor) -> None:
        if weight.grad is None:
            raise AssertionError(f"no gradient reached {name}")
        self._sums[name].add_(weight.grad)
        weight.grad = None
        self._arrivals[name] += 1
        if self._missing:
            for place in self._places[name]:
                self._missing[place] -= 1
            self._send(next((place for place, left in enumerate(self._missing) if left), len(self._missing)))

    def _send(self, ready: int) -> None:
        """Start the reduction of all buckets before the one of this number."""
        while self._sent < ready:
            if self._replicas.size > 1:
                group, bucket = self._buckets[self._sent]
                self._under_way.append(group.start_reduction(bucket))
            self._sent += 1

    def _learn(self) -> None:
        if never := self._sums.keys() - self._arrivals.keys():
            raise AssertionError(f"no gradient reached {', '.join(sorted(never))}")
        self._expected = [0] * len(self._buckets)
        for name, count in self._arrivals.items():
            for place in self._places[name]:
                self._expected[place] += count

    def _incomplete(self) -> str:
        names = (name for name, places in self._places.items() if any(self._missing[place] for place in places))
        return ", ".join(sorted(names))
