"""Replicas on Ray: a process a rank, in a placement group with a bundle a tensor parallel group.

Processes that do no more than keep a job's state are in no placement group, and take neither CPUs nor GPUs.
"""

import os
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from service.gang.assignment import SnapshotOwner, WorkerPlace, ordered
from service.gang.context import GangContext
from service.gang.resources import worker_resources

CALLS_AT_ONCE = 8  # of a process: training, and what is asked of it meanwhile
MOST_FAILED_STARTS = 5  # of a process, in a row

_numbers = count(1)  # of replicas and processes, over all of a gang's life


class CannotStart(RuntimeError):
    """The processes of a replica end again and again before they are up."""


class RankActor:
    """Loads what a rank needs in a process of its own, so that its supervisor need not import torch.

    Args:
        title: What Ray's dashboard shows of it.
        arguments: Those of ``service.gang.rank.RankProcess``.
    """

    def __init__(self, title: str, *arguments: Any) -> None:
        from service.gang.rank import RankProcess

        self._title = title
        self._process = RankProcess(*arguments)

    def __repr__(self) -> str:
        return self._title

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of it."""
        return getattr(self._process, method)(*arguments)


class Places(Protocol):
    """Where the processes of a replica may be."""

    def reserved(self) -> bool:
        """Whether what they need is reserved."""

    def options(self, place: int) -> dict[str, Any]:
        """What to tell Ray of the process at a place: what it takes, and where."""

    def in_order(self, places: Sequence[WorkerPlace]) -> list[int]:
        """Numbers of the processes in the order of their ranks, by where they are."""

    def free(self) -> None:
        """Give it back."""


class Reservation:
    """A placement group with a bundle a tensor parallel group.

    Args:
        spec: The job; its parallelism has the replica's layout.
        selector: What its nodes must have, or must not be; as ``node_selector`` says it.
        name: What Ray's dashboard shows of it.
    """

    def __init__(self, spec: JobSpec, selector: Mapping[str, str], name: str) -> None:
        self._tensor, pipeline = spec.parallelism.tensor_parallel_size, spec.parallelism.pipeline_parallel_size
        self._each = worker_resources(spec)
        bundle = {resource: amount * self._tensor for resource, amount in self._each.items()}
        self._group = placement_group(
            [bundle] * pipeline,
            strategy=spec.resources.placement,
            name=name,
            bundle_label_selector=[dict(selector)] * pipeline if selector else None,
        )

    def reserved(self) -> bool:
        """Whether the group is there."""
        # Ray's own ready() would start a process on the nodes to find out, which takes seconds where they are busy.
        return bool(placement_group_table(self._group).get("state") == "CREATED")

    def options(self, place: int) -> dict[str, Any]:
        """A rank's part of its bundle."""
        bundle = place // self._tensor
        return {
            "num_cpus": self._each["CPU"],
            "num_gpus": self._each.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        }

    def in_order(self, places: Sequence[WorkerPlace]) -> list[int]:
        """Tensor parallel groups in turn, each on one node.

        Raises:
            MisplacedRanks: One is not.
        """
        return ordered(places, self._tensor)

    def free(self) -> None:
        """Remove the group."""
        with suppress(RayError):  # a cluster that is going down frees it by itself
            remove_placement_group(self._group)


class Unreserved:
    """Places for processes that take neither CPUs nor GPUs.

    Args:
        nodes: Where each should be, as long as that node is there.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes

    def reserved(self) -> bool:
        """They need nothing."""
        return True

    def options(self, place: int) -> dict[str, Any]:
        """Nothing, on its node."""
        there = NodeAffinitySchedulingStrategy(self._nodes[place], soft=True)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": there}

    def in_order(self, places: Sequence[WorkerPlace]) -> list[int]:
        """As they are: they exchange little."""
        return list(range(len(places)))

    def free(self) -> None:
        """Nothing is reserved."""


class Member:
    """One process of a replica.

    Args:
        options: What it takes, and where it is to be, in Ray's words.
        supervisor: Handle of the ``Supervisor`` actor.
        context: What it is told of its surroundings.

    Attributes:
        number: Its number among all processes of the gang.
        where: Where it is; ``None`` until it is up.
    """

    def __init__(self, options: Mapping[str, Any], supervisor: Any, context: GangContext) -> None:
        self.number = next(_numbers)
        self._actor: Any = (
            ray.remote(RankActor)
            .options(max_concurrency=CALLS_AT_ONCE, **options)
            .remote(f"{context.tag}: worker {self.number}", self.number, supervisor, context)
        )
        self._placing = self.call("place")
        self.where: WorkerPlace | None = None

    @property
    def owner(self) -> SnapshotOwner:
        """The process as one that has snapshots."""
        return SnapshotOwner(self.number, self._actor)

    def call(self, method: str, *arguments: Any) -> ray.ObjectRef[Any]:
        """Call a method of the process's ``RankProcess``; its result comes later."""
        result: ray.ObjectRef[Any] = self._actor.call.remote(method, *arguments)
        return result

    def is_up(self) -> bool:
        """Whether the process answers.

        Raises:
            RayActorError: It has ended.
        """
        if self.where is None and ray.wait([self._placing], timeout=0)[0]:
            self.where = ray.get(self._placing)
        return self.where is not None

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self._actor)

    def kill_from_outside(self) -> None:
        """The same for a process that may not hear: Ray asks the process itself, and one that is stopped never does."""
        self.kill()
        if self.where is not None:
            there = NodeAffinitySchedulingStrategy(self.where.node, soft=False)
            _kill_process.options(scheduling_strategy=there).remote(self.where.pid)


