"""Copies of a running job's state: in memory, and in the checkpoint folder."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable
from boost_core.checkpoint.peer_memory import Snapshot
from boost_core.checkpoint.saver import HostCopies, SaveOutcome, Saver, SaveRequest
from boost_core.checkpoint.shards import Chunk, SaveFailed, read_on_first_rank
from boost_core.config import JobSpec
from boost_core.messages import CheckpointReport, Fault, FaultReport, Reporter
from boost_core.plan.snapshots import SnapshotKey
from boost_core.train.state import Membership, TrainState

# Which copies of a job's state are due. Pure: ranks given the same inputs decide the same.


@dataclass
class DueCopies:
    """Tracks what is due from step to step. A checkpoint stays due until the store has one of its step or a later one.

    Attributes:
        steps: The job's last step, whose checkpoint is always due.
        store_every_steps: How often a checkpoint is due.
        memory_every_steps: How often a copy in memory is due; ``None`` for never.
        store: The newest step whose checkpoint is due and not known to be in the store; 0 if there is none.
        memory: Whether a copy in memory is due.
        requested: Whether the state is to be copied as soon as possible.
    """

    steps: int
    store_every_steps: int
    memory_every_steps: int | None
    store: int = 0
    memory: bool = False
    requested: bool = False

    def resumed(self, step: int, stored_step: int | None) -> None:
        """Take note of a loaded state.

        Args:
            step: Steps done.
            stored_step: The newest step that the store has; ``None`` if unknown.
        """
        due = step if step >= self.steps else step - step % self.store_every_steps
        self.store = due if stored_step is None or stored_step < due else 0
        self.memory = self.memory_every_steps is not None and step > 0
        self.requested = self.memory or self.store > 0

    def after(self, step: int) -> bool:
        """Return whether the state is to be copied after a step."""
        return self.requested or self.stores(step) or self._remembers(step)

    def stores(self, step: int) -> bool:
        """Return whether a checkpoint of this very step is due."""
        return step == self.steps or step % self.store_every_steps == 0

    def _remembers(self, step: int) -> bool:
        # The last one, too: nothing else keeps the state while waiting for the store.
        return self.memory_every_steps is not None and (step == self.steps or step % self.memory_every_steps == 0)

    def reached(self, step: int) -> None:
        """Take note of a completed step."""
        if self.stores(step):
            self.store = step
        self.memory |= self._remembers(step)
        self.requested = self.after(step)

    def stored(self, step: int) -> None:
        """Take note that the store has a checkpoint of a step."""
        if step >= self.store:
            self.store = 0


# Continuing from a checkpoint.

logger = logging.getLogger(__name__)

STORE_PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 2.0
_MOST_NAMED = 3
_PROBED_CHECKPOINTS, _PROBED_FILES = 3, 2  # the index and a shard of each


class StoreAway(OSError):
    """A store returns nothing of any checkpoint. All ranks raise it."""


def load_newest(
    load: Callable[[int], None], folder: CheckpointFolder, step: int | None = None, most: int | None = None
) -> int | None:
    """Load the newest checkpoint of a folder that can be read and is intact, if it has any. All ranks call it.

    In a store, a checkpoint is left out only when it has failed twice, and if it cannot be read, only while others can:
    a store that is away is waited for, so that no progress is lost.

    Args:
        load: Loads the checkpoint of a step. Raises on all ranks ``CheckpointDamaged`` if any finds it damaged, and
            ``CheckpointUnreadable`` if any cannot read it.
        folder: The checkpoints.
        step: The only one to try; default: all, newest first.
        most: Try none of a later step.

    Returns:
        The step that was loaded, the same on all ranks; ``None`` if the folder has no checkpoint.

    Raises:
        ValueError: All existing checkpoints are damaged.
        StoreAway: Nothing can be read.
        OSError: The checkpoints cannot be listed, or none of them can be read.
    """
    # Rank 0 looks and tells the others, so that all load the same one.
    listed = read_on_first_rank(lambda: [each for each in reversed(_steps(folder)) if step in (None, each)])
    candidates = [each for each in listed if most is None or each <= most]
    left_out, unread = [], None
    for each in candidates:
        try:
            _load_patiently(load, folder, each, candidates)
            return each
        except (CheckpointDamaged, CheckpointUnreadable, PermissionError) as problem:
            left_out.append(f"step {each}: {problem}")
            unread = problem if isinstance(problem, OSError) else unread
            if dist.get_rank() == 0:
                what = "is damaged" if isinstance(problem, CheckpointDamaged) else "cannot be read, though others can,"
                logger.warning("checkpoint %s %s and skipped: %s", folder.step_url(each), what, problem)
    if not candidates:
        return None
    named = "; ".join(left_out[:_MOST_NAMED] + ["…"] * (len(left_out) > _MOST_NAMED))
    none = f"no checkpoint in {folder.url}"
    if unread is not None:
        raise CheckpointUnreadable(f"{none} can be read: {named}")
    raise ValueError(f"{none} is intact; restore its files, or remove the folder to start over: {named}")


def _load_patiently(load: Callable[[int], None], folder: CheckpointFolder, step: int, steps: Sequence[int]) -> None:
    """Load a checkpoint, and try again if that fails.

    Raises:
        CheckpointDamaged: On all ranks: it was damaged twice, or is on a disk, where reading again helps nothing.
        CheckpointUnreadable: On all ranks: it has failed between two times that another could be read.
        PermissionError: Likewise.
        StoreAway: On all ranks: nothing can be read.
    """

    def damage() -> str:
        """What a checkpoint's manifest and file sizes say, which is cheap."""
        try:
            return folder.checkpoint(step).damage
        except FileNotFoundError:
            return f"{url} is gone"

    url = folder.step_url(step)
    deadline = time.monotonic() + STORE_PATIENCE_SECONDS  # of the first rank alone
    attempts, others_answered = 0, False
    while True:
        attempts += 1
        try:
            if problem := read_on_first_rank(damage):
                raise CheckpointDamaged(problem)
            load(step)
            return
        except CheckpointDamaged:
            if folder.is_local or attempts > 1:
                raise
        except (CheckpointUnreadable, PermissionError) as failure:
            others_answer, is_too_late = read_on_first_rank(
                lambda: (_another_answers(folder, step, steps), time.monotonic() > deadline)
            )
            if others_answered and others_answer and attempts > 1:
                raise
            if is_too_late:
                raise StoreAway(f"checkpoint {url} cannot be read: {failure}") from failure
            others_answered = others_answer
            if dist.get_rank() == 0:
                logger.warning("checkpoint %s cannot be read; retrying in %g s: %s", url, RETRY_SECONDS, failure)
            time.sleep(RETRY_SECONDS)


