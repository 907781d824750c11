"""The metrics of the cluster, as the scheduler last saw it."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from prometheus_client.metrics_core import Metric

from service.telemetry.families import family

_RESOURCES = ("CPU", "GPU")


def cluster_families(snapshot: tuple[datetime, Sequence[Mapping[str, Any]]] | None) -> Iterator[Metric]:
    """Yield the metrics of the nodes.

    Args:
        snapshot: When the nodes were seen, and each in the form of ``service.models.nodes.Node``; ``None``: not yet.
    """
    seen_at = family("boost_cluster_seen_timestamp_seconds", "When the scheduler last saw the cluster.")
    nodes = family("boost_cluster_nodes", "Nodes that stay, and nodes about to leave.", ("condition",))
    resources = family(
        "boost_cluster_resources", "Resources of all nodes, and the unused part.", ("resource", "condition")
    )
    if snapshot is not None:
        time, found = snapshot
        seen_at.add_metric((), time.timestamp())
        draining = sum(node["draining"] for node in found)
        nodes.add_metric(("alive",), len(found) - draining)
        nodes.add_metric(("draining",), draining)
        for resource in _RESOURCES:
            for condition in ("total", "free"):
                amount = sum(node[condition].get(resource, 0) for node in found)
                resources.add_metric((resource, condition), amount)
    yield from (seen_at, nodes, resources)
