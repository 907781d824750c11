"""What a rank of an elastic gang is given besides its job, and the outcome of its training."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch.distributed import DistError

from boost_core.checkpoint.snapshot_store import Fetch, SnapshotStore
from boost_core.parallel.communicator import StepParts, Totals
from boost_core.parallel.symmetric_memory import abort_all
from boost_core.plan.snapshots import MemoryState, SnapshotKey


class Outcome(StrEnum):
    """How a rank's training ended, if it did not fail."""

    FINISHED = "FINISHED"  # the job's last step is done
    HALTED = "HALTED"  # as requested; the state is in the memory of all ranks
    STORED = "STORED"  # the same, and also in the checkpoint folder


@dataclass(frozen=True)
class StepTimes:
    """A step as one rank saw it.

    Attributes:
        step: Steps done, this one included.
        seconds: Its duration, from the end of the previous step.
        busy_seconds: The part not spent waiting for other ranks.
        parts: The step itself, part by part, without what happened between it and the previous one.
        communication: Its collectives by kind and group, for example ``("all_reduce", "tp")``.
    """

    step: int
    seconds: float
    busy_seconds: float
    parts: StepParts
    communication: Mapping[tuple[str, str], Totals]


def _nowhere(_owner: Any, key: SnapshotKey, _regions: Any) -> Any:
    raise LookupError(f"{key} cannot be fetched from anywhere")


@dataclass
class Membership:
    """A rank's place in an elastic gang; the defaults are for a rank without one.

    Attributes:
        generation: Number of the gang, counted over the job's life.
        snapshots: This process's snapshots, which outlive the gang.
        owner_of: Which rank keeps the copy of each rank's snapshots; empty to make none.
        recovery: The state to continue from, in memory; ``None`` to look for a checkpoint.
        fetch: Gets parts of a snapshot from its owner.
        halt: Set to stop after a step; all ranks then stop after the same one.
        store: Set before ``halt`` to also have a checkpoint written then.
        aborted: Set before collectives are aborted: from then on their results are invalid.
        after_step: Called with each step on every rank, before the next.
        before_copy: Called before a copy of the state is kept anywhere; from a thread.
        after_copy: Called with each step whose state is held twice for every rank; from a thread.
        before_save: Called before a checkpoint is written; an exception counts as the store's refusal.
        while_saving: Called repeatedly after the last step with the store's error for the last checkpoint; empty
            as long as it has not failed.
        waited_seconds: How long previous gangs have waited for the store to take the last checkpoint.
    """

    generation: int = 1
    snapshots: SnapshotStore = field(default_factory=SnapshotStore)
    owner_of: Sequence[int] = ()
    recovery: MemoryState[Any] | None = None
    fetch: Fetch = _nowhere
    halt: threading.Event = field(default_factory=threading.Event)
    store: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)
    after_step: Callable[[StepTimes], None] = lambda _: None
    before_copy: Callable[[], None] = lambda: None
    after_copy: Callable[[int], None] = lambda _: None
    before_save: Callable[[], None] = lambda: None
    while_saving: Callable[[str], None] = lambda _: None
    waited_seconds: float = 0.0

    def abort(self) -> None:
        """End the kernels that wait for a rank that is gone. NCCL's collectives are left for the caller to abort."""
        self.aborted.set()
        abort_all()

    def refuse_aborted(self) -> None:
        """Check values that collectives contributed to, before they are used.

        NCCL's collectives end early when they are aborted, and nothing in their results says so.

        Raises:
            DistError: They have been aborted.
        """
        if self.aborted.is_set():
            raise DistError("its collectives were aborted, because another rank is gone")