def _another_answers(folder: CheckpointFolder, step: int, steps: Sequence[int]) -> bool:
    """Whether the store returns all of another intact checkpoint's smallest files."""
    for other in [each for each in steps if each != step][:_PROBED_CHECKPOINTS]:
        try:
            manifest = folder.manifest(other)
            smallest = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)[:_PROBED_FILES]
            if not folder.damage_of(manifest, smallest):
                return True
        except Exception as error:  # stores raise types of their own
            logger.warning("checkpoint %s cannot be read either: %s", folder.step_url(other), error)
    return False


def _steps(folder: CheckpointFolder) -> list[int]:
    """Return the steps of its checkpoints. Waits for an unavailable store, as saving does."""
    deadline = time.monotonic() + STORE_PATIENCE_SECONDS
    while True:
        try:
            return folder.steps()
        except (FileNotFoundError, PermissionError):  # the store is there, and refused
            raise
        except Exception as error:  # the clients of object stores raise types of their own
            if time.monotonic() > deadline:
                raise
            logger.warning("%s cannot be listed; retrying in %g s: %s", folder.url, RETRY_SECONDS, error)
        time.sleep(RETRY_SECONDS)


REPORT_SECONDS = 30.0  # how long a store may fail before it is reported, and between reports
REPEAT_SECONDS = 600.0  # between reports about the same checkpoint
HALT_SECONDS = 30.0  # how long a halt waits for a failing store
SLOW_STORE_SECONDS = 1800.0  # how long a store may take for one checkpoint before the gang seems to hang
WAIT_SECONDS = 0.2  # between polls while waiting


class LastSaveFailed(SaveFailed):
    """The store has not accepted the job's last checkpoint within the time the job allows."""


