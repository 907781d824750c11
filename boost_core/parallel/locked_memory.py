"""Page-locked memory of exactly the sizes requested: torch's own allocator rounds each up to a power of two."""

import contextlib
import logging
import mmap
import sys
from collections.abc import Sequence
from itertools import accumulate

import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 256  # of each tensor, as CUDA's own memory has it


class _LockedPages(mmap.mmap):
    """Pages that the driver has locked; released with the last tensor in them."""

    address: int | None = None
    device = 0  # whose context locked them

    def __del__(self) -> None:
        if self.address is None or sys.is_finalizing():
            return
        with torch.cuda.device(self.device):  # the last tensor may go in any thread
            status = int(torch.cuda.cudart().cudaHostUnregister(self.address))  # type: ignore[no-untyped-call]
        if status != 0:
            logger.warning("CUDA does not release locked memory of the host (error %d)", status)


def page_locked_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As ``locked_like``, but if the driver does not lock that much at once, torch locks it piece by piece."""
    try:
        return locked_like(tensors)
    except RuntimeError as error:
        logger.warning("%s; torch locks it piece by piece", error)
    return [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]


def locked_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An uninitialised tensor on the host for each, each with its own storage, in memory locked at once.

    Raises:
        RuntimeError: The driver does not lock it, for example because the host lacks memory.
    """
    places = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
    size = -(-places[-1] // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _LockedPages(-1, size)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
    if status != 0:
        with contextlib.suppress(Exception):  # the driver's error is said by the next launch, which clears it
            torch.ones(1, device="cuda")
        raise RuntimeError(f"CUDA does not lock {size:,} bytes of the host's memory (error {status})")
    pages.address, pages.device = address, torch.cuda.current_device()
    return [
        torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=place).view(tensor.shape)
        for tensor, place in zip(tensors, places, strict=False)
    ]
