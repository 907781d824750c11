"""What a gang's supervisor and its workers tell each other, and what workers need of their nodes.

Plain data, free of torch and of Ray.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from boost_core import __version__
from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.messages import Report, Steer
from boost_core.plan.machine import NOMINAL, Basis
from boost_core.plan.memory import rank_memory
from service.gang.control.fault_detection import Heartbeat
from service.gang.status import JobTag
from service.logs import LogFormat, write_logs
from service.security.access import Access


@dataclass(frozen=True)
class GangContext:
    """Settings of the service that a gang's workers need and cannot read for themselves.

    Attributes:
        tag: The job, as shown to people in Ray's tools.
        access: What the workers may reach for the job.
        metrics_ports: Each rank serves its metrics on the first free one of these ports; empty: no metrics.
        log_format: The format of a line in the processes' logs.
        version: Version of the service, which the workers must have too.
        basis: What the job's times are predicted from.
    """

    tag: JobTag
    access: Access
    metrics_ports: range
    log_format: LogFormat
    version: str = __version__
    basis: Basis = NOMINAL

    def write_logs(self, rank: int | None = None) -> None:
        """Start logging in one of the gang's processes, or start logging as a rank."""
        write_logs(self.log_format, job=self.tag.job_id, attempt=self.tag.attempt, rank=rank)


@dataclass(frozen=True)
class WorkerPlace:
    """Where a process runs.

    Attributes:
        node: Ray's ID of its node.
        address: The node's address.
        accelerators: The GPUs that it may use.
        pid: Its process ID.
        host: Name of its host.
        actor: Ray's ID of its actor.
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
        prefix: Prefix of all the gang's keys; random, so that a process of an earlier gang finds none of them. It hides
            nothing: the store lists its keys to whoever reaches the port.
    """

    address: str
    port: int
    prefix: str


@dataclass(frozen=True)
class Assignment:
    """What a worker needs to know to train as a rank of a gang.

    Attributes:
        generation: Number of the gang, counted over the job's life.
        spec: The job at the gang's layout.
        rank: This rank.
        rendezvous: Where the ranks meet.
        owner_of: For each rank, the rank that keeps a copy of its snapshots.
        waited_seconds: How long the job has waited for the store to take its last checkpoint.
        gpus: The GPUs of its tensor parallel group, in the order of the ranks.
        steers: Changes of values that the job is still to make, the same for all ranks.
    """

    generation: int
    spec: JobSpec
    rank: int
    rendezvous: Rendezvous
    owner_of: tuple[int, ...]
    waited_seconds: float = 0.0
    gpus: tuple[str, ...] = ()
    steers: tuple[Steer, ...] = ()


class End(StrEnum):
    """How a rank's training ended."""

    FINISHED = "FINISHED"
    HALTED = "HALTED"
    STORED = "STORED"  # halted, with its state in the checkpoint folder
    LASTING = "LASTING"  # failed, and would fail again
    CONNECTION = "CONNECTION"  # failed because another rank is gone
    STATE_LOST = "STATE_LOST"  # could not load the state from memory
    DEVICE = "DEVICE"  # failed because its GPU did, which its process cannot use any more
    FAILED = "FAILED"


FAILURES = frozenset({End.LASTING, End.CONNECTION, End.STATE_LOST, End.DEVICE, End.FAILED})


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's training.

    Attributes:
        how: The kind of end.
        message: Why it failed, human-readable; empty if it did not.
        reusable: Whether the process can be a rank again.
    """

    how: End
    message: str = ""
    reusable: bool = True


@dataclass(frozen=True)
class Message:
    """A message from a worker to its supervisor.

    Attributes:
        worker: Number of the worker.
        rank: Its rank; ``None`` before its first gang.
        generation: Number of its gang.
        reports: Reports with their times, in order.
        beat: Its newest step, if it is new.
        kept_step: The newest step kept in memory twice for every rank, if it is new.
        going_on: Progress other than a step or a report: empty, or the store's error for the last checkpoint, which
            is waited for; ``None`` if there is nothing new.
        failed: How the rank's training is about to end, said before what it takes to end it; ``None``: it has not
            failed.
        others: Messages of other ranks of its node that say no more than how far they are, in order.
    """

    worker: int
    rank: int | None
    generation: int
    reports: list[tuple[datetime, Report]]
    beat: Heartbeat | None
    kept_step: int | None
    going_on: str | None = None
    failed: RankEnd | None = None
    others: tuple["Message", ...] = ()


def require_version(other: str, who: str) -> None:
    """Check that another process has this version: Ray's nodes must run the service's.

    Args:
        other: Its version.
        who: What has that version, for the message.

    Raises:
        ValueError: The versions differ.
    """
    if other != __version__:
        differ = f"{who} has BOOST {other}, but this process has {__version__}"
        advice = "run the same version on the API and on all of Ray's nodes"
        raise ValueError(f"{differ}; {advice}: upgrade the older one, or roll back the newer one")


# Ranks and GPUs


class MisplacedRanks(RuntimeError):
    """Processes are not placed as the gang's order of ranks requires."""


