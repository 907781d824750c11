"""What all ranks of a gang keep, put together."""

import torch
import torch.distributed as dist

from boost_core.train.state import TrainState

Whole = dict[str, torch.Tensor]


def whole_tensors(state: TrainState) -> Whole:
    """Masters and moments of the whole model; every element is kept by some rank, and all that keep it agree."""
    mine = [(chunk.name, chunk.shape, chunk.offsets, chunk.tensor.clone()) for chunk in state.chunks()]
    of_ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    whole: Whole = {}
    for name, shape, offsets, tensor in (chunk for chunks in of_ranks for chunk in chunks):
        target = whole.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))
        box = target[tuple(slice(begin, begin + size) for begin, size in zip(offsets, tensor.shape, strict=True))]
        assert box.isnan().all() or torch.equal(box, tensor), f"ranks disagree on {name}"
        box.copy_(tensor)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole
