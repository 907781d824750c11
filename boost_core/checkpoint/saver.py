"""Copies in peers' memory and checkpoints, made in the background of the training loop.

The loop blocks only while state is copied on the host: on a CPU, or for what is in the host's memory already
(``parallelism.optimizer_offload``). Copying from a GPU does not block it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.peer_memory import PeerCopies, Snapshot, SnapshotStore
from boost_core.checkpoint.shards import Chunk, SaveFailed, on_first_rank, refuse_damaged, save_chunks
from boost_core.config.job import CheckpointConfig
from boost_core.parallel.activation_offload import page_locked_like

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts to write a checkpoint; the last one repeats

Checksums = dict[str, int]


class SaveRequest(NamedTuple):
    """How to write a copy to the store.

    Attributes:
        commit: Commits what was written, on the first rank.
        unless_newest_is: Nothing is written if a checkpoint of this step or a later one is already committed; ``None``
            if that is known not to be the case.
        read_back: Whether the checkpoint counts only once all of it has been read back.
    """

    commit: Callable[[Checksums], Manifest]
    unless_newest_is: int | None = None
    read_back: bool = False


class SaveOutcome(NamedTuple):
    """The outcome of handling a copy of the state, the same on all ranks.

    Attributes:
        stored_step: The newest step known to be in the store as a result; -1 if the copy was not written.
        manifest: Its manifest in the store, if it was written.
        failure: Why it could not be written.
        seconds: How long it took.
    """

    stored_step: int
    manifest: Manifest | None
    failure: str
    seconds: float


class Saver:
    """Keeps or writes one copy of the state at a time, and removes old ones. All ranks act in step on their own parts.

    A failing store is retried at increasing intervals until it accepts the copy or the copy is told to make way. The
    interval carries over from one copy to the next.

    Args:
        folder: The job's checkpoints.
        keep: Which of them to keep.
        snapshots: This process's in-memory snapshot store.
        owner_of: For each rank, the rank that keeps the copy of its snapshots; empty if none does.
        before_copy: Called before a copy is kept anywhere.
        after_copy: Called with each step whose snapshots are in two places.
        before_save: Called on the first rank before each attempt to write; its errors count as the store's.
    """

    def __init__(
        self, folder: CheckpointFolder, keep: CheckpointConfig, snapshots: SnapshotStore, owner_of: Sequence[int],
        before_copy: Callable[[], None], after_copy: Callable[[int], None], before_save: Callable[[], None],
    ) -> None:  # fmt: skip
        self._folder, self._keep = folder, keep
        self._before_copy, self._after_copy, self._before_save = before_copy, after_copy, before_save
        # A separate group, because the training loop's collectives continue meanwhile.
        self._ranks = dist.new_group(backend="gloo")
        self._peers = PeerCopies(snapshots, owner_of, self._ranks) if owner_of else None
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | Exception | None = None
        self._failures, self._next_try = 0, 0.0  # consecutive failed attempts; when the next may begin
        # Only the first rank's values matter; it tells the others.
        self._makes_way, self._trying, self._began = threading.Event(), False, 0.0
        self._unremoved = ""  # the latest reason for which old checkpoints could not be removed
        self._lock = threading.Lock()
        self.failure = ""

    def start(self, step: int, chunks: Sequence[Chunk], snapshot: Snapshot | None, request: SaveRequest | None) -> None:
        """Start handling a copy; the outcome of the previous one must have been collected.

        Args:
            step: The copy's step.
            chunks: The copy of this rank's state; must not change until the outcome is known.
            snapshot: The same as a snapshot, if it is to be kept in memory; must not change as long as it is kept.
            request: How to write it; ``None`` to write nothing.
        """
        if self._thread is not None:
            raise AssertionError("a copy is being written")
        self._makes_way.clear()
        self._trying, self._began = request is not None and not self._failures, time.monotonic()
        # A daemon, so that a failed process does not wait for a store.
        device = torch.cuda.current_device() if dist.get_backend() == "nccl" else None
        work = partial(self._run, device, step, chunks, snapshot, request)
        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()

    def make_way(self) -> bool:
        """Stop retrying the copy if its store fails. All ranks call this; it takes effect on the first.

        Returns:
            Whether the store is still at work for the copy, so that its end is to be waited for.
        """
        with self._lock:
            self._makes_way.set()
            return self._trying and self._thread is not None and self._thread.is_alive()

    def wait_for_store(self) -> bool:
        """Have the copy make way, and wait for the store until ``store_wait_seconds`` after writing began.

        A store that has failed before is not waited for.

        Returns:
            Whether the store is done with the copy.
        """
        if not self.make_way():
            return True
        until = time.monotonic() if self._failures else self._began + self._keep.store_wait_seconds
        return self.ends_within(max(0.0, until - time.monotonic()))

    def outcome(self, wait: bool) -> SaveOutcome | None:
        """The outcome of the current copy, returned once; ``None`` if there is no copy or no outcome yet.

        Args:
            wait: Whether to wait for it; the copy then makes way.

        Raises:
            Exception: The ranks' exchange failed, for example because a rank is gone.
        """
        if wait:
            self.make_way()
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        outcome, self._thread, self._outcome = self._outcome, None, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ends_within(self, seconds: float) -> bool:
        """Wait at most this long for the current copy; returns whether it has finished."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(
        self, device: int | None, step: int, chunks: Sequence[Chunk], snapshot: Snapshot | None,
        request: SaveRequest | None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        stored_step, manifest = -1, None
        try:
            if device is not None:  # threads start on the first GPU, where CUDA would allocate memory for each rank
                torch.cuda.set_device(device)
            self._before_copy()
            if self._peers and snapshot:
                self._peers.exchange(snapshot)
                self._after_copy(step)
            if request:
                stored_step, manifest = self._stored(step, chunks, request)
        except Exception as error:  # raised in the loop, which collects the outcome
            self._outcome = error
            return
        failure = self.failure if request and stored_step < 0 else ""
        self._outcome = SaveOutcome(stored_step, manifest, failure, time.perf_counter() - started)
        if manifest is not None and dist.get_rank() == 0:
            try:
                self._folder.prune(self._keep.keep_last, self._keep.keep_every, newest=stored_step)
            except Exception as error:  # stores raise types of their own
                if str(error) != self._unremoved:  # one that may not remove anything would say so at each checkpoint
                    logger.warning("old checkpoints in %s cannot be removed now: %s", self._folder.url, error)
                self._unremoved = str(error)
            else:
                self._unremoved = ""

    def _stored(self, step: int, chunks: Sequence[Chunk], request: SaveRequest) -> tuple[int, Manifest | None]:
        """Retry until the copy is written or makes way; return the step then stored, and its manifest."""
        while True:
            if not self._failures:
                self._trying = True
            elif not on_first_rank(self._wait_for_next_try, self._ranks):
                return -1, None
            try:
                on_first_rank(self._before_save, self._ranks)
                stored: tuple[int, Manifest | None] | None = None
                least = request.unless_newest_is
                newest = None if least is None else on_first_rank(self._folder.newest_intact, self._ranks)
                if least is not None and newest is not None and newest >= least:
                    try:
                        manifest = None
                        if request.read_back:  # it counts only if it reads back as written
                            manifest = on_first_rank(partial(self._folder.manifest, newest), self._ranks)
                            refuse_damaged(self._folder, newest, self._ranks)
                        stored = newest, manifest
                    except SaveFailed as damage:
                        if dist.get_rank() == 0:
                            logger.warning("%s is written again: %s", self._folder.step_url(newest), damage)
                if stored is None:
                    checksums = save_chunks(self._folder, step, chunks, self._ranks)
                    stored = step, on_first_rank(partial(request.commit, checksums), self._ranks)
                    if request.read_back:
                        refuse_damaged(self._folder, step, self._ranks)
            except SaveFailed as reason:
                pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
                self._failures, self._next_try, self.failure = self._failures + 1, time.monotonic() + pause, str(reason)
                if dist.get_rank() == 0:
                    url = self._folder.step_url(step)
                    logger.warning("%s cannot be written: %s; the next try is in %g s", url, reason, pause)
                    try:  # remove what was written; a later step's may be attempted instead
                        self._folder.discard(step)
                    except Exception as error:  # stores raise types of their own
                        logger.warning("the partial files of %s cannot be removed now: %s", url, error)
                self._trying = False
            else:
                self._failures, self.failure = 0, ""
                return stored

    def _wait_for_next_try(self) -> bool:
        """Wait until the next attempt is due; return whether it is still wanted."""
        self._makes_way.wait(max(0.0, self._next_try - time.monotonic()))
        with self._lock:
            self._trying = not self._makes_way.is_set()
            return self._trying


