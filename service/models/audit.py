"""The audit log, as the API shows it to operators."""

from datetime import datetime

from pydantic import BaseModel, Field

# Names of requests in the log. They never change.
ACTIONS = (
    "job.submit", "job.change", "job.cancel", "job.pause", "job.resume", "job.retry", "job.clone", "job.drill",
    "job.profile", "job.evaluate", "checkpoint.pin", "checkpoint.unpin", "checkpoint.delete", "dataset.create",
    "dataset.cancel", "dataset.delete", "queue.put", "queue.delete", "tenant.put", "profile.put", "profile.delete",
    "key.create", "key.revoke", "session.open", "session.close",
)  # fmt: skip


class AuditEntry(BaseModel):
    """One request that changed something, or that was refused for lack of permission."""

    id: int = Field(description="Increases over time.")
    time: datetime = Field(description="When the request was answered.")
    tenant: str | None = Field(description="Tenant that sent the request; null without a valid key.")
    key_id: str | None = Field(description="ID of the key; null without a valid one.")
    key_name: str | None = Field(description="Name of that key.")
    action: str = Field(description=f"The request: {', '.join(ACTIONS)}.")
    resource: str = Field(description="Target of the action, for example a job ID.")
    status: int = Field(description="HTTP status of the response.")
    address: str | None = Field(description="Client address.")
    request_id: str = Field(description="Request ID, also in the response and the service's log.")


class AuditPage(BaseModel):
    """A page of the audit log."""

    entries: list[AuditEntry] = Field(description="Ordered by ID.")
    next_after: int | None = Field(description="Pass as after to get later entries; null if there are none.")
