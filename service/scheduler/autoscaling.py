"""What nodes the jobs need, for a cluster whose autoscaler makes nodes come when they are asked for, and go when idle.

A job asks for its own layout, that of its ``parallelism``, or for its smallest if its elasticity or its quotas leave
no room for that. A gang goes on asking for as much when it has started with less, and for what it has when that is
more. So elastic jobs grow into nodes that are there, and make none come for it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boost_core.config import Layout
from service.gang.status import Bundle, Gangs
from service.jobs.model import JobRecord
from service.jobs.states import WAITING_STATES
from service.scheduler.demand import Demand, demand_of
from service.scheduler.quotas import Limits, Quotas

MOST_AT_ONCE = 128  # waiting jobs
VERDICT_SECONDS = 10.0  # in which an autoscaler has seen what it was asked for
ASIDE_SECONDS = 120.0
REPEAT_SECONDS = 60.0  # a cluster whose head was started anew knows nothing of what it was asked for

Bundles = tuple[Bundle, ...]


@dataclass(frozen=True)
class ResourceRequest:
    """What a waiting job needs: the same bundle so many times."""

    job_id: str
    bundles: Bundles


def nodes_wanted(jobs: Sequence[JobRecord], limits: Limits) -> tuple[Bundles, list[ResourceRequest]]:
    """What gangs hold or are to have, and what waiting jobs need that their quotas allow, in the order of the queue.

    Args:
        jobs: All active jobs.
        limits: What tenants and queues may hold.
    """
    queue = sorted(jobs, key=lambda job: (-job.spec.priority, job.queued_at, job.id))
    quotas = Quotas(limits, lambda job: demand_of(job.spec, job.basis))
    gangs = [job for job in queue if job.has_gang]
    for job in gangs:
        quotas.take(job, job.present_layout.world_size)
    held: Bundles = ()
    for job in gangs:
        present = job.present_layout
        more = [layout for layout in _choice(job) if layout.world_size > present.world_size]
        larger = _allowed(job, more, quotas, present.world_size)
        held += _bundles(demand_of(job.spec, job.basis), larger or present)
    requests = []
    for job in queue:
        waits = job.state in WAITING_STATES and not (job.has_gang or job.pause_requested or job.cancel_requested)
        if waits and (wanted := _allowed(job, _choice(job), quotas)):
            requests.append(ResourceRequest(job.id, _bundles(demand_of(job.spec, job.basis), wanted)))
    return held, requests


def _choice(job: JobRecord) -> list[Layout]:
    """Its own layout, if it is still among those that the job allows, and then the smallest.

    The own layout of a job that leaves its layouts to the service is the fastest.
    """
    demand, own = demand_of(job.spec, job.basis), Layout.of(job.spec.parallelism)
    layouts = demand.layouts
    if job.spec.leaves_layouts:
        own = demand.fastest(layouts) or own
    return [own, *layouts[:1]] if own in layouts else [*layouts[:1]]


def _allowed(job: JobRecord, choice: Sequence[Layout], quotas: Quotas, has: int = 0) -> Layout | None:
    """The first of some layouts that its quotas have room for, which it takes from them."""
    for layout in choice:
        if quotas.allows(job, layout.world_size - has):
            quotas.take(job, layout.world_size - has)
            return layout
    return None


def _bundles(demand: Demand, layout: Layout) -> Bundles:
    size, count = demand.groups(layout)
    return (Bundle(demand.amounts(size), dict(demand.labels)),) * count


class Autoscaling:
    """Asks a cluster for nodes; remembers what for.

    Ray's autoscaler grants all of a request or nothing, so one job that no nodes could hold would keep all others from
    theirs. When a request is refused, half as many waiting jobs are asked for. When that is the first of them alone, it
    is set aside for a while, and with it all that need as many of the same. Otherwise it becomes twice as many again.

    Args:
        gangs: The cluster.
        clock: Tells seconds.
    """

    def __init__(self, gangs: Gangs, clock: Callable[[], float] = time.monotonic) -> None:
        self._gangs, self._clock = gangs, clock
        self._most = MOST_AT_ONCE
        self._aside: list[tuple[Bundles, float]] = []  # until when
        self._asked: Bundles | None = None
        self._asked_at = self._judged_at = clock()

    def ask(self, held: Bundles, requests: Sequence[ResourceRequest]) -> None:
        """Ask for nodes that can hold all gangs, and the waiting jobs in their order.

        Args:
            held: What gangs need.
            requests: What waiting jobs need.
        """
        now = self._clock()
        self._aside = [(bundles, until) for bundles, until in self._aside if until > now]
        if now >= self._judged_at + VERDICT_SECONDS:
            self._judge(self._hopeful(requests), now)
        waiting = self._hopeful(requests)
        bundles = held + tuple(bundle for wish in waiting[: self._most] for bundle in wish.bundles)
        if bundles != self._asked or now >= self._asked_at + REPEAT_SECONDS:
            self._gangs.request_nodes(bundles)
            self._asked, self._asked_at = bundles, now

    def _hopeful(self, requests: Sequence[ResourceRequest]) -> list[ResourceRequest]:
        return [wish for wish in requests if not any(wish.bundles[: len(much)] == much for much, _ in self._aside)]

    def _judge(self, waiting: Sequence[ResourceRequest], now: float) -> None:
        self._judged_at = now
        if not self._gangs.refused():
            self._most = min(2 * self._most, MOST_AT_ONCE)
            return
        asked = min(self._most, len(waiting))
        self._most = max(1, asked // 2)
        if asked == 1:
            self._aside.append((waiting[0].bundles, now + ASIDE_SECONDS))
