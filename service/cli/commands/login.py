"""``boost login``, ``logout`` and ``whoami``."""

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import SecretStr

from service.cli.connection import Login, client_of, open_client, write_login
from service.cli.failures import BadInput, read_settings
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_json, say
from service.models.access import Identity

_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


def login(
    url: Annotated[str | None, typer.Option(help="URL of the service (default: BOOST_URL, or this machine).")] = None,
    key_stdin: Annotated[bool, typer.Option("--key-stdin", help="Read the key from standard input.")] = False,
    ca_file: Annotated[Path | None, typer.Option(help="CA bundle to verify the service's certificate with.")] = None,
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
    write_login(settings.config, Login(url=address, api_key=SecretStr(key), ca_file=ca_file and ca_file.absolute()))
    say(f"signed in to {address} as {_in_words(who)}; saved in {settings.config}")


def logout() -> None:
    """Forget the key of `boost login`. It stays valid until it is revoked."""
    path = read_settings().config
    try:
        path.unlink()
    except FileNotFoundError:
        say("not signed in")
    else:
        say(f"removed {path}")


def whoami(as_json: AsJson = False, url: Url = None) -> None:
    """Show which tenant and key you are signed in with."""
    with open_client(url) as client:
        who = client.whoami()
    if as_json:
        print_json(who)
    else:
        say(_in_words(who))


def _in_words(who: Identity) -> str:
    return f"{who.name} of tenant {who.tenant}, with scope {', '.join(who.scopes)}"
