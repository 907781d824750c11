"""``boost audit``: for operators."""

from typing import Annotated

import typer

from service.cli.connection import open_client
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_json, print_table, say
from service.models.audit import AuditEntry


def audit(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's requests.")] = None,
    after: Annotated[int | None, typer.Option(min=0, help="Only entries with a higher ID.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of results.")] = 100,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Print the audit log; for operators."""
    with open_client(url) as client:
        page = client.audit(tenant, after, limit)
    if as_json:
        print_json(page)
        return
    print_table(("ID", "TIME", "TENANT", "KEY", "FROM", "STATUS", "ACTION", "RESOURCE"), map(_row, page.entries))
    if page.next_after is not None:
        say(f"(more entries follow: add --after {page.next_after})")


def _row(entry: AuditEntry) -> tuple[str, ...]:
    return (
        str(entry.id),
        f"{entry.time.astimezone():%Y-%m-%d %H:%M:%S}",
        entry.tenant or "-",
        entry.key_name or "-",
        entry.address or "-",
        str(entry.status),
        entry.action,
        entry.resource,
    )
