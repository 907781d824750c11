"""Who calls: ``boost login``, ``logout`` and ``whoami``; for operators, ``boost keys`` and ``boost audit``."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from typer import Argument, Option

from service.cli.connection import client_of, open_client
from service.cli.console import BadInput, Failed, bad_input, print_answer, read_settings, say
from service.cli.options import UNOPENED, AsJson, Service, Url, moment
from service.client import Client
from service.models.access import Scope
from service.models.jobs import KeyRequest

if TYPE_CHECKING:
    from service.accounts.local import LocalKeys


_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


def login(
    url: Annotated[str | None, Option(help="URL of the service (default: BOOST_URL, or this machine).")] = None,
    key_stdin: Annotated[bool, Option("--key-stdin", help="Read the key from standard input.")] = False,
    ca_file: Annotated[Path | None, Option(help="CA bundle to verify the service's certificate with.")] = None,
) -> None:
    """Sign in: ask for an API key, check it and store it in a file that only you can read."""
    settings = read_settings()
    address = url or settings.url
    if urlsplit(address).scheme == "http" and urlsplit(address).hostname not in _THIS_MACHINE:
        say(f"warning: traffic to {address}, including the key, is not encrypted; use https", err=True)
    key = sys.stdin.readline().strip() if key_stdin else typer.prompt("API key", hide_input=True).strip()
    if not key:
        raise BadInput("no key was given; an operator creates one with: boost keys create NAME --tenant TENANT")
    with client_of(address, api_key=key, verify=ca_file or True, retry_seconds=settings.retry_seconds) as client:
        who = client.whoami()
    # What ``service.cli.connection.Login`` reads.
    contents = {"url": address, "api_key": key, "ca_file": str(ca_file.absolute()) if ca_file else None}
    path = settings.config
    try:  # to write it atomically, readable by its owner only
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:  # created with mode 0600
            try:
                file.write(json.dumps(contents, indent=2, ensure_ascii=False).encode())
                file.flush()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink()
                raise
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}; name another file with BOOST_CONFIG") from error
    scopes = ", ".join(who.scopes)
    say(f"signed in to {address} as {who.name} of tenant {who.tenant}, with scope {scopes}; saved in {path}")


def logout() -> None:
    """Forget the key of `boost login`. It stays valid until it is revoked."""
    path = read_settings().config
    try:
        path.unlink()
    except FileNotFoundError:
        say("not signed in")
    else:
        say(f"removed {path}")


def whoami(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """Show which tenant and key you are signed in with."""
    who = client.whoami()
    print_answer(who, as_json, f"{who.name} of tenant {who.tenant}, with scope {', '.join(who.scopes)}")


app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys; for operators.")

_SCOPE_HELP = "Scope of the key; each includes the ones before it. Repeatable."
_EXPIRES_HELP = "Expiry: 90d, or 2027-01-01T00:00:00Z (default: never)."
_DIRECT_HELP = "Write to the database at BOOST_DATABASE_URL directly, as needed to create the first key."
Direct = Annotated[bool, Option("--direct", help=_DIRECT_HELP)]


@app.command()
def create(
    name: Annotated[str, Argument(metavar="NAME", help="The key's name in job records and the audit log.")],
    tenant: Annotated[str, Option(help="The tenant it acts for.")],
    scope: Annotated[list[Scope], Option(help=_SCOPE_HELP)] = [Scope.SUBMIT],  # noqa: B006  # Typer copies it
    expires: Annotated[str | None, Option(metavar="TIME", help=_EXPIRES_HELP)] = None,
    direct: Direct = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Create a key and print it. It is shown only once."""
    expires_at = moment(expires, in_future=True) if expires else None
    with bad_input():
        request = KeyRequest(name=name, tenant=tenant, scopes=scope, expires_at=expires_at)
    with _keys(direct, url) as book:
        key = book.create_key(request)
    print_answer(key, as_json, key.key)
    if not as_json:
        say(f"this is the key {key.id} of tenant {key.tenant}; store it now, it cannot be shown again", err=True)


@app.command("ls")
def list_keys(direct: Direct = False, as_json: AsJson = False, url: Url = None) -> None:
    """List the keys, without their secrets."""
    with _keys(direct, url) as book:
        result = book.keys()
    rows = []
    for key in result.keys:
        moments = key.created_at, key.expires_at, key.last_used_at, key.revoked_at
        times = (f"{moment.astimezone():%Y-%m-%d %H:%M}" if moment else "-" for moment in moments)
        rows.append((key.id, key.name, key.tenant, ", ".join(key.scopes), *times))
    columns = ("ID", "NAME", "TENANT", "SCOPES", "CREATED", "EXPIRES", "LAST USED", "REVOKED")
    print_answer(result, as_json, rows, columns)


@app.command()
def revoke(
    key_id: Annotated[str, Argument(metavar="ID", help="The key's ID; `boost keys ls` lists them.")],
    direct: Direct = False,
    url: Url = None,
) -> None:
    """Revoke a key."""
    with _keys(direct, url) as book:
        book.revoke_key(key_id)
    say(f"key {key_id} is revoked")


@contextmanager
def _keys(direct: bool, url: str | None) -> "Iterator[Client | LocalKeys]":
    """Give what creates, lists and revokes keys: a service, or the database itself, with its tables if needed.

    Raises:
        Failed: The database cannot be used, or the key does not exist.
    """
    if not direct:
        with open_client(url) as client:
            yield client
        return

    # Imported here because few commands need SQL.
    from sqlalchemy.exc import SQLAlchemyError

    from service.accounts.keys import KeyNotFound
    from service.accounts.local import LocalKeys
    from service.jobs.database import in_words, migrate

    settings = read_settings()
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        migrate(settings.database_url)
        yield LocalKeys(settings.database_url)
    except KeyNotFound as error:
        raise Failed(str(error)) from error
    except (OSError, ValueError, SQLAlchemyError) as error:
        raise Failed(f"the database that BOOST_DATABASE_URL names cannot be used: {in_words(error)}") from error


def audit(
    tenant: Annotated[str | None, Option(help="Only this tenant's requests.")] = None,
    after: Annotated[int | None, Option(min=0, help="Only entries with a higher ID.")] = None,
    limit: Annotated[int, Option("--limit", "-n", min=1, help="Maximum number of results.")] = 100,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Print the audit log; for operators."""
    page = client.audit(tenant, after, limit)
    rows = []
    for entry in page.entries:
        time, status = f"{entry.time.astimezone():%Y-%m-%d %H:%M:%S}", str(entry.status)
        sender = (fact or "-" for fact in (entry.tenant, entry.key_name, entry.address))
        rows.append((str(entry.id), time, *sender, status, entry.action, entry.resource))
    print_answer(page, as_json, rows, ("ID", "TIME", "TENANT", "KEY", "FROM", "STATUS", "ACTION", "RESOURCE"))
    if page.next_after is not None and not as_json:
        say(f"(more entries follow: add --after {page.next_after})")
