"""Copies of a running job's state: in memory, and in the checkpoint folder."""

import logging
import time

import torch.distributed as dist

from boost_core.checkpoint.chunks import Chunk
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.host_copies import HostCopies
from boost_core.checkpoint.memory import Snapshot
from boost_core.checkpoint.saver import Outcome, Saver
from boost_core.checkpoint.shards import SaveFailed
from boost_core.config.reports import CheckpointReport, Fault, FaultReport, Reporter
from boost_core.plan.snapshots import Key
from boost_core.train.membership import Membership
from boost_core.train.resume import newest_checkpoint
from boost_core.train.state import TrainState

logger = logging.getLogger(__name__)


class Saving:
    """Makes one rank's copies, behind the loop, and goes back to them.

    Args:
        state: What is copied.
        folder: The job's checkpoints.
        membership: Gives the shelf, and which rank keeps whose copies.
        reporter: Told of checkpoints; ``None`` on all ranks but the first.
    """

    def __init__(
        self, state: TrainState, folder: CheckpointFolder, membership: Membership, reporter: Reporter | None
    ) -> None:
        self._state, self._folder, self._membership, self._reporter = state, folder, membership, reporter
        self._every = state.spec.fault_tolerance.memory_copy_every_steps if membership.holder_of else None
        # What is on the shelf stays as it is until the next is on all shelves.
        self._copies = HostCopies(2 if self._every else 1)
        self._newest: tuple[int, list[Chunk]] | None = None  # step and copies
        holder_of = membership.holder_of if self._every else ()
        self._saver = Saver(
            folder, state.spec.checkpoint, membership.shelf, holder_of, membership.after_copy, membership.before_save
        )
        self._copy_seconds, self._held_seconds = 0.0, 0.0

    def after_resuming(self) -> None:
        """Have a copy in this gang's memory: those of the gang before it go with its processes."""
        recovery = self._membership.recovery
        if self._every and self._state.step > 0:
            self._copy(to_memory=True, to_store=False)
        elif recovery is not None:
            self._membership.shelf.keep_only(recovery.parts[0].key.generation, recovery.step)

    def after_step(self) -> None:
        """Make what copies are due."""
        spec, step = self._state.spec, self._state.step
        to_store = step == spec.training.steps or step % spec.checkpoint.every_steps == 0
        to_memory = self._every is not None and step % self._every == 0
        if to_store or to_memory:
            self._copy(to_memory, to_store)

    def put_on_shelf(self) -> None:
        """Leave the state, as it is now, in this process's memory, for the gang that comes next."""
        started = time.perf_counter()
        self.collect(wait=True)
        self._membership.shelf.put(self._as_snapshot(self._copied(lasting=True)))
        self._copy_seconds = time.perf_counter() - started

    def store_shelved(self) -> None:
        """Write what has just been put on the shelf to a checkpoint, and wait until it is there.

        Raises:
            SaveFailed: It cannot be written.
        """
        assert self._newest is not None
        self._saver.start(*self._newest, None, self._state.manifest_writer(self._folder))
        outcome = self._saver.outcome(wait=True)
        assert outcome is not None
        if outcome.failure:
            raise SaveFailed(self._given_up(outcome))
        self._report(outcome)

    def go_back(self) -> str | None:
        """Take weights and step back to the newest copy; the data goes on.

        Returns:
            ``memory`` or ``storage``; ``None`` if there is no copy.
        """
        self.collect(wait=True)
        state, samples = self._state, self._state.samples
        if self._newest:
            step, copies = self._newest
            for chunk, copy in zip(state.chunks(), copies, strict=True):
                chunk.tensor.copy_(copy.tensor)
            state.optimizer.round_masters()
            state.step = step
            return "memory"
        source = newest_checkpoint(self._folder, None)
        if source is None:
            return None
        state.load(*source)
        state.samples = samples
        return "storage"

    def held_seconds(self) -> float:
        """How long the loop has stood still for copies since this was asked last."""
        held, self._held_seconds = self._held_seconds, 0.0
        return held

    def collect(self, wait: bool = False) -> None:
        """Report the checkpoint that was being written, once it is committed.

        Args:
            wait: Whether to wait for it.

        Raises:
            SaveFailed: It is the job's last and could not be written.
        """
        outcome = self._saver.outcome(wait)
        if outcome is not None:
            self._report(outcome)

    def _copy(self, to_memory: bool, to_store: bool) -> None:
        """Copy the state and have it kept while training goes on; waits for the copy before it."""
        started = time.perf_counter()
        self.collect(wait=True)
        chunks = self._copied(lasting=to_memory)
        snapshot = self._as_snapshot(chunks) if to_memory else None
        commit = self._state.manifest_writer(self._folder) if to_store else None
        self._saver.start(self._state.step, chunks, snapshot, commit)
        self._copy_seconds = time.perf_counter() - started
        self._held_seconds += self._copy_seconds

    def _copied(self, lasting: bool) -> list[Chunk]:
        chunks = self._copies.take(self._state.chunks(), lasting)
        self._newest = self._state.step, chunks
        return chunks

    def _as_snapshot(self, chunks: list[Chunk]) -> Snapshot:
        key = Key(self._membership.generation, self._state.step, dist.get_rank())
        return Snapshot.of(key, dist.get_world_size(), self._state.samples, chunks)

    def _report(self, outcome: Outcome) -> None:
        if outcome.failure:
            what = self._given_up(outcome)
            if outcome.step == self._state.spec.training.steps:
                raise SaveFailed(f"the last checkpoint, {what}")
            if dist.get_rank() == 0:
                logger.warning("%s; training goes on without it", what)
        elif outcome.manifest is not None and self._reporter:
            self._reporter.report(
                CheckpointReport(
                    step=outcome.step,
                    url=self._folder.step_url(outcome.step),
                    bytes=outcome.manifest.bytes,
                    seconds=self._copy_seconds,
                    commit_seconds=outcome.seconds,
                )
            )

    def _given_up(self, outcome: Outcome) -> str:
        """Report a checkpoint that the store has not taken; say in words what has failed."""
        what = f"{self._folder.step_url(outcome.step)} cannot be written: {outcome.failure}"
        if self._reporter:
            self._reporter.report(FaultReport(what=Fault.STORE, step=outcome.step, message=what))
        return what
