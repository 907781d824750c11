"""What tenants and queues may hold, and what of it is taken.

A job draws on its tenant's quota and on its queue's, with every rank of its gang. It has to find room in one after the
other, its tenant's first, and then on the nodes: at each it keeps what it has found before, and waits where there is
too little. So who waits for room in a quota takes nothing from anybody that does not draw on it, and yet its turn
comes: nobody behind it can take from it what it has already found.
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
    """Quotas: how much of which resources the gangs may hold in all. What is not named has no limit.

    Attributes:
        tenants: Of each tenant.
        queues: Of each queue.
    """

    tenants: Mapping[str, Amounts] = field(default_factory=lambda: _NO_LIMITS)
    queues: Mapping[str, Amounts] = field(default_factory=lambda: _NO_LIMITS)


class Account(NamedTuple):
    """One resource that one tenant or queue has a quota of; ``holder`` is for people: ``tenant team-a``."""

    holder: str
    resource: str


class Quotas:
    """The quotas during one round of decisions.

    Args:
        limits: How much there may be.
        demand: What a job asks for.

    Attributes:
        heads: Who waits for room in an account, as the first of all that do.
    """

    def __init__(self, limits: Limits, demand: Callable[[JobRecord], Demand]) -> None:
        self._demand, self._limits = demand, limits
        self._accounts: dict[tuple[str, str], list[Account]] = {}
        self._limit: dict[Account, float] = {}
        self._held: dict[Account, float] = defaultdict(float)
        self._kept: dict[Account, dict[str, float]] = defaultdict(dict)
        self.heads: dict[Account, JobRecord] = {}

    def accounts(self, job: JobRecord) -> list[Account]:
        """What a job draws on that is limited, in the order in which it has to find room there."""
        each = self._demand(job).each
        return [account for account in self._accounts_of(job) if account.resource in each]

    def limit(self, account: Account) -> float:
        """How much gangs may hold."""
        return self._limit[account]

    def held(self, account: Account) -> float:
        """How much they hold."""
        return self._held[account]

    def kept(self, account: Account) -> Mapping[str, float]:
        """What is kept for jobs that have found it and wait for something else, by their ids."""
        return self._kept[account]

    def left(self, account: Account) -> float:
        """How much is neither held nor kept."""
        return self._limit[account] - self._held[account] - sum(self._kept[account].values())

    def take(self, job: JobRecord, ranks: int) -> None:
        """Count ranks as held."""
        each = self._demand(job).each
        for account in self.accounts(job):
            self._held[account] += each[account.resource] * ranks

    def keep(self, job: JobRecord, ranks: int, until: Account | None = None) -> None:
        """Keep room for a job, in all its accounts or in those that come before one."""
        each = self._demand(job).each
        for account in self.accounts(job):
            if account == until:
                return
            self._kept[account][job.id] = each[account.resource] * ranks

    def allows(self, job: JobRecord, ranks: int) -> bool:
        """Whether there is room for some more ranks of a job; always for none."""
        return ranks <= 0 or all(
            self.left(account) >= self._needs(job, account, ranks) for account in self.accounts(job)
        )

    def too_small(self, job: JobRecord, ranks: int) -> Account | None:
        """The first account that could not hold a gang of so many ranks even if it were empty."""
        accounts = self.accounts(job)
        return next((one for one in accounts if self._limit[one] < self._needs(job, one, ranks)), None)

    def obstacle(self, job: JobRecord, ranks: int) -> Account | None:
        """The first account where a gang has to wait: for room, or behind another that does."""
        for account in self.accounts(job):
            if account in self.heads or self.left(account) < self._needs(job, account, ranks):
                return account
        return None

    def _needs(self, job: JobRecord, account: Account, ranks: int) -> float:
        return self._demand(job).each[account.resource] * ranks - ROUNDING

    def _accounts_of(self, job: JobRecord) -> list[Account]:
        key = job.tenant, job.queue
        if key not in self._accounts:
            holders = (
                (f"tenant {job.tenant}", self._limits.tenants.get(job.tenant, {})),
                (f"queue {job.queue}", self._limits.queues.get(job.queue, {})),
            )
            found = {Account(holder, name): limits[name] for holder, limits in holders for name in sorted(limits)}
            self._limit |= found
            self._accounts[key] = list(found)
        return self._accounts[key]
