"""What a tenant's processes may reach: object stores with a secret of its own, and some folders of the disk."""

from dataclasses import dataclass
from typing import Any

from boost_core.config.storage import confine, is_local
from service.security.secrets import SecretReference, configure_fsspec, load


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
            configure_fsspec(load(self.secret))


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
