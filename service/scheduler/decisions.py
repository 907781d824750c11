"""What to do about the jobs that wait. Pure: records and capacities in, actions out.

First in, first out: a job starts when its whole gang fits. One that must wait for others to finish holds back all
behind it, so that it cannot starve; one that the whole cluster could not hold does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.scheduler.placement import Demand, Room, total_resources

_NAMED_JOBS = 3  # in a message


@dataclass(frozen=True)
class Admit:
    """The job comes out of the queue."""

    job: JobRecord


@dataclass(frozen=True)
class Launch:
    """The job's next gang starts."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Wait:
    """The job stays where it is."""

    job: JobRecord
    message: str


Action = Admit | Launch | Wait


def has_gang(job: JobRecord) -> bool:
    """Whether the job's newest gang runs, or was about to be started."""
    return job.state is JobState.RUNNING or (job.state is JobState.SCHEDULING and job.reason is Reason.GANG_STARTING)


def decide(jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity]) -> list[Action]:
    """What to do now.

    Args:
        jobs: All active jobs in the order of their submission.
        nodes: What the alive nodes have, and have free.
    """
    holders = [job for job in jobs if has_gang(job)]
    room = Room.now(nodes, [Demand.of(job.spec) for job in holders])
    actions: list[Action] = []
    for job in jobs:
        if has_gang(job):
            continue
        if job.state is JobState.QUEUED:
            actions.append(Admit(job))
        demand = Demand.of(job.spec)
        if Room.empty(nodes).workers(demand.each) < demand.workers:
            actions.append(Wait(job, _never(demand, nodes)))
        elif room.place(demand):
            actions.append(Launch(job, f"starting {demand}"))
            holders.append(job)
        else:
            actions.append(Wait(job, _not_yet(demand, room, nodes, holders)))
            break
    return actions


def _never(demand: Demand, nodes: Sequence[NodeCapacity]) -> str:
    total = total_resources(nodes)
    has = ", ".join(f"{total.get(name, 0):g} {name}" for name in demand.each)
    fits = Room.empty(nodes).workers(demand.each)
    return f"needs {demand}; the cluster has {has} in all, room for {fits}; waits for nodes to join"


def _not_yet(demand: Demand, room: Room, nodes: Sequence[NodeCapacity], holders: Sequence[JobRecord]) -> str:
    total = total_resources(nodes)
    free = ", ".join(f"{room.free(name):g} of {total.get(name, 0):g} {name} free" for name in demand.each)
    message = f"waits for {demand}; {free}"
    if holders:
        more = len(holders) - _NAMED_JOBS
        named = ", ".join(job.id for job in holders[:_NAMED_JOBS])
        message += f"; behind {named}" + (f" and {more} more" if more > 0 else "")
    return message
