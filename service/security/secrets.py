"""Named secrets: a job gives only a name; the values are in files that the operator keeps.

::

    <secrets>/<tenant>/<name>/access_key_id
    <secrets>/<tenant>/<name>/secret_access_key
    <secrets>/<tenant>/<name>/session_token …   and what else ``OPTIONAL`` has, as a Kubernetes secret is mounted
    <secrets>/<tenant>/<another>/tracking_uri   of a tracker, and what else its kind asks for

Only references travel. A process that needs the values reads them itself, and redacts them from all its output.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from service.security.redaction import SHORTEST, register_secrets

REQUIRED = ("access_key_id", "secret_access_key")
OPTIONAL = ("session_token", "endpoint_url", "region")

_PUBLIC = frozenset({"base_url", "endpoint_url", "region", "tracking_uri", "username"})
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_REMEDY = "ask the operator of the service to correct it"


class SecretUnusable(ValueError):
    """A secret is missing or invalid. The message is for the job's user and reveals nothing of its content."""


@dataclass(frozen=True)
class SecretReference:
    """A reference to a secret: all that other processes get.

    Attributes:
        folder: The folder of all secrets, the same on all nodes.
        tenant: Tenant that owns it.
        name: Its name.

    Raises:
        SecretUnusable: A name could lead out of the folder.
    """

    folder: str
    tenant: str
    name: str

    def __post_init__(self) -> None:
        for what, name, pattern in (("a tenant", self.tenant, _TENANT), ("credentials", self.name, _NAME)):
            if not pattern.fullmatch(name):
                raise SecretUnusable(f"the name of {what} is not of the form {pattern.pattern}; correct it")

    def __str__(self) -> str:
        return f"the secret {self.name!r} of tenant {self.tenant!r}"


@dataclass(frozen=True)
class Secret:
    """Credentials for ``s3://``. They are never printed, and never leave their process."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    region: str | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret stays in its process; pass on its SecretReference")

    def storage_options(self) -> dict[str, Any]:
        """Return the same by s3fs's names, overriding any process-wide settings that would mix with it."""
        key, secret, token = self.access_key_id, self.secret_access_key, self.session_token
        options: dict[str, Any] = {"anon": False, "key": key, "secret": secret, "token": token}
        if self.endpoint_url:
            options["endpoint_url"] = self.endpoint_url
        if self.region:
            options["client_kwargs"] = {"region_name": self.region}
        return options


def load(reference: SecretReference) -> Secret:
    """Read a secret's present values; ``service.security.redaction.redact`` removes them from text from then on.

    Raises:
        SecretUnusable: A file is missing, cannot be read, or does not hold one value.
    """
    return Secret(**read(reference, REQUIRED, OPTIONAL))


def read(reference: SecretReference, required: Iterable[str], optional: Iterable[str]) -> dict[str, str]:
    """Read a secret's present values by the names of their files; they are redacted from then on.

    Raises:
        SecretUnusable: A file is missing, cannot be read, or does not hold one value.
    """
    folder = Path(reference.folder) / reference.tenant / reference.name
    if not folder.is_dir():
        problem = f"tenant {reference.tenant!r} has no secret of that name"  # the name may be the secret itself
        raise SecretUnusable(f"{problem}; correct credentials, or ask the operator of the service to add it")
    present = [name for name in optional if (folder / name).exists()]
    values = {}
    for name in (*required, *present):
        try:
            value = (folder / name).read_bytes().decode("ascii").strip()
        except FileNotFoundError:
            raise SecretUnusable(f"{reference} has no file {name}; {_REMEDY}") from None
        except OSError as error:
            raise SecretUnusable(f"{name} of {reference} cannot be read: {error.strerror}; {_REMEDY}") from None
        except UnicodeDecodeError:  # from None, because the error contains what was read
            raise SecretUnusable(f"{name} of {reference} holds more than ASCII text; {_REMEDY}") from None
        if not value.isprintable() or " " in value:
            raise SecretUnusable(f"{name} of {reference} holds more than one word; {_REMEDY}")
        if len(value) < (1 if name in _PUBLIC else SHORTEST):
            raise SecretUnusable(f"{name} of {reference} is too short to be one; {_REMEDY}")
        values[name] = value
    register_secrets(value for name, value in values.items() if name not in _PUBLIC)
    return values
