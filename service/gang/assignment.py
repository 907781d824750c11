"""What supervisor and workers tell each other. Plain data, free of torch and of Ray."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from boost_core import __version__
from boost_core.config import JobSpec
from boost_core.messages.reports import Report
from boost_core.plan.measured import NOMINAL, Basis
from service.gang.control.watch import Heartbeat
from service.gang.status import JobTag
from service.logs import GangLogs
from service.security.secrets import SecretReference


@dataclass(frozen=True)
class GangContext:
    """Settings of the service that a gang's workers need and cannot read for themselves.

    Attributes:
        tag: The job, for people who look at Ray.
        secret: What the ranks reach data and checkpoints with; ``None`` for their nodes' own means.
        metrics_ports: Each rank serves its metrics on the first of these that is free; none: not at all.
        logs: How the processes write their logs.
        version: Of the service, which the workers' has to be.
        basis: What the job's seconds are predicted by.
    """

    tag: JobTag
    secret: SecretReference | None
    metrics_ports: range
    logs: GangLogs
    version: str = __version__
    basis: Basis = NOMINAL


@dataclass(frozen=True)
class WorkerPlace:
    """Where a process is.

    Attributes:
        node: Ray's id of its node.
        address: The node's address.
        accelerators: The GPUs that it may use.
        pid: Its process id.
        host: Its host's name.
        actor: Ray's id of its actor.
        metrics: ``host:port`` of its metrics; ``None`` if it serves none.
    """

    node: str
    address: str
    accelerators: tuple[str, ...]
    pid: int
    host: str
    actor: str
    metrics: str | None = None


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a gang meet: torch's key-value store, in the process of rank 0.

    Attributes:
        address: The only address that it listens on.
        port: Its port.
        prefix: Of all the gang's keys; random, and known to those alone whom Ray has handed it to.
    """

    address: str
    port: int
    prefix: str


@dataclass(frozen=True)
class Assignment:
    """A rank of a gang.

    Attributes:
        generation: Number of the gang, counted over the job's life.
        spec: The job at the gang's layout.
        rank: This rank.
        rendezvous: Where the ranks meet.
        owner_of: Which rank keeps the copy of each rank's snapshots.
        waited_seconds: How long the job has waited for the store with its last checkpoint.
        gpus: Those of its tensor parallel group, in the order of the ranks, on which all of these compute.
    """

    generation: int
    spec: JobSpec
    rank: int
    rendezvous: Rendezvous
    owner_of: tuple[int, ...]
    waited_seconds: float = 0.0
    gpus: tuple[str, ...] = ()


class End(StrEnum):
    """How a rank's training ended."""

    FINISHED = "FINISHED"
    HALTED = "HALTED"
    STORED = "STORED"  # halted, with its state in the checkpoint folder
    LASTING = "LASTING"  # failed, and would again
    CONNECTION = "CONNECTION"  # failed because another rank is gone
    STATE_LOST = "STATE_LOST"  # could not load what was in memory
    FAILED = "FAILED"


FAILURES = frozenset({End.LASTING, End.CONNECTION, End.STATE_LOST, End.FAILED})


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's training.

    Attributes:
        how: In a word.
        message: Why, for people, if it failed.
        reusable: Whether the process can be a rank again.
    """

    how: End
    message: str = ""
    reusable: bool = True


@dataclass(frozen=True)
class Message:
    """What a worker says to its supervisor.

    Attributes:
        worker: Its number.
        rank: Its rank; ``None`` before its first gang.
        generation: Number of its gang.
        reports: Reports with their times, in order.
        beat: Its newest step, if it is new.
        kept_step: The newest step that is in memory twice for every rank, if it is new.
        saving: After the last step, what the store has said to its checkpoint; empty as long as it has not failed;
            ``None`` if there are steps to do, or nothing new.
    """

    worker: int
    rank: int | None
    generation: int
    reports: list[tuple[datetime, Report]]
    beat: Heartbeat | None
    kept_step: int | None
    saving: str | None = None


class MisplacedRanks(RuntimeError):
    """Processes are not where the gang's order of ranks needs them."""


def ordered(places: Sequence[WorkerPlace], tensor: int) -> list[int]:
    """Numbers of a replica's processes in the order of their ranks: groups in turn, within one by GPU, then by process.

    Args:
        places: Where each is, tensor parallel group after group.
        tensor: Size of a group.

    Raises:
        MisplacedRanks: A group is not on one node.
    """
    order: list[int] = []
    for begin in range(0, len(places), tensor):
        group = range(begin, begin + tensor)
        nodes = sorted({places[number].node for number in group})
        if len(nodes) > 1:
            raise MisplacedRanks(
                f"the tensor parallel group of ranks {begin} to {begin + tensor - 1} lies on nodes {', '.join(nodes)}; "
                "its placement group should have kept it on one"
            )
        order += sorted(group, key=lambda number: (_numeric(places[number].accelerators), places[number].pid))
    return order


def visible_gpus(groups: Sequence[Sequence[WorkerPlace]]) -> list[tuple[str, ...]]:
    """The GPUs that each rank is to see: all of its tensor parallel group's, which is on one node, by rank.

    Ray shows each worker its own GPU alone, as number 0. Ranks reach each other's memory where they see each other's
    GPUs under the same numbers. Those of other groups stay out of sight: CUDA looks once, and what it has seen then is
    to hold when others come and go.

    Args:
        groups: Places of ranks, tensor parallel group after group.
    """
    return [
        tuple(dict.fromkeys(gpu for place in group for gpu in place.accelerators)) for group in groups for _ in group
    ]


def _numeric(accelerators: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((int(each) if each.isdigit() else 0, each) for each in accelerators))
