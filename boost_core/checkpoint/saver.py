"""Checkpoints written behind the training loop, which is held only while the state is copied to the host."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from boost_core.checkpoint.chunks import Chunk
from boost_core.checkpoint.folder import CheckpointFolder, Manifest
from boost_core.checkpoint.shards import SaveFailed, on_first_rank, save_chunks
from boost_core.config.checkpoint import CheckpointConfig

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between tries to write a checkpoint

Checksums = dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """What became of a checkpoint.

    Attributes:
        step: Its step.
        manifest: Its manifest; ``None`` if it could not be written.
        failure: Why not.
        seconds: How long it took.
    """

    step: int
    manifest: Manifest | None
    failure: str
    seconds: float


class Saver:
    """Writes one checkpoint at a time, and removes old ones. All ranks do the same with theirs.

    A store that is away is tried again for half a minute.

    Args:
        folder: The job's checkpoints.
        keep: What is kept of them.
    """

    def __init__(self, folder: CheckpointFolder, keep: CheckpointConfig) -> None:
        self._folder, self._keep = folder, keep
        # Of its own, because the training loop's collectives go on meanwhile.
        self._ranks = dist.new_group(backend="gloo")
        self._writing: threading.Thread | None = None
        self._outcome: Outcome | None = None

    def start(self, step: int, chunks: Sequence[Chunk], commit: Callable[[Checksums], Manifest]) -> None:
        """Start to write; the one before has been collected.

        Args:
            step: The checkpoint's step.
            chunks: What this rank writes; not to be changed before the outcome is there.
            commit: Commits what was written, on the first rank.
        """
        if self._writing is not None:
            raise AssertionError("a checkpoint is being written")
        # A daemon, so that a process that has failed does not wait for a store.
        self._writing = threading.Thread(target=self._run, args=(step, chunks, commit), name="saver", daemon=True)
        self._writing.start()

    def outcome(self, wait: bool) -> Outcome | None:
        """What became of the checkpoint that was started, once; ``None`` if there is none, or it is not known yet."""
        if self._writing is None or (self._writing.is_alive() and not wait):
            return None
        self._writing.join()
        outcome, self._writing, self._outcome = self._outcome, None, None
        if outcome is None:
            raise AssertionError("the saver's thread has failed; its error is in the log")
        return outcome

    def _run(self, step: int, chunks: Sequence[Chunk], commit: Callable[[Checksums], Manifest]) -> None:
        started = time.perf_counter()
        manifest, failure = self._written(step, chunks, commit)
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