def node_selector(spec: JobSpec, avoid: Collection[str], avoid_kinds: Collection[str] = ()) -> dict[str, str]:
    """What a node must have, or must not be, as Ray's labels say it.

    Args:
        spec: The job.
        avoid: Nodes.
        avoid_kinds: Kinds of GPU; none if the job names the one that it takes.
    """
    selector = dict(spec.resources.node_labels)
    if spec.resources.accelerator_type:
        selector[ACCELERATOR_LABEL] = spec.resources.accelerator_type
    if avoid_kinds:
        selector[ACCELERATOR_LABEL] = f"!in({','.join(sorted(avoid_kinds))})"
    if avoid:
        selector["ray.io/node-id"] = f"!in({','.join(sorted(avoid))})"
    return selector


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Replica:
    """The processes of one data parallel rank, tensor parallel group after group.

    Args:
        spec: The job; its parallelism has the replica's layout.
        selector: What its nodes must have, or must not be; as ``node_selector`` says it.
        supervisor: Handle of the ``Supervisor`` actor.
        context: What its processes are told of their surroundings.
        keep_on: For processes that are to keep the state alone: the node of each.

    Attributes:
        number: Its number.
        layout: Its own: dp is 1.
        selector: As given.
        keeps: Whether its processes only keep the state.
    """

    def __init__(
        self, spec: JobSpec, selector: Mapping[str, str], supervisor: Any, context: GangContext,
        keep_on: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._supervisor, self._context = supervisor, context
        self.selector, self.keeps = dict(selector), bool(keep_on)
        self.number = next(_numbers)
        self.layout = Layout.of(spec.parallelism).per_replica
        tag = context.tag
        name = f"{tag.name} ({tag.job_id}-{tag.attempt}-{self.number})"  # no two have one name
        self._places: Places = Unreserved(keep_on) if keep_on else Reservation(spec, selector, name)
        self._placed = False
        self._members: list[Member] = []
        self._failed_starts: Counter[int] = Counter()

    @property
    def placed(self) -> bool:
        """Whether its resources are reserved; its processes are started then."""
        if not self._placed and self._places.reserved():
            self._placed = True
            self._members = [self._started(place) for place in range(self.layout.world_size)]
        return self._placed

    @property
    def members(self) -> Sequence[Member]:
        """Its processes, tensor parallel group after group; empty until it is placed."""
        return self._members

    def ready(self) -> bool:
        """Whether all its processes are up. One that has ended while it started is started again.

        Raises:
            CannotStart: That happens again and again.
        """
        up = [self._is_up(place) for place in range(len(self._members))] if self.placed else [False]
        return all(up)

    def _is_up(self, place: int) -> bool:
        try:
            up = self._members[place].is_up()
        except RayActorError as error:
            self._failed_starts[place] += 1
            if self._failed_starts[place] >= MOST_FAILED_STARTS:
                raise CannotStart(f"a worker ended {MOST_FAILED_STARTS} times while it started: {error}") from error
            self.start_again(self._members[place])
            return False
        if up:
            self._failed_starts[place] = 0
        return up

    def start_again(self, member: Member) -> None:
        """Put a new process into the place of one that has ended, on the same resources."""
        place = self._members.index(member)
        self._members[place] = self._started(place)

    def in_order(self) -> list[Member]:
        """Its processes in the order of their ranks.

        Raises:
            MisplacedRanks: A tensor parallel group is not on one node.
        """
        places = [member.where for member in self._members if member.where is not None]
        return [self._members[number] for number in self._places.in_order(places)]

    def nodes(self) -> set[str]:
        """The nodes on which its processes are, as far as they are up."""
        return {member.where.node for member in self._members if member.where is not None}

    def give_up(self) -> None:
        """End its processes and free its resources."""
        for member in self._members:
            member.kill()
        self._places.free()

    def _started(self, place: int) -> Member:
        return Member(self._places.options(place), self._supervisor, self._context)
