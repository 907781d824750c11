"""Interface between the scheduler and gangs. Plain data: importing it does not import Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause, Report, Steer, WorkerCommand
from boost_core.plan.machine import NOMINAL, Basis


class GangPhase(StrEnum):
    """The phase of a gang's life."""

    STARTING = "STARTING"  # workers are not all up yet
    WAITING = "WAITING"  # the resources for the smallest gang are not available
    TRAINING = "TRAINING"
    SAVING = "SAVING"  # all steps are done, but the store does not take the last checkpoint
    RECOVERING = "RECOVERING"  # between two steps, after a fault or for a change of layout
    PAUSED = "PAUSED"  # as ordered; its state is in the checkpoint folder
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class JobTag:
    """A job as shown in Ray's tools. Everybody with access to Ray sees it, so it contains no secret.

    Attributes:
        job_id: The job.
        attempt: Number of the gang, counted over the job's life.
        name: The job's name.
        tenant: Tenant that owns it, and whose secrets it may use.
        submitted_by: Name of the key that it was submitted with.
        url: URL of its page, if known.
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
    """What the scheduler wants of a gang, repeated with every poll. A gang makes do with less when it loses nodes.

    Attributes:
        target: The layout to take once its workers are available; ``None`` to pause.
        allowed: The layouts that it may take meanwhile, none with more ranks than the target.
        cause: Why this is the target, for the record if the gang has to change.
        avoid: Kinds of GPU, by Ray's names, with too little memory for one of these layouts.
        near: Labels of the nodes on which workers are to start; given only for some seconds.
        unusable: Nodes on which no worker could start.
        steers: Changes of values that have been requested and that the gang has not been seen to make, in order.
    """

    target: Layout | None
    allowed: tuple[Layout, ...]
    cause: Cause
    avoid: tuple[str, ...] = ()
    near: Labels = ()
    unusable: tuple[str, ...] = ()
    steers: tuple[Steer, ...] = ()


@dataclass(frozen=True)
class GangReport:
    """One report of a gang's trainer. ``sequence`` starts at 1 with each attempt."""

    sequence: int
    time: datetime
    report: Report


@dataclass(frozen=True)
class GangStatus:
    """A gang's phase, and its reports since those already read.

    A final phase comes with the last report, never before it; there are at most 1000 reports at a time.

    Attributes:
        phase: The phase.
        message: The same, human-readable.
        reports: The reports, in order.
        layout: The present layout, or the last one.
        silent_seconds: How long the gang has not answered.
    """

    phase: GangPhase
    message: str
    reports: list[GangReport]
    layout: Layout | None = None
    silent_seconds: float = 0.0


GangKey = tuple[str, int]  # a job's ID, and the number of its gang


@dataclass(frozen=True)
class PollRequest:
    """One gang's part of a poll.

    Attributes:
        gang: The gang.
        after_sequence: Return its reports after this one; those up to it are stored.
        orders: Its orders.
    """

    gang: GangKey
    after_sequence: int
    orders: Orders


# ``None``: the gang does not exist. An exception: it could not be polled, which says nothing about the others.
PollResult = GangStatus | Exception | None


@dataclass(frozen=True)
class NodeCapacity:
    """One node's resources by Ray's names (``CPU``, ``GPU``): total and free."""

    node_id: str
    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    draining: bool = False  # it will go away, so nothing new is placed there
    unusable: str | None = None  # why ranks cannot run there


@dataclass(frozen=True)
class Bundle:
    """Resources needed together on one node, by Ray's names, and labels that the node must have."""

    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)


class Gangs(Protocol):
    """Starts, watches and ends gangs. The Ray implementation is ``service.gang.ray.gangs.RayGangs``."""

    def connect(self) -> None:
        """Connect to the cluster; call this first. The calling thread must live until ``close``."""

    def close(self) -> None:
        """Disconnect from the cluster; harmless if not connected."""

    def check(self) -> None:
        """Check within seconds whether the cluster can still be reached; call this before each pass.

        Raises:
            ConnectionError: It cannot; ``close`` and ``connect`` again.
        """

    def nodes(self) -> list[NodeCapacity]:
        """Return the alive nodes on which ranks can be placed."""

    def request_nodes(self, bundles: Sequence[Bundle]) -> None:
        """Ask the cluster's autoscaler for nodes that can hold all of these at once, replacing the previous request.

        The request includes what gangs already hold. Without an autoscaler it has no effect.
        """

    def refused(self) -> bool:
        """Whether the autoscaler says that it cannot fulfil the present request."""

    def alive(self) -> set[GangKey]:
        """Return all gangs that have not been ended."""

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        """Start a gang. ``spec.checkpoint.url`` is set. Launching the same attempt twice starts one gang.

        Args:
            tag: The job and the gang's number.
            spec: The job's spec as submitted.
            orders: The first orders.
            basis: What the job's times are predicted from.
        """

    def poll(self, requests: Sequence[PollRequest]) -> list[PollResult]:
        """Give orders to many gangs at once and return their answers, in the same order.

        This takes at most a second. A gang that does not answer in time counts as STARTING until it does.
        """

    def wait_for_updates(self, seconds: float) -> set[GangKey]:
        """Wait at most ``seconds`` for gangs with news since their last poll, and return these gangs.

        Gangs whose answer to that poll was an exception, or is still pending, may be missing.
        """

    def ask(self, job_id: str, attempt: int, command: WorkerCommand) -> None:
        """Send a gang a drill or a profile; harmless if the gang does not exist."""

    def end(self, job_id: str, attempt: int) -> None:
        """End all of a gang's processes and free its placement groups; harmless if the gang does not exist."""

    def end_hung(self, job_id: str, attempt: int) -> None:
        """End a gang that does not answer, and return once none of its processes is left; takes seconds.

        Raises:
            RuntimeError: Some are left; its job must not get another gang yet.
        """
