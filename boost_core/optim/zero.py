"""Weights that are updated alike, flat in memory, their gradients, and the part of their state that this replica keeps.

With ZeRO's first stage (arXiv 1910.02054) each of the data parallel replicas keeps an equal part of the masters and
moments: it gets the sum of that part's gradients and updates it, and all gather the rounded weights. Memory is divided
into buckets, and every bucket into one part per replica, so a bucket can be sent as soon as its gradients are there.
With the second stage there is no sum of all gradients: a bucket has memory from its first gradient of a micro-batch
until it is sent, and each replica adds up what it receives. ``Gradients`` sums a step's gradients over micro-batches as
they are computed, and over replicas meanwhile.

The tail of a replica's masters and moments may be in the host's memory (``HostTier``).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from math import nan, prod
from weakref import ref

import torch
from torch import nn

from boost_core.architecture import ParamKind
from boost_core.kernels.scaled_weight import unscale_
from boost_core.parallel.activation_offload import page_locked_like
from boost_core.parallel.btp import GradientSinks, WeightPart
from boost_core.parallel.communicator import Communicator
from boost_core.plan.memory import STAGED_CHUNK, offloaded_elements, staged_elements

# Tensors one after the other in one block of memory, so that one kernel or one collective serves them all.

BLOCK = 64  # elements; matrix products and 16-byte accesses need each tensor to begin at an aligned address

Offsets = tuple[int, ...]


class FlatLayout:
    """Positions of tensors of given shapes in one flat tensor.

    Args:
        shapes: Shape of each tensor by name, in memory order.
        parts: Number of equal parts that the length divides into, each beginning at an aligned address.

    Attributes:
        length: Elements of the flat tensor; the rest is padding, and stays zero.
        shapes: The shapes.
        ranges: Where each tensor begins and ends, by name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], parts: int = 1) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            self.ranges[name] = (end, end + shape.numel())
            end = -(-(end + shape.numel()) // BLOCK) * BLOCK
        self.length = -(-end // (BLOCK * parts)) * BLOCK * parts

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor as a view of ``flat``."""
        return {name: flat[slice(*self.ranges[name])].view(shape) for name, shape in self.shapes.items()}

    def boxes_within(self, begin: int, end: int) -> Iterator[tuple[str, Offsets, Offsets, int]]:
        """Yield everything between two positions as boxes whose elements are contiguous, padding left out.

        A box is its tensor's name, where it begins in the tensor, its shape, and where it begins in the flat tensor.
        """
        for name, (first, last) in self.ranges.items():
            low, high = max(begin, first), min(end, last)
            for offsets, sizes in boxes(self.shapes[name], low - first, high - first):
                yield name, offsets, sizes, low
                low += prod(sizes)


def boxes(shape: Offsets, begin: int, end: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Split the elements from ``begin`` to ``end`` of a tensor, in order, into few boxes: offsets and sizes of each."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row, inner = prod(shape[1:]), shape[1:]
    while begin < end:
        number, first = divmod(begin, row)
        whole = 0 if first else (end - begin) // row
        if whole:
            yield (number, *(0 for _ in inner)), (whole, *inner)
            begin += whole * row
        else:  # a part of one row
            last = min(end - number * row, row)
            for offsets, sizes in boxes(inner, first, last):
                yield (number, *offsets), (1, *sizes)
            begin += last - first


# Masters and moments in the host's memory, and how they get to the device to be updated.
#
# The update itself runs on the device, chunk by chunk: a chunk of the state is copied into one of two buffers, updated
# there, and copied back. So nothing is computed differently, and results are bit-identical with and without it. (Like
# ``offload_optimizer`` of DeepSpeed and ProTrain, arXiv 2406.08334, except that these update on the host's cores.)
#
# On a GPU copies use two streams of their own, one for each direction, so that the next chunk arrives while the
# previous one returns.

_SLOTS = 2


def host_zeros(number: int, elements: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return ``number`` flat tensors in the host's memory; for a GPU page-locked, so that copies need no other."""
    if device.type != "cuda":
        return [torch.zeros(elements, dtype=dtype) for _ in range(number)]
    like = torch.empty(elements, dtype=dtype, device="meta")
    return [tensor.zero_() for tensor in page_locked_like([like] * number)]


@dataclass(frozen=True)
class Staged:
    """Some of the state in a buffer on the device.

    Attributes:
        tensors: One flat tensor per quantity, its parts one after the other; may be read and written.
        origins: The parts of each.
        ready: Event for the end of the copies; ``None`` where copies are made at once.
    """

    tensors: list[torch.Tensor]
    origins: Sequence[Sequence[torch.Tensor]]
    ready: torch.cuda.Event | None

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the place of each part in the buffer, and the part."""
        for tensor, parts in zip(self.tensors, self.origins, strict=True):
            begin = 0
            for part in parts:
                yield tensor[begin : begin + len(part)], part
                begin += len(part)


class Staging:
    """Two buffers on the device, each for one chunk; all groups of an optimizer share them.

    Args:
        device: The device.

    Attributes:
        elements: The size of each, to be set before the first chunk is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.elements, self._turn = device, 0, 0
        self._slots: list[torch.Tensor] = []
        on_gpu = device.type == "cuda"
        self._incoming = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._outgoing = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def load(self, origins: Sequence[Sequence[torch.Tensor]]) -> Staged:
        """Start copying parts of the state into the next buffer; what was in it must have been stored.

        Args:
            origins: For each quantity its parts, any of which may be on the device.
        """
        if not self._slots:
            dtype = origins[0][0].dtype
            self._slots = [torch.empty(self.elements, dtype=dtype, device=self._device) for _ in range(_SLOTS)]
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        sizes = [sum(part.numel() for part in parts) for parts in origins]
        begins = [0, *accumulate(-(-size // BLOCK) * BLOCK for size in sizes)]
        tensors = [slot[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        staged = Staged(tensors, origins, None if self._incoming is None else torch.cuda.Event())  # type: ignore[no-untyped-call]
        if self._incoming is not None and self._outgoing is not None:
            # After everything that used this buffer, and after the last writes to the origins.
            self._incoming.wait_stream(torch.cuda.current_stream())
            self._incoming.wait_stream(self._outgoing)
        with torch.cuda.stream(self._incoming):  # which ``None`` leaves as it is
            for buffer, part in staged.parts():
                buffer.copy_(part, non_blocking=True)
            if staged.ready is not None:
                staged.ready.record(self._incoming)
        return staged

    def use(self, staged: Staged) -> list[torch.Tensor]:
        """Return its tensors, for work enqueued from now on."""
        if staged.ready is not None:
            torch.cuda.current_stream().wait_event(staged.ready)
        return staged.tensors

    def store(self, staged: Staged) -> None:
        """Copy it back to its origins, after all enqueued work; to the host concurrently with what is enqueued next."""
        for buffer, part in staged.parts():
            if not part.is_cpu:
                part.copy_(buffer, non_blocking=True)
        if self._outgoing is not None:
            self._outgoing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outgoing):
            for buffer, part in staged.parts():
                if part.is_cpu:
                    part.copy_(buffer, non_blocking=True)

    def wait(self) -> None:
        """Return when no copy is in flight, so that the host may read and write its part of the state."""
        if self._incoming is not None and self._outgoing is not None:
            self._incoming.synchronize()
            self._outgoing.synchronize()


BUCKET_ELEMENTS = 1 << 25  # at most in a bucket: 128 MiB of fp32 gradients


@dataclass(frozen=True)
class StateSlice:
    """A box of one weight's state that this rank keeps.

    Attributes:
        name: The weight's name.
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
        weights: The weights by name, fp32; they are converted to ``compute_type`` here, as views of one tensor.
        compute_type: What the model computes in.
        replicas: The ranks with the same weights: data parallel ones, and context parallel ones.
        zero_stage: 1 if each replica is to keep a part of the state, 2 if of the gradients, too; else 0.
        offload: The share of this replica's masters and moments to keep in the host's memory; masters that the
            model computes with stay on the device.
        staging: Where those are updated; by default the group's own.

    Attributes:
        kind: As given.
        sharded: Whether this replica keeps a part of the state, or all of it.
        names: Names of the weights.
        buckets: Where each bucket lies.
        own_gradient: The reduced gradients of what this replica keeps; flat, as are the next four.
        master: Its weights in the same type; without the tail on the host, as are the moments.
        first_moment: Running mean of its gradients.
        second_moment: Running mean of their squares; empty where the update does not use it.
        own_weight: Its weights in the compute type; ``None`` where the masters are the weights.
        tier: The tail of each state quantity that is kept in host memory; empty if none is.
        sums: Each weight's sum of gradients; empty where buckets have memory only until they are reduced.
        lends_buckets: Whether they have.
        lent: The sums in buckets that have not been sent.
        norms: Where ``squares`` expects the norms of each weight's whole blocks, if this replica keeps the whole group.
        with_norm: How many elements of the step's reduced gradients have entered what ``squares`` returns.
    """

    def __init__(
        self, kind: ParamKind, weights: Mapping[str, nn.Parameter], compute_type: torch.dtype, replicas: Communicator,
        zero_stage: int, offload: float = 0.0, staging: Staging | None = None,
    ) -> None:  # fmt: skip
        self.kind, self._replicas = kind, replicas
        self.sharded = zero_stage > 0 and not kind.custom_update and replicas.size > 1
        parts = replicas.size if self.sharded else 1
        self._layout = FlatLayout({name: weight.shape for name, weight in weights.items()}, parts)
        length, unit = self._layout.length, BLOCK * parts
        size = max(1, BUCKET_ELEMENTS // unit) * unit if replicas.size > 1 else length
        self.buckets = [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]
        # This replica's part of each bucket: where it lies in the whole group, and here, packed without the gaps.
        shares = [(bucket.start, (bucket.stop - bucket.start) // parts) for bucket in self.buckets]
        rank, end = replicas.rank if self.sharded else 0, length // parts
        self._own = [slice(begin + rank * share, begin + (rank + 1) * share) for begin, share in shares]
        self._places = [slice(begin // parts, begin // parts + share) for begin, share in shares]

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
        self.sums = {} if self._gradient is None else self._layout.views(self._gradient)
        self.lends_buckets, self.lent = self._gradient is None, dict[int, torch.Tensor]()
        # Norms of blocks, padded to whole blocks of them; and how many elements have one.
        self._norms, self.with_norm = full.new_zeros(-(-end // BLOCK**2) * BLOCK), 0
        self.norms = {name: self._norms[lo // BLOCK : hi // BLOCK] for name, (lo, hi) in self._layout.ranges.items()}

        offloaded = offloaded_elements(end, offload)
        self._resident, self._staging = end - offloaded, staging or Staging(device)
        computed_with = compute_type == precise and not self.sharded  # the masters themselves
        separate = self.sharded or (offloaded > 0 and not computed_with)
        self.master = self._fill(full.new_empty(self._resident), full) if separate else full
        self.own_gradient = full.new_zeros(end) if self._gradient is None or self.sharded else self._gradient
        self.first_moment = full.new_zeros(self._resident)
        self.second_moment = full.new_zeros(self._resident if kind.moments == 2 else 0)
        self.own_weight = None if compute_type == precise else self._weight
        if self.sharded and compute_type != precise:
            self.own_weight = self._fill(full.new_empty(end, dtype=compute_type), full)
        self.tier: dict[str, torch.Tensor] = {}
        if offloaded:
            moments = ("first_moment", "second_moment")[: kind.moments]
            names = moments if computed_with else ("master", *moments)
            self.tier = dict(zip(names, host_zeros(len(names), offloaded, precise, device), strict=True))
            if not computed_with:
                self._fill(self.tier["master"], full, self._resident)
            largest = max(last - first for first, last in self._layout.ranges.values())
            self._staging.elements = max(self._staging.elements, staged_elements(kind, offloaded, len(names), largest))

    def _own_parts(self, begin: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield what this replica keeps between two positions: its position in the whole group, and here."""
        for own, place in zip(self._own, self._places, strict=True):
            low, high, ahead = max(begin, place.start), min(end, place.stop), own.start - place.start
            if low < high:
                yield slice(low + ahead, high + ahead), slice(low, high)

    def _fill(self, own: torch.Tensor, full: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Copy to ``own`` what this replica keeps from a position on, and return it."""
        for here, place in self._own_parts(begin, begin + len(own)):
            own[place.start - begin : place.stop - begin].copy_(full[here])
        return own

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield this replica's state part by part, flat and on the device; update each before requesting the next.

        A part is masters, their reduced gradients, the running means of these and of their squares, and the weights in
        the compute type, ``None`` where the masters are the weights.
        """
        for here, place, (master, first, second) in self._through("master", "first_moment", "second_moment"):
            yield master, self.own_gradient[place], first, second, self._weight_of(here, place)

    @contextmanager
    def on_device(self, name: str, *quantities: str) -> Iterator[list[torch.Tensor]]:
        """Give access to some quantities of one weight; requires that this replica keeps all of it.

        Two weights can be on the device at a time.

        Args:
            name: The weight's name.
            quantities: As in ``StateSlice``; two at most.
        """
        place = slice(*self._layout.ranges[name])
        staged = self._load(place, quantities)
        yield [each.view(self._layout.shapes[name]) for each in self._arrived(staged, place, quantities)]
        if staged is not None:
            self._staging.store(staged)

    def clear_moments(self) -> None:
        """Set all moments to zero."""
        if self.tier:
            self._staging.wait()
        away = (self.tier[name] for name in self.tier.keys() - {"master"})
        for moment in (self.first_moment, self.second_moment, *away):
            moment.zero_()

    def _through(self, *quantities: str, store: bool = True) -> Iterator[tuple[slice, slice, list[torch.Tensor]]]:
        """Go through quantities of this replica's state: first those on the device, then the host's, chunk by chunk.

        Args:
            quantities: Their names.
            store: Whether they are changed.

        Yields:
            The position of each part in the whole group, if it is the host's; its position here; and the tensors.
        """
        parts = [(slice(0), slice(0, self._resident))] if self._resident else []
        chunk = STAGED_CHUNK
        if self.tier:  # a custom update's buffers are as large as its weights, which may be smaller
            away = len(self.tier.keys() & set(quantities))
            chunk = min(chunk, self._staging.elements // max(away, 1) // BLOCK * BLOCK)
        for here, place in self._own_parts(self._resident, len(self.own_gradient)):
            for at in range(0, place.stop - place.start, chunk):
                size = min(chunk, place.stop - place.start - at)
                begins = here.start + at, place.start + at
                parts.append((slice(begins[0], begins[0] + size), slice(begins[1], begins[1] + size)))
        upcoming = self._load(parts[0][1], quantities)
        for (here, place), following in zip(parts, [*parts[1:], None], strict=True):
            # The next one is on its way while this one is updated.
            staged, upcoming = upcoming, None if following is None else self._load(following[1], quantities)
            yield here, place, self._arrived(staged, place, quantities)
            if store and staged is not None:
                self._staging.store(staged)

    def _load(self, place: slice, quantities: Sequence[str]) -> Staged | None:
        """Start copying to the device what is not there."""
        origins = [self._where(name, place) for name in quantities if self._is_away(name, place)]
        return self._staging.load(origins) if origins else None

    def _arrived(self, staged: Staged | None, place: slice, quantities: Sequence[str]) -> list[torch.Tensor]:
        copies = iter(() if staged is None else self._staging.use(staged))
        return [next(copies) if self._is_away(name, place) else self._where(name, place)[0] for name in quantities]

    def _is_away(self, quantity: str, place: slice) -> bool:
        return quantity in self.tier and place.stop > self._resident

    def _where(self, quantity: str, place: slice) -> list[torch.Tensor]:
        """Return its parts: the one on the device, and the one on the host."""
        resident: torch.Tensor = getattr(self, quantity)
        if not self._is_away(quantity, place):
            return [resident[place]]
        begin, host = self._resident, self.tier[quantity]
        away = host[max(0, place.start - begin) : place.stop - begin]
        return [resident[place.start :], away] if place.start < begin else [away]

    def _weight_of(self, here: slice, place: slice) -> torch.Tensor | None:
        """Return the model's weights for a part, if they are to be written."""
        if self.own_weight is not None:
            return self.own_weight[place]
        # In fp32 replicas get the masters; the host's are published from where they are written in the whole group.
        return self._weight[here] if self.sharded and place.start >= self._resident else None

    def buckets_of(self, name: str) -> range:
        """Return the buckets that contain a weight."""
        (first, last), size = self._layout.ranges[name], self.buckets[0].stop
        return range(first // size, -(-last // size))

    def add_gradient(
        self, name: str, gradient: torch.Tensor, part: WeightPart | None = None, first: bool = False
    ) -> None:
        """Add the gradient of a weight, or of a part of one, in a micro-batch to its sum, in at least fp32.

        Args:
            name: The weight's name.
            gradient: The gradient.
            part: Which part of the weight it is of; ``None`` for all of it.
            first: Whether the weight's sum of this step begins with it, whatever its memory has.
        """
        if self._gradient is not None:
            sums = self.sums[name]
            if part is not None:
                if first:
                    sums.zero_()
                part.of(sums).add_(gradient)
            else:
                (sums.copy_ if first else sums.add_)(gradient.reshape(sums.shape))
            return
        if part is not None:  # a bucket may end anywhere in a weight
            whole = gradient.new_zeros(self._layout.shapes[name])
            part.of(whole).copy_(gradient)
            gradient = whole
        begin, end = self._layout.ranges[name]
        for index in self.buckets_of(name):
            bucket = self.buckets[index]
            low, high = max(begin, bucket.start), min(end, bucket.stop)
            here = self._memory_of(index)[low - bucket.start : high - bucket.start]
            here.add_(gradient.flatten()[low - begin : high - begin])

    def summed_gradients(self) -> dict[str, torch.Tensor]:
        """Sums of gradients by name; requires that this replica keeps all of them."""
        return self._layout.views(self.own_gradient)

    def start_reduction(self, bucket: int) -> Callable[[], None]:
        """Start summing a bucket's gradients over the replicas; each gets its own part, or all of it.

        Returns:
            A function that waits for the sum.
        """
        here = self.buckets[bucket]
        local = self.own_gradient[self._places[bucket] if self.sharded else here]
        memory = self._memory_of(bucket) if self._gradient is None else self._gradient[here]
        self.lent.pop(bucket, None)
        if self.sharded:
            received = torch.empty_like(local) if self._gradient is None else local
            pending = self._replicas.start_reduce_scatter(received, memory, "gradients")
        else:
            received, pending = memory, self._replicas.start_all_reduce_(memory, "gradients")

        def add() -> None:  # a micro-batch's to the previous ones
            pending.wait()
            local.add_(received)

        return pending.wait if self._gradient is not None else add

    def _memory_of(self, bucket: int) -> torch.Tensor:
        if bucket not in self.lent:
            here = self.buckets[bucket]
            self.lent[bucket] = self.own_gradient.new_zeros(here.stop - here.start)
        return self.lent[bucket]

    def add_squares(self, names: Sequence[str] | None = None) -> None:
        """Begin what ``squares`` returns with some weights, or all, whose gradients no longer change in this step."""
        spans = [[0, len(self.own_gradient)]] if names is None else list[list[int]]()
        for begin, end in sorted([self._layout.ranges[name] for name in names or ()]):
            if not spans or spans[-1][1] != begin:
                spans.append([begin, begin])
            spans[-1][1] = -(-end // BLOCK) * BLOCK
        for begin, end in spans:
            norms = self._norms[begin // BLOCK : end // BLOCK]
            torch.linalg.vector_norm(self.own_gradient[begin:end].view(-1, BLOCK), dim=1, out=norms)
            self.with_norm += end - begin

    def squares(self) -> torch.Tensor:
        """Return the sum of squares of this replica's reduced gradients, one float64 element."""
        if self.with_norm < len(self.own_gradient):
            self.add_squares()
        # In a block of blocks, too, fp32 is precise enough; over the many it is not.
        norms: torch.Tensor = torch.linalg.vector_norm(self._norms.view(-1, BLOCK), dim=1)
        return norms.double().square().sum()

    def publish(self) -> None:
        """Give all replicas the updated weights."""
        if not self.sharded:
            return
        if self.own_weight is None and self.tier:
            for here, place in self._own_parts(0, self._resident):
                self._weight[here].copy_(self.master[place])
            updated = [self._weight[own] for own in self._own]  # for a gather into the same memory
        else:
            flat = self.master if self.own_weight is None else self.own_weight
            updated = [flat[place] for place in self._places]
        under_way = [
            self._replicas.start_all_gather(self._weight[bucket], local, "weights")
            for bucket, local in zip(self.buckets, updated, strict=True)
        ]
        for pending in under_way:
            pending.wait()

    def round_masters(self) -> None:
        """Round the masters into the model's weights, on all replicas."""
        for here, place, (master,) in self._through("master", store=False):
            if (weight := self._weight_of(here, place)) is not None:
                weight.copy_(master)
        self.publish()

    def pieces(self) -> Iterator[StateSlice]:
        """Yield this rank's state; the host's part is up to date, and stays so until an update."""
        if self.tier:
            self._staging.wait()
        quantities = ("master", "first_moment", "second_moment")[: 1 + self.kind.moments]
        on_host = self._own_parts(self._resident, len(self.own_gradient))
        for here, place in (*self._own_parts(0, self._resident), *on_host):
            for name, offsets, sizes, begin in self._layout.boxes_within(here.start, here.stop):
                first = place.start + begin - here.start
                for quantity in quantities:
                    (flat,) = self._where(quantity, slice(first, first + prod(sizes)))
                    yield StateSlice(name, quantity, self._layout.shapes[name], offsets, flat.view(sizes))


# Products of 16-bit factors that are added to fp32 sums by the kernel that multiplies them.
#
# A weight's gradient is then neither rounded to 16 bits nor written, read again and added. torch can do so on GPUs.
# Shape suffixes: T tokens, d rows and c columns of a weight.


@lru_cache(8)
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``add_product_`` is available for factors of a type; tries it on small ones."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        for several in ((), (2,)):
            # Small integers, exact in all types, and sums with gaps between their rows.
            x = torch.arange(16 * 16, device=device).remainder(5).view(16, 16).expand(*several, 16, 16)
            dy = torch.arange(16 * 8, device=device).remainder(7).view(16, 8).expand(*several, 16, 8)
            memory = torch.ones(*several, 16, 24, device=device)
            add_product_(memory[..., :8], x.to(dtype), dy.to(dtype))
            expected = torch.ones_like(memory)
            expected[..., :8] += (x.cpu().mT @ dy.cpu()).to(expected)
            begun = torch.full_like(memory, nan)
            add_product_(begun[..., :8], x.to(dtype), dy.to(dtype), first=True)
            if not (torch.equal(memory, expected) and torch.equal(begun[..., :8], expected[..., :8] - 1)):
                return False
    except (RuntimeError, TypeError):  # torch lacks it for this device, or altogether
        return False
    return True


def add_product_(sum_dc: torch.Tensor, x_Td: torch.Tensor, dy_Tc: torch.Tensor, first: bool = False) -> None:
    """Add xᵀ dy to fp32 sums, or begin them with it; with an extra leading axis, each x and dy to its own sum."""
    multiply = torch.addmm if x_Td.dim() == 2 else torch.baddbmm
    multiply(sum_dc, x_Td.mT, dy_Tc, out_dtype=torch.float32, beta=0 if first else 1, out=sum_dc)


# Buckets in flight at a time where each has memory of its own.
_AT_ONCE = 2


class Gradients:
    """Receives the gradients of all groups.

    The first step with a given number of micro-batches learns how often each weight's gradient arrives in a step. From
    the second on, a bucket is sent as soon as its last gradient has arrived, while the rest of the backward pass
    continues: once per step, or under ZeRO's second stage once per micro-batch. Buckets go in a fixed order, from the
    last to the first, because all replicas must agree on one.

    A weight's first gradient of a step overwrites its sum, which so needs no zeros.

    On a GPU most arrive as their factors, in 16 bits, and the product is added directly to the sum. If the weight is
    scaled in the forward pass, the sum is at first that of the scaled weight, and is converted to the weight's own and
    the scale's once per step, when the last of them is in. On a rank without replicas this is put off until the ranks
    wait for a large exchange (``GradientSinks.settle``), and the gradients' norm is computed then, too.

    Args:
        weights: The model's weights by name.
        groups: The groups that they are in.
        replicas: The ranks with the same weights: data parallel ones, and context parallel ones.
        by_micro_batch: Whether each bucket is sent once per micro-batch, or once per step.
        sinks: Gets where gradients that are computed outside of autograd go; ``None`` if none are.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], groups: Sequence[ParamGroup], replicas: Communicator,
        by_micro_batch: bool = False, sinks: GradientSinks | None = None,
    ) -> None:  # fmt: skip
        sinks = sinks or GradientSinks()
        self._groups, self._replicas, self._by_micro_batch = groups, replicas, by_micro_batch
        self._micro_batches, self._rounds = 1, 1
        self._buckets = [(group, bucket) for group in groups for bucket in reversed(range(len(group.buckets)))]
        self._group_of = {name: group for group in groups for name in group.names}
        self._places = {
            name: [self._buckets.index((group, bucket)) for bucket in group.buckets_of(name)]
            for name, group in self._group_of.items()
        }
        self._arrivals: Counter[str] = Counter()
        self._arrived = [0] * len(self._buckets)
        self._expected: list[int] | None = None  # per round
        self._under_way: deque[Callable[[], None]] = deque()
        self._sent = 0
        # The weights' hooks hold this object, and torch hides them from Python's garbage collector.
        self._weights = {name: ref(weight) for name, weight in weights.items()}
        self._name_of = {id(weight): name for name, weight in weights.items()}
        self._unscaled: dict[str, str] = {}  # sums of scaled weights, and their scales
        self._in_a_step: dict[str, int] = {}  # gradients of each weight, once known
        self._complete: list[str] = []  # weights of which all have come, and nothing else has been done since
        # The group whose gradients are those of the whole model as soon as they have come, if it is the largest.
        largest = max(groups, key=lambda group: len(group.own_gradient))
        whole = replicas.size == 1 and not largest.kind.partial and not largest.kind.tied
        self._squares_of = largest if whole else None
        for name, weight in weights.items():
            if not by_micro_batch and name in self._group_of[name].sums and adds_products(weight.device, weight.dtype):
                sinks.products[id(weight)] = partial(self._add_product, name)
            weight.register_post_accumulate_grad_hook(partial(self._take, name))  # type: ignore[no-untyped-call]
            sinks.gradients[id(weight)] = partial(self._add, name)
        sinks.settle = self._settle

    def begin(self, micro_batches: int = 1) -> None:
        """Begin a step of this many micro-batches."""
        if micro_batches != self._micro_batches:
            self._micro_batches, self._expected, self._in_a_step = micro_batches, None, {}
            self._rounds = micro_batches if self._by_micro_batch else 1
        for group in self._groups:
            group.with_norm = 0
            if group.lends_buckets:  # other sums begin with their first gradient
                group.own_gradient.zero_()
        self._arrivals.clear()
        self._unscaled.clear()
        self._complete.clear()
        self._arrived, self._sent = [0] * len(self._buckets), 0

    def finish(self) -> None:
        """Wait until every replica has its part of the sums over all replicas."""
        self._settle()
        if self._expected is None:
            for name in list(self._unscaled):
                self._unscale(name)
            if never := self._group_of.keys() - self._arrivals.keys():
                raise AssertionError(f"no gradient reached {', '.join(sorted(never))}")
            self._in_a_step = dict(self._arrivals)
            self._expected = [count // self._rounds for count in self._arrived]
            for _ in self._buckets:
                self._send_next()
        elif self._sent < self._rounds * len(self._buckets):
            late = self._sent % len(self._buckets)
            names = ", ".join(sorted(name for name, places in self._places.items() if late in places))
            raise AssertionError(f"gradients of {names} did not come up as often as in the first step")
        while self._under_way:
            self._under_way.popleft()()

    def abandon(self, deferred: deque[Callable[[], None]]) -> None:
        """Discard the gradients of an unfinished step, without waiting for what is in flight.

        Args:
            deferred: Those still to be computed (``DeferredWeightGradients``), which are discarded, too.
        """
        deferred.clear()
        self._under_way.clear()
        for group in self._groups:
            group.lent.clear()

    def _take(self, name: str, weight: torch.Tensor) -> None:
        if weight.grad is None:
            raise AssertionError(f"no gradient reached {name}")
        gradient, weight.grad = weight.grad, None
        self._add(name, gradient)

    def _add(self, name: str, gradient: torch.Tensor, part: WeightPart | None = None) -> None:
        self._group_of[name].add_gradient(name, gradient, part, first=not self._arrivals[name])
        self._has_come(name)

    def _add_product(
        self, name: str, x: torch.Tensor, dy: torch.Tensor, part: WeightPart | None, scale: torch.Tensor | None
    ) -> bool:
        sums = self._group_of[name].sums.get(name)
        if sums is None or (scale is not None and x.dim() > 2):
            return False
        first = not self._arrivals[name]
        if part is None:
            add_product_(sums.view(*x.shape[:-2], x.shape[-1], dy.shape[-1]), x, dy, first)
        else:  # others may come after it
            if first:
                sums.zero_()
            add_product_(part.of(sums), x, dy)
        if scale is not None:
            self._unscaled[name] = self._name_of[id(scale)]
        self._has_come(name)
        return True

    def _unscale(self, name: str) -> bool:
        """Convert the sum of a scaled weight's gradients into the weight's and its scale's.

        Returns:
            Whether its norms were computed in the same pass.
        """
        scale, group = self._unscaled.pop(name), self._group_of[name]
        weight, scale_d = self._weights[name](), self._weights[scale]()
        if weight is None or scale_d is None:
            raise AssertionError("the weight or its scale is gone")
        sum_dc, scale_sums = group.sums[name].view(len(scale_d), -1), self._group_of[scale].sums[scale]
        is_first, weight_dc = not self._arrivals[scale], weight.detach().view(sum_dc.shape)
        norms = group.norms[name] if group is self._squares_of and sum_dc.shape[1] % BLOCK == 0 else None
        unscale_(sum_dc, weight_dc, scale_d.detach(), scale_sums, is_first, norms)
        self._has_come(scale)
        group.with_norm += 0 if norms is None else sum_dc.numel()
        return norms is not None

    def _settle(self) -> None:
        """Do what is left to do with gradients of which all have come."""
        # Unscaling completes scales, which this goes through, too.
        complete = [name for name in self._complete if name not in self._unscaled or not self._unscale(name)]
        self._complete = []
        if self._squares_of is not None:
            self._squares_of.add_squares([name for name in complete if self._group_of[name] is self._squares_of])

    def _has_come(self, name: str) -> None:
        self._arrivals[name] += 1
        if self._arrivals[name] == self._in_a_step.get(name):
            self._complete.append(name)
            if self._replicas.size > 1:  # its bucket may be sent next
                self._settle()
        for place in self._places[name]:
            self._arrived[place] += 1
        if self._expected is None:
            return
        # Sendings are counted through the rounds; one is ready when all of its round's gradients have arrived.
        while self._sent < self._rounds * len(self._buckets):
            finished, place = divmod(self._sent, len(self._buckets))
            if self._arrived[place] < (finished + 1) * self._expected[place]:
                break
            self._send_next()

    def _send_next(self) -> None:
        """Start the reduction of the next bucket."""
        if self._replicas.size > 1:
            group, bucket = self._buckets[self._sent % len(self._buckets)]
            self._under_way.append(group.start_reduction(bucket))
            if group.lends_buckets and len(self._under_way) > _AT_ONCE:
                self._under_way.popleft()()
        self._sent += 1
