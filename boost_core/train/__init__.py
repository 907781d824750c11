"""The trainer: state, step and loop."""

from boost_core.checkpoint.peer_memory import SnapshotStore, StateLost
from boost_core.parallel.communicator import StepParts, Totals
from boost_core.train.checkpoint_manager import LastSaveFailed
from boost_core.train.loop import train
from boost_core.train.profiling import StepProfiler, release_broken_step
from boost_core.train.state import Membership, Outcome, StepTimes

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
