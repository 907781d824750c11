"""On which node a spare copy of a gang's state is kept, and when it is renewed. Pure.

Ranks keep copies for each other. If some can do so only on their own node, the state would be lost with it; then a
process on a suitable idle node keeps a copy until the ranks no longer need it. A node is suitable if those ranks, or
those of one replica, could be placed there now. Nothing on it is reserved, so others may take it.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from boost_core.config import JobSpec, Layout
from boost_core.messages import SpareReport
from service.gang.assignment import node_selector, worker_resources
from service.gang.control import port
from service.gang.control.policy import Formation
from service.gang.control.record import GangRecord

LOOK_SECONDS = 10.0  # between two searches for a node
AVOID_SECONDS = 60.0  # during which a node that could not keep the copy is left alone
BUSY_SECONDS = 1800.0  # for it to start or to copy, after which its node is given up
PAUSE_SECONDS = 0.5  # minimum time from the start of one copy to that of the next
REPORT_SECONDS = 10.0  # between two reports of a newer copy


@dataclass
class SparePolicy:
    """Decides about the spare copy of one gang.

    Args:
        spec: The job.
        record: Records what people should know.

    Attributes:
        node: The node on which one has been started.
    """

    spec: JobSpec
    record: GangRecord
    node: str | None = None
    _status: port.SpareStatus | None = None
    _failed: dict[str, float] = field(default_factory=dict)  # until when nodes are left alone
    _look_at: float = 0.0
    _copy_at: float = 0.0
    _report_at: float = 0.0
    _busy_since: float | None = None

    def owner(self, unusable: Set[str]) -> tuple[int, ...]:
        """Return its number, if it has a copy and its node is not known to be gone."""
        status = self._status
        return (status.number,) if status and status.saved and status.node not in unusable else ()

    def observe(self, status: port.SpareStatus | None) -> None:
        """Take note of its status."""
        before, self._status = self._status, status
        if status is None or status.saved is None or (before and before.saved == status.saved):
            return
        now, (_, step) = self.record.now.seconds, status.saved
        if before is None or before.saved is None:
            self.record.log("INFO", f"a spare copy of the state of step {step} is kept on node {status.node[:12]}")
            self._report_at = now
        if now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            self.record.add(SpareReport(step=step, node=status.node))

    def look(self, ranks: int, avoid: Set[str], avoid_kinds: tuple[str, ...]) -> port.FindIdleNodes:
        """Look for suitable nodes.

        Args:
            ranks: Number of ranks that must fit on one node.
            avoid: Nodes not to use.
            avoid_kinds: Kinds of GPU that the job cannot use.
        """
        now = self.record.now.seconds
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        resources = {name: ranks * amount for name, amount in worker_resources(self.spec).items()}
        return port.FindIdleNodes(resources, node_selector(self.spec, avoid | self._failed.keys(), avoid_kinds))

    def start(self, nodes: tuple[str, ...]) -> Iterator[port.Decision]:
        """Start one on the first of the suitable nodes, while a gang trains."""
        if nodes and self.node is None:
            self.node, self._busy_since = nodes[0], self.record.now.seconds
            yield port.StartSpare(self.node)

    def tend(
        self, gang: Formation, layout: Layout, unusable: Set[str], avoid_kinds: tuple[str, ...], growing: bool
    ) -> Iterator[port.Decision]:
        """Return what to do about it now.

        Args:
            gang: The training gang.
            layout: Its layout.
            unusable: Nodes on which nothing should be placed.
            avoid_kinds: Kinds of GPU that it cannot use.
            growing: Whether more replicas are about to join it.
        """
        now, status, settled = self.record.now.seconds, self._status, self.record.settled
        nodes = [gang.places[rank].node for rank in gang.uncopied]  # of the ranks whose state would be lost with them
        if self.node is None:
            if nodes and settled and not growing and now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                together = max(map(nodes.count, nodes))  # that would have to be placed on one node again
                yield self.look(min(together, layout.per_replica.world_size), unusable | set(nodes), avoid_kinds)
            return
        if status and status.up and not status.copying:
            self._busy_since = None
        failure = status and status.failure
        if self._busy_since is not None and now > self._busy_since + BUSY_SECONDS:
            failure = f"its process has made no copy in {BUSY_SECONDS:.0f} s"
        reason = failure
        if failure:
            self._failed[self.node] = now + AVOID_SECONDS
        elif self.node in unusable:
            reason = "the node is gone or about to leave"
        elif settled:  # otherwise the gang may have to resume from it once more
            if not nodes:
                reason = "the ranks keep their copies on other nodes now"
            elif self.node in nodes:
                reason = "ranks of the gang are on that node now"
        if reason:
            self.record.log("INFO", f"the spare copy of the state on node {self.node[:12]} is gone: {reason}")
            self.forget()
            yield port.EndSpare()
            return
        newest = gang.generation, gang.kept_step
        old = bool(nodes) and gang.kept_step >= 0 and status and (status.saved is None or status.saved < newest)
        if old and self._busy_since is None and now >= self._copy_at:
            self._copy_at, self._busy_since = now + PAUSE_SECONDS, now
            yield port.CopyToSpare(gang.generation, {rank: gang.workers[rank] for rank in gang.uncopied})

    def forget(self) -> None:
        """Take note that it ends, by itself or with the gang."""
        if self._status is not None and self._status.saved is not None:
            self.record.add(SpareReport(step=None, node=None))
        self.node = self._status = self._busy_since = None
