"""Copies in peers' memory and checkpoints, made behind the training loop.

The loop is held only while the state is copied to the host.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from boost_core.checkpoint.chunks import Chunk
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.memory import Shelf, Snapshot
from boost_core.checkpoint.peers import PeerCopies
from boost_core.checkpoint.shards import SaveFailed, on_first_rank, save_chunks
from boost_core.config.checkpoint import CheckpointConfig

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between tries to write a checkpoint

Checksums = dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """What became of a copy of the state.

    Attributes:
        step: Its step.
        manifest: Its manifest in the store; ``None`` if it was to be kept in memory alone, or could not be written.
        failure: Why it could not be written.
        seconds: How long it took.
    """

    step: int
    manifest: Manifest | None
    failure: str
    seconds: float


class Saver:
    """Keeps or writes one copy of the state at a time, and removes old ones. All ranks do the same with theirs.

    A store that is away is tried again for half a minute.

    Args:
        folder: The job's checkpoints.
        keep: What is kept of them.
        shelf: For snapshots in memory.
        holder_of: Which rank keeps the copy of each rank's snapshots; empty if none does.
        after_copy: Told of each step whose snapshots are in two places.
        before_save: Called on the first rank before each try to write; what it raises counts as the store's refusal.
    """

    def __init__(
        self, folder: CheckpointFolder, keep: CheckpointConfig, shelf: Shelf, holder_of: Sequence[int],
        after_copy: Callable[[int], None], before_save: Callable[[], None],
    ) -> None:  # fmt: skip
        self._folder, self._keep = folder, keep
        self._after_copy, self._before_save = after_copy, before_save
        # Of its own, because the training loop's collectives go on meanwhile.
        self._ranks = dist.new_group(backend="gloo")
        self._peers = PeerCopies(shelf, holder_of, self._ranks) if holder_of else None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | Exception | None = None

    def start(
        self,
        step: int,
        chunks: Sequence[Chunk],
        snapshot: Snapshot | None,
        commit: Callable[[Checksums], Manifest] | None,
    ) -> None:
        """Start with a copy; the one before has been collected.

        Args:
            step: Its step.
            chunks: The copy of what this rank keeps; not to be changed before the outcome is there.
            snapshot: The same, if it is to be kept in memory, too; not to be changed as long as it is on the shelf.
            commit: Commits what was written, on the first rank; ``None`` to write nothing.
        """
        if self._thread is not None:
            raise AssertionError("a copy is being written")
        # A daemon, so that a process that has failed does not wait for a store.
        work = partial(self._run, step, chunks, snapshot, commit)
        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()

    def outcome(self, wait: bool) -> Outcome | None:
        """What became of the copy that was started, once; ``None`` if there is none, or it is not known yet.

        Raises:
            Exception: What the ranks' exchange has failed with, as when one of them is gone.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        outcome, self._thread, self._outcome = self._outcome, None, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _run(
        self,
        step: int,
        chunks: Sequence[Chunk],
        snapshot: Snapshot | None,
        commit: Callable[[Checksums], Manifest] | None,
    ) -> None:
        started = time.perf_counter()
        try:
            if self._peers and snapshot:
                self._peers.exchange(snapshot)
                self._after_copy(step)
            manifest, failure = self._written(step, chunks, commit) if commit else (None, "")
        except Exception as error:  # for the loop, which collects the outcome
            self._outcome = error
            return
        self._outcome = Outcome(step, manifest, failure, time.perf_counter() - started)
        if manifest is not None and dist.get_rank() == 0:
            self._prune()

    def _prune(self) -> None:
        try:
            self._folder.prune(self._keep.keep_last, self._keep.keep_every)
        except Exception as error:  # stores raise types of their own
            logger.warning("old checkpoints in %s cannot be removed now: %s", self._folder.url, error)

    def _written(
        self, step: int, chunks: Sequence[Chunk], commit: Callable[[Checksums], Manifest]
    ) -> tuple[Manifest | None, str]:
        failure = ""
        for pause in (*RETRY_SECONDS, None):
            try:
                on_first_rank(self._before_save, self._ranks)
                checksums = save_chunks(self._folder, step, chunks, self._ranks)
                return on_first_rank(partial(commit, checksums), self._ranks), ""
            except SaveFailed as reason:
                failure = str(reason)
                if pause is not None:
                    if dist.get_rank() == 0:
                        url = self._folder.step_url(step)
                        logger.warning("%s cannot be written: %s; the next try is in %g s", url, failure, pause)
                    time.sleep(pause)
        return None, failure
