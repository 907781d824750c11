"""Explanations of why a job waits or has paused. Their wording is stable from pass to pass while nothing changes.

They are for the job's tenant, to whom jobs of other tenants are not named.
"""

from collections.abc import Iterable

from boost_core.plan.memory import GIB
from boost_core.plan.resolve import why_not
from service.jobs.model import JobRecord
from service.scheduler.cluster_snapshot import ClusterSnapshot
from service.scheduler.placement import Room
from service.scheduler.quotas import Account

_NAMED_JOBS = 3
GAVE_WAY = "because another job, which comes before it, needs its resources"  # to whom is not known


def never_fits(cluster: ClusterSnapshot, job: JobRecord) -> str:
    """The job is too large for all nodes together."""
    demand = cluster.demands[job.id]
    if not demand.layouts and demand.lacks_hosts:
        lacking = "every layout that fits those GPUs needs more memory on a node's host than nodes had"
        remedy = "clone it to plan for the nodes there are now"
        return f"needs {demand.in_words}; {lacking} when the job was submitted; {remedy}"
    if not demand.layouts:
        needed, there = demand.least_bytes / GIB, demand.limit / GIB
        message = f"needs {demand.in_words}, and {needed:.1f} GiB of memory per rank; the GPUs that it may use have"
        return f"{message} {there:.1f} GiB; waits for nodes to join"
    total = cluster.whole.total(cluster.whole.nodes_for(demand))
    has = ", ".join(f"{total.get(name, 0):g} {name}" for name in demand.each)
    labels = ", ".join(f"{name}={value}" for name, value in sorted(demand.labels))
    kinds = cluster.fleet.accelerators & demand.avoid
    where = "the cluster has"
    if labels:
        where = f"the nodes with {labels} have"
    elif kinds:
        where = f"the nodes with more memory than {', '.join(sorted(kinds))} have"
    message = f"needs {demand.in_words}; {where} {has} in all, room for {sum(cluster.whole.slots(demand))}"
    return f"{message}{_unusable_room(cluster, job, cluster.whole)}; waits for nodes to join"


def short_of_quota(cluster: ClusterSnapshot, job: JobRecord, ranks: int, account: Account) -> str:
    """The job is too large for its quota, even if nothing else used it; or other jobs use it, or come first.

    If another job comes first, the number of those that wait with it is to be added.
    """
    quotas = cluster.quotas
    needed = cluster.demands[job.id].amounts(ranks)[account.resource]
    limit, allocated = quotas.limit[account], quotas.allocated[account]
    message = f"needs {needed:g} {account.resource}; {account.holder} may hold {limit:g}"
    if quotas.too_small(job, ranks) == account:
        return f"{message}; waits for a higher quota"
    message += f" and holds {allocated:g}"
    if reserved := quotas.reserved[account]:
        holders = (cluster.records[job_id].job for job_id in reserved)
        message += f", {sum(reserved.values()):g} kept for {_named(job, holders)}"
    if head := quotas.heads.get(account):
        return f"{message}; behind {_named(job, [head])}"
    leaving = [other for other in cluster.leaving() if account in quotas.accounts(other)]
    return f"{message}; {_named(job, leaving)} make{'' if len(leaving) > 1 else 's'} room" if leaving else message


def no_room(cluster: ClusterSnapshot, job: JobRecord) -> str:
    """The job waits for others to make room or to end."""
    nodes = cluster.nodes(job)
    message = _needs(cluster, job) + _unusable_room(cluster, job, cluster.room)
    if leaving := [other for other in cluster.leaving() if cluster.nodes(other) & nodes]:
        return f"{message}; {_named(job, leaving)} make{'' if len(leaving) > 1 else 's'} room"
    holders = [other for other in cluster.queue if cluster.nodes(other) & nodes]
    return f"{message}; behind {_named(job, holders)}" if holders else message


def held_back(cluster: ClusterSnapshot, job: JobRecord, head: JobRecord, fits: bool) -> str:
    """Another job comes first; unless there is room, the number of those that wait with it is to be added.

    Args:
        cluster: The cluster snapshot.
        job: The waiting job.
        head: The job that comes before it and is waiting itself.
        fits: Whether there is room for it now.
    """
    if fits:
        return f"{_needs(cluster, job)}; it might delay {_named(job, [head])}, which comes before it"
    return f"{_needs(cluster, job)}; behind {_named(job, [head])}"


def _needs(cluster: ClusterSnapshot, job: JobRecord) -> str:
    """What a job needs, and how much of that is free."""
    demand, room = cluster.demands[job.id], cluster.room
    total = room.total(room.nodes_for(demand))
    free = ", ".join(f"{room.free(demand, name):g} of {total.get(name, 0):g} {name} free" for name in demand.each)
    return f"needs {demand.in_words}; {free}"


def _unusable_room(cluster: ClusterSnapshot, job: JobRecord, room: Room) -> str:
    """Why a job does not fit although there is enough room in total, and which nodes cannot run its ranks."""
    demand, message = cluster.demands[job.id], ""
    slots, least = room.slots(demand), demand.layouts[0].world_size
    if sum(slots) >= least <= room.ranks(demand):
        message = f": {why_not(job.spec, slots, demand.layouts)}"
    if unused := [node for node in cluster.fleet.unusable if demand.takes(node)]:
        more = f", nor are {len(unused) - 1} more (boost nodes)" if len(unused) > 1 else ""
        message += f"; node {unused[0].node_id[:12]} is not used: it {unused[0].unusable}{more}"
    return message


def _named(job: JobRecord, others: Iterable[JobRecord]) -> str:
    """Other jobs, for a job's tenant: the ids of the first of its own, and the number of the rest."""
    jobs = list(others)
    own = [other.id for other in jobs if other.tenant == job.tenant]
    foreign = len(jobs) - len(own)
    words = [", ".join(own[:_NAMED_JOBS])] if own else []
    if len(own) > _NAMED_JOBS:
        words.append(f"{len(own) - _NAMED_JOBS} more")
    if foreign:
        words.append("a job of another tenant" if foreign == 1 else f"{foreign} jobs of other tenants")
    return " and ".join(words)
