"""Who calls, as the API shows it: identities and their scopes, keys, the audit log, tenants."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

DEFAULT_TENANT = "default"  # owns everything while authentication is off

TenantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]


class Scope(StrEnum):
    """The scope of a key; each includes the ones before it."""

    READ = "read"  # see the tenant's own jobs, queues and nodes
    SUBMIT = "submit"  # also create and change the tenant's own jobs
    ADMIN = "admin"  # operate the service: all tenants' jobs, keys, quotas, queues, the audit log

    def includes(self, other: "Scope") -> bool:
        """Whether this scope includes the permissions of another one."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


class Identity(BaseModel):
    """The identity that the service sees in a request."""

    tenant: str = Field(description="Tenant of the key.")
    name: str = Field(description="Name of the key; anonymous while authentication is off.")
    scopes: list[Scope] = Field(description="Scopes of the key.")


class _KeyFacts(BaseModel):
    id: str = Field(description="ID of the key: its second part, which is not secret.")
    name: str = Field(description="Its name in job records and the audit log.")
    tenant: str = Field(description="The tenant it acts for.")
    scopes: list[Scope] = Field(description="Scopes of the key.")
    created_at: datetime = Field(description="When it was created.")
    expires_at: datetime | None = Field(description="Expiry; null: never.")


class Key(_KeyFacts):
    """A key, without its secret, which the service does not have."""

    revoked_at: datetime | None = Field(None, description="When it was revoked; null: not revoked.")
    last_used_at: datetime | None = Field(
        None, description="When it was last used, accurate to about a minute; null: never."
    )


class NewKey(_KeyFacts):
    """A key that has just been created."""

    key: str = Field(description="The key, boost_<id>_<secret>. It is shown only once.")


class KeyList(BaseModel):
    """All keys."""

    keys: list[Key] = Field(description="Newest first.")


# The requests that the audit log records, and their names there, which never change.
ACTIONS = {
    ("POST", "/v1/jobs"): "job.submit",
    ("PATCH", "/v1/jobs/{job_id}"): "job.change",
    ("DELETE", "/v1/jobs/{job_id}"): "job.cancel",
    ("POST", "/v1/jobs/cancel"): "job.cancel",
    ("POST", "/v1/jobs/{job_id}/cancel"): "job.cancel",
    ("POST", "/v1/jobs/{job_id}/pause"): "job.pause",
    ("POST", "/v1/jobs/{job_id}/resume"): "job.resume",
    ("POST", "/v1/jobs/{job_id}/retry"): "job.retry",
    ("POST", "/v1/jobs/{job_id}/clone"): "job.clone",
    ("POST", "/v1/jobs/{job_id}/drills"): "job.drill",
    ("POST", "/v1/jobs/{job_id}/profiles"): "job.profile",
    ("POST", "/v1/jobs/{job_id}/evaluations"): "job.evaluate",
    ("PUT", "/v1/jobs/{job_id}/checkpoints/{step}/pin"): "checkpoint.pin",
    ("DELETE", "/v1/jobs/{job_id}/checkpoints/{step}/pin"): "checkpoint.unpin",
    ("DELETE", "/v1/jobs/{job_id}/checkpoints/{step}"): "checkpoint.delete",
    ("POST", "/v1/datasets"): "dataset.create",
    ("POST", "/v1/datasets/{name}/cancel"): "dataset.cancel",
    ("DELETE", "/v1/datasets/{name}"): "dataset.delete",
    ("POST", "/v1/sweeps"): "sweep.create",
    ("POST", "/v1/sweeps/{name}/stop"): "sweep.stop",
    ("PUT", "/v1/queues/{name}"): "queue.put",
    ("DELETE", "/v1/queues/{name}"): "queue.delete",
    ("PUT", "/v1/tenants/{name}"): "tenant.put",
    ("PUT", "/v1/profiles/{kind}"): "profile.put",
    ("DELETE", "/v1/profiles/{kind}"): "profile.delete",
    ("POST", "/v1/keys"): "key.create",
    ("DELETE", "/v1/keys/{key_id}"): "key.revoke",
    ("POST", "/session"): "session.open",
    ("DELETE", "/session"): "session.close",
}


class AuditEntry(BaseModel):
    """One request that changed something, or that was refused for lack of permission."""

    id: int = Field(description="Increases over time.")
    time: datetime = Field(description="When the request was answered.")
    tenant: str | None = Field(description="Tenant that sent the request; null without a valid key.")
    key_id: str | None = Field(description="ID of the key; null without a valid one.")
    key_name: str | None = Field(description="Name of that key.")
    action: str = Field(description=f"The request: {', '.join(dict.fromkeys(ACTIONS.values()))}.")
    resource: str = Field(description="Target of the action, for example a job ID.")
    status: int = Field(description="HTTP status of the response.")
    address: str | None = Field(description="Client address.")
    request_id: str = Field(description="Request ID, also in the response and the service's log.")


class AuditPage(BaseModel):
    """A page of the audit log."""

    entries: list[AuditEntry] = Field(description="Ordered by ID.")
    next_after: int | None = Field(description="Pass as after to get later entries; null if there are none.")


class Tenant(BaseModel):
    """A tenant: its quota and usage."""

    name: str = Field(description="Its name.")
    gpus: float | None = Field(description="Maximum number of GPUs that its jobs may hold at a time; null: no limit.")
    cpus: float | None = Field(description="Maximum number of CPUs that its jobs may hold at a time; null: no limit.")
    used_gpus: float = Field(description="GPUs that its jobs hold now.")
    used_cpus: float = Field(description="CPUs that its jobs hold now.")
    jobs: dict[str, int] = Field(description="Number of its jobs by state.")


class TenantList(BaseModel):
    """All tenants."""

    tenants: list[Tenant] = Field(description="Ordered by name.")
