"""What a tenant's processes may reach: object stores with a secret of its own, and some folders of the disk."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

from boost_core.config import JobSpec
from boost_core.config.storage import confine, is_local
from boost_core.config.training import BYTES, SourceConfig
from service.models.problems import FieldError
from service.security.secrets import SecretReference, load

# The node's own settings for s3://, except for credentials.
_CREDENTIALS = {"key", "secret", "token", "username", "password", "profile", "anon"}
_OF_THE_NODE = {name: value for name, value in fsspec.config.conf.get("s3", {}).items() if name not in _CREDENTIALS}


@dataclass(frozen=True)
class Access:
    """What a process may reach for a job or a dataset. It travels to other processes; a secret itself never does.

    Attributes:
        secret: Credentials for ``s3://``; ``None`` to use those of the node.
        folders: The folders of the disk; ``None`` for the whole disk.
    """

    secret: SecretReference | None = None
    folders: tuple[str, ...] | None = None

    def storage_options(self) -> dict[str, Any]:
        """Return the same as options for fsspec.

        Raises:
            SecretUnusable: The secret is missing or malformed.
        """
        options = load(self.secret).storage_options() if self.secret else {}
        return options if self.folders is None else options | {"beneath": self.folders}

    def configure(self) -> None:
        """Let this whole process reach this and nothing else; for processes that work for one tenant only.

        Raises:
            SecretUnusable: The secret is missing or malformed.
        """
        confine(self.folders)
        if self.secret is not None:
            fsspec.config.conf["s3"] = {**_OF_THE_NODE, **load(self.secret).storage_options()}


@dataclass(frozen=True)
class AccessRules:
    """The rules by which tenants get access.

    Attributes:
        secrets: Folder of all secrets, the same on all nodes.
        prefixes: Absolute paths or URLs in which ``{tenant}`` stands for the tenant; ``None``: the whole disk.
    """

    secrets: str
    prefixes: tuple[str, ...] | None = None

    def of(self, tenant: str, credentials: str | None) -> Access:
        """Return the access of a tenant with one of its secrets, by name.

        Raises:
            SecretUnusable: The name cannot be that of a secret.
        """
        secret = SecretReference(self.secrets, tenant, credentials) if credentials else None
        if self.prefixes is None:
            return Access(secret)
        named = (prefix.replace("{tenant}", tenant) for prefix in self.prefixes)
        return Access(secret, tuple(each.removeprefix("file://") for each in named if is_local(each)))


# Which places a job may name: those under the prefixes that the operator allows for its tenant.

_LONGEST_VALUE = 200  # characters of a refused place that are shown


def refused_places(places: Iterable[tuple[str, str]], prefixes: Sequence[str] | None, tenant: str) -> list[FieldError]:
    """Return the fields that name places outside the prefixes, each with its value and what is allowed.

    Local paths are resolved, so that no symbolic link leads out.

    Args:
        places: The fields, and the places that they name; ``named_places`` has those of a job.
        prefixes: Absolute paths or URLs in which ``{tenant}`` stands for the tenant; ``None`` if everything is allowed.
        tenant: The tenant.
    """
    if prefixes is None:
        return []
    allowed = [prefix.replace("{tenant}", tenant) for prefix in prefixes]
    folders = [_place(prefix) for prefix in allowed]
    listed = f"use a place under {' or '.join(allowed)}" if allowed else "the service allows none"
    return [
        FieldError(field=field, message=f"{problem}; {listed}", value=named[:_LONGEST_VALUE])
        for field, named in places
        if (problem := _problem(named, folders)) is not None
    ]


def named_places(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the fields of a job that name places, with these."""
    data, checkpoint = spec.data, spec.checkpoint
    sources: list[tuple[str, SourceConfig | None]] = [
        *((f"data.mixture[{number}]", each) for number, each in enumerate(data.mixture)),
        *((f"data.validation[{number}]", each) for number, each in enumerate(data.validation)),
        ("data.source", data.source),
    ]
    for field, source in sources:
        if source is not None:
            yield from ((f"{field}.paths[{number}]", path) for number, path in enumerate(source.paths))
    places = {"data.tokenizer": None if data.tokenizer == BYTES else data.tokenizer}
    places |= {f"checkpoint.{name}": getattr(checkpoint, name) for name in ("url", "continue_from", "weights_from")}
    yield from ((field, place) for field, place in places.items() if place is not None)


def _problem(named: str, folders: Sequence[Sequence[str]]) -> str | None:
    path = named.removeprefix("file://")
    if named.startswith(("s3://", "hf://")):
        if {".", ".."}.intersection(named.split("/")):
            return f"a path on {named[:5]} has no . or .. between its slashes here"
    elif not path.startswith("/"):
        return "the path is not absolute, so it would be a different place on each node"
    # Matches of a pattern are in the folder before its first wildcard; but if a file has that very name, the
    # pattern means that file, which may be a link.
    magic = re.search(r"[*?\[]", named)
    above = named if magic is None else named[: named.rindex("/", 0, magic.start()) + 1]
    try:
        places = [_place(named), _place(above)]
    except OSError as error:  # a link that may not be read
        return f"cannot be looked up ({error.strerror})"
    if all(any(place[: len(folder)] == folder for folder in folders) for place in places):
        return None
    return "is outside of what this tenant may use"


def _place(named: str) -> list[str]:
    """A file or folder in canonical form: its scheme, and the folders, or the bucket and the parts of a key."""
    scheme, separator, key = named.partition("://")
    if separator and scheme != "file":
        return [scheme, *(key.strip("/").split("/") if key.strip("/") else ())]
    real = os.path.realpath(named.removeprefix("file://"))
    return ["file", *filter(None, real.split("/"))]
