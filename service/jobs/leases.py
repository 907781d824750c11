"""Work that one of several processes does at a time.

A lease runs out unless it is renewed, so that another process takes over from one that has died. The one that was
taken for dead may live on for a while: its writes carry the lease's token, which is no longer the newest one then, and
change nothing. The processes' clocks should agree within a few seconds; if they do not, the lease changes hands more
often than it needs to, and that is all.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, CursorResult, Engine, exists, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.jobs.tables import LeaseRow


class LeaseLost(RuntimeError):
    """Another process does this work now."""

    def __init__(self, lease: "Lease") -> None:
        super().__init__(f"the lease {lease.name!r} has gone to another process, which goes on with the work")


@dataclass(frozen=True)
class Lease:
    """The right to do some work. Valid as long as no newer token is given out."""

    name: str
    token: int

    def holds(self) -> ColumnElement[bool]:
        """A condition for writes."""
        return exists().where(LeaseRow.name == self.name, LeaseRow.token == self.token)


class Leases:
    """Takes, renews and gives back the leases of one process.

    Args:
        engine: The database that all processes share.
        holder: Name of this process, different from all others.
    """

    def __init__(self, engine: Engine, holder: str) -> None:
        self._engine, self._holder = engine, holder

    def take(self, name: str, seconds: float) -> Lease | None:
        """Take a lease or renew it.

        Args:
            name: The work.
            seconds: For how long, unless it is renewed before.

        Returns:
            ``None`` while another process has it.
        """
        now = datetime.now(UTC)
        until = now + timedelta(seconds=seconds)
        try:
            with Session(self._engine) as session, session.begin():
                row = session.get(LeaseRow, name)
                if row is None:
                    session.add(LeaseRow(name=name, holder=self._holder, token=1, expires_at=until))
                    return Lease(name, 1)
                mine = row.holder == self._holder and row.expires_at > now
                if not mine and row.expires_at > now:
                    return None
                lease = Lease(name, row.token if mine else row.token + 1)
                unmoved = (LeaseRow.name == name) & (LeaseRow.token == row.token) & (LeaseRow.holder == row.holder)
                values = {"holder": self._holder, "token": lease.token, "expires_at": until}
                taken = session.execute(
                    update(LeaseRow).where(unmoved).values(values).execution_options(synchronize_session=False)
                )
                assert isinstance(taken, CursorResult)
                return lease if taken.rowcount == 1 else None
        except IntegrityError:  # another process was the first
            return None

    def give_back(self, lease: Lease) -> None:
        """Let another process have a lease at once."""
        mine = (LeaseRow.name == lease.name) & (LeaseRow.token == lease.token)
        with Session(self._engine) as session, session.begin():
            session.execute(update(LeaseRow).where(mine).values(expires_at=datetime.now(UTC)))
