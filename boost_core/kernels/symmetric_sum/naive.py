"""The reference: plain torch, one rank after the other."""

import time

import torch

from boost_core.kernels.latent_epilogue.naive import latent_epilogue
from boost_core.kernels.symmetric_sum.memory import Epilogue


def meet(signals: list[torch.Tensor], rank: int, met: torch.Tensor, aborted: torch.Tensor, seconds: float) -> None:
    """Count, tell all others, and wait; see the package for the arguments."""
    met += 1
    for signal_p in signals:
        signal_p[rank] = met[0]
    by = time.monotonic() + seconds
    while (missing := (signals[rank] - met < 0).nonzero().flatten().tolist()) and not aborted.item():
        if time.monotonic() > by:
            raise TimeoutError(f"rank {rank} has waited {seconds:g} s in a collective for ranks {missing} of its group")
        time.sleep(0)


def symmetric_sum(memory: list[torch.Tensor], out_n: torch.Tensor) -> None:
    """``Σ_k x_k``; see the package for the arguments."""
    out_n.copy_(_summed(memory, slice(0, len(out_n))))


def spread_sum(memory: list[torch.Tensor], begin: int, end: int) -> None:
    """Sum a part, into all; see the package for the arguments."""
    part = slice(begin, end)
    total = _summed(memory, part)
    for each in memory:
        each[part] = total


def sum_of_latents(memory: list[torch.Tensor], out_n: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The sum, then the epilogue; see the package for the arguments."""
    symmetric_sum(memory, out_n)
    h_Tc, s_T = epilogue.split(out_n)
    return latent_epilogue(h_Tc, s_T, epilogue.count, epilogue.width, epilogue.epsilon, epilogue.activation)


def _summed(memory: list[torch.Tensor], part: slice) -> torch.Tensor:
    first, *others = (each[part].to(torch.promote_types(each.dtype, torch.float32)) for each in memory)
    total = first.clone()
    for each in others:
        total += each
    return total
