"""What the scheduler asks of a gang and what it hears back. Plain data: importing it does not import Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from boost_core.config import JobSpec, Layout
from boost_core.messages.commands import WorkerCommand
from boost_core.messages.reports import Cause, Report
from boost_core.plan.measured import NOMINAL, Basis


class GangPhase(StrEnum):
    """Where a gang is in its life."""

    STARTING = "STARTING"  # workers are not all up yet
    WAITING = "WAITING"  # what it needs at least is not to be had
    TRAINING = "TRAINING"
    SAVING = "SAVING"  # all steps are done, and the store does not take the last checkpoint
    RECOVERING = "RECOVERING"  # between two steps, after a fault or for a change of layout
    PAUSED = "PAUSED"  # as ordered; its state is in the checkpoint folder
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class JobTag:
    """A job as people who look at Ray are to see it. Ray shows it to all of them, so it holds no secret.

    Attributes:
        job_id: The job.
        attempt: Number of the gang, counted over the job's life.
        name: What its user calls it.
        tenant: Whose it is, and whose secrets its credentials are among.
        submitted_by: Name of the key that it was submitted with.
        url: Its page, if there is an address for it.
    """

    job_id: str
    attempt: int
    name: str
    tenant: str
    submitted_by: str
    url: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.job_id}, {self.submitted_by} of {self.tenant})"


Labels = tuple[tuple[str, str], ...]  # by Ray's names


@dataclass(frozen=True)
class Orders:
    """What the scheduler wants of a gang, told again with every poll. A gang does with less when it loses nodes.

    Attributes:
        target: The layout to take when workers can be had for it; ``None`` to pause.
        allowed: The layouts that it may take meanwhile, none larger than the target's number of ranks.
        cause: Why the target is what it is, for the record if the gang has to change.
        avoid: Kinds of GPU, by Ray's names, whose memory is too small for one of these layouts.
        near: Labels of the nodes on which workers are to start; said for some seconds only.
    """

    target: Layout | None
    allowed: tuple[Layout, ...]
    cause: Cause
    avoid: tuple[str, ...] = ()
    near: Labels = ()


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
    layout: Layout | None = None  # that it trains at, or trained at last


GangKey = tuple[str, int]  # a job's id, and the number of its gang


@dataclass(frozen=True)
class PollRequest:
    """What one gang is told and asked in a poll.

    Attributes:
        gang: Which.
        after_sequence: Its reports after this one are wanted; those up to it are stored.
        orders: What it is to do.
    """

    gang: GangKey
    after_sequence: int
    orders: Orders


# ``None``: there is no such gang. An exception: it could not be asked, which says nothing about the others.
PollResult = GangStatus | Exception | None


@dataclass(frozen=True)
class NodeCapacity:
    """One node's resources by Ray's names (``CPU``, ``GPU``): in all, and not yet taken."""

    node_id: str
    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    draining: bool = False  # it will go away: nothing new is placed there


@dataclass(frozen=True)
class Bundle:
    """Resources that are needed together on one node, by Ray's names, and labels that the node must have."""

    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)


class Gangs(Protocol):
    """Starts, watches and ends gangs. The Ray implementation is ``service.gang.ray.gangs.RayGangs``."""

    def connect(self) -> None:
        """Reach the cluster; comes before all else. The calling thread must live until ``close``."""

    def close(self) -> None:
        """Leave the cluster; harmless when it was not reached."""

    def check(self) -> None:
        """Find out whether the cluster is still in reach, within seconds; comes before a pass.

        Raises:
            ConnectionError: It is not; ``close``, and ``connect`` anew.
        """

    def nodes(self) -> list[NodeCapacity]:
        """The alive nodes of the cluster on which ranks can be placed."""

    def request_nodes(self, bundles: Sequence[Bundle]) -> None:
        """Ask the cluster's autoscaler for nodes that can hold all of these at once, instead of what was asked before.

        What gangs have is part of it. Without an autoscaler nothing comes of it.
        """

    def refused(self) -> bool:
        """Whether the autoscaler says that it cannot give what it is asked for now."""

    def alive(self) -> set[GangKey]:
        """Every gang that has not been ended."""

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        """Start a gang. ``spec.checkpoint.url`` is set. Launching the same attempt twice starts one gang.

        Args:
            tag: The job and the gang's number.
            spec: What the job's user has said.
            orders: The first orders.
            basis: What the job's seconds are predicted by.
        """

    def poll(self, requests: Sequence[PollRequest]) -> list[PollResult]:
        """Give orders to many gangs at once; what each of them answers, in their order.

        That takes a second at most. A gang that does not answer in time is STARTING until it does.
        """

    def wait_for_updates(self, seconds: float) -> set[GangKey]:
        """Wait at most ``seconds`` for gangs with news since their last poll; returns these.

        A gang whose answer to that poll was an exception, or is still to come, need not be among them.
        """

    def ask(self, job_id: str, attempt: int, command: WorkerCommand) -> None:
        """Have a gang do something besides training; harmless if there is none."""

    def end(self, job_id: str, attempt: int) -> None:
        """End all of a gang's processes and free its placement groups; harmless if there is none."""
