"""``boost keys``: for operators."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer

from service.cli.commands.key_stores import KeyBook, KeysOfService, keys_in_database, legal_key
from service.cli.connection import open_client
from service.cli.failures import read_settings
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_json, print_table, say
from service.cli.times import moment_from_now
from service.models.identity import Scope
from service.models.keys import Key, KeyList

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys; for operators.")

Direct = Annotated[
    bool,
    typer.Option(
        "--direct", help="Write to the database at BOOST_DATABASE_URL directly: how the first key is created."
    ),
]


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in records and the audit log.")],
    tenant: Annotated[str, typer.Option(help="The tenant it acts for.")],
    scope: Annotated[
        list[Scope], typer.Option(help="Scope of the key; each includes the ones before it. Repeatable.")
    ] = [Scope.SUBMIT],  # noqa: B006  # Typer copies it
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Expiry: 90d, or 2027-01-01T00:00:00Z (default: never).")
    ] = None,
    direct: Direct = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Create a key and print it. It is shown only once."""
    wanted = legal_key(name=name, tenant=tenant, scopes=scope, expires_at=moment_from_now(expires) if expires else None)
    with _keys(direct, url) as book:
        made = book.create(wanted.name, wanted.tenant, wanted.scopes, wanted.expires_at)
    if as_json:
        print_json(made)
        return
    say(made.key)
    say(f"this is the key {made.id} of tenant {made.tenant}; keep it now, it cannot be shown again", err=True)


@app.command("ls")
def list_keys(direct: Direct = False, as_json: AsJson = False, url: Url = None) -> None:
    """List the keys, without their secrets."""
    with _keys(direct, url) as book:
        found = KeyList(keys=list(book.list()))
    if as_json:
        print_json(found)
        return
    print_table(("ID", "NAME", "TENANT", "SCOPES", "CREATED", "EXPIRES", "LAST USED", "REVOKED"), map(_row, found.keys))


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's ID; `boost keys ls` lists them.")],
    direct: Direct = False,
    url: Url = None,
) -> None:
    """Revoke a key."""
    with _keys(direct, url) as book:
        book.revoke(key_id)
    say(f"key {key_id} is revoked")


@contextmanager
def _keys(direct: bool, url: str | None) -> Iterator[KeyBook]:
    if direct:
        with keys_in_database(read_settings()) as book:
            yield book
        return
    with open_client(url) as client:
        yield KeysOfService(client)


def _row(key: Key) -> tuple[str, ...]:
    times = key.created_at, key.expires_at, key.last_used_at, key.revoked_at
    return key.id, key.name, key.tenant, ", ".join(key.scopes), *map(_time, times)


def _time(time: datetime | None) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M}" if time else "-"
