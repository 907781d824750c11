"""Symmetric memory without GPUs: files that all ranks of a group have mapped."""

import shutil
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.parallel.symmetric_memory import SymmetricMemory

SIGNAL_BYTES = 256
POISON = 0xFF  # of which every kind of number is none
LARGEST = 1 << 20


class SharedFiles:
    """What torch's rendezvous gives, of files."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        folders: list[str] = [""] * self.world_size
        dist.all_gather_object(folders, tempfile.mkdtemp(prefix="symmetric-"), group=group)
        folder = Path(folders[0])
        self._map(folder, "memory", self.rank, size).fill_(POISON)
        self._map(folder, "signals", self.rank, SIGNAL_BYTES).zero_()
        dist.barrier(group)
        ranks = range(self.world_size)
        self.memory = [self._map(folder, "memory", rank, size) for rank in ranks]
        self.signals = [self._map(folder, "signals", rank, SIGNAL_BYTES) for rank in ranks]
        dist.barrier(group)
        shutil.rmtree(folders[self.rank])

    @staticmethod
    def _map(folder: Path, kind: str, rank: int, size: int) -> torch.Tensor:
        return torch.from_file(str(folder / f"{kind}-{rank}"), shared=True, size=size, dtype=torch.uint8)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.memory[rank].view(dtype)[: sizes[0]]

    def get_signal_pad(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.signals[rank].view(dtype)[: sizes[0]]


class OneShot(Communicator):
    """Tensor parallel all-reduces through files, in one shot."""

    LIMITS = SymmetricMemoryConfig(one_shot_bytes=LARGEST, two_shot_bytes=0)

    def __init__(
        self, group: dist.ProcessGroup | None, dimension: str, ledger: CommunicationLedger, seconds: float = 60.0
    ) -> None:
        super().__init__(group, dimension, ledger)
        if group is None or self.size == 1 or dimension != "tp":
            return
        files = SharedFiles(group, self.LIMITS.largest)
        self.symmetric = SymmetricMemory(
            files, files.memory[files.rank], self.LIMITS, torch.device("cpu"), timedelta(seconds=seconds)
        )


class TwoShots(OneShot):
    """The same, in two."""

    LIMITS = SymmetricMemoryConfig(one_shot_bytes=0, two_shot_bytes=LARGEST)


class Either(OneShot):
    """The same, in one or in two, by size; the largest by gloo."""

    LIMITS = SymmetricMemoryConfig(one_shot_bytes=64, two_shot_bytes=200)