class CheckpointManager:
    """Makes one rank's copies, behind the loop, and rolls back to them.

    Args:
        state: The state to copy.
        folder: The job's checkpoints.
        membership: Has the snapshot store, and says which rank keeps whose copies.
        reporter: Receives reports of checkpoints; ``None`` on all ranks but the first.

    Attributes:
        copies: Makes the copies on the host.
        saver: Keeps or writes them.
        held_seconds: How long the loop has stood still for copies since this was last set to zero.
    """

    def __init__(
        self, state: TrainState, folder: CheckpointFolder, membership: Membership, reporter: Reporter | None
    ) -> None:
        self._state, self._folder, self._membership, self._reporter = state, folder, membership, reporter
        spec = state.spec
        every = spec.fault_tolerance.memory_copy_every_steps if membership.owner_of else None
        self._due = DueCopies(spec.training.steps, spec.checkpoint.every_steps, every)
        # A snapshot stays unchanged until all ranks have the next.
        self.copies = HostCopies(2 if every else 1, membership.snapshots.is_held)
        self._newest: tuple[int, list[Chunk]] | None = None  # step and copies
        owners = membership.owner_of if every else ()
        before = partial(_before_keeping, self.copies, membership)
        self.saver = Saver(
            folder, spec.checkpoint, membership.snapshots, owners, before, membership.after_copy, membership.before_save
        )
        self._copy_seconds, self.held_seconds = 0.0, 0.0
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
        if self._due.requested:
            self._copy(ask_store=stored_step is None)
        self.copies.prepare(self._state.chunks())

    def steer(self, spec: JobSpec) -> None:
        """Take other steps and another interval from a job that was steered."""
        self._due.steps, self._due.store_every_steps = spec.training.steps, spec.checkpoint.every_steps

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
        is_free = self.saver.wait_for_store()
        self.held_seconds += time.perf_counter() - started
        return not is_free

    def after_step(self, store_is_stuck: bool) -> None:
        """Make the copies that are due.

        Args:
            store_is_stuck: Whether any rank's ``before_step`` said so. Copies are then postponed, training continues,
                and the newest state is written later.
        """
        if self._due.stores(self._state.step):
            self._report_missed()
        self._due.reached(self._state.step)
        if self._due.requested and not store_is_stuck:
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
        if self._due.requested:  # postponed, because an older one was in progress
            self.saver.make_way()
            self._wait_for_store(deadline)
            self._copy()
        self._wait_for_store(deadline)
        self.collect(wait=True)
        return self._due.store == 0

    def _wait_for_store(self, deadline: float) -> None:
        url = self._folder.step_url(self._state.step)
        while not self.saver.ends_within(WAIT_SECONDS):
            membership, failure = self._membership, self.saver.failure
            membership.goes_on(failure and f"{url} cannot be written: {failure}")
            self._report_failing_store()
            if membership.halt.is_set() and not membership.store.is_set():  # ``store`` would write this very checkpoint
                self.saver.make_way()
            if time.monotonic() > deadline:
                limit = self._state.spec.checkpoint.final_save_timeout_seconds
                why = failure or "the store does not answer"
                raise LastSaveFailed(
                    f"the last checkpoint, {url} cannot be written: {why}; it was tried for "
                    f"checkpoint.final_save_timeout_seconds = {limit:g} s; fix the store and retry the job, which "
                    "continues from its newest checkpoint"
                )

    def keep(self, store: bool) -> None:
        """Leave the current state in this process's memory, for the next gang.

        Args:
            store: Whether to then write it as a checkpoint, too, and wait until it is stored.

        Raises:
            SaveFailed: It cannot be written.
        """
        started = time.perf_counter()
        self.collect(wait=True)
        chunks = self.copies.take(self._state.chunks(), lasting=True)
        self._newest = self._state.step, chunks
        self.copies.wait()
        self._membership.refuse_aborted()
        self._membership.snapshots.put(self._snapshot(chunks))
        self._copy_seconds = time.perf_counter() - started
        if not store:
            return
        self.saver.start(self._state.step, chunks, None, SaveRequest(self._state.manifest_writer(self._folder)))
        self.saver.ends_within(HALT_SECONDS)
        outcome = self.collect(wait=True)
        assert outcome is not None
        if outcome.failure:
            raise SaveFailed(self._refused(self._state.step, outcome.failure))

    def roll_back(self) -> str | None:
        """Return weights and step to the newest copy; the data cursor moves on.

        Returns:
            ``memory`` or ``storage``; ``None`` if there is no copy.
        """
        state, samples = self._state, self._state.samples
        if self._newest:  # which a store may still be taking; it need not be waited for
            step, copies = self._newest
            self.copies.wait()
            self._membership.refuse_aborted()
            for chunk, copy in zip(state.chunks(), copies, strict=True):
                chunk.tensor.copy_(copy.tensor)
            state.optimizer.round_masters()
            state.step, source = step, "memory"
        elif load_newest(partial(state.load, self._folder), self._folder, most=state.step) is not None:
            state.samples, source = samples, "storage"
        else:
            return None
        if self._due.memory_every_steps is not None:  # else a gang that recovers would read the same batches again
            self._due.memory = self._due.requested = True
        return source

    def collect(self, wait: bool = False) -> SaveOutcome | None:
        """Report the checkpoint being written, once it is committed, and return its outcome, if it has one.

        Args:
            wait: Whether to wait for it; if the store fails, it is not retried.
        """
        until = time.monotonic() + SLOW_STORE_SECONDS
        if wait:
            self.saver.make_way()
        while wait and time.monotonic() < until and not self.saver.ends_within(WAIT_SECONDS):
            self._membership.goes_on("")
        outcome = self.saver.outcome(wait)
        if outcome is not None:
            self._due.stored(outcome.stored_step)
            if outcome.manifest is not None and self._reporter:
                step, url = outcome.stored_step, self._folder.step_url(outcome.stored_step)
                times = {"seconds": self._copy_seconds, "commit_seconds": outcome.seconds}
                self._reporter.report(CheckpointReport(step=step, url=url, bytes=outcome.manifest.bytes, **times))
        return outcome

    def _copy(self, ask_store: bool = False) -> None:
        """Copy the state and keep the copy while training continues; waits for the previous copy.

        Args:
            ask_store: Whether to check if the store already has what is due.
        """
        started = time.perf_counter()
        self.collect(wait=True)  # from here on all ranks have the same information
        due = self._due
        chunks = self.copies.take(self._state.chunks(), lasting=due.memory)
        self._newest = self._state.step, chunks
        snapshot = self._snapshot(chunks) if due.memory else None
        checkpoint = None
        if due.store:
            commit = self._state.manifest_writer(self._folder)
            checkpoint = SaveRequest(commit, due.store if ask_store else None, read_back=due.store >= due.steps)
        self.saver.start(self._state.step, chunks, snapshot, checkpoint)
        due.memory = due.requested = False
        self._copy_seconds = time.perf_counter() - started
        self.held_seconds += self._copy_seconds

    def _snapshot(self, chunks: list[Chunk]) -> Snapshot:
        key = SnapshotKey(self._membership.generation, self._state.step, dist.get_rank())
        return Snapshot.of(key, dist.get_world_size(), self._state.samples, chunks)

    def _report_failing_store(self) -> None:
        """Report that the store fails, once it has failed for a while."""
        if not self.saver.failure:
            self._failing_since = None
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now > self._failing_since + REPORT_SECONDS:
            self._report_missed()

    def _report_missed(self) -> None:
        """Report that the store does not have the checkpoint that is due, unless just reported."""
        step, failure, now = self._due.store, self.saver.failure, time.monotonic()
        pause = REPORT_SECONDS if step > self._reported else REPEAT_SECONDS
        if failure and step and now >= self._reported_at + pause:
            self._reported, self._reported_at = step, now
            what = self._refused(step, failure)
            if self._reporter and step < self._due.steps:  # the last one is waited for
                logger.warning("%s; training continues without it", what)

    def _refused(self, step: int, failure: str) -> str:
        """Report a checkpoint that the store has not accepted, and return the message."""
        what = f"{self._folder.step_url(step)} cannot be written: {failure}"
        if self._reporter:
            self._reporter.report(FaultReport(what=Fault.STORE, step=step, message=what))
        return what


# Not a method of the manager: through what it hands to the saver it would reference itself, and with it the state.
def _before_keeping(copies: HostCopies, membership: Membership) -> None:
    copies.wait()  # until then a GPU may be busy with the update before it, and so with collectives
    membership.refuse_aborted()
    membership.before_copy()