# Copies of a rank's state in the host's memory.
#
# On a GPU, copies are made on a separate stream, after all work queued at the time of the request. The next step
# proceeds meanwhile, up to its update, which waits for the copies on the device, since only updates change the state.


class HostCopies:
    """Makes copies in several buffers, so that one copy stays intact while others are made.

    Args:
        places: Number of buffers; each is as large as the rank's state.
        is_held: Whether someone still reads a copy in the buffer to be used next. If so, a new buffer is allocated.
    """

    def __init__(self, places: int, is_held: Callable[[torch.Tensor], bool] = lambda _: False) -> None:
        self._is_held = is_held
        self._buffers: list[list[torch.Tensor]] = [[] for _ in range(places)]
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None  # the end of the newest copy

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Allocate memory for the next copy now if that is slow, as for a GPU's copies, which are page-locked."""
        if not self._buffers[self._turn] and any(chunk.tensor.is_cuda for chunk in chunks):
            self._buffers[self._turn] = _memory_for(chunks)

    def take(self, chunks: Sequence[Chunk], lasting: bool = False) -> list[Chunk]:
        """Copy chunks; from a GPU, read copies only after ``wait`` and change the state only after ``before_update``.

        Args:
            chunks: The chunks, the same ones every time.
            lasting: Whether the next copy goes to the next buffer, in turn; otherwise it overwrites this one.
        """
        if self._buffers[self._turn] and self._is_held(self._buffers[self._turn][0]):
            self._buffers[self._turn] = []
        buffer = self._buffers[self._turn]
        if lasting:
            self._turn = (self._turn + 1) % len(self._buffers)
        if not buffer:
            buffer += _memory_for(chunks)
        if on_gpu := [pair for pair in zip(chunks, buffer, strict=True) if pair[0].tensor.is_cuda]:
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for chunk, copy in on_gpu:
                    copy.copy_(chunk.tensor, non_blocking=True)
                    chunk.tensor.record_stream(self._stream)  # in case the state is freed before it has been copied
                self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                self._copied.record(self._stream)
        for chunk, copy in zip(chunks, buffer, strict=True):
            if not chunk.tensor.is_cuda:
                copy.copy_(chunk.tensor)
        return [replace(chunk, tensor=copy) for chunk, copy in zip(chunks, buffer, strict=True)]

    def before_update(self) -> None:
        """Make work queued from now on wait, on the device, until the newest copy has been made."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the newest copy has been made. Another thread may call this before the next copy is taken."""
        if self._copied is not None:
            self._copied.synchronize()


def _memory_for(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """Allocate a separate storage for each chunk; torch's checkpoint would copy a view again to write it."""
    of_gpu = [chunk.tensor for chunk in chunks if chunk.tensor.is_cuda]
    locked = iter(page_locked_like(of_gpu) if of_gpu else ())
    return [next(locked) if chunk.tensor.is_cuda else torch.empty_like(chunk.tensor) for chunk in chunks]
