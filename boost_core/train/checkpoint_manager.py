"""Copies of a running job's state: in memory, and in the checkpoint folder."""

import logging
import time
from functools import partial

import torch.distributed as dist

from boost_core.checkpoint.chunks import Chunk
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.host_copies import HostCopies
from boost_core.checkpoint.saver import SaveOutcome, Saver, SaveRequest
from boost_core.checkpoint.shards import SaveFailed
from boost_core.checkpoint.snapshot_store import Snapshot
from boost_core.messages.reports import CheckpointReport, Fault, FaultReport, Reporter
from boost_core.plan.snapshots import SnapshotKey
from boost_core.train.due import DueCopies
from boost_core.train.membership import Membership
from boost_core.train.resume import load_newest
from boost_core.train.state import TrainState

REPORT_SECONDS = 30.0  # how long a store may fail before it is reported, and between reports
REPEAT_SECONDS = 600.0  # between reports about the same checkpoint
HALT_SECONDS = 30.0  # how long a halt waits for a failing store
WAIT_SECONDS = 0.2  # between polls while waiting

logger = logging.getLogger(__name__)


class LastSaveFailed(SaveFailed):
    """The store has not accepted the job's last checkpoint within the time the job allows."""


class CheckpointManager:
    """Makes one rank's copies, behind the loop, and rolls back to them.

    Args:
        state: The state to copy.
        folder: The job's checkpoints.
        membership: Has the snapshot store, and says which rank keeps whose copies.
        reporter: Receives reports of checkpoints; ``None`` on all ranks but the first.
    """

    def __init__(
        self, state: TrainState, folder: CheckpointFolder, membership: Membership, reporter: Reporter | None
    ) -> None:
        self._state, self._folder, self._membership, self._reporter = state, folder, membership, reporter
        spec = state.spec
        every = spec.fault_tolerance.memory_copy_every_steps if membership.owner_of else None
        self._due = DueCopies(spec.training.steps, spec.checkpoint.every_steps, every)
        # A snapshot stays unchanged until all ranks have the next.
        self._copies = HostCopies(2 if every else 1, membership.snapshots.is_held)
        self._newest: tuple[int, list[Chunk]] | None = None  # step and copies
        owner_of = membership.owner_of if every else ()
        before_keeping = partial(_before_keeping, self._copies, membership)
        self._saver = Saver(
            folder, spec.checkpoint, membership.snapshots, owner_of, before_keeping, membership.after_copy,
            membership.before_save,
        )  # fmt: skip
        self._copy_seconds, self._held_seconds = 0.0, 0.0
        self._failing_since: float | None = None
        self._reported, self._reported_at = 0, -REPORT_SECONDS  # the newest due step reported as missed, and when

    def after_resuming(self, stored_step: int | None) -> None:
        """Make the copies that are due of the loaded state: those of the previous gang go with its processes.

        Args:
            stored_step: The newest step for which the job has a checkpoint, 0 for none; ``None`` if unknown.
        """
        self._due.resumed(self._state.step, stored_step)
        recovery = self._membership.recovery
        if recovery is not None and not self._due.memory:  # else the new copy replaces what was loaded
            self._membership.snapshots.keep_only(recovery.parts[0].key.generation, recovery.step)
        if self._due.wanted:
            self._copy(ask_store=stored_step is None)
        self._copies.prepare(self._state.chunks())

    def before_step(self) -> bool:
        """Report the outcome of the previous copy, and have it make way if one is due after the coming step.

        Returns:
            Whether none can be taken then, because the store is still at work for the previous copy and has failed
            before, or has had ``checkpoint.store_wait_seconds``.
        """
        self.collect()
        self._report_failing_store()
        if not self._due.after(self._state.step + 1):
            return False
        started = time.perf_counter()
        is_free = self._saver.wait_for_store()
        self._held_seconds += time.perf_counter() - started
        return not is_free

    def before_update(self) -> None:
        """Make changes to the state wait for a copy of it that is in progress on the device."""
        self._copies.before_update()

    def after_step(self, store_is_stuck: bool) -> None:
        """Make the copies that are due.

        Args:
            store_is_stuck: Whether any rank's ``before_step`` said so. Copies are then postponed, training continues,
                and the newest state is written later.
        """
        if self._due.stores(self._state.step):
            self._report_missed()
        self._due.reached(self._state.step)
        if self._due.wanted and not store_is_stuck:
            self._copy()

    def finish(self) -> bool:
        """Wait until the store has the job's last checkpoint, and has returned it.

        Returns:
            Whether it has; if not, the gang was asked to halt in the meantime.

        Raises:
            LastSaveFailed: The store has not accepted it within ``checkpoint.final_save_timeout_seconds``.
        """
        deadline = self._state.spec.checkpoint.final_save_timeout_seconds - self._membership.waited_seconds
        deadline += time.monotonic()
        if self._due.wanted:  # postponed, because an older one was in progress
            self._saver.make_way()
            self._wait_for_store(deadline)
            self._copy()
        self._wait_for_store(deadline)
        self.collect(wait=True)
        return self._due.store == 0

    def _wait_for_store(self, deadline: float) -> None:
        step = self._state.step
        while not self._saver.ends_within(WAIT_SECONDS):
            membership, failure = self._membership, self._saver.failure
            membership.while_saving(failure and self._in_words(step, failure))
            self._report_failing_store()
            if membership.halt.is_set() and not membership.store.is_set():  # ``store`` would write this very checkpoint
                self._saver.make_way()
            if time.monotonic() > deadline:
                limit = self._state.spec.checkpoint.final_save_timeout_seconds
                what = self._in_words(step, failure or "the store does not answer")
                raise LastSaveFailed(
                    f"the last checkpoint, {what}; it was tried for checkpoint.final_save_timeout_seconds = {limit:g} "
                    "s; fix the store and retry the job, which continues from its newest checkpoint"
                )

    def keep_in_memory(self) -> None:
        """Leave the current state in this process's memory, for the next gang."""
        started = time.perf_counter()
        self.collect(wait=True)
        copied = self._copied(lasting=True)
        _until_made(self._copies, self._membership)
        self._membership.snapshots.put(self._as_snapshot(copied))
        self._copy_seconds = time.perf_counter() - started

    def store_kept(self) -> None:
        """Write the snapshot just kept in memory as a checkpoint, and wait until it is stored.

        Raises:
            SaveFailed: It cannot be written.
        """
        assert self._newest is not None
        self._saver.start(*self._newest, None, SaveRequest(self._state.manifest_writer(self._folder)))
        self._saver.ends_within(HALT_SECONDS)
        outcome = self._saver.outcome(wait=True)
        assert outcome is not None
        if outcome.failure:
            raise SaveFailed(self._refused(outcome.step, outcome.failure))
        self._report(outcome)

    def make_way(self) -> None:
        """Stop retrying the copy in progress, so that this process is free for another gang."""
        self._saver.make_way()

    def roll_back(self) -> str | None:
        """Return weights and step to the newest copy; the data cursor moves on.

        Returns:
            ``memory`` or ``storage``; ``None`` if there is no copy.
        """
        state, samples = self._state, self._state.samples
        if self._newest:  # which a store may still be taking; it need not be waited for
            step, copies = self._newest
            _until_made(self._copies, self._membership)
            for chunk, copy in zip(state.chunks(), copies, strict=True):
                chunk.tensor.copy_(copy.tensor)
            state.optimizer.round_masters()
            state.step = step
            return "memory"
        if load_newest(partial(state.load, self._folder), self._folder) is None:
            return None
        state.samples = samples
        return "storage"

    def held_seconds(self) -> float:
        """Return how long the loop has stood still for copies since the last call."""
        held, self._held_seconds = self._held_seconds, 0.0
        return held

    def collect(self, wait: bool = False) -> None:
        """Report the checkpoint being written, once it is committed.

        Args:
            wait: Whether to wait for it; if the store fails, it is not retried.
        """
        outcome = self._saver.outcome(wait)
        if outcome is not None:
            self._due.stored(outcome.stored_step)
            self._report(outcome)

    def _copy(self, ask_store: bool = False) -> None:
        """Copy the state and keep the copy while training continues; waits for the previous copy.

        Args:
            ask_store: Whether to check if the store already has what is due.
        """
        started = time.perf_counter()
        self.collect(wait=True)  # from here on all ranks have the same information
        due = self._due
        chunks = self._copied(lasting=due.memory)
        snapshot = self._as_snapshot(chunks) if due.memory else None
        checkpoint = None
        if due.store:
            commit = self._state.manifest_writer(self._folder)
            checkpoint = SaveRequest(commit, due.store if ask_store else None, read_back=due.is_last)
        self._saver.start(self._state.step, chunks, snapshot, checkpoint)
        due.copied()
        self._copy_seconds = time.perf_counter() - started
        self._held_seconds += self._copy_seconds

    def _copied(self, lasting: bool) -> list[Chunk]:
        chunks = self._copies.take(self._state.chunks(), lasting)
        self._newest = self._state.step, chunks
        return chunks

    def _as_snapshot(self, chunks: list[Chunk]) -> Snapshot:
        key = SnapshotKey(self._membership.generation, self._state.step, dist.get_rank())
        return Snapshot.of(key, dist.get_world_size(), self._state.samples, chunks)

    def _report(self, outcome: SaveOutcome) -> None:
        if outcome.manifest is not None and self._reporter:
            self._reporter.report(
                CheckpointReport(
                    step=outcome.stored_step,
                    url=self._folder.step_url(outcome.stored_step),
                    bytes=outcome.manifest.bytes,
                    seconds=self._copy_seconds,
                    commit_seconds=outcome.seconds,
                )
            )

    def _report_failing_store(self) -> None:
        """Report that the store fails, once it has failed for a while."""
        if not self._saver.failure:
            self._failing_since = None
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now > self._failing_since + REPORT_SECONDS:
            self._report_missed()

    def _report_missed(self) -> None:
        """Report that the store does not have the checkpoint that is due, unless just reported."""
        step, failure, now = self._due.store, self._saver.failure, time.monotonic()
        pause = REPORT_SECONDS if step > self._reported else REPEAT_SECONDS
        if failure and step and now >= self._reported_at + pause:
            self._reported, self._reported_at = step, now
            what = self._refused(step, failure)
            if self._reporter and not self._due.is_last:
                logger.warning("%s; training continues without it", what)

    def _refused(self, step: int, failure: str) -> str:
        """Report a checkpoint that the store has not accepted, and return the message."""
        what = self._in_words(step, failure)
        if self._reporter:
            self._reporter.report(FaultReport(what=Fault.STORE, step=step, message=what))
        return what

    def _in_words(self, step: int, failure: str) -> str:
        return f"{self._folder.step_url(step)} cannot be written: {failure}"


def _until_made(copies: HostCopies, membership: Membership) -> None:
    """Wait for the newest copy. Until then a GPU may be busy with the update before it, and so with collectives."""
    copies.wait()
    membership.refuse_aborted()


# Not methods of the manager: through what it hands to the saver it would reference itself, and with it the state.
def _before_keeping(copies: HostCopies, membership: Membership) -> None:
    _until_made(copies, membership)
    membership.before_copy()
