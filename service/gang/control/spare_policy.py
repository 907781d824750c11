"""On which node a spare copy of a gang's state is kept, and when it is renewed. Pure.

Ranks keep copies for each other. If some can do so only on their own node, the state would be lost with it; then a
process on a suitable idle node keeps a copy until the ranks no longer need it. A node is suitable if those ranks, or
those of one replica, could be placed there now. Nothing on it is reserved, so others may take it.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass

from boost_core.config import JobSpec
from boost_core.messages import SpareReport
from service.gang.assignment import node_selector, worker_resources
from service.gang.control import port
from service.gang.control.record import GangRecord

LOOK_SECONDS = 10.0  # between two searches for a node
AVOID_SECONDS = 60.0  # during which a node that could not keep the copy is left alone
BUSY_SECONDS = 1800.0  # for it to start or to copy, after which its node is given up
PAUSE_SECONDS = 0.5  # minimum time from the start of one copy to that of the next
REPORT_SECONDS = 10.0  # between two reports of a newer copy


@dataclass(frozen=True)
class SpareView:
    """What matters here about a training gang.

    Attributes:
        generation: Its number.
        uncopied: The workers, by rank, whose state would be lost with their nodes.
        uncopied_nodes: The nodes of these workers.
        most_on_a_node: Largest number of ranks that would have to be placed together on one node again.
        settled: Whether it no longer needs what earlier gangs have kept.
        kept_step: The newest step that its ranks keep in memory; -1 before the first.
        unusable: Nodes on which nothing should be placed.
        avoid_kinds: Kinds of GPU that it cannot use.
        growing: Whether more replicas are about to join it.
    """

    generation: int
    uncopied: dict[int, int]
    uncopied_nodes: Set[str]
    most_on_a_node: int
    settled: bool
    kept_step: int
    unusable: Set[str]
    avoid_kinds: tuple[str, ...]
    growing: bool


class SparePolicy:
    """Decides about the spare copy of one gang.

    Args:
        spec: The job.
        record: Records what people should know.
    """

    def __init__(self, spec: JobSpec, record: GangRecord) -> None:
        self._spec, self._record = spec, record
        self._node: str | None = None  # where one has been started
        self._status: port.SpareStatus | None = None
        self._failed: dict[str, float] = {}  # until when nodes are left alone
        self._look_at = self._copy_at = self._report_at = 0.0
        self._busy_since: float | None = None

    @property
    def nodes(self) -> frozenset[str]:
        """The node it is on, if there is one."""
        return frozenset() if self._node is None else frozenset({self._node})

    def owner(self, unusable: Set[str]) -> tuple[int, ...]:
        """Return its number, if it has a copy and its node is not known to be gone."""
        status = self._status
        return (status.number,) if status and status.saved and status.node not in unusable else ()

    def observe(self, status: port.SpareStatus | None) -> None:
        """Take note of its status."""
        before, self._status = self._status, status
        if status is None or status.saved is None or (before and before.saved == status.saved):
            return
        now, (_, step) = self._record.now.seconds, status.saved
        if before is None or before.saved is None:
            self._record.log("INFO", f"a spare copy of the state of step {step} is kept on node {status.node[:12]}")
            self._report_at = now
        if now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            self._record.add(SpareReport(step=step, node=status.node))

    def look(self, ranks: int, avoid: Set[str], avoid_kinds: tuple[str, ...]) -> port.FindIdleNodes:
        """Look for suitable nodes.

        Args:
            ranks: Number of ranks that must fit on one node.
            avoid: Nodes not to use.
            avoid_kinds: Kinds of GPU that the job cannot use.
        """
        now = self._record.now.seconds
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        resources = {name: ranks * amount for name, amount in worker_resources(self._spec).items()}
        return port.FindIdleNodes(resources, node_selector(self._spec, avoid | self._failed.keys(), avoid_kinds))

    def start(self, nodes: tuple[str, ...]) -> Iterator[port.Decision]:
        """Start one on the first of the suitable nodes, while a gang trains."""
        if nodes and self._node is None:
            self._node, self._busy_since = nodes[0], self._record.now.seconds
            yield port.StartSpare(self._node)

    def tend(self, gang: SpareView) -> Iterator[port.Decision]:
        """Return what to do about it now."""
        now, status = self._record.now.seconds, self._status
        if self._node is None:
            if gang.uncopied and gang.settled and not gang.growing and now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                yield self.look(gang.most_on_a_node, gang.unusable | gang.uncopied_nodes, gang.avoid_kinds)
            return
        if status and status.up and not status.copying:
            self._busy_since = None
        failure = status and status.failure
        if self._busy_since is not None and now > self._busy_since + BUSY_SECONDS:
            failure = f"its process has made no copy in {BUSY_SECONDS:.0f} s"
        reason = failure
        if failure:
            self._failed[self._node] = now + AVOID_SECONDS
        elif self._node in gang.unusable:
            reason = "the node is gone or about to leave"
        elif gang.settled:  # otherwise the gang may have to resume from it once more
            if not gang.uncopied:
                reason = "the ranks keep their copies on other nodes now"
            elif self._node in gang.uncopied_nodes:
                reason = "ranks of the gang are on that node now"
        if reason:
            self._record.log("INFO", f"the spare copy of the state on node {self._node[:12]} is gone: {reason}")
            self.forget()
            yield port.EndSpare()
            return
        newest = gang.generation, gang.kept_step
        old = bool(gang.uncopied) and gang.kept_step >= 0 and status and (status.saved is None or status.saved < newest)
        if old and self._busy_since is None and now >= self._copy_at:
            self._copy_at, self._busy_since = now + PAUSE_SECONDS, now
            yield port.CopyToSpare(gang.generation, gang.uncopied)

    def forget(self) -> None:
        """Take note that it ends, by itself or with the gang."""
        if self._status is not None and self._status.saved is not None:
            self._record.add(SpareReport(step=None, node=None))
        self._node = self._status = self._busy_since = None
