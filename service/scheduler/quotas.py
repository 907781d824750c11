"""Quotas of tenants and queues, and their usage during a pass.

Every rank of a job's gang counts towards its tenant's quota and its queue's. A job needs room in its tenant's quota
first, then in its queue's, then on the nodes: at each it reserves what it has found so far, and waits if there is too
little. So a job that waits for a quota takes nothing from jobs that do not use it, yet its turn comes: no job behind it
can take what it has already found.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from service.jobs.model import JobRecord
from service.scheduler.demand import Amounts, Demand
from service.scheduler.placement import ROUNDING


@dataclass(frozen=True)
class Limits:
    """Quotas: how much of each resource the gangs may hold in total. Resources not named have no limit.

    Attributes:
        tenants: Quota of each tenant.
        queues: Quota of each queue.
    """

    tenants: Mapping[str, Amounts] = field(default_factory=dict)
    queues: Mapping[str, Amounts] = field(default_factory=dict)


class Account(NamedTuple):
    """The quota of one tenant or queue for one resource; ``holder`` is for messages: ``tenant team-a``."""

    holder: str
    resource: str


@dataclass
class Quotas:
    """The quotas during one pass.

    Attributes:
        limits: The quotas.
        demand: Returns a job's demand.
        heads: By account, the first job that waits for room in it.
        limit: By account, how much gangs may hold.
        allocated: By account, how much they hold.
        reserved: By account, what is kept for jobs that have room there and wait for something else, by their ids.
    """

    limits: Limits
    demand: Callable[[JobRecord], Demand]
    heads: dict[Account, JobRecord] = field(default_factory=dict, init=False)
    limit: dict[Account, float] = field(default_factory=dict, init=False)
    allocated: dict[Account, float] = field(default_factory=lambda: defaultdict(float), init=False)
    reserved: dict[Account, dict[str, float]] = field(default_factory=lambda: defaultdict(dict), init=False)
    _accounts: dict[tuple[str, str], list[Account]] = field(default_factory=dict, init=False)

    def accounts(self, job: JobRecord) -> dict[Account, float]:
        """What each rank of a job takes of what is limited, in the order in which the job has to find room there."""
        key, each = (job.tenant, job.queue), self.demand(job).each
        if key not in self._accounts:
            of_tenant, of_queue = self.limits.tenants.get(job.tenant, {}), self.limits.queues.get(job.queue, {})
            holders = (f"tenant {job.tenant}", of_tenant), (f"queue {job.queue}", of_queue)
            new = {Account(holder, name): amounts[name] for holder, amounts in holders for name in sorted(amounts)}
            self.limit |= new
            self._accounts[key] = list(new)
        return {account: each[account.resource] for account in self._accounts[key] if account.resource in each}

    def left(self, account: Account) -> float:
        """How much is neither allocated nor reserved."""
        return self.limit[account] - self.allocated[account] - sum(self.reserved[account].values())

    def take(self, job: JobRecord, ranks: int) -> None:
        """Count ranks as allocated."""
        for account, amount in self.accounts(job).items():
            self.allocated[account] += amount * ranks

    def keep(self, job: JobRecord, ranks: int, until: Account | None = None) -> None:
        """Keep room for a job, in all its accounts or in those that come before one."""
        for account, amount in self.accounts(job).items():
            if account == until:
                return
            self.reserved[account][job.id] = amount * ranks

    def allows(self, job: JobRecord, ranks: int) -> bool:
        """Whether there is room for some more ranks of a job; always for none."""
        accounts = self.accounts(job).items()
        return ranks <= 0 or all(self.left(each) >= amount * ranks - ROUNDING for each, amount in accounts)

    def too_small(self, job: JobRecord, ranks: int) -> Account | None:
        """The first account that could not hold a gang of this many ranks even if it were empty."""
        accounts = self.accounts(job).items()
        return next((each for each, amount in accounts if self.limit[each] < amount * ranks - ROUNDING), None)
