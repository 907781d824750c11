"""Who has changed what: the audit log, as the API shows it to operators."""

from datetime import datetime

from pydantic import BaseModel, Field

# What requests are called in the log. These names do not change.
ACTIONS = (
    "job.submit", "job.change", "job.cancel", "job.pause", "job.resume", "job.retry", "job.clone", "job.drill",
    "job.profile", "checkpoint.pin", "checkpoint.unpin", "checkpoint.delete", "queue.put", "queue.delete", "tenant.put",
    "key.create", "key.revoke", "session.open", "session.close",
)  # fmt: skip


class AuditEntry(BaseModel):
    """One request that changed something, or that was refused for want of a right to."""

    id: int = Field(description="Grows with time.")
    time: datetime = Field(description="When the request was answered.")
    tenant: str | None = Field(description="The tenant that asked; null when the request came without a valid key.")
    key_id: str | None = Field(description="The key that it came with; null without a valid one.")
    key_name: str | None = Field(description="That key's name.")
    action: str = Field(description=f"What was asked for: {', '.join(ACTIONS)}.")
    resource: str = Field(description="What it was asked of, for example a job's id.")
    status: int = Field(description="The HTTP status of the answer.")
    address: str | None = Field(description="The network address that it came from.")
    request_id: str = Field(description="Names the request; the answer and the service's log have it, too.")


class AuditPage(BaseModel):
    """Some entries of the audit log."""

    entries: list[AuditEntry] = Field(description="In order of ids.")
    next_after: int | None = Field(description="Give this as after to see later entries; null when there are none.")
