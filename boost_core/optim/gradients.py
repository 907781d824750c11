"""A step's gradients, summed over micro-batches as they are computed, and over replicas meanwhile."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from weakref import ref

import torch
from torch import nn

from boost_core.optim.zero import ParamGroup
from boost_core.parallel.btp import GradientSinks, WeightPart
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.mesh import ProcessGroups

# The global norm of the gradients, and clipping by it.


def global_norm(
    groups: Sequence[ParamGroup], process_groups: ProcessGroups, notices: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the norm of the whole model's reduced gradients, and which notices any rank has given.

    Args:
        groups: This rank's groups.
        process_groups: The groups that it is in. What several ranks hold or keep whole counts on the first of them.
        notices: What all ranks are to know, one element each; they cost no collective of their own here.

    Returns:
        The norm, one float64 element, and for each notice the number of ranks that gave it; the same on all ranks.
    """
    squares = [
        group.squares()
        for group in groups
        if (group.kind.split or process_groups.tensor.rank == 0)
        and (group.sharded or process_groups.data.rank == 0)
        and (not group.kind.tied or process_groups.pipeline.rank == 0)
    ]
    # A rank may have nothing to count.
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=groups[0].own_gradient.device))
    message = torch.stack([total, *(notice.to(total) for notice in notices)])
    square, *counts = process_groups.gang.all_reduce_(message, "gradient norm").unbind()
    return square.sqrt(), counts


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Return the factor that reduces gradients of this norm to at most ``clip_norm``: one fp32 element."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0).float().view(1)


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
            if not torch.equal(memory, expected):
                return False
    except (RuntimeError, TypeError):  # torch lacks it for this device, or altogether
        return False
    return True


def add_product_(sum_dc: torch.Tensor, x_Td: torch.Tensor, dy_Tc: torch.Tensor) -> None:
    """Add xᵀ dy to fp32 sums; with an extra leading axis, each x and dy to its own sum."""
    multiply = torch.addmm if x_Td.dim() == 2 else torch.baddbmm
    multiply(sum_dc, x_Td.mT, dy_Tc, out_dtype=torch.float32, out=sum_dc)


# Buckets in flight at a time where each has memory of its own.
_AT_ONCE = 2


class Gradients:
    """Receives the gradients of all groups.

    The first step with a given number of micro-batches learns how often each weight's gradient arrives in a step. From
    the second on, a bucket is sent as soon as its last gradient has arrived, while the rest of the backward pass
    continues: once per step, or under ZeRO's second stage once per micro-batch. Buckets go in a fixed order, from the
    last to the first, because all replicas must agree on one.

    On a GPU most arrive as their factors, in 16 bits, and the product is added directly to the sum. If the weight is
    scaled in the forward pass, the sum is at first that of the scaled weight, and is converted to the weight's own and
    the scale's once per step, when the last of them is in.

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
        for name, weight in weights.items():
            whole = name in self._group_of[name].sums and not by_micro_batch
            if whole and adds_products(weight.device, weight.dtype):
                sinks.products[id(weight)] = partial(self._add_product, name)
            weight.register_post_accumulate_grad_hook(partial(self._take, name))  # type: ignore[no-untyped-call]
            sinks.gradients[id(weight)] = partial(self._add, name)

    def begin(self, micro_batches: int = 1) -> None:
        """Begin a step of this many micro-batches."""
        if micro_batches != self._micro_batches:
            self._micro_batches, self._expected, self._in_a_step = micro_batches, None, {}
            self._rounds = micro_batches if self._by_micro_batch else 1
        for group in self._groups:
            group.clear_gradients()
        self._arrivals.clear()
        self._unscaled.clear()
        self._arrived, self._sent = [0] * len(self._buckets), 0

    def finish(self) -> None:
        """Wait until every replica has its part of the sums over all replicas."""
        if self._expected is None:
            for name in list(self._unscaled):
                self._unscale(name)
            if never := self._group_of.keys() - self._arrivals.keys():
                raise AssertionError(f"no gradient reached {', '.join(sorted(never))}")
            self._in_a_step = dict(self._arrivals)
            self._expected = [count // self._rounds for count in self._arrived]
            self._send(len(self._buckets))
        elif self._sent < self._rounds * len(self._buckets):
            late = self._sent % len(self._buckets)
            names = ", ".join(sorted(name for name, places in self._places.items() if late in places))
            raise AssertionError(f"gradients of {names} did not come up as often as in the first step")
        while self._under_way:
            self._under_way.popleft()()

    def abandon(self) -> None:
        """Discard the gradients of an unfinished step, without waiting for what is in flight."""
        self._under_way.clear()
        self._unscaled.clear()
        for group in self._groups:
            group.lent.clear()

    def _take(self, name: str, weight: torch.Tensor) -> None:
        if weight.grad is None:
            raise AssertionError(f"no gradient reached {name}")
        gradient, weight.grad = weight.grad, None
        self._add(name, gradient)

    def _add(self, name: str, gradient: torch.Tensor, part: WeightPart | None = None) -> None:
        self._group_of[name].add_gradient(name, gradient, part)
        self._has_come(name)

    def _add_product(
        self, name: str, x: torch.Tensor, dy: torch.Tensor, part: WeightPart | None, scale: torch.Tensor | None
    ) -> bool:
        sums = self._group_of[name].sums.get(name)
        if sums is None or (scale is not None and x.dim() > 2):
            return False
        here = sums.view(*x.shape[:-2], x.shape[-1], dy.shape[-1]) if part is None else part.of(sums)
        add_product_(here, x, dy)
        if scale is not None:
            self._unscaled[name] = self._name_of[id(scale)]
        self._has_come(name)
        return True

    def _unscale(self, name: str) -> None:
        """Convert the sum of a scaled weight's gradients into the weight's and its scale's."""
        sums, scale = self._group_of[name].sums.get(name), self._unscaled.pop(name)
        weight, scale_d = self._weights[name](), self._weights[scale]()
        if sums is None or weight is None or scale_d is None:
            raise AssertionError("its buckets are lent, or it is gone")
        sum_dc = sums.view(len(scale_d), -1)
        self._add(scale, (sum_dc * weight.detach().view(sum_dc.shape)).sum(dim=1))
        sum_dc.mul_(scale_d.detach().unsqueeze(1))

    def _has_come(self, name: str) -> None:
        self._arrivals[name] += 1
        if name in self._unscaled and self._arrivals[name] == self._in_a_step.get(name):
            self._unscale(name)
        for place in self._places[name]:
            self._arrived[place] += 1
        if self._expected is None:
            return
        # Sendings are counted through the rounds; one is ready when all of its round's gradients have arrived.
        ready = self._sent
        while ready < self._rounds * len(self._buckets):
            finished, place = divmod(ready, len(self._buckets))
            if self._arrived[place] < (finished + 1) * self._expected[place]:
                break
            ready += 1
        self._send(ready)

    def _send(self, ready: int) -> None:
        """Start the reduction of everything before this sending."""
        while self._sent < ready:
            if self._replicas.size > 1:
                group, bucket = self._buckets[self._sent % len(self._buckets)]
                self._under_way.append(group.start_reduction(bucket))
                if group.lends_buckets and len(self._under_way) > _AT_ONCE:
                    self._under_way.popleft()()
            self._sent += 1
