"""The cluster's nodes and the jobs on them."""

from collections import Counter
from typing import Any

from fastapi import APIRouter

from service.accounts.principal import Principal
from service.api.auth import Reader
from service.api.deps import ContextDep
from service.jobs.model import NODES, JobRecord
from service.jobs.seen_nodes import cpus_without_rank
from service.models.datasets import Dataset
from service.models.identity import Scope
from service.models.nodes import Node, NodeDataset, NodeJob, NodeList

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


@router.get("")
def list_nodes(who: Reader, context: ContextDep) -> NodeList:
    """List the nodes as the scheduler last saw them, and the jobs on them."""
    seen = context.store.snapshot(NODES)
    if seen is None:
        return NodeList(seen_at=None, nodes=[])
    time, nodes = seen
    running = [job for job in context.store.active() if job.has_gang and job.shape]
    build = context.datasets.building()
    return NodeList(
        seen_at=time,
        nodes=[
            Node(**node, **_tenants_of(node["node_id"], running, who), dataset=_share_of(build, node, running, who))
            for node in nodes
        ],
    )


def _share_of(
    build: Dataset | None, node: dict[str, Any], running: list[JobRecord], who: Principal
) -> NodeDataset | None:
    if build is None or build.progress is None:
        return None
    cpus = min(build.progress.cpus, cpus_without_rank(node["node_id"], node["total"], node["free"], running))
    shown = build.tenant == who.tenant or who.may(Scope.ADMIN)
    return NodeDataset(name=build.name if shown else None, cpus=cpus) if cpus > 0 else None


def _tenants_of(node_id: str, running: list[JobRecord], who: Principal) -> dict[str, object]:
    jobs, others = [], 0
    for job in running:
        ranks = Counter(job.shape.nodes if job.shape else ())[node_id]
        if ranks and (job.tenant == who.tenant or who.may(Scope.ADMIN)):
            jobs.append(NodeJob(id=job.id, name=job.name, ranks=ranks))
        else:
            others += ranks
    return {"jobs": jobs, "other_ranks": others}
