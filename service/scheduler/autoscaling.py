"""Requests the nodes that jobs need from the autoscaler of a cluster that adds nodes on request and removes idle ones.

A job requests its own layout, that of its ``parallelism``, or its smallest if its elasticity or its quotas do not allow
that. A gang that started with less keeps requesting as much; one that has more requests what it has. So elastic jobs
grow into existing nodes, but do not cause new ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from boost_core.config import Layout
from service.gang.status import Bundle, Gangs
from service.jobs.model import JobRecord
from service.jobs.states import WAITING_STATES
from service.scheduler.demand import Demand
from service.scheduler.quotas import Limits, Quotas

MOST_AT_ONCE = 128  # waiting jobs
VERDICT_SECONDS = 10.0  # by then an autoscaler has seen a request
ASIDE_SECONDS = 120.0  # the first one, and longer for each that is aside already, or those found first would be back
REPEAT_SECONDS = 60.0  # a cluster whose head was restarted has forgotten earlier requests

Bundles = tuple[Bundle, ...]


def requested_nodes(
    jobs: Sequence[JobRecord], limits: Limits, demand: Callable[[JobRecord], Demand]
) -> tuple[Bundles, Iterator[Bundles]]:
    """What gangs hold or should have, and what each waiting job needs and its quotas allow, in queue order.

    Args:
        jobs: All active jobs.
        limits: Quotas of tenants and queues.
        demand: Returns a job's demand.
    """
    queue = sorted(jobs, key=attrgetter("queue_order"))
    quotas = Quotas(limits, demand)
    gangs = [job for job in queue if job.has_gang]
    for job in gangs:
        quotas.take(job, job.present_layout.world_size)
    allocated = tuple(bundle for job in gangs for bundle in _request(job, quotas, job.present_layout))
    without_gang = (job for job in queue if job.state in WAITING_STATES and not job.has_gang)
    waiting = (job for job in without_gang if not (job.pause_requested or job.cancel_requested))
    return allocated, (bundles for job in waiting if (bundles := _request(job, quotas)))


def _request(job: JobRecord, quotas: Quotas, present: Layout | None = None) -> Bundles:
    """What a job requests, deducted from its quotas: its own layout, if it still allows that, or else its smallest.

    For a job that leaves its layouts to the service, its own is the fastest one. A gang requests no less than it has.
    """
    demand, own = quotas.demand(job), Layout.of(job.spec.parallelism)
    if job.spec.leaves_layouts:
        own = demand.fastest(demand.layouts) or own
    has = present.world_size if present else 0
    for layout in (*((own,) if own in demand.layouts else ()), *demand.layouts[:1]):
        if layout.world_size > has and quotas.allows(job, layout.world_size - has):
            quotas.take(job, layout.world_size - has)
            present = layout
            break
    if present is None:
        return ()
    size, count = present.units(demand.placement)
    return (Bundle(demand.amounts(size), dict(demand.labels)),) * count


class Autoscaling:
    """Requests nodes from a cluster and remembers the requests.

    Ray's autoscaler grants a request entirely or not at all, so a single job that no nodes could hold would block all
    others. After a refusal, the next request covers half as many waiting jobs. If only the first job is left, it is set
    aside for a while, with all that need as many of the same bundles. Otherwise the number doubles again.

    Args:
        gangs: The cluster.
        clock: Returns seconds.
    """

    def __init__(self, gangs: Gangs, clock: Callable[[], float]) -> None:
        self._gangs, self._clock = gangs, clock
        self._most = MOST_AT_ONCE
        self._aside: list[tuple[Bundles, float]] = []  # until when
        self._requested: Bundles | None = None
        self._requested_at = self._judged_at = clock()

    def ask(self, allocated: Bundles, requests: Iterable[Bundles]) -> None:
        """Request nodes for all gangs and for the waiting jobs in their order.

        Args:
            allocated: What gangs need.
            requests: What each waiting job needs, in equal bundles; no more of them are looked at than are requested.
        """
        now = self._clock()
        self._aside = [(bundles, until) for bundles, until in self._aside if until > now]
        aside = [much for much, _ in self._aside]
        others = (needed for needed in requests if not any(needed[: len(much)] == much for much in aside))
        waiting = list(islice(others, self._most))
        if now >= self._judged_at + VERDICT_SECONDS:
            self._judged_at = now
            if not self._gangs.refused():
                self._most = min(2 * self._most, MOST_AT_ONCE)
            else:
                refused = len(waiting)
                self._most = max(1, refused // 2)
                if refused == 1:
                    aside.append(waiting.pop())  # and those that need as much from here on
                    self._aside.append((aside[-1], now + ASIDE_SECONDS * (1 + len(self._aside))))
        waiting += islice(others, max(0, self._most - len(waiting)))
        bundles = allocated + tuple(bundle for needed in waiting[: self._most] for bundle in needed)
        if bundles != self._requested or now >= self._requested_at + REPEAT_SECONDS:
            self._gangs.request_nodes(bundles)
            self._requested, self._requested_at = bundles, now
