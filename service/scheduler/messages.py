"""Explanations of why a job waits or has paused. Their wording is stable from pass to pass while nothing changes.

They are for the job's tenant, to whom jobs of other tenants are not named.
"""

from collections.abc import Iterable

from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan.resolve import why_not
from service.jobs.model import JobRecord
from service.scheduler.cluster_snapshot import ClusterSnapshot
from service.scheduler.placement import Room
from service.scheduler.quotas import Account

_NAMED_JOBS = 3
GAVE_WAY = "because another job, which comes before it, needs its resources"  # to whom is not known


def preempted_by(job: JobRecord, other: JobRecord) -> str:
    """Why a job has paused for one of higher priority; goes on from "paused after step 7"."""
    if other.tenant != job.tenant:
        return "to make room for a job of higher priority"
    return f"to make room for {other.name} ({other.id}), which has priority {other.spec.priority}"


def gave_way_to(job: JobRecord, other: JobRecord) -> str:
    """Why a job has paused when neither had all of its workers; goes on in the same way."""
    if other.tenant != job.tenant:
        return GAVE_WAY
    return f"because {other.name} ({other.id}), which comes before it, needs its workers"


def never_fits(cluster: ClusterSnapshot, job: JobRecord) -> str:
    """The job is too large for all nodes together."""
    demand = cluster.demand(job)
    if not demand.layouts and demand.lacks_hosts:
        return (
            f"needs {demand.in_words}; every layout that fits those GPUs needs more memory on a node's host than nodes "
            "had when the job was submitted; clone it to plan for the nodes there are now"
        )
    if not demand.layouts:
        needed, there = demand.least_bytes / 1e9, demand.limit / 1e9
        message = f"needs {demand.in_words}, and {needed:.1f} GB of memory per rank; the GPUs that it may use have"
        return f"{message} {there:g} GB; waits for nodes to join"
    has = ", ".join(f"{cluster.whole.total(demand, name):g} {name}" for name in demand.each)
    labels = ", ".join(f"{name}={value}" for name, value in sorted(demand.labels))
    kinds = {node.labels.get(ACCELERATOR_LABEL) for node in cluster.capacities} & demand.avoid
    where = "the cluster has"
    if labels:
        where = f"the nodes with {labels} have"
    elif kinds:
        where = f"the nodes with more memory than {', '.join(sorted(filter(None, kinds)))} have"
    room = sum(cluster.whole.slots(demand))
    message = f"needs {demand.in_words}; {where} {has} in all, room for {room}"
    return f"{message}{_scattered(cluster, job, cluster.whole)}{_unused(cluster, job)}; waits for nodes to join"


def over_quota(cluster: ClusterSnapshot, job: JobRecord, ranks: int, account: Account) -> str:
    """The job is too large for its quota, even if nothing else used it."""
    needed = f"{cluster.demand(job).amounts(ranks)[account.resource]:g} {account.resource}"
    limit = cluster.quotas.limit[account]
    return f"needs {needed}; {account.holder} may hold {limit:g}; waits for a higher quota"


def short_of_quota(cluster: ClusterSnapshot, job: JobRecord, ranks: int, account: Account) -> str:
    """Other jobs use the quota, or come first."""
    quotas = cluster.quotas
    needed = f"{cluster.demand(job).amounts(ranks)[account.resource]:g} {account.resource}"
    limit, allocated = quotas.limit[account], quotas.allocated[account]
    message = f"needs {needed}; {account.holder} may hold {limit:g} and holds {allocated:g}"
    if reserved := quotas.reserved[account]:
        message += f", {sum(reserved.values()):g} kept for {_named(job, (cluster.jobs[each] for each in reserved))}"
    if head := quotas.heads.get(account):
        return f"{message}; {_behind(job, head, cluster.lines[account])}"
    leaving = [other for other in cluster.leaving() if account in quotas.accounts(other)]
    return f"{message}; {_make_room(job, leaving)}" if leaving else message


def no_room(cluster: ClusterSnapshot, job: JobRecord) -> str:
    """The job waits for others to make room or to end."""
    nodes = cluster.nodes(job)
    message = f"needs {cluster.demand(job).in_words}; {_free(cluster, job)}{_scattered(cluster, job, cluster.room)}"
    message += _unused(cluster, job)
    if leaving := [other for other in cluster.leaving() if cluster.nodes(other) & nodes]:
        return f"{message}; {_make_room(job, leaving)}"
    holders = [other for other in cluster.queue if other.id in cluster.gangs and cluster.nodes(other) & nodes]
    return f"{message}; behind {_named(job, holders)}" if holders else message


def held_back(cluster: ClusterSnapshot, job: JobRecord, head: JobRecord, fits: bool) -> str:
    """Another job comes first.

    Args:
        cluster: The cluster snapshot.
        job: The waiting job.
        head: The job that comes before it and is waiting itself.
        fits: Whether there is room for it now.
    """
    message = f"needs {cluster.demand(job).in_words}; {_free(cluster, job)}"
    if fits:
        return f"{message}; it might delay {_named(job, [head])}, which comes before it"
    nodes = cluster.nodes(job)
    waiting = sum(count for line, count in cluster.lines.items() if isinstance(line, int) and line & nodes)
    return f"{message}; {_behind(job, head, waiting)}"


def _free(cluster: ClusterSnapshot, job: JobRecord) -> str:
    demand, room = cluster.demand(job), cluster.room
    return ", ".join(f"{room.free(demand, name):g} of {room.total(demand, name):g} {name} free" for name in demand.each)


def _scattered(cluster: ClusterSnapshot, job: JobRecord, room: Room) -> str:
    """Why a job does not fit although there is enough room in total."""
    demand = cluster.demand(job)
    slots, least = room.slots(demand), demand.layouts[0].world_size
    if sum(slots) >= least <= room.ranks(demand):
        return f": {why_not(job.spec, slots, demand.layouts)}"
    return ""


def _unused(cluster: ClusterSnapshot, job: JobRecord) -> str:
    """Which nodes would suit a job, but cannot run its ranks."""
    unused = [node for node in cluster.capacities if node.unusable and cluster.demand(job).takes(node)]
    if not unused:
        return ""
    more = f", nor are {len(unused) - 1} more (boost nodes)" if len(unused) > 1 else ""
    return f"; node {unused[0].node_id[:12]} is not used: it {unused[0].unusable}{more}"


def _behind(job: JobRecord, head: JobRecord, waiting: int) -> str:
    return f"behind {_named(job, [head])}" + (f" and {waiting - 1} more" if waiting > 1 else "")


def _make_room(job: JobRecord, others: list[JobRecord]) -> str:
    return f"{_named(job, others)} make{'' if len(others) > 1 else 's'} room"


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
