"""A worker on the mock whose training fails, hangs or breaks its GPU. A rank of a few, each in its own process.

Takes a scenario, the rank, their number and a folder where the ranks find each other. What a supervisor would do is
done by the process itself: it has the training aborted once a rank has said that it fails, or once all hang.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from boost_core.train.step_graph import CudaGraph
from service.gang.assignment import Assignment, End, GangContext, Message, RankEnd, Rendezvous
from service.gang.status import JobTag
from service.gang.worker import worker as worker_module
from service.gang.worker.worker import Worker
from service.logs import LogFormat
from service.security.access import Access
from tests.jobs import tiny_job
from tests.mock_gpu import control

BYTES = 2**30
MOST_SECONDS = 2.0  # from an abort until the training thread is back


def captured(first: int) -> tuple[CudaGraph, torch.Tensor]:
    """A graph that has captured a collective of each of three communicators, that of one of them first."""
    groups = [None, *(dist.new_group(list(range(dist.get_world_size()))) for _ in range(2))]
    x, state = torch.ones(4).cuda(), torch.empty(BYTES, device="cuda", dtype=torch.uint8)

    def work() -> torch.Tensor:
        kept = torch.empty_like(state)
        for number in range(3):
            dist.all_reduce(x, group=groups[(first + number) % 3], async_op=True).wait()
        return kept

    graph = CudaGraph()
    graph.warm(work)
    graph.capture(work)
    return graph, x


class Rank:
    """One of the ranks, with its worker.

    Args:
        rank: Its number.
        size: Their number.
        folder: Where they find each other.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self._folder = rank, size, folder
        context = GangContext(JobTag("job-1", 1, "a", "t", "u"), Access(), range(0), LogFormat.TEXT)
        self.worker = Worker(rank, context, "node", "actor", "127.0.0.1", ("0",), self._push, lambda *_: [])

    def _push(self, message: Message) -> None:
        if message.failed is not None and message.failed.how is not End.CONNECTION:
            self.note(f"failed-{message.generation}")

    def note(self, what: str) -> None:
        """Let all ranks know something."""
        (self._folder / what).touch()

    def wait_for(self, *notes: str) -> None:
        """Wait until all of these are known."""
        deadline = time.monotonic() + 60
        while not all((self._folder / note).exists() for note in notes):
            assert time.monotonic() < deadline, notes
            time.sleep(0.01)

    def train(
        self, generation: int, training: Callable[[], None], abort_after: tuple[str, ...]
    ) -> tuple[RankEnd, float]:
        """Train as a rank of a generation until it ends.

        Args:
            generation: Its number.
            training: What it does instead of training.
            abort_after: The notes after which all are aborted.

        Returns:
            How it ended, and the seconds from then until it did.
        """
        meeting = self._folder / f"meeting-{generation}"
        if self.rank == 0:
            rendezvous = self.worker.rendezvous()
            made = meeting.with_suffix(".new")
            made.write_text(json.dumps(vars(rendezvous)))
            made.rename(meeting)
        self.wait_for(meeting.name)
        parallelism = {"tensor_parallel_size": self.size}
        spec = tiny_job("unused", self._folder, parallelism=parallelism, resources={"gpus_per_worker": 1})
        found = Rendezvous(**json.loads(meeting.read_text()))
        assignment = Assignment(generation, spec, self.rank, found, tuple(range(self.size)), gpus=("0",))
        self.worker.join(assignment, None)
        membership, ends = self.worker.membership, list[RankEnd]()

        def instead(*_: object) -> str:
            training()
            membership.refuse_aborted()
            return "HALTED"

        worker_module.trainer.train = instead  # type: ignore[assignment]
        thread = threading.Thread(target=lambda: ends.append(self.worker.train(assignment)))
        thread.start()
        self.wait_for(*abort_after)
        time.sleep(0.3)  # until the others wait
        begin = time.monotonic()
        self.worker.abort()
        self.worker.abort()
        thread.join(60)
        assert not thread.is_alive(), "the training thread does not come back"
        return ends[0], time.monotonic() - begin


def hang(rank: Rank) -> None:
    """Whichever communicator all wait for, an abort brings them back, and the same processes train again."""
    for first in range(3):
        generation = first + 1

        def training(first: int = first, generation: int = generation) -> None:
            graph, x = captured(first)
            on_host = torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
            on_host[:1].copy_(x[:1], non_blocking=True)
            try:
                graph.replay()
                torch.cuda.synchronize()
                rank.note(f"replays-{generation}-{rank.rank}")
                if rank.rank == 1:  # which does not come to this step
                    rank.worker.membership.aborted.wait(60)
                    return
                graph.replay()
                x.sum().item()
            finally:
                graph.reset()

        end, seconds = rank.train(
            generation, training, tuple(f"replays-{generation}-{each}" for each in range(rank.size))
        )
        assert (end.how, end.reusable) == (End.CONNECTION, True), end
        assert seconds < MOST_SECONDS, seconds
        assert torch.cuda.memory_reserved() == 0, torch.cuda.memory_summary()
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0


def fails(rank: Rank, error: Callable[[], object]) -> RankEnd:
    """One fails while the others wait for it in a captured step; return how this one ends."""

    def training() -> None:
        graph, x = captured(0)
        try:
            if rank.rank == 1:
                error()
            graph.replay()
            x.sum().item()
        finally:
            graph.reset()

    end, seconds = rank.train(1, training, ("failed-1",))
    assert seconds < MOST_SECONDS, seconds
    if rank.rank == 0:
        assert (end.how, end.reusable) == (End.CONNECTION, True), end
    return end


def bad_data(rank: Rank) -> None:
    """A rank's error arrives before it leaves the others, and it leaves them without waiting for them."""

    def error() -> None:
        raise ValueError("a document has a token beyond the vocabulary")

    end = fails(rank, error)
    if rank.rank == 1:
        assert end == RankEnd(End.LASTING, "a document has a token beyond the vocabulary")


def out_of_memory(rank: Rank) -> None:
    """Likewise, with figures."""
    end = fails(rank, lambda: torch.empty(100 * 2**30, device="cuda", dtype=torch.uint8))
    if rank.rank == 1:
        assert (end.how, end.reusable) == (End.FAILED, True), end
        total = torch.cuda.mem_get_info()[1]
        for words in (
            "100.00 GiB were requested",
            "Planned were",
            "torch had allocated",
            f"of {total / 2**30:.1f} GiB",
        ):
            assert words in end.message, end.message


def broken(rank: Rank) -> None:
    """After an illegal access the process says so, before NCCL's watchdog could end it, and touches nothing more."""

    def training() -> None:
        x = torch.ones(4).cuda()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.all_reduce(x, async_op=True)
        control.break_device(700)
        time.sleep(1.5)  # in which the watchdog asks for the collective
        x.sum().item()

    end, _ = rank.train(1, training, ("failed-1",))
    assert (end.how, end.reusable) == (End.DEVICE, False), end
    assert "an illegal memory access was encountered" in end.message, end.message


SCENARIOS = {each.__name__: each for each in (hang, bad_data, out_of_memory, broken)}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
    os._exit(0)  # as a broken process cannot tidy up
