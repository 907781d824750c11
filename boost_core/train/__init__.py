"""The trainer: state, step and loop."""

from boost_core.checkpoint.snapshot_store import SnapshotStore, StateLost
from boost_core.parallel.clock import StepParts
from boost_core.parallel.ledger import Totals
from boost_core.train.checkpoint_manager import LastSaveFailed
from boost_core.train.garbage import release_broken_step
from boost_core.train.loop import train
from boost_core.train.membership import Membership, Outcome, StepTimes
from boost_core.train.profiling import StepProfiler

__all__ = [
    "LastSaveFailed",
    "Membership",
    "Outcome",
    "SnapshotStore",
    "StateLost",
    "StepParts",
    "StepProfiler",
    "StepTimes",
    "Totals",
    "release_broken_step",
    "train",
]
