"""What a rank of an elastic gang is given besides its job, and what its training comes to."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch.distributed import DistError

from boost_core.checkpoint.snapshot_store import Fetch, SnapshotStore
from boost_core.parallel.clock import StepParts
from boost_core.parallel.ledger import Totals
from boost_core.parallel.symmetric_memory import abort_all
from boost_core.plan.snapshots import MemoryState, SnapshotKey


class Outcome(StrEnum):
    """How a rank's training ended, if it did not fail."""

    FINISHED = "FINISHED"  # the job's last step is done
    HALTED = "HALTED"  # as asked; the state is in the memory of all ranks
    STORED = "STORED"  # the same, and in the checkpoint folder


@dataclass(frozen=True)
class StepTimes:
    """A step as one rank saw it.

    Attributes:
        step: Steps done, this one included.
        seconds: How long it took, from the end of the step before.
        busy_seconds: The part of it that was not spent waiting for other ranks.
        parts: The step itself part by part, without what was done between it and the one before.
        communication: Its collectives by kind and group, for example ``("all_reduce", "tp")``.
    """

    step: int
    seconds: float
    busy_seconds: float
    parts: StepParts
    communication: Mapping[tuple[str, str], Totals]


def _nowhere(_owner: Any, key: SnapshotKey, _regions: Any) -> Any:
    raise LookupError(f"{key} is nowhere to be fetched from")


@dataclass
class Membership:
    """A rank's place in an elastic gang; the defaults are those of one that stands alone.

    Attributes:
        generation: Number of the gang, counted over the job's life.
        snapshots: This process's snapshots, which outlive the gang.
        owner_of: Which rank keeps the copy of each rank's snapshots; empty to make none.
        recovery: The state to continue from, in memory; ``None`` to look for a checkpoint.
        fetch: Gets parts of a snapshot from its owner.
        halt: Set it to stop after a step; all ranks then stop after the same one.
        store: Set it before, to have a checkpoint written then.
        aborted: Set before collectives are aborted: what they give from then on is worth nothing.
        after_step: Told of each step on every rank, before the next.
        before_copy: Called before a copy of the state is kept anywhere; from a thread.
        after_copy: Told of each step whose state is in the memory of two ranks for every rank; from a thread.
        before_save: Called before a checkpoint is written; what it raises is taken for the store's refusal.
        while_saving: Told again and again, after the last step, what the store has said to the last checkpoint; empty
            as long as it has not failed.
        waited_seconds: How long gangs before this one have waited for the store with the last checkpoint.
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
        """Have the kernels end that wait for a rank that is gone. NCCL's collectives are for the caller to abort."""
        self.aborted.set()
        abort_all()

    def refuse_aborted(self) -> None:
        """Called once values are there that collectives had a part in, before they count for anything.

        NCCL's collectives end early when they are aborted, and nothing in their results says so.

        Raises:
            DistError: They have been aborted.
        """
        if self.aborted.is_set():
            raise DistError("its collectives were aborted, because another rank is gone")
