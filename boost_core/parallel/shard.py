"""Turns a model's declarations into this rank's weights, the same full weights in any layout."""

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import nn

from boost_core.architecture import SplitAxes, WeightSpec
from boost_core.model.low_rank import WeightedModule

# Normal values determined by each element's place in a tensor: any part can be drawn by itself, on any device.
#
# The bits are those of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a
# tensor's key and a place in it give four 32-bit words, which the Box-Muller method turns into four normal values.
# Words are int64, which torch multiplies on every device, modulo 2^64 as the method requires.

Sizes = tuple[int, ...]
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # of 32 bits, int64

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

# Elements drawn at a time, with about 32 bytes of scratch each: what fits a core's cache, and what keeps a GPU busy.
_CHUNK_ON_CPU = 1 << 16
_CHUNK = 1 << 20


def normal_(box: torch.Tensor, shape: Sizes, offsets: Sequence[int], key: int, stds: torch.Tensor | float) -> None:
    """Fill a box of a tensor with its normal values, which depend on the key and their places in the tensor alone.

    They are computed in float64 and rounded to fp32. On another device, whose logarithm, sine and cosine differ by a
    unit or two in the last place, about one element in 10^8 therefore differs, by one unit of fp32.

    Args:
        box: The box to fill, on the device that draws.
        shape: The tensor's shape, with fewer than 2^32 rows along its last axis.
        offsets: Where the box begins in the tensor.
        key: The tensor's key, 64 bits.
        stds: Standard deviations: one for all, or one per element in a shape that broadcasts to the box's.
    """
    if box.numel() == 0:
        return
    device, whole = box.device, tuple(box.shape)
    limit = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK
    axis, inner = len(whole) - 1, 1  # boxes of at most ``limit`` elements: all of the axes behind this one
    while axis > 0 and inner * whole[axis] <= limit:
        inner *= whole[axis]
        axis -= 1
    step, behind = limit // inner, whole[axis + 1 :]
    for *before, first in product(*map(range, whole[:axis]), range(0, whole[axis], step)):
        inside = (*before, first, *(0 for _ in behind))
        sizes = (*(1 for _ in before), min(step, whole[axis] - first), *behind)
        begin = [offset + more for offset, more in zip(offsets, inside, strict=True)]

        # Four neighbours in a row of the tensor share a counter.
        low, high = begin[-1] // 4, -(-(begin[-1] + sizes[-1]) // 4)
        row = torch.zeros((), dtype=torch.int64, device=device)
        for size, offset, count in zip(shape[:-1], begin[:-1], sizes[:-1], strict=True):
            row = (row * size).unsqueeze(-1) + torch.arange(offset, offset + count, device=device)
        column = torch.arange(low, high, device=device).expand(*sizes[:-1], -1)
        counters = column.contiguous(), row.unsqueeze(-1).expand_as(column).contiguous()
        words = philox((*counters, torch.zeros_like(column), torch.zeros_like(column)), (key & _WORD, key >> 32))

        # Four standard normal values from each four words, in order along the last axis: Box and Muller's method.
        normal = torch.empty(*column.shape, 4, dtype=torch.float64, device=device)
        for index in (0, 2):
            # Halves keep the logarithm's argument off zero; the largest value is 6.8.
            radius = words[index].double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
            angle = words[index + 1].double().mul_(2.0 * math.pi * 2.0**-32)
            torch.mul(radius, angle.cos(), out=normal[..., index])
            torch.mul(radius, angle.sin_(), out=normal[..., index + 1])
        values = normal.flatten(-2).narrow(-1, begin[-1] - low * 4, sizes[-1])
        part = tuple(slice(at, at + size) for at, size in zip(inside, sizes, strict=True))
        values *= stds if isinstance(stds, float) else stds.expand(box.shape)[part]
        box[part].copy_(values.float())


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter of four words; the counter is overwritten."""
    c0, c1, c2, c3 = counter
    product_0, product_1 = torch.empty_like(c0), torch.empty_like(c0)
    for turn in range(_ROUNDS):
        key_0, key_1 = ((part + turn * step) & _WORD for part, step in zip(key, _KEY_STEPS, strict=True))
        torch.mul(c0, _MULTIPLIERS[0], out=product_0)
        torch.mul(c2, _MULTIPLIERS[1], out=product_1)
        torch.bitwise_right_shift(product_1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(key_0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(product_0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key_1).bitwise_and_(_WORD)
        # Their upper halves are dropped by the next round's mask.
        c1, c3, product_0, product_1 = product_1, product_0, c1, c3
    return c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)


# Gives this rank's shards to a model with declared weights, as ``make_weights`` does, from other values.
WeightMaker = Callable[[nn.Module, SplitAxes, int, int, int, torch.device], None]


def make_weights(
    model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Replace every declared weight by this rank's shard of its initial value.

    The values depend only on the seed, not on the number of ranks or which one asks.

    Args:
        model: A model with declared weights.
        axes: The axis that each role is split along.
        rank: This rank's index in the tensor parallel group.
        size: Number of ranks in the tensor parallel group.
        seed: The job's seed.
        device: Where the shards live.
        dtype: Their type.
    """

    def shard(name: str, spec: WeightSpec) -> torch.Tensor:
        axis, sizes = axes[spec.role], shard_shape(spec, axes, size)
        offsets = [rank * length if place == axis else 0 for place, length in enumerate(sizes)]
        weight = torch.empty(sizes, dtype=dtype, device=device)
        initialize_(weight, offsets, name, spec, seed)
        return weight

    replace_weights(model, shard)


def allocate_weights(model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device) -> None:
    """A ``WeightMaker`` without values: for weights that are loaded, or drawn if there is nothing to load."""
    del rank, seed
    replace_weights(model, lambda _, spec: torch.empty(shard_shape(spec, axes, size), device=device))


def replace_weights(model: nn.Module, shard: Callable[[str, WeightSpec], torch.Tensor]) -> None:
    """Replace every declared weight by what ``shard`` returns for its full name and declaration."""
    for path, module in model.named_modules():
        if isinstance(module, WeightedModule):
            for name, spec in module.weight_specs.items():
                module.register_parameter(name, nn.Parameter(shard(f"{path}.{name}", spec)))


def shard_shape(spec: WeightSpec, axes: SplitAxes, size: int) -> list[int]:
    """The shape of one rank's part of a weight."""
    shape, axis = list(spec.shape), axes[spec.role]
    if axis is not None:
        shape[axis] //= size
    return shape


def initialize_(box: torch.Tensor, offsets: Sequence[int], name: str, spec: WeightSpec, seed: int) -> None:
    """Fill a box of a weight with its initial values, which depend on the seed, the weight's name and their places.

    Only this part of the weight is drawn, on the box's device.

    Args:
        box: The box to fill.
        offsets: Where it begins in the full weight.
        name: The weight's full name.
        spec: Its declaration.
        seed: The job's seed.
    """
    if isinstance(spec.start, float):
        box.fill_(spec.start)
        return
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
    stds: torch.Tensor | float = spec.start[0]
    if spec.axis is not None and len(spec.start) > 1:  # one per projection along the projections' axis
        each = torch.tensor(spec.start, dtype=torch.float64, device=box.device)
        along = each.repeat_interleave(spec.shape[spec.axis] // len(spec.start))
        sizes = [1] * box.ndim
        sizes[spec.axis] = box.shape[spec.axis]
        stds = along.narrow(0, offsets[spec.axis], box.shape[spec.axis]).view(sizes)
    normal_(box, spec.shape, offsets, key, stds)
