"""Leases, for work that only one of several processes does at a time.

A lease expires unless it is renewed, so that another process takes over from one that has died. A process wrongly
presumed dead may live on for a while: its writes carry the lease's token, which is then no longer the newest, and have
no effect. So a lease that changes hands too early costs no more than the change itself.

One clock decides whether a lease has expired: that of PostgreSQL, or of the machine whose processes share the SQLite
file. Differences between the processes' own clocks do not matter. If that clock is set back, a lease that would last
longer than any lease granted counts as expired.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, case, exists, func, insert, or_, select, true, update
from sqlalchemy.exc import IntegrityError

from service.jobs.tables import LeaseRow, UtcDateTime

LONGEST_SECONDS = 60.0  # of a lease; what would last longer from now was taken before the clock was set back


class LeaseLost(RuntimeError):
    """Another process does this work now."""


@dataclass(frozen=True)
class Lease:
    """The right to do some work. Valid until a newer token is issued."""

    name: str
    token: int


def permitted(lease: Lease | None) -> ColumnElement[bool]:
    """A condition for writes under a lease; ``None`` for those that need none."""
    return exists().where(LeaseRow.name == lease.name, LeaseRow.token == lease.token) if lease else true()


def refuse_if_lost(connection: Connection, lease: Lease | None) -> None:
    """Raise ``LeaseLost`` if a lease is no longer valid, within a transaction, which that rolls back."""
    if lease and not connection.scalar(select(permitted(lease))):
        raise LeaseLost(f"the lease {lease.name!r} was taken over by another process, which continues the work")


def write_under(engine: Engine, lease: Lease | None, statement: Any) -> int:
    """Carry out an UPDATE or DELETE under a lease in a transaction of its own; return how many rows it concerned.

    Raises:
        LeaseLost: The lease is no longer valid.
    """
    with engine.begin() as connection:
        refuse_if_lost(connection, lease)
        return connection.execute(statement.where(permitted(lease))).rowcount


@dataclass(frozen=True)
class Leases:
    """Takes, renews and gives back the leases of one process.

    Attributes:
        engine: The database that all processes share.
        holder: Name of this process, different from all others.
    """

    engine: Engine
    holder: str

    def take(self, name: str, seconds: float) -> Lease | None:
        """Take a lease, or renew it; an expired one continues if no other process has taken it.

        Args:
            name: The work.
            seconds: For how long, unless it is renewed before; ``LONGEST_SECONDS`` at most.

        Returns:
            The lease; ``None`` while another process has it.
        """
        try:
            with self.engine.begin() as connection:
                now, length = _now(connection), timedelta(seconds=seconds)
                # Twice, because others may have written while this one waited for the database.
                clock_was_set_back = LeaseRow.expires_at > now + 2 * timedelta(seconds=LONGEST_SECONDS)
                mine, expired = LeaseRow.holder == self.holder, LeaseRow.expires_at <= now
                values = {"holder": self.holder, "expires_at": now + length}
                # One statement, so that a renewal in another thread happens either before or after it.
                takeover = update(LeaseRow).where(LeaseRow.name == name, or_(mine, expired, clock_was_set_back))
                takeover = takeover.values({**values, "token": case((mine, LeaseRow.token), else_=LeaseRow.token + 1)})
                if (token := connection.scalar(takeover.returning(LeaseRow.token))) is not None:
                    return Lease(name, token)
                if connection.scalar(select(LeaseRow.token).where(LeaseRow.name == name)) is not None:
                    return None
                connection.execute(insert(LeaseRow).values({**values, "name": name, "token": 1}))
                return Lease(name, 1)
        except IntegrityError:  # another process was the first
            return None

    def renew(self, lease: Lease, seconds: float) -> bool:
        """Renew a lease for a number of seconds; return whether it was still valid.

        After 0 seconds it is given back: another process can take it immediately.
        """
        with self.engine.begin() as connection:
            expiry = {"expires_at": _now(connection) + timedelta(seconds=seconds)}
            newest = update(LeaseRow).where(LeaseRow.name == lease.name, LeaseRow.token == lease.token)
            return connection.execute(newest.values(expiry)).rowcount == 1


def _now(connection: Connection) -> datetime:
    if connection.dialect.name == "postgresql":
        return connection.execute(select(func.clock_timestamp(type_=UtcDateTime()))).scalar_one()
    return datetime.now(UTC)
