"""The sum over ranks of what each has written into memory that all of them can read: an all-reduce in a few kernels.

With ``x_k`` written by rank k of p, and latents, statistic, scale and SiLU as in ``latent_epilogue``::

    h = round(Σ_k x_k)                   summed in rank order in fp32, so that all ranks have the same bits
    z = silu(h / sqrt(s / d + epsilon))  if the same pass continues with h and the statistic s behind it

*One shot*: every rank sums everything, and reads (p − 1) n. *Two shots*: every rank sums its p-th part and writes it to
all, then reads its own memory: (p − 1)/p · n read and as much written, and one more meeting of the ranks. Either way
h and s are rounded to the type that was sent before anything is computed from them, so that z is what
``latent_epilogue`` computes.

*Meeting*: each rank counts its meetings, writes the count into every rank's signals, and waits until all counts in its
own signals are as high. Whatever a rank wrote before is then visible, and whatever it was to read has been read. Counts
only grow, so nothing is reset, and a rank may be a meeting ahead. Ranks meet before and after reading others' memory.

Shape suffixes: T tokens, c = g·r columns, g projections, r rank of a latent, n elements, p ranks.
"""

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.symmetric_sum import naive
from boost_core.kernels.symmetric_sum.memory import Epilogue, Peers


def meet(signals: Peers, rank: int, met: torch.Tensor, aborted: torch.Tensor, seconds: float) -> None:
    """Wait until all ranks have come to this meeting; on a GPU, the wait precedes whatever is enqueued next.

    Args:
        signals: Each rank's counts of meetings, int32 ``[p]``, one from each rank.
        rank: This rank.
        met: How many meetings it has had, int32 ``[1]``; incremented.
        aborted: Nonzero to stop waiting, int32 ``[1]``; in pinned memory for a GPU. Sums computed from then on are
            invalid.
        seconds: How long the reference waits; a kernel waits until it is aborted.

    Raises:
        TimeoutError: A rank has not come; only from the reference.
    """
    if runs_on_triton(met):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.symmetric_sum import triton

        triton.meet(signals, rank, met, aborted)
    else:
        naive.meet(signals.memory, rank, met, aborted, seconds)


def symmetric_sum(peers: Peers, out_n: torch.Tensor) -> None:
    """Sum the first n elements of all ranks into ``out_n``, of the same type."""
    if runs_on_triton(out_n):
        from boost_core.kernels.symmetric_sum import triton

        triton.symmetric_sum(peers, out_n)
    else:
        naive.symmetric_sum(peers.memory, out_n)


def spread_sum(peers: Peers, begin: int, end: int) -> None:
    """Sum the elements from ``begin`` to ``end`` of all ranks into all of them."""
    if runs_on_triton(peers.memory[0]):
        from boost_core.kernels.symmetric_sum import triton

        triton.spread_sum(peers, begin, end)
    else:
        naive.spread_sum(peers.memory, begin, end)


def sum_of_latents(peers: Peers, out_n: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """Do ``symmetric_sum``, and in the same pass what ``latent_epilogue`` computes from it.

    Args:
        peers: As above.
        out_n: As above: latents, followed by statistics, if there are any.
        epilogue: What to compute.

    Returns:
        ``z_gTr``, outside of autograd.
    """
    if runs_on_triton(out_n):
        from boost_core.kernels.symmetric_sum import triton

        return triton.sum_of_latents(peers, out_n, epilogue)
    return naive.sum_of_latents(peers.memory, out_n, epilogue)
