"""Quotas of tenants and queues, and their usage.

Every rank of a job's gang counts towards its tenant's quota and its queue's. A job needs room in its tenant's quota
first, then in its queue's, then on the nodes: at each it reserves what it has found so far, and waits if there is too
little. So a job that waits for a quota takes nothing from jobs that do not use it, yet its turn comes: no job behind it
can take what it has already found.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from service.jobs.model import JobRecord
from service.scheduler.demand import Amounts, Demand
from service.scheduler.placement import ROUNDING

_NO_LIMITS: Mapping[str, Amounts] = MappingProxyType({})


@dataclass(frozen=True)
class Limits:
    """Quotas: how much of each resource the gangs may hold in total. Resources not named have no limit.

    Attributes:
        tenants: Quota of each tenant.
        queues: Quota of each queue.
    """

    tenants: Mapping[str, Amounts] = field(default_factory=lambda: _NO_LIMITS)
    queues: Mapping[str, Amounts] = field(default_factory=lambda: _NO_LIMITS)


class Account(NamedTuple):
    """The quota of one tenant or queue for one resource; ``holder`` is for messages: ``tenant team-a``."""

    holder: str
    resource: str


class Quotas:
    """The quotas during one pass.

    Args:
        limits: The quotas.
        demand: Returns a job's demand.

    Attributes:
        heads: By account, the first job that waits for room in it.
        limit: By account, how much gangs may hold.
        allocated: By account, how much they hold.
        reserved: By account, what is kept for jobs that have room there and wait for something else, by their ids.
    """

    def __init__(self, limits: Limits, demand: Callable[[JobRecord], Demand]) -> None:
        self._demand, self._limits = demand, limits
        self._accounts: dict[tuple[str, str], list[Account]] = {}
        self.limit: dict[Account, float] = {}
        self.allocated: dict[Account, float] = defaultdict(float)
        self.reserved: dict[Account, dict[str, float]] = defaultdict(dict)
        self.heads: dict[Account, JobRecord] = {}

    def accounts(self, job: JobRecord) -> list[Account]:
        """What a job draws on that is limited, in the order in which it has to find room there."""
        key, each = (job.tenant, job.queue), self._demand(job).each
        if key not in self._accounts:
            holders = (
                (f"tenant {job.tenant}", self._limits.tenants.get(job.tenant, {})),
                (f"queue {job.queue}", self._limits.queues.get(job.queue, {})),
            )
            limits = {Account(holder, name): amounts[name] for holder, amounts in holders for name in sorted(amounts)}
            self.limit |= limits
            self._accounts[key] = list(limits)
        return [account for account in self._accounts[key] if account.resource in each]

    def left(self, account: Account) -> float:
        """How much is neither allocated nor reserved."""
        return self.limit[account] - self.allocated[account] - sum(self.reserved[account].values())

    def take(self, job: JobRecord, ranks: int) -> None:
        """Count ranks as allocated."""
        each = self._demand(job).each
        for account in self.accounts(job):
            self.allocated[account] += each[account.resource] * ranks

    def keep(self, job: JobRecord, ranks: int, until: Account | None = None) -> None:
        """Keep room for a job, in all its accounts or in those that come before one."""
        each = self._demand(job).each
        for account in self.accounts(job):
            if account == until:
                return
            self.reserved[account][job.id] = each[account.resource] * ranks

    def allows(self, job: JobRecord, ranks: int) -> bool:
        """Whether there is room for some more ranks of a job; always for none."""
        return ranks <= 0 or all(
            self.left(account) >= self._needs(job, account, ranks) for account in self.accounts(job)
        )

    def too_small(self, job: JobRecord, ranks: int) -> Account | None:
        """The first account that could not hold a gang of this many ranks even if it were empty."""
        accounts = self.accounts(job)
        return next((one for one in accounts if self.limit[one] < self._needs(job, one, ranks)), None)

    def obstacle(self, job: JobRecord, ranks: int) -> Account | None:
        """The first account where a gang has to wait: for room, or behind another that does."""
        for account in self.accounts(job):
            if account in self.heads or self.left(account) < self._needs(job, account, ranks):
                return account
        return None

    def _needs(self, job: JobRecord, account: Account, ranks: int) -> float:
        return self._demand(job).each[account.resource] * ranks - ROUNDING
