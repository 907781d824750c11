"""What the scheduler asks of a gang and what it hears back. Plain data: importing it does not import Ray."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from boost_core.config import JobSpec
from boost_core.config.reports import Report


class GangPhase(StrEnum):
    """Where a gang is in its life."""

    STARTING = "STARTING"  # placement group or workers are not all up yet
    TRAINING = "TRAINING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class GangReport:
    """One report of a gang's trainer. ``sequence`` starts at 1 with each attempt."""

    sequence: int
    time: datetime
    report: Report


@dataclass(frozen=True)
class GangStatus:
    """A gang's phase and reports that came after those already read.

    A final phase is told together with the last report, never before; there are at most 1000 reports at once.
    """

    phase: GangPhase
    message: str
    reports: list[GangReport]


@dataclass(frozen=True)
class NodeCapacity:
    """One node's resources by Ray's names (``CPU``, ``GPU``): in all, and not yet taken."""

    node_id: str
    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)


class Gangs(Protocol):
    """Starts, watches and ends gangs. The Ray implementation is ``service.gang.ray_gangs.RayGangs``."""

    def connect(self) -> None:
        """Reach the cluster; comes before all else. The calling thread must live until ``close``."""

    def close(self) -> None:
        """Leave the cluster."""

    def nodes(self) -> list[NodeCapacity]:
        """The alive nodes of the cluster."""

    def alive(self) -> set[tuple[str, int]]:
        """Job id and attempt of every gang that has not been ended."""

    def launch(self, job_id: str, attempt: int, spec: JobSpec) -> None:
        """Start a gang. ``spec.checkpoint.url`` is set. Launching the same attempt twice starts one gang."""

    def poll(self, job_id: str, attempt: int, after_sequence: int) -> GangStatus | None:
        """The gang's status with reports after ``after_sequence``; ``None`` if there is no such gang."""

    def end(self, job_id: str, attempt: int) -> None:
        """End all of a gang's processes and free its placement group; harmless if there is none."""
