"""Weights that are updated alike, flat in memory, and the part of their state that this replica keeps.

With ZeRO's first stage (arXiv 1910.02054) each of the data parallel replicas keeps an equal part of the masters and
moments: it gets the sum of that part's gradients, updates it, and all gather the rounded weights. Memory is divided
into buckets, and every bucket into a part a replica, so that a bucket can be sent as soon as its gradients are there.
With the second stage there is no sum of all gradients: a bucket has memory from its first gradient of a micro-batch
until it is sent, and each replica adds up what it gets.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import nn

from boost_core.architecture.roles import ParamKind
from boost_core.optim.flat import BLOCK, FlatLayout, Offsets
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.gradient_sinks import WeightPart

BUCKET_ELEMENTS = 1 << 25  # 128 MiB of fp32 gradients


@dataclass(frozen=True)
class StateSlice:
    """A box of one weight's state that this rank keeps.

    Attributes:
        name: The weight's.
        quantity: ``master``, ``first_moment`` or ``second_moment``.
        shape: Shape of this tensor parallel rank's part of the weight.
        offsets: Where the box begins in it.
        tensor: The box.
    """

    name: str
    quantity: str
    shape: Offsets
    offsets: Offsets
    tensor: torch.Tensor


class ParamGroup:
    """One group.

    Args:
        kind: What its weights have in common.
        weights: The weights by name, fp32; they become ``compute_type`` here, and views of one tensor.
        compute_type: What the model computes in.
        replicas: The ranks with the same weights: data parallel ones, and context parallel ones.
        zero_stage: 1 if each replica is to keep a part of the state, 2 if of the gradients, too; else 0.
        bucket_elements: Elements of a bucket, at most.

    Attributes:
        kind: As given.
        sharded: Whether this replica keeps a part of the state, or all of it.
        names: Of the weights.
        buckets: Where each bucket lies.
        own_gradient: The reduced gradients of what this replica keeps; flat, as the next four.
        master: Its weights in the same type.
        first_moment: Running mean of its gradients.
        second_moment: Running mean of their squares; empty where the update goes without.
        own_weight: Its weights in the compute type; ``None`` where the masters serve as such.
    """

    def __init__(
        self, kind: ParamKind, weights: Mapping[str, nn.Parameter], compute_type: torch.dtype, replicas: Communicator,
        zero_stage: int, *, bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:  # fmt: skip
        self.kind, self._replicas = kind, replicas
        self.sharded = zero_stage > 0 and not kind.custom_update and replicas.size > 1
        parts = replicas.size if self.sharded else 1
        self._layout = FlatLayout({name: weight.shape for name, weight in weights.items()}, parts)
        self.buckets = _buckets(self._layout.length, parts, bucket_elements if replicas.size > 1 else None)
        self._own = _part(self.buckets, replicas.rank if self.sharded else 0, parts)
        self._places = _one_after_the_other(self._own)

        device = next(iter(weights.values())).device
        precise = torch.promote_types(compute_type, torch.float32)
        full = torch.zeros(self._layout.length, dtype=precise, device=device)
        for name, view in self._layout.views(full).items():
            view.copy_(weights[name].detach())
        self._weight = full if compute_type == precise else full.to(compute_type)
        for name, view in self._layout.views(self._weight).items():
            weights[name].data = view
        self.names = list(weights)
        self._gradient = None if zero_stage == 2 and replicas.size > 1 else torch.zeros_like(full)
        self._sums = {} if self._gradient is None else self._layout.views(self._gradient)
        self._of_buckets: dict[int, torch.Tensor] = {}

        self.master = torch.cat([full[own] for own in self._own]) if self.sharded else full
        self.own_gradient = torch.zeros_like(self.master) if self._gradient is None or self.sharded else self._gradient
        self.first_moment = torch.zeros_like(self.master)
        self.second_moment = torch.zeros_like(self.master) if kind.moments == 2 else self.master.new_empty(0)
        self.own_weight = None
        if compute_type != precise:
            self.own_weight = self.master.to(compute_type) if self.sharded else self._weight

    def whole(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """``master`` or a moment by the weights' names, where this replica keeps all of it."""
        if self.sharded:
            raise AssertionError("each replica keeps a part of it")
        return self._layout.views(flat)

    def buckets_of(self, name: str) -> range:
        """The buckets in which a weight lies."""
        first, last = self._layout.ranges[name]
        touched = [index for index, bucket in enumerate(self.buckets) if bucket.start < last and first < bucket.stop]
        return range(touched[0], touched[-1] + 1)

    @property
    def lends_buckets(self) -> bool:
        """Whether a bucket's gradients have memory only until they are reduced."""
        return self._gradient is None

    def clear_gradients(self) -> None:
        """Begin the sums of a step."""
        (self.own_gradient if self._gradient is None else self._gradient).zero_()

    def add_gradient(self, name: str, gradient: torch.Tensor, part: WeightPart | None = None) -> None:
        """Add a gradient of a micro-batch to its sum, in at least fp32: a weight's, or that of a part of it."""
        if self._gradient is not None:
            sums = self._sums[name]
            if part is None:
                sums.add_(gradient.reshape(sums.shape))
            else:
                part.of(sums).add_(gradient)
            return
        if part is not None:  # buckets divide a weight where they like
            whole = gradient.new_zeros(self._layout.shapes[name])
            part.of(whole).copy_(gradient)
            gradient = whole
        first, last = self._layout.ranges[name]
        for index in self.buckets_of(name):
            bucket = self.buckets[index]
            low, high = max(first, bucket.start), min(last, bucket.stop)
            here = self._memory_of(index)[low - bucket.start : high - bucket.start]
            here.add_(gradient.flatten()[low - first : high - first])

    def sum_of(self, name: str) -> torch.Tensor | None:
        """A weight's sum of gradients; ``None`` where its buckets have memory only until they are reduced."""
        return self._sums.get(name)

    def abandon_buckets(self) -> None:
        """Forget what has been added up in buckets that have not been sent."""
        self._of_buckets.clear()

    def summed_gradients(self) -> dict[str, torch.Tensor]:
        """Sums of gradients by name, where this replica keeps all of them."""
        if self.sharded:
            raise AssertionError("each replica keeps a part of them")
        return self._layout.views(self.own_gradient)

    def start_reduction(self, bucket: int) -> Callable[[], None]:
        """Start to sum a bucket's gradients over the replicas; each gets its own part, or all of it.

        Returns:
            Waits for it.
        """
        here = self.buckets[bucket]
        place = self._places[bucket] if self.sharded else here
        mine = self.own_gradient[place]
        if self._gradient is None:
            return self._start_part(mine, bucket)
        if self.sharded:
            return self._replicas.start_reduce_scatter(mine, self._gradient[here], "gradients").wait
        return self._replicas.start_all_reduce_(mine, "gradients").wait

    def _start_part(self, mine: torch.Tensor, bucket: int) -> Callable[[], None]:
        """The same of a micro-batch's gradients, which are added to what there is."""
        memory = self._memory_of(bucket)
        del self._of_buckets[bucket]
        if self.sharded:
            received = torch.empty_like(mine)
            pending = self._replicas.start_reduce_scatter(received, memory, "gradients")
        else:
            received, pending = memory, self._replicas.start_all_reduce_(memory, "gradients")

        def add() -> None:
            pending.wait()
            mine.add_(received)

        return add

    def _memory_of(self, bucket: int) -> torch.Tensor:
        if bucket not in self._of_buckets:
            here = self.buckets[bucket]
            self._of_buckets[bucket] = self.own_gradient.new_zeros(here.stop - here.start)
        return self._of_buckets[bucket]

    def squares(self) -> torch.Tensor:
        """Sum of squares of the reduced gradients that this replica keeps, one float64 element."""
        # Within a block fp32 is precise enough; there are many blocks.
        norms = torch.linalg.vector_norm(self.own_gradient.view(-1, BLOCK), dim=1)
        total: torch.Tensor = norms.double().square().sum()
        return total

    def publish(self) -> None:
        """Give all replicas the updated weights of each."""
        if not self.sharded:
            return
        mine = self.master if self.own_weight is None else self.own_weight
        under_way = [
            self._replicas.start_all_gather(self._weight[bucket], mine[place], "weights")
            for bucket, place in zip(self.buckets, self._places, strict=True)
        ]
        for pending in under_way:
            pending.wait()

    def round_masters(self) -> None:
        """Make the model's weights those of the masters, on all replicas."""
        if self.own_weight is not None:
            self.own_weight.copy_(self.master)
        self.publish()

    def pieces(self) -> Iterator[StateSlice]:
        """The state that this rank keeps."""
        flats = {"master": self.master, "first_moment": self.first_moment}
        if self.kind.moments == 2:
            flats["second_moment"] = self.second_moment
        for own, place in zip(self._own, self._places, strict=True):
            for box in self._layout.boxes_within(own.start, own.stop):
                begin = place.start + box.begin - own.start
                for quantity, flat in flats.items():
                    tensor = flat[begin : begin + prod(box.sizes)].view(box.sizes)
                    yield StateSlice(box.name, quantity, self._layout.shapes[box.name], box.offsets, tensor)


def _buckets(length: int, parts: int, largest: int | None) -> list[slice]:
    unit = max(1, largest // (BLOCK * parts)) * BLOCK * parts if largest else length
    return [slice(begin, min(begin + unit, length)) for begin in range(0, length, unit)]


def _one_after_the_other(parts: list[slice]) -> list[slice]:
    """Where each part lies once they are kept without what was between them."""
    ends = list(accumulate(part.stop - part.start for part in parts))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _part(buckets: list[slice], part: int, parts: int) -> list[slice]:
    """One of equal parts of each bucket."""
    sizes = [(bucket.stop - bucket.start) // parts for bucket in buckets]
    return [
        slice(bucket.start + part * size, bucket.start + (part + 1) * size)
        for bucket, size in zip(buckets, sizes, strict=True)
    ]
