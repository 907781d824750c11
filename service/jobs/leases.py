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

from sqlalchemy import ColumnElement, Connection, CursorResult, Engine, case, exists, func, or_, select, true, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.jobs.tables import LeaseRow, UtcDateTime

LONGEST_SECONDS = 60.0  # of a lease; what would last longer from now was taken before the clock was set back


class LeaseLost(RuntimeError):
    """Another process does this work now."""

    def __init__(self, lease: "Lease") -> None:
        super().__init__(f"the lease {lease.name!r} was taken over by another process, which continues the work")


@dataclass(frozen=True)
class Lease:
    """The right to do some work. Valid until a newer token is issued."""

    name: str
    token: int

    @property
    def newest(self) -> ColumnElement[bool]:
        """A condition that selects its row while no newer token has been issued."""
        return (LeaseRow.name == self.name) & (LeaseRow.token == self.token)


def permitted(lease: Lease | None) -> ColumnElement[bool]:
    """A condition for writes under a lease; ``None`` for those that need none."""
    return exists().where(lease.newest) if lease else true()


def refuse_if_lost(connection: Connection, lease: Lease | None) -> None:
    """Raise ``LeaseLost`` if a lease is no longer valid, within a transaction, which that rolls back."""
    if lease and not connection.scalar(select(permitted(lease))):
        raise LeaseLost(lease)


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
            with Session(self.engine) as session, session.begin():
                now, length = _now(session), timedelta(seconds=seconds)
                # Twice, because others may have written while this one waited for the database.
                clock_was_set_back = LeaseRow.expires_at > now + 2 * timedelta(seconds=LONGEST_SECONDS)
                mine, expired = LeaseRow.holder == self.holder, LeaseRow.expires_at <= now
                # One statement, so that a renewal in another thread happens either before or after it.
                token = session.scalar(
                    update(LeaseRow)
                    .where(LeaseRow.name == name, or_(mine, expired, clock_was_set_back))
                    .values(
                        holder=self.holder,
                        token=case((mine, LeaseRow.token), else_=LeaseRow.token + 1),
                        expires_at=now + length,
                    )
                    .returning(LeaseRow.token)
                    .execution_options(synchronize_session=False)
                )
                if token is not None:
                    return Lease(name, token)
                if session.get(LeaseRow, name) is not None:
                    return None
                session.add(LeaseRow(name=name, holder=self.holder, token=1, expires_at=now + length))
                return Lease(name, 1)
        except IntegrityError:  # another process was the first
            return None

    def renew(self, lease: Lease, seconds: float) -> bool:
        """Let a lease end so many seconds from now; return whether it was still valid."""
        with Session(self.engine) as session, session.begin():
            expiry = {"expires_at": _now(session) + timedelta(seconds=seconds)}
            statement = update(LeaseRow).where(lease.newest).values(expiry)
            result = session.execute(statement.execution_options(synchronize_session=False))
            assert isinstance(result, CursorResult)
            return result.rowcount == 1

    def give_back(self, lease: Lease) -> None:
        """Release a lease, so that another process can take it immediately."""
        self.renew(lease, 0.0)


def _now(session: Session) -> datetime:
    if session.get_bind().dialect.name == "postgresql":
        return session.scalars(select(func.clock_timestamp(type_=UtcDateTime()))).one()
    return datetime.now(UTC)
