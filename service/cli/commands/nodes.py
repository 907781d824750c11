"""``boost nodes``."""

from service.cli.connection import open_client
from service.cli.options import AsJson, Url
from service.cli.output.printing import number, print_json, print_table, say
from service.models.nodes import Node

_RESOURCES = ("GPU", "CPU")  # by Ray's names; all others are in the JSON


def nodes(as_json: AsJson = False, url: Url = None) -> None:
    """List the cluster's nodes, their free resources and their jobs."""
    with open_client(url) as client:
        found = client.nodes()
    if as_json:
        print_json(found)
        return
    if found.seen_at is None:
        say("no scheduler has seen the cluster yet")
        return
    print_table(("NODE", "STATE", "FREE GPUS", "FREE CPUS", "JOBS", "LABELS"), map(_row, found.nodes))
    for node in found.nodes:
        if node.unusable:
            say(f"{node.node_id} is not used: it {node.unusable}")
    say(f"(as seen at {found.seen_at.astimezone():%H:%M:%S})")


def _row(node: Node) -> tuple[str, ...]:
    state = "draining" if node.draining else "unusable" if node.unusable else "ready"
    labels = ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
    return node.node_id, state, *(_free(node, resource) for resource in _RESOURCES), _jobs(node), labels or "-"


def _free(node: Node, resource: str) -> str:
    total = node.total.get(resource, 0.0)
    return f"{number(node.free.get(resource, 0.0))}/{number(total)}" if total else "-"


def _jobs(node: Node) -> str:
    own = [f"{job.name} ({job.id}): {job.ranks} rank(s)" for job in node.jobs]
    others = [f"others: {node.other_ranks} rank(s)"] if node.other_ranks else []
    return ", ".join(own + others + _dataset(node)) or "-"


def _dataset(node: Node) -> list[str]:
    if node.dataset is None:
        return []
    what = f"dataset {node.dataset.name}" if node.dataset.name else "a dataset"
    return [f"{what}: {number(node.dataset.cpus)} CPU(s)"]