def ordered(places: Sequence[WorkerPlace], tensor: int) -> list[int]:
    """Return a replica's processes in rank order: group by group, and within a group by GPU, then by process.

    Args:
        places: Where each process runs, tensor parallel group after group.
        tensor: Size of a group.

    Raises:
        MisplacedRanks: A group spans several nodes.
    """
    gpus = [sorted((int(gpu) if gpu.isdigit() else 0, gpu) for gpu in place.accelerators) for place in places]
    order: list[int] = []
    for begin in range(0, len(places), tensor):
        group = range(begin, begin + tensor)
        nodes = sorted({places[number].node for number in group})
        if len(nodes) > 1:
            where = f"group of ranks {begin} to {begin + tensor - 1} spans nodes {', '.join(nodes)}"
            raise MisplacedRanks(f"the tensor parallel {where}; its placement group should have kept it on one")
        order += sorted(group, key=lambda number: (gpus[number], places[number].pid))
    return order


def visible_gpus(groups: Sequence[Sequence[WorkerPlace]]) -> list[tuple[str, ...]]:
    """Return the GPUs that each rank is to see: all those of its tensor parallel group, which is on one node.

    Ray shows each worker only its own GPU, as number 0. Ranks can reach each other's memory if they see each other's
    GPUs under the same numbers. GPUs of other groups stay hidden: CUDA looks only once, and what it has seen must
    stay valid when other groups come and go.

    Args:
        groups: Places of ranks, tensor parallel group after group.
    """
    return [tuple(dict.fromkeys(gpu for each in group for gpu in each.accelerators)) for group in groups for _ in group]


# What workers need of their nodes, by Ray's names

ON_THE_HEAD = {"node:__internal_head__": 0.001}  # for what should not go down with a gang's node
_NONE_OF = "!in("  # Ray's syntax for values that a label must not have


def worker_resources(spec: JobSpec) -> dict[str, float]:
    """Return one worker's bundle, for example ``{"CPU": 1, "GPU": 1}``."""
    gpus = {"GPU": spec.resources.gpus_per_worker} if spec.resources.gpus_per_worker else {}
    return {"CPU": spec.resources.cpus_per_worker, **gpus}


def node_selector(
    spec: JobSpec, avoid: Collection[str], avoid_kinds: Collection[str] = (), near: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """Return the constraints on a node, in Ray's syntax for label selectors.

    Args:
        spec: The job.
        avoid: Nodes not to use.
        avoid_kinds: Kinds of GPU not to use; empty if the job names its kind.
        near: Further labels that the node must have.
    """
    selector = {**dict(near), **spec.resources.node_labels}
    if spec.resources.accelerator_type:
        selector[ACCELERATOR_LABEL] = spec.resources.accelerator_type
    if avoid_kinds:
        selector[ACCELERATOR_LABEL] = f"{_NONE_OF}{','.join(sorted(avoid_kinds))})"
    if avoid:
        selector["ray.io/node-id"] = f"{_NONE_OF}{','.join(sorted(avoid))})"
    return selector


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels matches a selector from ``node_selector``."""
    for name, value in selector.items():
        if value.startswith(_NONE_OF):
            if labels.get(name) in value.removeprefix(_NONE_OF).removesuffix(")").split(","):
                return False
        elif labels.get(name) != value:
            return False
    return True


def bytes_to_keep(spec: JobSpec, layout: Layout) -> int:
    """Return the bytes of node memory needed to take over a rank's state: the state, and two copies to store."""
    # Such processes have no GPU: what the gang has in its hosts' memory is theirs to hold, too.
    needed = rank_memory(spec.at(layout).with_parallelism(recompute="none", optimizer_offload=0.0), layout)
    return 3 * (needed.weights + needed.gradients + needed.optimizer)


def gang_in_words(workers: int, resources: dict[str, float]) -> str:
    """Format a gang's size, for example ``2 × {CPU: 1}``."""
    bundle = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
    return f"{workers} × {{{bundle}}}"
