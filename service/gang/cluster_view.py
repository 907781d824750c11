"""Which nodes are alive, and which will go away, as a gang's supervisor needs to know it."""

import socket
import time
from collections.abc import Collection

from service.gang.ray_private import draining_nodes, node_table

LOOK_SECONDS = 1.0
PROBE_SECONDS = 1.0
URGENT_SECONDS = 20.0  # before a node goes away
PATIENCE_SECONDS = 60.0  # with a notice that does not say when


class ClusterView:
    """Remembers what it has seen, and asks no more often than once a second."""

    def __init__(self) -> None:
        self._looked = 0.0
        self._leaving: dict[str, float] = {}  # when each is to be left at the latest
        self._silent: set[str] = set()  # dead, but Ray does not know it yet
        self._quarantined: dict[str, float] = {}  # until when

    def look(self) -> None:
        """Ask the cluster, if it is time."""
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self._silent &= {entry["NodeID"] for entry in node_table() if entry["Alive"]}
        notices = draining_nodes()
        self._leaving = {node: self._leaving.get(node) or _last_moment(deadline) for node, deadline in notices.items()}

    def leaving(self, nodes: Collection[str]) -> bool:
        """Whether any of some nodes will go away."""
        return any(node in self._leaving for node in nodes)

    def urgent(self, nodes: Collection[str]) -> bool:
        """Whether that is soon."""
        now = time.monotonic()
        return any(self._leaving.get(node, now + 1) <= now for node in nodes)

    def gone(self, nodes: Collection[str]) -> set[str]:
        """Those of some nodes that are gone, whether or not Ray has noticed: their raylets take no connection.

        A node that is quarantined counts as gone.
        """
        entries = [entry for entry in node_table() if entry["NodeID"] in nodes]
        silent = {entry["NodeID"] for entry in entries if entry["Alive"] and not _answers(entry)}
        self._silent |= silent
        dead = {entry["NodeID"] for entry in entries if not entry["Alive"]}
        return set(nodes) & (silent | dead | self._quarantined_now())

    def quarantine(self, node: str, seconds: float) -> None:
        """Treat a node as gone for a while."""
        self._quarantined[node] = time.monotonic() + seconds

    def unusable(self) -> set[str]:
        """Nodes on which nothing should be placed."""
        return self._silent | self._quarantined_now() | self._leaving.keys()

    def _quarantined_now(self) -> set[str]:
        now = time.monotonic()
        return {node for node, until in self._quarantined.items() if until > now}


def _last_moment(deadline: float | None) -> float:
    if deadline is None:
        return time.monotonic() + PATIENCE_SECONDS
    return time.monotonic() + deadline - time.time() - URGENT_SECONDS


def _answers(node: dict[str, object]) -> bool:
    try:
        with socket.create_connection(
            (str(node["NodeManagerAddress"]), int(str(node["NodeManagerPort"]))), PROBE_SECONDS
        ):
            return True
    except OSError:
        return False
