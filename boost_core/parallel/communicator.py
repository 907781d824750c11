"""Every collective of the trainer, counted and timed by the ledger."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from boost_core.kernels.symmetric_sum.memory import Epilogue
from boost_core.parallel.ledger import CommunicationLedger, Entry, Pending
from boost_core.parallel.symmetric_memory import Summing, SymmetricMemory

# torch renamed both in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicator:
    """The collectives over one dimension of the mesh.

    Args:
        group: The process group; ``None`` for a group of one.
        dimension: The mesh dimension's name for the ledger: ``tp``, ``pp``, ``cp``, ``dp``, or ``all`` for the
            whole gang.
        ledger: Counts them.
    """

    def __init__(self, group: dist.ProcessGroup | None, dimension: str, ledger: CommunicationLedger) -> None:
        self._group = group
        self._dimension = dimension
        self._ledger = ledger
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._symmetric: SymmetricMemory | None = None

    def use(self, symmetric: SymmetricMemory) -> None:
        """From now on, sum through the group's symmetric memory whatever it takes."""
        self._symmetric = symmetric

    def start_all_reduce_(self, tensor: torch.Tensor, purpose: str, operation: Any = dist.ReduceOp.SUM) -> Pending:
        """Start to reduce ``tensor`` in place over a group of several ranks; complete after ``wait``."""
        if operation == dist.ReduceOp.SUM and self._symmetric is not None and self._symmetric.takes(tensor):
            return self._start_symmetric(self._symmetric, tensor, purpose, None)[0]

        def launch() -> dist.Work:
            work: dist.Work = dist.all_reduce(tensor, operation, group=self._group, async_op=True)
            return work

        return self._ledger.start(Entry("all_reduce", self._dimension, purpose), tensor, launch)

    def start_sum_of_latents_(
        self, payload: torch.Tensor, purpose: str, epilogue: Epilogue
    ) -> tuple[Pending, torch.Tensor | None]:
        """Start to sum latents in place, together with the statistics behind them if there are any.

        Returns:
            The pending sum, and the epilogue's result, to be read after ``wait``, if one pass computes both; else
            ``None``.
        """
        if self._symmetric is None or not self._symmetric.takes(payload):
            return self.start_all_reduce_(payload, purpose), None
        return self._start_symmetric(self._symmetric, payload, purpose, epilogue)

    def all_reduce_(self, tensor: torch.Tensor, purpose: str, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce ``tensor`` in place over the group and return it."""
        if self.size > 1:
            self.start_all_reduce_(tensor, purpose, operation).wait()
        return tensor

    def start_all_gather(self, gathered: torch.Tensor, shard: torch.Tensor, purpose: str) -> Pending:
        """Start to fill ``gathered``, flat, with every rank's ``shard`` in the order of ranks."""
        return self._start("all_gather", _all_gather, gathered, shard, purpose)

    def start_reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, purpose: str) -> Pending:
        """Start to fill ``part`` with this rank's part of the sum of every rank's ``whole``, which is flat."""
        return self._start("reduce_scatter", _reduce_scatter, part, whole, purpose)

    def all_gather(self, x_Tc: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[T, c]`` on each of p ranks to ``[p, T, c]`` on all."""
        gathered = x_Tc.new_empty((self.size * x_Tc.shape[0], x_Tc.shape[1]))
        self.start_all_gather(gathered, x_Tc.contiguous(), purpose).wait()
        return gathered.view(self.size, *x_Tc.shape)

    def reduce_scatter(self, x_pTc: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[p, T, c]`` on each of p ranks to this rank's ``[T, c]`` of their sum."""
        scattered = x_pTc.new_empty(x_pTc.shape[1:])
        self.start_reduce_scatter(scattered, x_pTc.flatten(0, 1).contiguous(), purpose).wait()
        return scattered

    def all_to_all(self, x_pac: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[p, a, c]`` on each of p ranks: part i goes to rank i, and part i of the result comes from rank i."""
        received = torch.empty_like(x_pac)
        self._start("all_to_all", dist.all_to_all_single, received, x_pac, purpose).wait()
        return received

    def start_uneven_all_to_all(
        self, received: torch.Tensor, payload: torch.Tensor, rows: tuple[Sequence[int], Sequence[int]], purpose: str
    ) -> Pending:
        """Start to fill ``received`` with the rows that each rank sends this one, in the order of ranks.

        Args:
            received: Receives the rows.
            payload: The rows for each rank, in the order of ranks.
            rows: Numbers of rows that come from each rank and go to each; may be 0, but all ranks have to call this.
            purpose: The purpose, for the ledger.
        """
        comes, goes = map(list, rows)

        def launch() -> dist.Work:
            work: dist.Work = dist.all_to_all_single(received, payload, comes, goes, self._group, async_op=True)
            return work

        return self._ledger.start(Entry("all_to_all", self._dimension, purpose), payload, launch)

    def send(self, tensor: torch.Tensor, to: int, purpose: str) -> Pending:
        """Start to send ``tensor`` to a rank of the group."""

        def launch() -> dist.Work:
            work = dist.isend(tensor, group=self._group, group_dst=to)
            if work is None:
                raise AssertionError("this rank is in its own group")
            return work

        return self._ledger.start(Entry("send", self._dimension, purpose), tensor, launch)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill ``tensor`` with what another rank of the group sends, and return it."""
        dist.recv(tensor, group=self._group, group_src=source)
        return tensor

    def _start_symmetric(
        self, symmetric: SymmetricMemory, payload: torch.Tensor, purpose: str, epilogue: Epilogue | None
    ) -> tuple[Pending, torch.Tensor | None]:
        started: list[Summing] = []

        def launch() -> Summing:
            started.append(symmetric.start(payload, epilogue))
            return started[0]

        pending = self._ledger.start(Entry("symmetric_all_reduce", self._dimension, purpose), payload, launch)
        return pending, started[0].made

    def _start(
        self, kind: str, collective: Callable[..., Any], out: torch.Tensor, payload: torch.Tensor, purpose: str
    ) -> Pending:
        def launch() -> dist.Work:
            work: dist.Work = collective(out, payload, group=self._group, async_op=True)
            return work

        return self._ledger.start(Entry(kind, self._dimension, purpose), payload, launch)
